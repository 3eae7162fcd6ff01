"""From the runs of a comparison to what is said of each arm and of each two arms."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations
from typing import Any

from mlxgen.experiment.arms import PLAIN
from mlxgen.experiment.intervals import (
    Interval,
    Work,
    ratio,
    ratio_interval,
    speed_interval,
)
from mlxgen.experiment.plan import Experiment, Phase
from mlxgen.experiment.records import RunRecord
from mlxgen.speculative.theory_check import TheoryCheck

NO_ROUND = "unknown"
"""The rule of an arm in which no round ran, as on the acceptance line."""


class Verdict(str, Enum):
    """What a ratio of speeds shows."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference shown"
    NO_INTERVAL = "no interval"
    """With fewer prompts than a bootstrap needs, or where nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Counts over the timed runs; rates with a zero denominator are 0."""

    rounds: int
    proposed: int
    positions_tested: int
    accepted: int
    per_position_acceptance: float
    mean_accepted_len: float
    tested_by_offset: list[int]
    accepted_by_offset: list[int]


@dataclass(frozen=True, kw_only=True)
class Theory:
    """The repeated runs against theory, over the same positions.

    closed_form: expected / positions_tested; under `block` too, where theory speaks of lengths.
    standard_error: of the measured acceptance, as theory has it. closed_form_*: as on the
    diagnostic line. repeats_timed: the counts and the text equal those of the timed runs.
    """

    runs: int
    positions_tested: int
    accepted: int
    acceptance: float
    closed_form: float
    standard_error: float
    expected: float
    variance: float
    z: float
    is_consistent: bool
    closed_form_sum_min: float
    closed_form_sum_prod: float
    closed_form_gumbel: float
    mean_accepted_len: float
    expected_accepted_len: float
    repeats_timed: bool


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Everything that depends on the clock. Speeds in tokens a second; intervals at 95 %.

    decode: over all timed runs. ratio: to the first arm, None where nothing was measured.
    """

    decode_tokens_per_s: float
    decode_interval: Interval | None
    decode_s: float
    prefill_ms: float
    prefill_tokens_per_s: float
    ratio_to_first: float | None
    ratio_interval: Interval | None
    verdict: Verdict | None


@dataclass(frozen=True, kw_only=True)
class ArmSummary:
    """One arm. settings: what it was told. text_sha256: of all its texts, so that arms which
    wrote the same have the same."""

    name: str
    rule: str
    settings: dict[str, Any]
    runs: int
    tokens: int
    tokens_per_forward: float
    text_sha256: str
    acceptance: Acceptance | None
    theory: Theory | None
    timing: Timing


@dataclass(frozen=True, kw_only=True)
class PairTiming:
    """How fast the second arm is against the first."""

    ratio: float | None
    interval: Interval | None
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class PairSummary:
    """Two arms by name."""

    first: str
    second: str
    timing: PairTiming


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a better rule can bring under one way of sampling and drafting.

    sum_min, sum_prod: over all positions that its arms tested with closed forms; their ratio is
    the most by which acceptance at a position can grow from `sampler-match` to `stochastic`.
    """

    arms: list[str]
    positions_tested: int
    sum_min: float
    sum_prod: float
    ratio: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison found. complete: all planned runs were made.

    prompts: how many of them every arm has run. text_groups: arms that wrote the same texts.
    """

    complete: bool
    runs: int
    planned_runs: int
    prompts: int
    bounds: list[Bound]
    arms: list[ArmSummary]
    pairs: list[PairSummary]
    text_groups: list[list[str]]


def summarise(experiment: Experiment, records: Sequence[RunRecord]) -> Comparison:
    """Sum up the runs made so far.

    Of the timed ones only prompts and seeds count that every arm has run.
    """
    timed = _common(experiment, [run for run in records if run.key.phase is Phase.SPEED])
    repeated = [run for run in records if run.key.phase is Phase.THEORY]
    prompts = sorted({run.key.prompt for run in timed[0]})
    works = [_work(runs, prompts) for runs in timed]
    planned = len(experiment.schedule())
    arms = []
    for index, arm in enumerate(experiment.arms):
        mine = [run for run in repeated if run.key.arm == index]
        arms.append(
            ArmSummary(
                name=arm.name,
                rule=_rule(timed[index]) if arm.speculates else PLAIN,
                settings=arm.facts,
                runs=len(timed[index]),
                tokens=sum(run.tokens for run in timed[index]),
                tokens_per_forward=_share(
                    sum(run.tokens for run in timed[index]),
                    sum(run.target_forwards for run in timed[index]),
                ),
                text_sha256=_text_digest(timed[index]),
                acceptance=_acceptance(timed[index]) if arm.speculates else None,
                theory=_theory(mine, timed[index]) if mine else None,
                timing=_timing(timed[index], works[index], works[0] if index else None),
            )
        )
    names = [arm.name for arm in arms]
    return Comparison(
        complete=len(records) == planned,
        runs=len(records),
        planned_runs=planned,
        prompts=len(prompts),
        bounds=_bounds(experiment, repeated),
        arms=arms,
        pairs=[
            _pair(names[a], names[b], works[a], works[b])
            for a, b in combinations(range(len(arms)), 2)
        ],
        text_groups=_text_groups(arms),
    )


def _common(experiment: Experiment, runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """The runs of each arm at the prompts and seeds that all arms have run, in a fixed order."""
    arms = range(len(experiment.arms))
    by_arm = [{(r.key.prompt, r.key.seed): r for r in runs if r.key.arm == arm} for arm in arms]
    shared = sorted(set.intersection(*(set(mine) for mine in by_arm)))
    return [[mine[place] for place in shared] for mine in by_arm]


def _work(runs: Sequence[RunRecord], prompts: Sequence[int]) -> Work:
    tokens: dict[int, float] = defaultdict(float)
    seconds: dict[int, float] = defaultdict(float)
    for run in runs:
        tokens[run.key.prompt] += run.tokens
        seconds[run.key.prompt] += run.decode_ms / 1e3
    return Work([tokens[prompt] for prompt in prompts], [seconds[prompt] for prompt in prompts])


def _share(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def _rule(runs: Sequence[RunRecord]) -> str:
    return next((run.rule for run in runs if run.rounds), NO_ROUND)


def _text_digest(runs: Sequence[RunRecord]) -> str:
    return hashlib.sha256("".join(run.text_sha256 for run in runs).encode()).hexdigest()


def _by_offset(lists: Sequence[tuple[int, ...]]) -> list[int]:
    width = max((len(counts) for counts in lists), default=0)
    return [sum(counts[i] for counts in lists if i < len(counts)) for i in range(width)]


def _acceptance(runs: Sequence[RunRecord]) -> Acceptance:
    rounds = sum(run.rounds for run in runs)
    tested = sum(run.positions_tested for run in runs)
    accepted = sum(run.accepted for run in runs)
    return Acceptance(
        rounds=rounds,
        proposed=sum(run.proposed for run in runs),
        positions_tested=tested,
        accepted=accepted,
        per_position_acceptance=_share(accepted, tested),
        mean_accepted_len=_share(accepted, rounds),
        tested_by_offset=_by_offset([run.tested_by_offset for run in runs]),
        accepted_by_offset=_by_offset([run.accepted_by_offset for run in runs]),
    )


def _theory(runs: Sequence[RunRecord], timed: Sequence[RunRecord]) -> Theory:
    # Sums of floats in one order, so that a resumed comparison gives the same digits.
    runs = sorted(runs, key=lambda run: (run.key.seed, run.key.prompt))
    check = TheoryCheck.combined(
        [TheoryCheck(run.expected, run.accepted, run.variance, run.largest_step) for run in runs]
    )
    rounds = sum(run.rounds for run in runs)
    tested = sum(run.positions_tested for run in runs)
    first = {(run.key.prompt, run.key.seed): run.counts for run in timed}
    return Theory(
        runs=len(runs),
        positions_tested=tested,
        accepted=check.observed,
        acceptance=_share(check.observed, tested),
        closed_form=_share(check.expected, tested),
        standard_error=_share(math.sqrt(check.variance), tested),
        expected=check.expected,
        variance=check.variance,
        z=check.z,
        is_consistent=check.is_consistent,
        closed_form_sum_min=_share(sum(run.sum_min for run in runs), tested),
        closed_form_sum_prod=_share(sum(run.sum_prod for run in runs), tested),
        closed_form_gumbel=_share(sum(run.gumbel for run in runs), tested),
        mean_accepted_len=_share(check.observed, rounds),
        expected_accepted_len=_share(check.expected, rounds),
        repeats_timed=all(first.get((run.key.prompt, run.key.seed)) == run.counts for run in runs),
    )


def _timing(runs: Sequence[RunRecord], work: Work, first: Work | None) -> Timing:
    prefill_ms = math.fsum(run.prefill_ms for run in runs)
    taken_in = sum(run.prompt_tokens - 1 for run in runs)
    interval = None if first is None else ratio_interval(work, first)
    return Timing(
        decode_tokens_per_s=work.speed,
        decode_interval=speed_interval(work),
        decode_s=math.fsum(work.seconds),
        prefill_ms=_share(prefill_ms, len(runs)),
        prefill_tokens_per_s=_share(1e3 * taken_in, prefill_ms),
        ratio_to_first=1.0 if first is None else ratio(work, first),
        ratio_interval=interval,
        verdict=None if first is None else verdict_of(interval),
    )


def verdict_of(interval: Interval | None) -> Verdict:
    """What an interval of a ratio shows: no difference when it covers 1."""
    if interval is None:
        return Verdict.NO_INTERVAL
    if interval.covers(1.0):
        return Verdict.NO_DIFFERENCE
    return Verdict.FASTER if interval.low > 1 else Verdict.SLOWER


def _pair(first: str, second: str, baseline: Work, work: Work) -> PairSummary:
    interval = ratio_interval(work, baseline)
    timing = PairTiming(
        ratio=ratio(work, baseline), interval=interval, verdict=verdict_of(interval)
    )
    return PairSummary(first=first, second=second, timing=timing)


def _bounds(experiment: Experiment, runs: Sequence[RunRecord]) -> list[Bound]:
    """One for each way of sampling and drafting, the rule aside."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, arm in enumerate(experiment.arms):
        if arm.speculates:
            same = {key: value for key, value in arm.facts.items() if key != "accept_rule"}
            groups[repr(same)].append(index)
    bounds = []
    for members in groups.values():
        order = sorted(
            (run for run in runs if run.key.arm in members),
            key=lambda run: (run.key.arm, run.key.seed, run.key.prompt),
        )
        tested = sum(run.positions_tested for run in order)
        if not tested:
            continue
        sum_min = _share(sum(run.sum_min for run in order), tested)
        sum_prod = _share(sum(run.sum_prod for run in order), tested)
        bounds.append(
            Bound(
                arms=[experiment.arms[index].name for index in members],
                positions_tested=tested,
                sum_min=sum_min,
                sum_prod=sum_prod,
                ratio=sum_min / sum_prod if sum_prod else None,
            )
        )
    return bounds


def _text_groups(arms: Sequence[ArmSummary]) -> list[list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for arm in arms:
        if arm.runs:
            groups[arm.text_sha256].append(arm.name)
    return [names for names in groups.values() if len(names) > 1]
