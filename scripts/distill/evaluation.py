"""Figures of a draft on the held-out rows of a corpus, over the target's own words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .config import AffineFormat
from .corpus import Round
from .draft import Draft
from .llama import fast_attention
from .prompts import GREEDY_TEMPERATURE, Role
from .target import Target

_TEMPERATURES = (1.0, 0.7)
_BATCH_TOKENS = 8192  # bounds the memory for float32 logits


class _Means:
    """Means by name, of values that come in parts."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, name: str, values: Tensor) -> None:
        total, count = self._sums.get(name, (0.0, 0))
        total += float(values.double().sum())
        self._sums[name] = (total, count + values.numel())

    def read(self) -> dict[str, float]:
        """Means over at least one value."""
        return {name: total / count for name, (total, count) in self._sums.items() if count}


def compare(logits: Tensor, target_logits: Tensor, temperature: float) -> dict[str, Tensor]:
    """How well q, the draft's distribution, stands in for the target's p, at each position.

    Logits are (positions, vocabulary) float32; each figure is (positions,) float32:
    sum_min: sum of min(p, q), the acceptance rate of speculative sampling;
    sum_product: sum of p q, acceptance when both sample on their own and must agree;
    top_probability: p of q's likeliest token, acceptance of a draft that does not sample.
    """
    p = (target_logits / temperature).softmax(dim=-1)
    q = (logits / temperature).softmax(dim=-1)
    top = logits.argmax(dim=-1, keepdim=True)
    return {
        "sum_min": torch.minimum(p, q).sum(dim=-1),
        "sum_product": (p * q).sum(dim=-1),
        "top_probability": p.gather(-1, top)[:, 0],
    }


def evaluate(
    draft: Draft,
    target: Target,
    rounds: Sequence[Round],
    most_rounds: int,
    rounding: AffineFormat | None,
) -> dict[str, float]:
    """Means over held-out rows of up to most_rounds rounds, spread over the corpus.

    Figures at a temperature are given over all rows and over the rows written at it; greedy
    agreement over all rows and over the nearly greedy ones; KL and entropy in nats.
    """
    means, positions = _Means(), 0
    stride = -(-len(rounds) // most_rounds)
    for part in rounds[::stride]:
        held_out = torch.arange(part.training_rows, len(part.tokens), device=target.device)
        for rows in torch.split(held_out, max(1, _BATCH_TOKENS // part.tokens.shape[1])):
            own = torch.zeros_like(part.roles[rows], dtype=torch.bool)
            own[:, :-1] = part.roles[rows, 1:] >= Role.ANSWER
            if not own.any():
                continue
            with torch.no_grad(), fast_attention(target.device):
                hidden, table = draft.forward(part.tokens[rows], target.precision.compute, rounding)
                head = table.to(target.head.dtype)
                logits = functional.linear(hidden[own].to(head.dtype), head).float()
                states = part.hidden[rows][own].to(target.head.dtype)
                target_logits = functional.linear(states, target.head).float()
            written_at = part.temperatures[rows][:, None].expand(own.shape)[own]
            positions += len(logits)

            agree = (logits.argmax(dim=-1) == target_logits.argmax(dim=-1)).float()
            means.add("agreement", agree)
            means.add("agreement, greedy rows", agree[written_at == GREEDY_TEMPERATURE])
            log_p, log_q = target_logits.log_softmax(dim=-1), logits.log_softmax(dim=-1)
            means.add("kl", (log_p.exp() * (log_p - log_q)).sum(dim=-1))
            means.add("target entropy", -(log_p.exp() * log_p).sum(dim=-1))
            for temperature in _TEMPERATURES:
                for name, values in compare(logits, target_logits, temperature).items():
                    label = f"{name} at {temperature}"
                    means.add(label, values)
                    means.add(f"{label}, rows written at it", values[written_at == temperature])
    return means.read() | {"positions": positions}
