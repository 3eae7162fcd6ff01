"""The bootstrap: does it cover what it says, and what does it make of odd data?

Comparisons are simulated as numbers. Prompts differ in length and in how fast they are, the second
arm gains more on some than on others, and the clock is noisy; the true ratio is that of the means
over all prompts there could be.
"""

from __future__ import annotations

import numpy as np
import pytest

from mlxgen.experiment.intervals import (
    FEWEST_PROMPTS,
    Interval,
    Work,
    ratio,
    ratio_interval,
    speed_interval,
)
from mlxgen.experiment.summary import Verdict, verdict_of

COMPARISONS = 400
RESAMPLES = 1999


def simulated(draws: np.random.Generator, prompts: int, true_ratio: float) -> tuple[Work, Work]:
    """The work of an arm and of its baseline."""

    def spread(share: float) -> np.ndarray:
        # Mean 1, so that it does not move the ratio.
        return draws.lognormal(-share * share / 2, share, prompts)

    pace_s, gain = 0.02 * spread(0.3), spread(0.15)
    tokens, baseline_tokens = draws.integers(20, 129, prompts), draws.integers(20, 129, prompts)
    seconds = tokens * pace_s * gain / true_ratio * spread(0.05)
    baseline_seconds = baseline_tokens * pace_s * spread(0.05)
    return (
        Work(tokens.tolist(), seconds.tolist()),
        Work(baseline_tokens.tolist(), baseline_seconds.tolist()),
    )


@pytest.mark.parametrize(
    # With few prompts the bootstrap is a little short of its level.
    ("prompts", "true_ratio", "least"),
    [(40, 1.3, 0.93), (12, 1.0, 0.915)],
)
def test_interval_covers_the_true_ratio_as_often_as_it_says(
    prompts: int, true_ratio: float, least: float
) -> None:
    draws = np.random.default_rng(7)
    covered = 0
    for _ in range(COMPARISONS):
        interval = ratio_interval(*simulated(draws, prompts, true_ratio), resamples=RESAMPLES)
        assert interval is not None
        covered += interval.covers(true_ratio)
    assert least <= covered / COMPARISONS <= 0.97


def test_arms_without_a_difference_are_rarely_told_apart() -> None:
    draws = np.random.default_rng(8)
    verdicts = [
        verdict_of(ratio_interval(*simulated(draws, 40, 1.0), resamples=999)) for _ in range(200)
    ]
    assert verdicts.count(Verdict.NO_DIFFERENCE) >= 0.92 * 200


def test_pairing_takes_out_what_prompts_have_in_common() -> None:
    draws = np.random.default_rng(9)
    pace = draws.lognormal(0, 0.8, 40)
    baseline = Work([100.0] * 40, pace.tolist())
    work = Work([100.0] * 40, (pace / 1.1 * draws.lognormal(0, 0.01, 40)).tolist())
    interval, own = ratio_interval(work, baseline), speed_interval(work)
    assert interval is not None and own is not None
    assert interval.high - interval.low < 0.03
    assert ratio(work, baseline) == pytest.approx(1.1, rel=0.01)
    assert (own.high - own.low) / work.speed > 0.3
    assert verdict_of(interval) is Verdict.FASTER


def test_identical_arms_cover_1_and_show_no_difference() -> None:
    work, _ = simulated(np.random.default_rng(1), 10, 1.0)
    assert ratio_interval(work, work) == Interval(1.0, 1.0)
    assert verdict_of(ratio_interval(work, work)) is Verdict.NO_DIFFERENCE


def test_same_data_give_the_same_interval() -> None:
    works = simulated(np.random.default_rng(2), 10, 1.2)
    assert ratio_interval(*works) == ratio_interval(*works)


def test_verdicts() -> None:
    assert verdict_of(Interval(0.8, 0.99)) is Verdict.SLOWER
    assert verdict_of(Interval(1.01, 1.2)) is Verdict.FASTER
    assert verdict_of(Interval(0.9, 1.0)) is Verdict.NO_DIFFERENCE
    assert verdict_of(None) is Verdict.NO_INTERVAL


def test_no_interval_where_there_can_be_none() -> None:
    few, baseline = simulated(np.random.default_rng(3), FEWEST_PROMPTS - 1, 1.0)
    assert ratio_interval(few, baseline) is None and speed_interval(few) is None
    nothing = Work([0.0] * 8, [0.1] * 8)
    work, _ = simulated(np.random.default_rng(3), 8, 1.0)
    assert ratio_interval(nothing, work) is None and ratio_interval(work, nothing) is None
    assert ratio(work, nothing) is None and Work([], []).speed == 0


def test_a_prompt_that_ended_at_once_does_not_spoil_the_rest() -> None:
    work, baseline = simulated(np.random.default_rng(4), 20, 1.2)
    silent = Work([0.0, *work.tokens[1:]], [0.0, *work.seconds[1:]])
    interval = ratio_interval(silent, baseline)
    assert interval is not None and interval.low < interval.high
