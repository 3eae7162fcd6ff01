"""Stop strings over streamed text: withhold only what could still become one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence


class StopStrings:
    """Passes text through until one of the stop strings is complete.

    Each piece carries a mark (whether it came from the draft), which its characters keep. The
    earliest completed occurrence wins, and of several that one piece completes the one that
    starts first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held: deque[tuple[str, bool]] = deque()
        self.matched: str | None = None

    def feed(self, text: str, mark: bool) -> list[tuple[str, bool]]:
        """Take in a piece; return what may be shown. After a match nothing more is shown."""
        if self.matched is not None or not text:
            return []
        self._held.append((text, mark))
        pending = "".join(piece for piece, _ in self._held)
        found = [(pending.find(stop), stop) for stop in self._stops if stop in pending]
        if found:
            start, self.matched = min(found)
            shown = list(self._take(start))
            self._held.clear()
            return shown
        return list(self._take(len(pending) - self._withheld(pending)))

    def flush(self) -> list[tuple[str, bool]]:
        """What is still withheld, at the end of the text."""
        return list(self._take(sum(len(piece) for piece, _ in self._held)))

    def _withheld(self, text: str) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            suffix = text[len(text) - length :]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0

    def _take(self, count: int) -> Iterator[tuple[str, bool]]:
        while count > 0:
            piece, mark = self._held.popleft()
            if len(piece) > count:
                self._held.appendleft((piece[count:], mark))
                piece = piece[:count]
            count -= len(piece)
            yield piece, mark
