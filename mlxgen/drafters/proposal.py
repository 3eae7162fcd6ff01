"""What the loop needs of a drafter, and what a drafter hands over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlxgen.sampling.history import History, IntArray


@dataclass(frozen=True)
class Proposal:
    """The drafted tokens of one round.

    ids: `[k] int32` on the device, k >= 1. log_q: `[k, width] float32`, the log of the
    distributions that the ids were really drawn from, or None when the drafter has none to
    report. finite: scalar bool on the device, whether the drafter's logits were usable.
    """

    ids: mx.array
    log_q: mx.array | None
    finite: mx.array


class Drafter(Protocol):
    """Proposes tokens. The loop depends on this alone.

    The number of proposals is fixed before any of them is drawn: a drafter returns k of them, so
    none can be dropped after a look at its value (docs/speculative-acceptance.md, "What a drafter
    may decide").
    """

    @property
    def reports_distribution(self) -> bool:
        """Whether proposals carry `log_q`."""

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the drafter's cache; tokens of the history behind it are owed."""

    def prefill(self, prompt: IntArray) -> None:
        """Take in all prompt tokens but the last."""

    def propose(self, history: History, k: int, *, want_distribution: bool) -> Proposal:
        """Propose k tokens to follow the history; nothing is evaluated yet."""

    def rewind(self, length: int) -> None:
        """Forget what lies behind the first `length` tokens of the text."""
