"""losses.logit_gradient as a Triton kernel: no float32 copy of the logits is ever stored."""

# No postponed annotations here: Triton compiles a kernel's, and knows only its own names.
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .schedule import LossWeights

_BLOCK = 4096  # vocabulary entries at a time
_WARPS = 16


def _logit_gradient(
    logits: tl.tensor,
    target_logits: tl.tensor,
    gradient: tl.tensor,
    statistics: tl.tensor,
    inverse_temperatures: tl.tensor,
    kl_weight: tl.tensor,
    tv_weight: tl.tensor,
    vocabulary: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One position, (vocabulary,) of each contiguous matrix; 1e30 stands for infinity."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    target_logits += row * vocabulary
    gradient += row * vocabulary
    heat = tl.load(inverse_temperatures + row)
    lanes = tl.arange(0, block)

    # First pass: each lane's maximum so far, and sums of exponentials relative to it.
    top = tl.full([block], -1e30, tl.float32)
    target_top = tl.full([block], -1e30, tl.float32)
    plain = tl.zeros([block], tl.float32)
    target_plain = tl.zeros([block], tl.float32)
    heated = tl.zeros([block], tl.float32)
    target_heated = tl.zeros([block], tl.float32)
    for start in range(0, vocabulary, block):
        inside = start + lanes < vocabulary
        z = tl.load(logits + start + lanes, inside, -1e30).to(tl.float32)
        t = tl.load(target_logits + start + lanes, inside, -1e30).to(tl.float32)
        new_top = tl.maximum(top, z)
        new_target_top = tl.maximum(target_top, t)
        plain = plain * tl.exp(top - new_top) + tl.exp(z - new_top)
        heated = heated * tl.exp((top - new_top) * heat) + tl.exp((z - new_top) * heat)
        fall = target_top - new_target_top
        rise = t - new_target_top
        target_plain = target_plain * tl.exp(fall) + tl.exp(rise)
        target_heated = target_heated * tl.exp(fall * heat) + tl.exp(rise * heat)
        top = new_top
        target_top = new_target_top
    row_top = tl.max(top, 0)
    row_target_top = tl.max(target_top, 0)
    plain_sum = tl.sum(plain * tl.exp(top - row_top), 0)
    heated_sum = tl.sum(heated * tl.exp((top - row_top) * heat), 0)
    target_plain_sum = tl.sum(target_plain * tl.exp(target_top - row_target_top), 0)
    target_heated_sum = tl.sum(target_heated * tl.exp((target_top - row_target_top) * heat), 0)
    log_shift = tl.log(plain_sum) - tl.log(target_plain_sum)

    # Second pass: the statistics, and the draft's mass on tokens that it gives too little.
    kl = tl.zeros([block], tl.float32)
    overlap = tl.zeros([block], tl.float32)
    short_mass = tl.zeros([block], tl.float32)
    agreement = tl.zeros([block], tl.float32)
    for start in range(0, vocabulary, block):
        inside = start + lanes < vocabulary
        z = tl.load(logits + start + lanes, inside, -1e30).to(tl.float32) - row_top
        t = tl.load(target_logits + start + lanes, inside, -1e30).to(tl.float32) - row_target_top
        kl += tl.where(inside, tl.exp(t) * (t - z + log_shift), 0.0)
        q = tl.exp(z * heat) / heated_sum
        p = tl.exp(t * heat) / target_heated_sum
        overlap += tl.minimum(q, p)
        short_mass += tl.where(q < p, q, 0.0)
        agreement = tl.maximum(agreement, tl.where((z == 0.0) & (t == 0.0), 1.0, 0.0))
    row_short_mass = tl.sum(short_mass, 0)
    tl.store(statistics + row * 3, tl.sum(kl, 0) / target_plain_sum)
    tl.store(statistics + row * 3 + 1, tl.sum(overlap, 0))
    tl.store(statistics + row * 3 + 2, tl.max(agreement, 0))

    # Third pass: the gradient.
    for start in range(0, vocabulary, block):
        inside = start + lanes < vocabulary
        z = tl.load(logits + start + lanes, inside, -1e30).to(tl.float32) - row_top
        t = tl.load(target_logits + start + lanes, inside, -1e30).to(tl.float32) - row_target_top
        q = tl.exp(z * heat) / heated_sum
        p = tl.exp(t * heat) / target_heated_sum
        slope = kl_weight * (tl.exp(z) / plain_sum - tl.exp(t) / target_plain_sum)
        slope += tv_weight * heat * q * (row_short_mass - tl.where(q < p, 1.0, 0.0))
        tl.store(gradient + start + lanes, slope.to(gradient.dtype.element_ty), inside)


_kernel: Any = triton.jit(_logit_gradient)


def fused_logit_gradient(
    logits: Tensor, target_logits: Tensor, inverse_temperatures: Tensor, weights: LossWeights
) -> tuple[Tensor, Tensor]:
    """See losses.logit_gradient; the gradient is bfloat16, the statistics are float32."""
    rows, vocabulary = logits.shape
    gradient = torch.empty_like(logits, dtype=torch.bfloat16)
    statistics = torch.empty(rows, 3, device=logits.device)
    _kernel[(rows,)](
        logits.contiguous(),
        target_logits.contiguous(),
        gradient,
        statistics,
        inverse_temperatures.contiguous(),
        weights.kl,
        weights.tv,
        vocabulary=vocabulary,
        block=_BLOCK,
        num_warps=_WARPS,
    )
    return gradient, statistics
