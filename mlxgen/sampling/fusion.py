"""Functions of arrays, traced once and with their elementwise work in single kernels, on a GPU.

A round at a vocabulary of 128,000 is bound by the host, which pays for each operation it builds
and encodes: a sampler of many small ones costs as much as the draft's forwards. On a CPU nothing is
gained, and MLX would need a C compiler there at run time, so the function runs as it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import mlx.core as mx

Arrays = tuple[mx.array, ...]


def fuses() -> bool:
    """Whether functions are fused on the device in use."""
    return mx.default_device().type == mx.DeviceType.gpu


def fused(function: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """The same function, fused where that pays. All arguments are arrays, and so is what it
    returns; arrays it finds elsewhere are read once and must not change."""
    compiled = mx.compile(function)

    @wraps(function)
    def call(*arrays: mx.array) -> Arrays:
        return tuple(compiled(*arrays)) if fuses() else function(*arrays)

    return call
