"""Elementary functions over a vocabulary, by the way that is quick where they are computed.

Where MLX computes one entry after the other, its own exp and log1p take two to four times as long
as its power and log (docs/cpu.md). Everywhere else they are MLX's.
"""

from __future__ import annotations

import math
import platform

import mlx.core as mx

_BASE = mx.array(math.e)
_NUDGE = -(2.0**-60)
"""Makes 0/0 a 1, and is lost in the rounding of anything else that it is added to."""


def computes_one_by_one() -> bool:
    """Whether MLX computes one entry after the other, without vector instructions."""
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return on_cpu and platform.machine().lower() in ("x86_64", "amd64")


def largest_at(rows: mx.array) -> mx.array:
    """Where the largest entry of each row is: `[..., V] -> [...] int32`."""
    # The index is a uint32 far below 2^31: the same bits, and no operation.
    return mx.argmax(rows, axis=-1).view(mx.int32)


def race(weights: mx.array, noise: mx.array) -> mx.array:
    """An exact draw in proportion to the weights of each row: `[..., V] -> [...] int32`.

    noise: standard exponential, positive and finite, so that a weight of 0 never wins. Then
    noise / weight is exponential with the weight as its rate, and of independent ones each is the
    first with a probability in proportion to its rate. This is the Gumbel-max trick, since
    -log(noise) is standard Gumbel, and takes no logarithm.
    """
    return largest_at(weights / noise)


def exp(x: mx.array) -> mx.array:
    """e to the x, for float32. As a power it is off by up to 6e-8 + 4e-8 |x| of itself, since e is
    rounded."""
    return mx.power(_BASE, x) if computes_one_by_one() else mx.exp(x)


def negative_log1m(u: mx.array) -> mx.array:
    """-log(1 - u) for float32 u in [0, 1), to a few units in the last place.

    Where 1 - u is rounded to y, log(y) / (y - 1) is off by little, and u times that is the result
    (Goldberg 1991, theorem 4).
    """
    if not computes_one_by_one():
        return -mx.log1p(-u)
    y = 1 - u
    return u * ((mx.log(y) + _NUDGE) / ((y - 1) + _NUDGE))


def probability_of(ids: mx.array, rows: mx.array) -> mx.array:
    """The entry of each row at its id: `[rows] int32, [rows, V] -> [rows]`."""
    return mx.take_along_axis(rows, ids[:, None], axis=-1).squeeze(-1)


def one_hot(ids: mx.array, width: int) -> mx.array:
    """`[rows] int32 -> [rows, width] float32`: 1 at the id and 0 elsewhere."""
    return (mx.arange(width)[None, :] == ids[:, None]).astype(mx.float32)
