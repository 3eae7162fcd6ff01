"""What the loop needs of a drafter, and what a drafter hands over."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import mlx.core as mx

from mlxgen.sampling.history import History, IntArray


class LengthPolicy(IntEnum):
    """What a drafter looks at when it decides how many tokens to propose.

    Rules that use q are lossless only while a proposal is not dropped for its own value: with
    p = (.5, .3, .2), dropping weak draws turns the text's law into (.55, .23, .22).
    """

    FIXED = 0
    """Nothing: exactly k are proposed, k fixed before the first is drawn."""
    PREFIX = 1
    """Rows and earlier proposals: it may stop after a proposal, but keeps what it drew."""
    VALUE = 2
    """Anything, the value of the token just drawn included."""


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
    """Proposes tokens. The loop depends on this alone."""

    @property
    def reports_distribution(self) -> bool:
        """Whether proposals carry `log_q`."""

    @property
    def length_policy(self) -> LengthPolicy:
        """How it decides on the number of proposals. A rule that allows less refuses it."""

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the drafter's cache; tokens of the history behind it are owed."""

    def prefill(self, prompt: IntArray) -> None:
        """Take in all prompt tokens but the last."""

    def propose(
        self, history: History, k: int, *, want_distribution: bool, coupled: bool
    ) -> Proposal:
        """Propose at most k tokens, under `LengthPolicy.FIXED` exactly k; nothing is evaluated yet.

        coupled: draw with the noise that the target will use at the same positions.
        """

    def rewind(self, length: int) -> None:
        """Forget what lies behind the first `length` tokens of the text."""
