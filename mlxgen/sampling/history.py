"""The tokens that a row of logits is conditioned on, as the penalties need them.

A row for the position after `d_1..d_i` sees prompt + emitted + `d_1..d_i`. The part up to the last
emitted token is known to the host and grows by commits; the proposals of a round live on the
device and leave no trace here when they are rejected.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


class History:
    """Prompt and emitted tokens, in order.

    With `track_matches`, also `match_lengths`: for each position j the number of tokens by which
    the text ending at j agrees, read backwards, with the text ending at the newest token. DRY
    needs it, and keeping it costs one pass over the history for each token. Tokens in `breakers`
    end a match.
    """

    def __init__(
        self,
        tokens: Iterable[int],
        *,
        track_matches: bool = False,
        breakers: frozenset[int] = frozenset(),
    ) -> None:
        self._buffer: IntArray = np.zeros(1024, dtype=np.int32)
        self._count = 0
        self._tracks_matches = track_matches
        self._breakers = breakers
        self._matches: IntArray = np.zeros(1024 if track_matches else 0, dtype=np.int32)
        self.extend(tokens)

    def __len__(self) -> int:
        return self._count

    @property
    def tokens(self) -> IntArray:
        """`[n] int32`, a view of the prompt and all emitted tokens."""
        return self._buffer[: self._count]

    @property
    def match_lengths(self) -> IntArray:
        """`[n] int32`; the entry of the newest token itself is 0."""
        return self._matches[: self._count]

    def extend(self, tokens: Iterable[int]) -> None:
        """Commit tokens: they are part of the text from now on."""
        for token in tokens:
            self._append(token)

    def truncate(self, length: int) -> None:
        """Take back everything behind the first `length` tokens."""
        kept = [int(token) for token in self.tokens[:length]]
        self._count = 0
        self.extend(kept)

    def _append(self, token: int) -> None:
        n = self._count
        if n == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.zeros_like(self._buffer)])
            if self._tracks_matches:
                self._matches = np.concatenate([self._matches, np.zeros_like(self._matches)])
        self._buffer[n] = token
        if self._tracks_matches:
            # The match ending at j grows from the one that ended at j - 1, or is broken.
            previous = np.concatenate([np.zeros(1, dtype=np.int32), self._matches[: n - 1]])[:n]
            if token in self._breakers:
                self._matches[:n] = 0
            else:
                self._matches[:n] = np.where(self._buffer[:n] == token, previous + 1, 0)
            self._matches[n] = 0
        self._count = n + 1
