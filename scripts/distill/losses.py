"""The loss between the target's and the draft's next-token distributions, with its gradient.

At each position the loss is

    weights.kl * KL(p || q) + weights.tv * TV(p', q')

with p and q the target's and the draft's distributions at temperature 1, and p' and q' those at
the temperature that the row was sampled at. TV = 1 - sum of min(p', q'): one minus the rate at
which speculative sampling accepts the draft's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from .schedule import LossWeights


@dataclass(frozen=True)
class HeadLoss:
    """The mean loss over positions, its gradients, and what it is made of.

    loss: float32 scalar. statistics: (3,) float32, the means of the KL divergence in nats, of the
    overlap sum of min(p', q'), and of greedy agreement. grad_hidden: (positions, hidden) of the
    hidden states' dtype. grad_table: (vocabulary, hidden) float32.
    """

    loss: Tensor
    statistics: Tensor
    grad_hidden: Tensor
    grad_table: Tensor


def head_loss(
    hidden: Tensor,
    table: Tensor,
    target_hidden: Tensor,
    target_head: Tensor,
    inverse_temperatures: Tensor,
    weights: LossWeights,
    chunk_positions: int,
) -> HeadLoss:
    """The loss of hidden (positions, hidden) under the head table (vocabulary, hidden).

    The target's states and head are (positions, its hidden) and (vocabulary, its hidden); logits
    have the dtype of its head. inverse_temperatures: (positions,) float32. Gradients are made on
    the spot, chunk by chunk, since logits of all positions would be by far the largest tensors.
    """
    with torch.no_grad():
        count = len(hidden)
        head = table.to(target_head.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_table = torch.zeros_like(table)
        totals = torch.zeros(3, device=hidden.device)
        for start in range(0, count, chunk_positions):
            part = slice(start, start + chunk_positions)
            states = hidden[part]
            logits = functional.linear(states.to(head.dtype), head)
            target_states = target_hidden[part].to(target_head.dtype)
            target_logits = functional.linear(target_states, target_head)
            gradient, statistics = logit_gradient(
                logits, target_logits, inverse_temperatures[part], weights
            )
            grad_hidden[part] = (gradient @ table.to(gradient.dtype) / count).to(hidden.dtype)
            grad_table += (gradient.T @ states.to(gradient.dtype)).to(table.dtype) / count
            totals += statistics.sum(dim=0)
        means = totals / count
        loss = weights.kl * means[0] + weights.tv * (1 - means[1])
        return HeadLoss(loss, means, grad_hidden, grad_table)


def logit_gradient(
    logits: Tensor, target_logits: Tensor, inverse_temperatures: Tensor, weights: LossWeights
) -> tuple[Tensor, Tensor]:
    """The loss's gradient with respect to the draft's logits, and each position's statistics.

    Logits are (positions, vocabulary) of any float dtype, inverse_temperatures (positions,).
    Returns the gradient, (positions, vocabulary), and (positions, 3) of KL, overlap and
    agreement. A Triton kernel does it in three passes over the logits where there is a GPU and
    Triton; its gradient is bfloat16.
    """
    if logits.is_cuda and find_spec("triton") is not None:
        from .fused_loss import fused_logit_gradient

        return fused_logit_gradient(logits, target_logits, inverse_temperatures, weights)
    return plain_logit_gradient(logits, target_logits, inverse_temperatures, weights)


def plain_logit_gradient(
    logits: Tensor, target_logits: Tensor, inverse_temperatures: Tensor, weights: LossWeights
) -> tuple[Tensor, Tensor]:
    """logit_gradient in PyTorch alone, in float32, or in float64 where the logits are."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    z, target_z = logits.to(dtype), target_logits.to(dtype)
    log_q, log_p = z.log_softmax(dim=-1), target_z.log_softmax(dim=-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    heat = inverse_temperatures.to(dtype)[:, None]
    q, p = (z * heat).softmax(dim=-1), (target_z * heat).softmax(dim=-1)
    overlap = torch.minimum(p, q).sum(dim=-1)
    at_top = (z == z.amax(dim=-1, keepdim=True)) & (target_z == target_z.amax(dim=-1, keepdim=True))
    agreement = at_top.any(dim=-1).to(dtype)

    # Raising a logit moves probability to its token from all others in proportion to theirs, so
    # the overlap gains where q < p and loses the share of such tokens in what is moved away.
    short = (q < p).to(dtype)
    short_mass = (q * short).sum(dim=-1, keepdim=True)
    gradient = weights.kl * (log_q.exp() - log_p.exp())
    gradient += weights.tv * heat * q * (short_mass - short)
    return gradient, torch.stack([kl, overlap, agreement], dim=-1)
