"""What kind of processor the arrays are computed on, where the quick way depends on it."""

from __future__ import annotations

import platform

import mlx.core as mx


def on_cpu() -> bool:
    """A CPU adds up a row in one running sum, and pays for each entry; a GPU adds up as a tree, and
    pays for each operation."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def computes_one_by_one() -> bool:
    """Whether MLX computes one entry after the other, without vector instructions."""
    return on_cpu() and platform.machine().lower() in ("x86_64", "amd64")
