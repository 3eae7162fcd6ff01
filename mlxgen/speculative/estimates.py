"""What a run has seen so far of costs and of acceptance, and what may be hoped of both.

A hope is the better end of what few observations leave open. An adaptive draft length stops looking
where not even hopes pay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

_SAMPLES = 21
_TRUSTED_SAMPLES = 2
_PACING_SAMPLES = 5
_HOPEFUL_SAMPLES = 4
_UNSURE_SHARE = 0.1
KNOWN_FIRST_USE_EXCESS = 1.1
_SLOW_RATE = 0.02
_FAST_RATE = 0.12
_SURPRISING_DEVIATIONS = 3.0
_DOUBT_DEVIATIONS = 0.5
_KEPT_TESTS = 2


class Cost:
    """A cost from its newest samples. The first use of a shape compiles kernels or warms caches, so
    few samples are read as their smallest. since_round: how many rounds there were before it; ms:
    the median, of fewer than three samples the least, None without any; first_ms: the median of
    the first ones, None while they are few."""

    def __init__(self, since_round: int = 0) -> None:
        self.since_round = since_round
        self.ms: float | None = None
        self.first_ms: float | None = None
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    def add(self, sample_ms: float) -> None:
        """Learn from one more sample."""
        self._samples.append(sample_ms)
        self.ms = self.least_ms if len(self._samples) < 3 else median(self._samples)
        if self.first_ms is None and len(self._samples) == _SAMPLES:
            self.first_ms = self.ms

    @property
    def least_ms(self) -> float | None:
        """The least sample, None without any."""
        return min(self._samples, default=None)

    @property
    def is_trusted(self) -> bool:
        """Whether a second sample stands behind the first."""
        return len(self._samples) >= _TRUSTED_SAMPLES

    @property
    def tells_pace(self) -> bool:
        """Whether a sample that strays from it says more of the machine than of the cost."""
        return len(self._samples) >= _PACING_SAMPLES

    @property
    def first_was_dear(self) -> bool:
        """Of two samples, whether the first one paid for more than the second."""
        samples = self._samples
        return len(samples) == 2 and samples[0] > KNOWN_FIRST_USE_EXCESS * samples[1]

    @property
    def hoped_ms(self) -> float:
        """The least sample until there are many; less than that while there are very few."""
        count = len(self._samples)
        if count == _SAMPLES and self.ms is not None:
            return self.ms
        missing = max(_HOPEFUL_SAMPLES - count, 0) / (_HOPEFUL_SAMPLES - 1)
        return (1 - _UNSURE_SHARE * missing) * min(self._samples)


class Acceptance:
    """Acceptance at one position. The plain mean of what was seen, then a slow average of it; where
    a fast average strays too far from the slow one, the text has changed and the slow one follows.
    """

    def __init__(self, start: float) -> None:
        self.rate = start
        self._fast = start
        self._tests = 0

    @property
    def hoped_rate(self) -> float:
        """The rate and some of its standard error."""
        error = (self.rate * (1 - self.rate) / (self._tests + 2)) ** 0.5
        return min(float(self.rate + _DOUBT_DEVIATIONS * error), 1.0)

    def learn(self, hit: bool) -> None:
        """Learn from one test."""
        self._tests += 1
        self._fast += _FAST_RATE * (hit - self._fast)
        slow_rate = max(1 / (self._tests + 2), _SLOW_RATE)
        self.rate += slow_rate * (hit - self.rate)
        variance = max(self.rate * (1 - self.rate), 0.02)
        spread = (variance * _FAST_RATE / (2 - _FAST_RATE)) ** 0.5
        if abs(self._fast - self.rate) > _SURPRISING_DEVIATIONS * spread:
            self.rate = self._fast

    def doubt(self) -> None:
        """Keep the rate as a guess only: the text has gone on without tests."""
        self._tests = min(self._tests, _KEPT_TESTS)
        self._fast = self.rate


def mean_tokens(acceptance: Iterable[float]) -> float:
    """Mean number of tokens that a round emits, from the acceptance at each of its positions."""
    mean, chain = 1.0, 1.0
    for rate in acceptance:
        chain *= rate
        mean += chain
    return mean


def cost_on_line(known: dict[int, float], width: int) -> float:
    """What is known of a width, else between its neighbours, or beyond the two largest: there costs
    never fall with width."""
    if width in known:
        return known[width]
    low = max(w for w in known if w < width)
    above = [w for w in known if w > width]
    if above:
        high = min(above)
        share = (width - low) / (high - low)
        return known[low] + share * (known[high] - known[low])
    below = [w for w in known if w < low]
    if not below:
        return known[low]
    slope = max((known[low] - known[max(below)]) / (low - max(below)), 0.0)
    return known[low] + slope * (width - low)
