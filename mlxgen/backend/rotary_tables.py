"""Rotary positions on a CPU: sines and cosines made once a forward, not twice a layer.

On a CPU MLX composes a rotation of some thirty operations, more than half of them for angles that
depend on the position alone. For a small model handing out operations takes as long as computing
them, so queries and keys of all layers share one table here: a fifth of a forward's operations are
gone, and the numbers are the same to the last bit (docs/cpu.md). A GPU has a kernel for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx.utils import tree_map

_PROBE_OFFSETS = (0, 7, 4095)


class Setting(NamedTuple):
    """What makes two rotations the same: `dims`, `base` and `scale` as in `nn.RoPE`."""

    dims: int
    base: float
    scale: float


class Span(NamedTuple):
    """Positions `first .. first + length - 1`, and the precision of a table for them."""

    first: int
    length: int
    dtype: mx.Dtype


class Table(NamedTuple):
    """Of the angles at each position of a span: `[length, dims / 2]` both."""

    cosines: mx.array
    sines: mx.array


class RotaryTables:
    """The newest table of each setting in a model."""

    def __init__(self) -> None:
        self._newest: dict[Setting, tuple[Span, Table]] = {}

    def at(self, setting: Setting, span: Span) -> Table:
        """The table of a span."""
        known = self._newest.get(setting)
        if known is None or known[0] != span:
            known = self._newest[setting] = span, _table(setting, span)
        return known[1]


def _table(setting: Setting, span: Span) -> Table:
    """In the order of MLX's own operations, so that not a bit differs."""
    half = setting.dims // 2
    positions = (mx.arange(span.length, dtype=mx.float32) + span.first) * setting.scale
    exponent = float(np.log(np.float32(setting.base)) / np.float32(half))
    frequencies = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * exponent)
    angles = positions[:, None] * frequencies
    return Table(mx.cos(angles).astype(span.dtype), mx.sin(angles).astype(span.dtype))


class TabledRoPE(RoPE):
    """A rotation (Su et al. 2021) whose angles are in tables that other layers use too."""

    def __init__(self, rotation: RoPE, tables: RotaryTables) -> None:
        super().__init__(rotation.dims, rotation.traditional, rotation.base, rotation.scale)
        # Out of reach of what walks over a module's parameters.
        self._tables_at = tables.at

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        """As `nn.RoPE`: x is `[batch, heads, positions, size]`, its first position `offset`."""
        if x.ndim != 4 or not isinstance(offset, int):
            rotated: mx.array = super().__call__(x, offset)
            return rotated
        cosines, sines = self._tables_at(_setting(self), Span(offset, x.shape[-2], x.dtype))
        half, size = self.dims // 2, x.shape[-1]
        ends = [half, self.dims] if self.dims < size else [half]
        first, second, *rest = mx.split(x, ends, axis=-1)
        parts = [first * cosines - second * sines, first * sines + second * cosines, *rest]
        return mx.concatenate(parts, axis=-1)


def share_rotary_tables(model: Any) -> None:
    """Let a model's rotations share their tables, where that changes no bit of them."""
    tables, agreeing = RotaryTables(), dict[Setting, bool]()

    def tabled(module: Module) -> Module:
        if type(module) is not RoPE or module.traditional or module.dims % 2:
            return module
        setting = _setting(module)
        if setting not in agreeing:
            agreeing[setting] = agrees(module)
        return TabledRoPE(module, tables) if agreeing[setting] else module

    model.update_modules(tree_map(tabled, model.leaf_modules(), is_leaf=Module.is_module))


def agrees(rotation: RoPE) -> bool:
    """Whether a rotation by table gives the same bits."""
    size = rotation.dims + 2
    x = (mx.arange(3 * size, dtype=mx.float32) / size - 1).reshape(1, 1, 3, size)
    by_table = TabledRoPE(rotation, RotaryTables())
    pairs = [(rotation(x, offset), by_table(x, offset)) for offset in _PROBE_OFFSETS]
    return all(bool(mx.array_equal(own, tabled).item()) for own, tabled in pairs)


def _setting(rotation: RoPE) -> Setting:
    return Setting(rotation.dims, rotation.base, rotation.scale)
