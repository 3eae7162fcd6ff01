"""What target.py and draft.py share of the llama architecture, and the precision of a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Precision:
    """The dtypes of hidden states and of logits.

    On a GPU logits are float16, since bfloat16 ones near 30 would lie 1/8 apart.
    """

    compute: torch.dtype
    logits: torch.dtype

    @classmethod
    def of(cls, device: str) -> Precision:
        if device == "cuda":
            return cls(torch.bfloat16, torch.float16)
        return cls(torch.float32, torch.float32)


def fast_attention(device: str) -> AbstractContextManager[None]:
    """Attention by PyTorch's own flash kernel on a GPU.

    Left to choose, PyTorch may take one that is prepared anew for each length of the cache.
    """
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device == "cuda" else nullcontext()


def rotary_tables(
    length: int, head_size: int, theta: float, device: str | torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each (length, head_size / 2) float32."""
    exponents = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, theta**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate (..., head_size) by its position; entry i pairs with entry i + head_size / 2."""
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(turned, dim=-1).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x (..., hidden) over its root mean square, times weight (hidden,); x's dtype."""
    return functional.rms_norm(x, weight.shape, weight.to(x.dtype), epsilon)


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Llama's MLP, x (..., hidden); gate and up are (mlp, hidden), down (hidden, mlp)."""
    return functional.linear(
        functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down
    )
