"""Does a run agree with theory? One statistic over all positions that were judged.

At a tested position the rule accepts with a probability a that p and q determine (its closed
form). accepted - expected is then a martingale: each term has mean 0 given all that came before,
and variance a (1 - a). Divided by the root of the summed variance it is near N(0, 1) when the rule
is right and q is what the proposals were drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

INCONSISTENT_Z = 4.9
"""Two-sided tail of 1e-6 under N(0, 1)."""
_SMALL_VARIANCE = 10.0
_SMALL_TAIL = 1e-5
"""Freedman's bound is about ten times the tail that it bounds."""
_ROUNDING_VARIANCE = 1e-5
"""Closed forms are off by about 1e-6 each in float32, so no less is divided by. It is enough to
forgive one rejection in a run of certain acceptances."""


@dataclass
class TheoryCheck:
    """Sums over the judged positions, or, under `block`, over the judged rounds.

    largest_step: the most that one of them can add to `observed`.
    """

    expected: float = 0.0
    observed: int = 0
    variance: float = 0.0
    largest_step: int = 1

    @classmethod
    def combined(cls, checks: Sequence[TheoryCheck]) -> TheoryCheck:
        """The check of several runs together."""
        return cls(
            expected=sum(check.expected for check in checks),
            observed=sum(check.observed for check in checks),
            variance=sum(check.variance for check in checks),
            largest_step=max((check.largest_step for check in checks), default=1),
        )

    def add_positions(self, probabilities: list[float], accepted: int) -> None:
        """Positions judged one by one, each accepted with its probability."""
        for probability in probabilities:
            a = min(max(probability, 0.0), 1.0)
            self.expected += a
            self.variance += a * (1 - a)
        self.observed += accepted

    def add_block(self, survival: list[float], accepted: int) -> None:
        """A block judged as a whole. survival: P(accepted length >= i), i = 1 .. k.

        E[L] = sum_i P(L >= i) and E[L^2] = sum_i (2 i - 1) P(L >= i).
        """
        mean = sum(survival)
        square = sum((2 * i - 1) * s for i, s in enumerate(survival, start=1))
        self.expected += mean
        self.variance += max(square - mean * mean, 0.0)
        self.observed += accepted
        self.largest_step = max(self.largest_step, len(survival))

    @property
    def z(self) -> float:
        """(observed - expected) / standard deviation."""
        return (self.observed - self.expected) / math.sqrt(max(self.variance, _ROUNDING_VARIANCE))

    @property
    def is_consistent(self) -> bool:
        """Whether the run agrees with theory, at a false-alarm rate of about 1e-6.

        With little variance (nearly every position certain) the normal tail says nothing: one
        rejection of probability 0.001 is then many standard deviations. There, Freedman's
        inequality for martingales has to agree as well. At its worst, just above that limit and
        with nearly every position certain, the rate is 2e-5.
        """
        if abs(self.z) <= INCONSISTENT_Z:
            return True
        # In units of the largest step, which is what counts as little.
        variance = max(self.variance / self.largest_step**2, _ROUNDING_VARIANCE)
        if variance >= _SMALL_VARIANCE:
            return False
        excess = abs(self.observed - self.expected) / self.largest_step / variance
        tail = 2 * math.exp(-variance * ((1 + excess) * math.log1p(excess) - excess))
        return tail >= _SMALL_TAIL
