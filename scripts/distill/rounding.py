"""MLX's affine quantisation as a rounding of weights that training can see."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .config import AffineFormat

_SMALLEST_SCALE = 1e-7


def affine_round(weight: Tensor, form: AffineFormat) -> Tensor:
    """The float32 values that MLX reads back after quantising these weights as float16.

    Any shape whose size is a multiple of the group size; a group is consecutive entries. The end
    of a group's range that is furthest from zero is kept exactly (up to float16) as the bias, and
    the scale is stretched so that zero has a code of its own.
    """
    groups = weight.half().float().reshape(-1, form.group_size)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    top_code = 2**form.bits - 1
    low_is_edge = low.abs() > high.abs()
    edge = torch.where(low_is_edge, low, high)
    step = ((high - low) / top_code).clamp(min=_SMALLEST_SCALE)
    step = torch.where(low_is_edge, step, -step)
    edge_code = torch.round(edge / step)
    has_edge = edge_code != 0
    scale = torch.where(has_edge, edge / edge_code, step)
    bias = torch.where(has_edge, edge, torch.zeros_like(edge))
    # MLX makes the codes with float32 scales and only then stores the scales as float16.
    codes = torch.round((groups - bias) / scale).clamp(0, top_code)
    return (codes * scale.half().float() + bias.half().float()).reshape(weight.shape)


def round_straight_through(matrices: Mapping[str, Tensor], form: AffineFormat) -> dict[str, Tensor]:
    """Each matrix rounded, with the gradient of the unrounded one.

    All are rounded in one go, which on a GPU saves most of the kernel launches.
    """
    groups = [matrix.detach().reshape(-1, form.group_size) for matrix in matrices.values()]
    lengths = [len(part) for part in groups]
    rounded = torch.split(affine_round(torch.cat(groups), form), lengths)
    return {
        # The bracket is zero, so the value is the rounded one to the last bit.
        name: part.reshape(matrix.shape) + (matrix - matrix.detach())
        for (name, matrix), part in zip(matrices.items(), rounded, strict=True)
    }
