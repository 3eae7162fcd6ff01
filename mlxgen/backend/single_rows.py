"""A single row times a matrix, multiplied as two rows where the library is faster at that.

Decoding multiplies single rows. MKL goes another way for one row than for two, and on an AMD EPYC
the first way reads a matrix at 12 GB/s where the second reads it at 19, so a forward over one
token takes longer than one over two. Here the row goes in twice, and one result is taken.

What is faster is found by timing, and timing must not decide about a text: a matrix is multiplied
this way only where both ways agree to the last bit.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_map

_PROBE_OUTPUTS, _PROBE_INPUTS = 16384, 576
"""A matrix that is larger than a core's caches, like the head of a small model."""
_PROBES = 5
_WORTHWHILE = 0.9
_LEAST_WEIGHTS = 2**22
"""Below this a forward is no matter of products, and not worth a probe."""


def pair_single_rows(model: Any) -> None:
    """Let a float32 model's products with a single row go in pairs, where that pays."""
    wide = [module for module in model.modules() if _is_wide(module)]
    if sum(module["weight"].size for module in wide) < _LEAST_WEIGHTS or not pairs_pay():
        return
    shapes = {module["weight"].shape: module["weight"] for module in wide}
    agreeing = {shape for shape, matrix in shapes.items() if ways_agree(matrix)}

    def paired(module: Module) -> Module:
        if _is_wide(module) and module["weight"].shape in agreeing:
            return _with_pairs(module)
        return module

    model.update_modules(tree_map(paired, model.leaf_modules(), is_leaf=Module.is_module))


def takes_pairs(model: Any) -> bool:
    """Whether any of a model's products go in pairs."""
    return any(isinstance(module, PairedLinear | PairedEmbedding) for module in model.modules())


def _is_wide(module: Module) -> bool:
    """Whether a layer multiplies by a float32 matrix with at least as many outputs as inputs; the
    others gain nothing."""
    if type(module) not in (Linear, Embedding):
        return False
    matrix = module["weight"]
    return bool(matrix.shape[0] >= matrix.shape[1] and matrix.dtype == mx.float32)


@lru_cache(maxsize=1)
def pairs_pay() -> bool:
    """Whether two rows take clearly less time than one."""
    matrix = _scattered(_PROBE_OUTPUTS * _PROBE_INPUTS).reshape(_PROBE_OUTPUTS, _PROBE_INPUTS)
    row = _scattered(_PROBE_INPUTS)[None]
    pair = mx.contiguous(_twice(row))
    mx.eval(matrix, row, pair, row @ matrix.T, pair @ matrix.T)
    times_s: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(_PROBES):
        for rows in (row, pair):
            started_s = time.perf_counter()
            mx.eval(rows @ matrix.T)
            times_s[len(rows)].append(time.perf_counter() - started_s)
    return min(times_s[2]) < _WORTHWHILE * min(times_s[1])


def ways_agree(matrix: mx.array) -> bool:
    """Whether a row alone and in a pair gives the same bits. matrix: `[outputs, inputs]`."""
    row = _scattered(matrix.shape[1])[None]
    return bool(mx.array_equal((row @ matrix.T)[0], (_twice(row) @ matrix.T)[0]).item())


class PairedLinear(Linear):
    """A linear layer that takes a single row twice."""

    def __call__(self, x: mx.array) -> mx.array:
        """As `nn.Linear`: `[..., inputs] -> [..., outputs]`."""
        if x.ndim < 2 or x.size > x.shape[-1]:
            return super().__call__(x)
        return super().__call__(_twice(x))[..., :1, :]


class PairedEmbedding(Embedding):
    """An embedding that takes a single row twice where it stands for the head."""

    def as_linear(self, x: mx.array) -> mx.array:
        """As `nn.Embedding`: `[..., size] -> [..., ids]`."""
        base: Any = super()  # MLX gives this method no types
        logits: mx.array
        if x.ndim < 2 or x.size > x.shape[-1]:
            logits = base.as_linear(x)
            return logits
        logits = base.as_linear(_twice(x))
        return logits[..., :1, :]


def _twice(x: mx.array) -> mx.array:
    return mx.broadcast_to(x, (*x.shape[:-2], 2, x.shape[-1]))


def _with_pairs(module: Module) -> Module:
    """The paired kind of a layer, with its arrays."""
    is_embedding = type(module) is Embedding
    paired = PairedEmbedding(1, 1) if is_embedding else PairedLinear(1, 1, bias="bias" in module)
    for name, array in module.parameters().items():
        setattr(paired, name, array)
    return paired


def _scattered(count: int) -> mx.array:
    """That many numbers in [-0.5, 0.5) without a pattern."""
    # Multiplying by a large odd number scatters the bits.
    return (mx.arange(count, dtype=mx.uint32) * 2654435761).astype(mx.float32) / 2**32 - 0.5
