"""Sums over a vocabulary that float32 gets right.

One running float32 sum over 150,000 small terms is off by several parts in 10,000, which moves the
cut of a nucleus by hundreds of tokens. Summing blocks first, then the blocks, is off by a few
parts in a million and costs the same. A GPU adds up in parts by itself, and what costs there is
the number of operations. All functions take `[rows, V] float32`.
"""

from __future__ import annotations

import mlx.core as mx

from mlxgen.sampling.elementary import computes_one_by_one, exp

_BLOCK = 256


def _adds_in_parts() -> bool:
    """Whether MLX's own sums are sums of parts: on a GPU every thread adds up its own."""
    return mx.default_device().type == mx.DeviceType.gpu


def _in_blocks(rows: mx.array, padding: float = 0.0) -> mx.array:
    """`[rows, V] -> [rows, blocks, block]`, padded at the end."""
    count, width = rows.shape
    if width <= _BLOCK:
        return rows[:, None, :]
    surplus = -width % _BLOCK
    if surplus:
        rows = mx.pad(rows, [(0, 0), (0, surplus)], constant_values=padding)
    return rows.reshape(count, -1, _BLOCK)


def weights(scores: mx.array) -> tuple[mx.array, mx.array | float]:
    """Weights of rows whose largest entry is 0, in proportion to exp of each: `[rows, V]`, and
    their sum, `[rows, 1]` or a number."""
    if _adds_in_parts():
        return mx.softmax(scores, axis=-1), 1.0
    mass = exp(scores)
    return mass, total(mass)


def total(rows: mx.array) -> mx.array:
    """Sum of each row: `[rows, 1]`."""
    if _adds_in_parts():
        return rows.sum(axis=-1, keepdims=True)
    return _in_blocks(rows).sum(axis=-1).sum(axis=-1, keepdims=True)


def sums_before(rows: mx.array) -> mx.array:
    """For each entry the sum of those before it in its row: `[rows, V]`."""
    if _adds_in_parts():
        return mx.cumsum(rows, axis=-1, inclusive=False)
    blocks = _in_blocks(rows)
    within = mx.cumsum(blocks, axis=-1, inclusive=False)
    outside = mx.cumsum(blocks.sum(axis=-1), axis=-1, inclusive=False)
    return (within + outside[..., None]).reshape(len(rows), -1)[:, : rows.shape[-1]]


def smallest_needed(ascending: mx.array, enough: mx.array | float) -> mx.array:
    """The smallest entry among as few of the largest ones as add up to `enough`: `[rows, 1]`.

    ascending: rows from small to large, not negative; enough: `[rows, 1]` or a number. The largest
    entry is always needed; one of 0 is only where `enough` is more than there is, but for rounding.
    """
    largest = ascending[:, -1:]
    if _adds_in_parts():
        behind = mx.cumsum(ascending, axis=-1, reverse=True, inclusive=False)
        return mx.where(behind < enough, ascending, largest).min(axis=-1, keepdims=True)
    blocks = _in_blocks(ascending)
    sums = blocks.sum(axis=-1)
    behind_blocks = mx.cumsum(sums, axis=-1, reverse=True, inclusive=False)
    # One block holds it: the first one that is needed at all.
    unneeded = ((behind_blocks >= enough) | (sums <= 0)).sum(axis=-1, keepdims=True)
    place = mx.minimum(unneeded, blocks.shape[1] - 1)
    block = mx.take_along_axis(blocks, place[..., None], axis=1)[:, 0]
    within = mx.cumsum(block, axis=-1, reverse=True, inclusive=False)
    behind = within + mx.take_along_axis(behind_blocks, place, axis=-1)
    is_needed = (behind < enough) & (block > 0)
    return mx.where(is_needed, block, largest).min(axis=-1, keepdims=True)


def log_sum_exp(rows: mx.array) -> mx.array:
    """Log of the sum of exp over each row: `[rows, 1]`. Rows hold no NaN and no +inf."""
    if _adds_in_parts():
        return mx.logsumexp(rows, axis=-1, keepdims=True)
    if not computes_one_by_one():
        inner = mx.logsumexp(_in_blocks(rows, -mx.inf), axis=-1)
        return mx.logsumexp(inner, axis=-1, keepdims=True)
    tops = mx.max(rows, axis=-1, keepdims=True)
    # A row without weight keeps its -inf: taking off another -inf would make it NaN.
    tops = mx.where(tops > -mx.inf, tops, 0)
    return tops + log_weight(rows - tops)


def log_weight(scores: mx.array) -> mx.array:
    """`log_sum_exp` of rows whose largest entry is 0, which need no look for it."""
    return mx.log(total(exp(scores))) if computes_one_by_one() else log_sum_exp(scores)
