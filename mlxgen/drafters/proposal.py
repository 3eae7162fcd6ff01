"""What the loop needs of a drafter, and what a drafter hands over."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import mlx.core as mx

from mlxgen.sampling.history import History, IntArray

MODEL_DRAFTER = "draft-model"
LOOKUP_DRAFTER = "prompt-lookup"


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

    ids: `[k] int32` on the device, k >= 1. q: `[k, width] float32`, rows sum to 1, the
    distributions that the ids were really drawn from, or None when the drafter has none to
    report. tops: the drafter's largest logits for `rows_are_usable`, one `[1, 1]` on the device for
    each row of logits that it had: a GPU hands the host so little without copying.
    """

    ids: mx.array
    q: mx.array | None
    tops: tuple[mx.array, ...] = ()


class Drafter(Protocol):
    """Proposes tokens. The loop depends on this alone.

    A round asks `plan` how many tokens will come, then `propose` for them, and tells `record` how
    they did.
    """

    @property
    def name(self) -> str:
        """Which drafter made the newest plan, for the statistics."""

    @property
    def reports_distribution(self) -> bool:
        """Whether proposals carry `q`."""

    @property
    def length_policy(self) -> LengthPolicy:
        """How it decides on the number of proposals. A rule that allows less refuses it."""

    @property
    def cached_tokens(self) -> int | None:
        """Number of tokens in the drafter's cache, None when it keeps none; tokens of the history
        behind it are owed."""

    def prefill(self, prompt: IntArray) -> None:
        """Take in all prompt tokens but the last."""

    def plan(self, history: History, k: int, limit: int) -> int:
        """How many tokens it will propose next, 0 for none. Nothing has been drawn yet.

        k: the number that the run asks for, or that its depth controller chose. limit: the most
        that may be proposed at all.
        """

    def propose(
        self, history: History, k: int, *, want_distribution: bool, coupled: bool
    ) -> Proposal:
        """Propose the k tokens of the plan; nothing is evaluated yet.

        Under `LengthPolicy.FIXED` exactly k come back, otherwise at most k. coupled: draw with the
        noise that the target will use at the same positions.
        """

    def record(self, proposed: int, accepted: int) -> None:
        """Learn how many of the newest proposals were accepted."""

    def rewind(self, length: int) -> None:
        """Forget what lies behind the first `length` tokens of the text."""
