"""States of the layers that cannot be trimmed, kept for going back to them.

A recurrent layer folds all tokens into one state, so taking tokens back means an earlier state and
the tokens since. MLX arrays are immutable, but assigning to a slice makes the same Python object
stand for another array; a snapshot therefore holds objects of its own, which share the data until
one of them changes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

_MOST_SNAPSHOTS = 6
"""Two that rounds begin with and four between; a state can be tens of megabytes."""


@dataclass(frozen=True)
class Snapshot:
    """The attributes of some caches when they held `tokens` tokens."""

    tokens: int
    states: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, caches: list[Any], tokens: int) -> Snapshot:
        """Take a snapshot; nothing is evaluated and no data copied."""
        return cls(tokens, tuple(_copied(vars(cache)) for cache in caches))

    def restore(self, caches: list[Any]) -> None:
        """Put the same caches back to this state. The snapshot stays usable."""
        for cache, state in zip(caches, self.states, strict=True):
            vars(cache).clear()
            vars(cache).update(_copied(state))


class SnapshotLog:
    """A snapshot for each forward of the last two rounds, and the tokens that were forwarded.

    A round begins with the first forward after a rewind. The loop may begin one before all tokens
    of the last one have been taken, and an exit goes back to the last token taken. Any length from
    the beginning of the last round but one can be gone back to: to a snapshot at or before it, and
    the tokens in between have to be forwarded again.
    """

    def __init__(self) -> None:
        self._snapshots: list[Snapshot] = []
        self._fed: list[mx.array] = []
        self._end = 0
        """Number of tokens that the snapshots and the forwarded tokens reach up to."""
        self._round_start = 0
        self._is_round_over = True

    @property
    def reach_tokens(self) -> int | None:
        """The smallest length that can be gone back to; None when there is no snapshot."""
        return self._snapshots[0].tokens if self._snapshots else None

    def covers(self, length: int) -> bool:
        """Whether `restore` can go back to that length."""
        return bool(self._snapshots) and self._snapshots[0].tokens <= length <= self._end

    def clear(self) -> None:
        """Forget everything: no rewind reaches behind the next forward."""
        self._snapshots, self._fed, self._is_round_over = [], [], True

    def record(self, caches: list[Any], tokens: int, ids: mx.array) -> None:
        """Before a forward of `ids: [L]`, with `tokens` tokens in the caches."""
        snapshot = Snapshot.of(caches, tokens)
        # A forward that failed may have left its own at this length.
        self._keep([taken for taken in self._snapshots if taken.tokens < tokens], tokens)
        if self._is_round_over:
            last = self._round_start
            self._keep([taken for taken in self._snapshots if taken.tokens >= last], tokens)
            self._round_start, self._is_round_over = tokens, False
        self._make_room()
        self._snapshots.append(snapshot)
        self._fed.append(ids)
        self._end = tokens + ids.shape[0]

    def restore(self, caches: list[Any], length: int) -> tuple[int, mx.array]:
        """Go back to at most `length` tokens; returns the number and the ids `[n]` since then.

        Can be repeated when what follows is interrupted. Needs `covers(length)`.
        """
        self._keep([taken for taken in self._snapshots if taken.tokens <= length], length)
        self._snapshots[-1].restore(caches)
        base = self._snapshots[-1].tokens
        return base, mx.concatenate(self._fed)[base - self._snapshots[0].tokens :]

    def end_round(self) -> None:
        """The next forward begins a new round."""
        self._is_round_over = True

    def _keep(self, snapshots: list[Snapshot], end: int) -> None:
        """Cut the log to some of its snapshots, from the first of them to `end` tokens."""
        if not snapshots:
            self._snapshots, self._fed, self._end = [], [], end
        elif snapshots[0] is not self._snapshots[0] or end != self._end:
            first = self._snapshots[0].tokens
            fed = mx.concatenate(self._fed)
            self._fed = [fed[snapshots[0].tokens - first : end - first]]
        self._snapshots, self._end = snapshots, end

    def _make_room(self) -> None:
        """Give up a snapshot when there are too many, save those that rounds begin with."""
        if len(self._snapshots) < _MOST_SNAPSHOTS:
            return
        spare = range(1, len(self._snapshots))
        del self._snapshots[
            next(i for i in spare if self._snapshots[i].tokens != self._round_start)
        ]


def _copied(value: Any) -> Any:
    if isinstance(value, mx.array):
        return copy.copy(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (int, str)) else copy.deepcopy(value)
