"""Intervals of a speed and of a ratio of speeds, by bootstrap over prompts.

A speed is a ratio of sums, tokens over seconds, and prompts are what was drawn at random: the
runs of one prompt stay together, and two arms are resampled at the same prompts. The interval is
the percentile one on a level widened for few prompts, (n-1)/n and Student's t for the normal tail
(Hesterberg 2015, "What Teachers Should Know About the Bootstrap", section 4.6): with 40 prompts a
plain percentile interval covers about 94 % where 95 is meant, with 10 about 90.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import bootstrap, norm, t

FEWEST_PROMPTS = 5
"""With fewer no bootstrap interval covers what it says."""
LEVEL = 0.95
RESAMPLES = 9999
_SEED = 0

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """Ends of an interval."""

    low: float
    high: float

    def covers(self, value: float) -> bool:
        """Whether the value lies inside, ends included."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Work:
    """What an arm did at each prompt: tokens emitted and seconds taken, `[prompts]` each."""

    tokens: Sequence[float]
    seconds: Sequence[float]

    @property
    def speed(self) -> float:
        """Tokens a second over all prompts; 0 where no time passed."""
        seconds = math.fsum(self.seconds)
        return math.fsum(self.tokens) / seconds if seconds > 0 else 0.0


def speed_interval(work: Work, *, resamples: int = RESAMPLES) -> Interval | None:
    """Of tokens a second; None with too few prompts, or when nothing was measured."""
    return _interval((work.tokens, work.seconds), _speed, resamples)


def ratio(work: Work, baseline: Work) -> float | None:
    """How many times as fast as the baseline; None when either did nothing."""
    return work.speed / baseline.speed if work.speed and baseline.speed else None


def ratio_interval(work: Work, baseline: Work, *, resamples: int = RESAMPLES) -> Interval | None:
    """Of the ratio; None with too few prompts, or when nothing was measured."""
    samples = (work.tokens, work.seconds, baseline.tokens, baseline.seconds)
    return _interval(samples, _ratio, resamples)


def _speed(tokens: FloatArray, seconds: FloatArray, axis: int = -1) -> FloatArray:
    return np.asarray(tokens.sum(axis) / seconds.sum(axis))


def _ratio(
    tokens: FloatArray,
    seconds: FloatArray,
    baseline_tokens: FloatArray,
    baseline_seconds: FloatArray,
    axis: int = -1,
) -> FloatArray:
    speed = _speed(tokens, seconds, axis)
    return np.asarray(speed / _speed(baseline_tokens, baseline_seconds, axis))


def _interval(samples: Sequence[Sequence[float]], statistic: object, count: int) -> Interval | None:
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    prompts = len(arrays[0])
    # A prompt without tokens is data, but a resample of nothing else has no speed.
    if prompts < FEWEST_PROMPTS or any((array <= 0).all() for array in arrays):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ends = bootstrap(
            arrays,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=count,
            confidence_level=_widened_level(prompts),
            method="percentile",
            rng=np.random.default_rng(_SEED),
        ).confidence_interval
    low, high = float(ends.low), float(ends.high)
    return Interval(low, high) if math.isfinite(low) and math.isfinite(high) else None


def _widened_level(prompts: int) -> float:
    tail = math.sqrt(prompts / (prompts - 1)) * t.ppf((1 - LEVEL) / 2, prompts - 1)
    return float(1 - 2 * norm.cdf(tail))
