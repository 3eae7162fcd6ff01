"""Prompt lookup: propose what followed the newest tokens the last time they stood in the text.

No model is needed and a proposal costs nothing but the width of the verification, so it pays where
the text repeats itself or its prompt (edits, quotes, code) and wastes a little elsewhere. A
governor pauses it when it misses.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlxgen.config import PromptLookupConfig
from mlxgen.drafters.proposal import LOOKUP_DRAFTER, LengthPolicy, Proposal
from mlxgen.sampling.elementary import one_hot
from mlxgen.sampling.history import History, IntArray

_MISSES_BEFORE_PAUSE = 2
_FIRST_PAUSE_ROUNDS = 4
_LONGEST_PAUSE_ROUNDS = 64
_NARROW_TOKENS = 3


def find_continuation(tokens: IntArray, config: PromptLookupConfig, limit: int) -> IntArray:
    """Tokens that followed the most recent earlier occurrence of the newest n-gram.

    tokens: `[n] int32`, the whole text. Longer n-grams are tried first, from `ngram_max` down to
    `ngram_min`. At most `limit` tokens come back, none when nothing matches.
    """
    n = len(tokens)
    for size in range(min(config.ngram_max, n - 1), config.ngram_min - 1, -1):
        # An earlier occurrence ends before the newest token, so that something follows it.
        starts = n - size
        matches = np.ones(starts, dtype=bool)
        for i in range(size):
            matches &= tokens[i : i + starts] == tokens[n - size + i]
        found = np.flatnonzero(matches)
        if len(found):
            follows = int(found[-1]) + size
            return tokens[follows : min(follows + limit, n)]
    return tokens[:0]


class LookupGovernor:
    """Decides how much lookup may propose, from how its past rounds went.

    It starts narrow. A round that lands whole opens the full width; two misses in a row close it
    for a few turns, and a miss right after such a pause for twice as many. A success starts anew.
    """

    def __init__(self, max_draft: int) -> None:
        self._max_draft = max_draft
        self._width = min(_NARROW_TOKENS, max_draft)
        self._misses = 0
        self._pause_rounds = _FIRST_PAUSE_ROUNDS
        self._paused_left = 0
        self.paused_rounds = 0

    def width(self) -> int:
        """Most tokens to propose in the coming round; 0 while paused."""
        if self._paused_left > 0:
            self._paused_left -= 1
            self.paused_rounds += 1
            return 0
        return self._width

    def record(self, proposed: int, accepted: int) -> None:
        """Learn how a round went."""
        if accepted == proposed:
            self._width = self._max_draft
        if accepted > 0:
            self._misses = 0
            self._pause_rounds = _FIRST_PAUSE_ROUNDS
            return
        self._width = min(_NARROW_TOKENS, self._max_draft)
        self._misses += 1
        if self._misses >= _MISSES_BEFORE_PAUSE:
            self._paused_left = self._pause_rounds
            self._pause_rounds = min(2 * self._pause_rounds, _LONGEST_PAUSE_ROUNDS)


class PromptLookup:
    """Proposes continuations found in the text itself. Its q is one-hot at each proposal."""

    name = LOOKUP_DRAFTER
    reports_distribution = True
    length_policy = LengthPolicy.FIXED
    cached_tokens = None

    def __init__(self, config: PromptLookupConfig, width: int) -> None:
        self._config = config
        self._vocabulary_width = width
        self._governor = LookupGovernor(config.max_draft)
        self._found: IntArray = np.zeros(0, dtype=np.int32)

    @property
    def paused_rounds(self) -> int:
        """How often the governor held it back."""
        return self._governor.paused_rounds

    def prefill(self, prompt: IntArray) -> None:
        """Nothing to take in: the text is all it needs."""

    def plan(self, history: History, k: int, limit: int) -> int:
        """Look the continuation up; its length, 0 when there is none or the governor pauses.

        It has a width of its own, so k does not matter.
        """
        limit = min(limit, self._governor.width())
        self._found = find_continuation(history.tokens, self._config, limit)
        return len(self._found)

    def propose(
        self, history: History, k: int, *, want_distribution: bool, coupled: bool
    ) -> Proposal:
        """What `plan` found."""
        ids = mx.array(self._found[:k])
        q = one_hot(ids, self._vocabulary_width) if want_distribution else None
        return Proposal(ids=ids, q=q)

    def record(self, proposed: int, accepted: int) -> None:
        """Tell the governor how the round went."""
        self._governor.record(proposed, accepted)

    def rewind(self, length: int) -> None:
        """Nothing to forget."""
