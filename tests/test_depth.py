"""The adaptive draft length against the best fixed one, on scripted costs and acceptance.

No model and no clock: a regime says what a draft step, a verification and a plain step cost, and
how likely each position is to be accepted. Tokens per millisecond are exact.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from mlxgen.speculative.depth import (
    MAX_DEPTH_TOKENS,
    AdaptiveDepth,
    DraftDepth,
    FixedDepth,
    TimedRound,
)
from mlxgen.speculative.estimates import Cost

TOKENS = 4000
SEEDS = range(3)


@dataclass(frozen=True)
class Regime:
    """Costs in ms; acceptance(emitted tokens, offset in the block)."""

    plain: float
    draft: float
    verify: Callable[[int], float]
    acceptance: Callable[[int, int], float]


def constant(rate: float) -> Callable[[int, int], float]:
    return lambda emitted, offset: rate


def falls_and_rises(emitted: int, offset: int) -> float:
    return 0.1 if TOKENS / 3 < emitted < 2 * TOKENS / 3 else 0.9


REGIMES = {
    "draft as slow as target, linear": Regime(10, 10, lambda w: 10 * w, constant(0.9)),
    "draft as slow as target, flat": Regime(10, 10, lambda w: 11, constant(0.9)),
    "verification flat in width": Regime(10, 1, lambda w: 11, constant(0.9)),
    "verification linear in width": Regime(10, 1, lambda w: 10 * w, constant(0.9)),
    "useless draft, flat": Regime(10, 1, lambda w: 11, constant(0.02)),
    "useless draft, linear": Regime(10, 1, lambda w: 6 + 4 * w, constant(0.02)),
    "middling draft": Regime(10, 1, lambda w: 9 + w, constant(0.55)),
    "falls to .1 and rises again": Regime(10, 1, lambda w: 9 + w, falls_and_rises),
    "acceptance decays with offset": Regime(10, 0.5, lambda w: 9 + w, lambda e, i: 0.9 * 0.8**i),
    "launch-bound accelerator": Regime(8, 3.6, lambda w: 12.7, constant(0.7)),
    "a step after two rows": Regime(
        60, 11, lambda w: (46, 76, 88, 98, 100, 112, 109, 120)[w - 2], constant(0.7)
    ),
    "flat behind a dear second row": Regime(10, 0.5, lambda w: 14, constant(0.6)),
    "a dear third row and cheaper ones behind it": Regime(
        80, 4, lambda w: (91, 111, 101, 110, 116, 132, 136, 133)[w - 2], constant(0.7)
    ),
    "two cores, blocked products": Regime(65, 7.5, lambda w: 65 + 13 * (w - 1), constant(0.55)),
}


def tokens_per_ms(regime: Regime, depth: DraftDepth, seed: int, tokens: int = TOKENS) -> float:
    """Play a run."""
    generator = random.Random(seed)
    elapsed, emitted = 0.0, 0
    while emitted < tokens:
        k = min(depth.choose(), tokens - emitted - 1)
        if k < 1:
            count = min(depth.plain_tokens, tokens - emitted)
            elapsed += count * regime.plain
            emitted += count
            depth.record_plain(count, regime.plain)
            continue
        accepted = 0
        while accepted < k and generator.random() < regime.acceptance(emitted, accepted):
            accepted += 1
        draft_ms = k * regime.draft
        cost_ms = draft_ms + regime.verify(k + 1)
        elapsed += cost_ms
        emitted += accepted + 1
        split = draft_ms if depth.wants_split_costs else None
        depth.record_round(TimedRound(k, min(accepted + 1, k), accepted, cost_ms, split))
    return emitted / elapsed


def mean_rate(regime: Regime, make: Callable[[], DraftDepth]) -> float:
    return sum(tokens_per_ms(regime, make(), seed) for seed in SEEDS) / len(SEEDS)


def best_fixed(regime: Regime) -> float:
    lengths = range(MAX_DEPTH_TOKENS + 1)
    return max(mean_rate(regime, lambda k=k: FixedDepth(k)) for k in lengths)  # type: ignore[misc]


@pytest.mark.parametrize("name", REGIMES)
def test_the_controller_ends_within_five_percent_of_the_best_fixed_length(name: str) -> None:
    regime = REGIMES[name]
    assert mean_rate(regime, AdaptiveDepth) >= 0.95 * best_fixed(regime)


def test_a_controller_that_never_stands_aside_fails_the_same_check() -> None:
    regime = REGIMES["useless draft, linear"]
    assert mean_rate(regime, lambda: FixedDepth(3)) < 0.95 * best_fixed(regime)


def test_a_controller_that_never_probes_again_loses_what_probing_wins() -> None:
    class NeverProbes(AdaptiveDepth):
        def record_plain(self, tokens: int, step_ms: float, is_steady: bool = True) -> None:
            if self._is_measuring_plain:
                super().record_plain(tokens, step_ms, is_steady)

    regime = REGIMES["falls to .1 and rises again"]
    assert mean_rate(regime, AdaptiveDepth) > 1.1 * mean_rate(regime, NeverProbes)


def test_a_controller_that_never_tries_what_the_line_rules_out_fails_the_same_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlxgen.speculative.depth._TRIAL_GAIN", 10**9)
    regime = REGIMES["flat behind a dear second row"]
    assert mean_rate(regime, AdaptiveDepth) < 0.95 * best_fixed(regime)


def launch_bound(rate: float) -> Regime:
    """Launching a small draft takes half as long as launching the target, and a wider verification
    costs hardly more than a narrow one: as measured with the default pair on an H200."""
    costs = (2.0, 2.2, 2.7, 2.95, 3.1, 3.4, 3.7, 4.0)
    return Regime(1, 0.3, lambda w: costs[w - 2] - 0.3 * (w - 1), constant(rate))


def short_run(rate: float, kind: type[AdaptiveDepth] = AdaptiveDepth) -> float:
    """Mean speed of runs of 200 tokens over plain decoding."""
    regime = launch_bound(rate)
    return sum(tokens_per_ms(regime, kind(), seed, 200) for seed in range(40)) / 40


@pytest.mark.parametrize("rate", [0.02, 0.4, 0.6])
@pytest.mark.parametrize("wrong", [{}, {"_JUDGED_ROUNDS": 12}, {"_PROBING_SHARE": 0.1}])
def test_looking_costs_a_short_run_little_where_plain_decoding_is_the_best(
    rate: float, wrong: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejects a first look that goes on for the sake of doubt, and looks that are too frequent."""
    for name, value in wrong.items():
        monkeypatch.setattr(f"mlxgen.speculative.depth.{name}", value)
    assert (short_run(rate) > 0.975) is not bool(wrong)


def test_a_probe_of_several_proposals_finds_a_length_that_pays_where_one_does_not() -> None:
    class ProbesSingly(AdaptiveDepth):
        def _probe_length(self) -> int:
            return 1

    assert short_run(0.9) > 1.15
    assert short_run(0.9, ProbesSingly) < 1.15


def rate_where_first_uses_cost(depth: DraftDepth, extra_ms: float, seed: int) -> float:
    """Tokens per ms where the first round of each length takes longer, by less than its double."""
    generator, used = random.Random(seed), set[int]()
    elapsed, emitted = 0.0, 0
    while emitted < TOKENS:
        k = min(depth.choose(), TOKENS - emitted - 1)
        if k < 1:
            count = min(depth.plain_tokens, TOKENS - emitted)
            elapsed, emitted = elapsed + 10.0 * count, emitted + count
            depth.record_plain(count, 10.0)
            continue
        accepted = 0
        while accepted < k and generator.random() < 0.9:
            accepted += 1
        cost_ms = 0.5 * k + 11.0 + (0.0 if k in used else extra_ms)
        used.add(k)
        elapsed, emitted = elapsed + cost_ms, emitted + accepted + 1
        split = 0.5 * k if depth.wants_split_costs else None
        depth.record_round(TimedRound(k, min(accepted + 1, k), accepted, cost_ms, split))
    return emitted / elapsed


@pytest.mark.parametrize("looks_again", [True, False])
def test_first_uses_that_cost_a_little_do_not_hold_up_the_climb(
    looks_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round of a length is believed, so it must not be believed for long where much is at
    stake. Rejects a fixed 128 rounds."""
    if not looks_again:
        monkeypatch.setattr("mlxgen.speculative.depth._PATIENCE_ROUNDS", 10**9)
        monkeypatch.setattr("mlxgen.speculative.depth._TRIAL_GAIN", 10**9)
    best = sum(rate_where_first_uses_cost(FixedDepth(8), 9.0, seed) for seed in SEEDS)
    adaptive = sum(rate_where_first_uses_cost(AdaptiveDepth(), 9.0, seed) for seed in SEEDS)
    assert (adaptive > 0.95 * best) is looks_again


def test_it_climbs_no_further_than_the_costs_it_knows() -> None:
    """Of costs that jump after two rows it tries the first beyond the jump alone, and rarely."""
    regime, depth = REGIMES["a step after two rows"], AdaptiveDepth()
    tried: list[int] = []
    for _ in range(60):
        k = depth.choose()
        if k == 0:
            depth.record_plain(depth.plain_tokens, regime.plain)
            continue
        tried.append(k)
        split = k * regime.draft if depth.wants_split_costs else None
        depth.record_round(TimedRound(k, k, k, k * regime.draft + regime.verify(k + 1), split))
    assert max(tried[:6]) == 2 and tried.count(2) <= 2


class FollowsTheMean(AdaptiveDepth):
    """Wrong: follows the pace by every sample alike."""

    def _learn(self, cost: Cost, sample_ms: float) -> None:
        if cost.tells_pace and cost.ms is not None:
            self._pace *= (sample_ms / self._pace / cost.ms) ** 0.2
        cost.add(sample_ms / self._pace)


@pytest.mark.parametrize("kind", [AdaptiveDepth, FollowsTheMean])
def test_rounds_that_are_held_up_now_and_then_do_not_make_the_machine_look_slow(
    kind: type[AdaptiveDepth],
) -> None:
    """One round in ten takes half as long again, plain steps never do; none is timed after the
    beginning."""
    strays = []
    for seed in range(9):
        depth, generator = kind(), random.Random(seed)
        depth.record_plain(6, 10.0)
        for _ in range(400):
            held_up = 1.5 if generator.random() < 0.1 else 1.0
            split = 1.0 if depth.wants_split_costs else None
            depth.record_round(TimedRound(1, 1, 1, held_up * generator.uniform(11.4, 12.6), split))
        plain_ms = depth.summary().plain_ms
        assert plain_ms is not None
        strays.append(plain_ms / 10.0 - 1)
    assert (max(map(abs, strays)) < 0.2) is (kind is AdaptiveDepth), strays


class ForgetsTheBeginning(AdaptiveDepth):
    """Wrong: compares with the newest samples, which the pace itself has scaled."""

    def _learn(self, cost: Cost, sample_ms: float) -> None:
        cost.first_ms = None
        super()._learn(cost, sample_ms)


@pytest.mark.parametrize("kind", [AdaptiveDepth, ForgetsTheBeginning])
def test_the_pace_stays_where_it_is_in_long_runs(kind: type[AdaptiveDepth]) -> None:
    """10,000 rounds that stray upwards alone."""
    depth, generator = kind(), random.Random(1)
    depth.record_plain(6, 10.0)
    for _ in range(10_000):
        held_up = 2.718 ** abs(generator.gauss(0, 0.2))
        split = 1.0 if depth.wants_split_costs else None
        depth.record_round(TimedRound(1, 1, 1, 12.0 * held_up, split))
    plain_ms = depth.summary().plain_ms
    assert plain_ms is not None
    assert (abs(plain_ms / 10.0 - 1) < 0.2) is (kind is AdaptiveDepth)


@pytest.mark.parametrize("times_again", [True, False])
def test_a_draft_that_was_held_up_at_first_gets_longer_rounds_in_the_end(
    times_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft steps of the first two rounds take six times as long, so that one looks as dear as
    a third of a plain step."""
    if not times_again:
        monkeypatch.setattr("mlxgen.speculative.depth._TIMED_AGAIN_ROUNDS", ())
    chosen = []
    for seed in range(5):
        depth, generator, emitted = AdaptiveDepth(), random.Random(seed), 0
        rounds = 0
        while emitted < 2000:
            k = depth.choose()
            if k == 0:
                emitted += depth.plain_tokens
                depth.record_plain(depth.plain_tokens, 10.0)
                continue
            slow = 6.0 if rounds < 2 else 1.0
            rounds, accepted = rounds + 1, 0
            while accepted < k and generator.random() < 0.85:
                accepted += 1
            emitted += accepted + 1
            draft_ms = slow * 0.5 * k
            split = draft_ms if depth.wants_split_costs else None
            depth.record_round(
                TimedRound(k, min(accepted + 1, k), accepted, draft_ms + 15.0, split)
            )
        chosen.append(max(depth.summary().rounds_by_k.items(), key=lambda item: item[1])[0])
    assert (min(chosen) >= 5) is times_again, chosen


@pytest.mark.parametrize("follows", [True, False])
def test_a_machine_that_slows_down_and_recovers_changes_no_decision(
    follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k = 1 is right at any pace. What was measured at a quick time looks cheap at a slow one, and
    a controller that takes costs as they come is led astray."""
    if not follows:
        monkeypatch.setattr("mlxgen.speculative.depth._PACE_RATE", 0.0)
    depth, generator = AdaptiveDepth(), random.Random(1)
    others = 0
    for turn in range(400):
        pace = 1.0 + 0.8 * ((turn // 40) % 2)
        k = depth.choose()
        if k == 0:
            depth.record_plain(depth.plain_tokens, pace * 60)
            others += depth.plain_tokens if turn > 40 else 0
            continue
        others += turn > 40 and k != 1
        accepted = 0
        while accepted < k and generator.random() < 0.5:
            accepted += 1
        draft_ms = pace * 11 * k
        cost_ms = draft_ms + pace * (50 + 26 * (k - 1))
        split = draft_ms if depth.wants_split_costs else None
        depth.record_round(TimedRound(k, min(accepted + 1, k), accepted, cost_ms, split))
    assert (others <= 10) is follows


class CountsEveryRound(AdaptiveDepth):
    """Wrong: takes the cost of a round as it comes."""

    def record_round(self, timed: TimedRound) -> None:
        if timed.draft_ms is not None or self._rounds_since_plain == 0:
            self._learn(self._rounds.setdefault(timed.k, Cost()), timed.cost_ms)
        super().record_round(timed)


@pytest.mark.parametrize("kind", [AdaptiveDepth, CountsEveryRound])
def test_rounds_that_wait_for_something_do_not_count_as_the_cost_of_rounds(
    kind: type[AdaptiveDepth],
) -> None:
    """A round behind plain steps and one that times its draft apart cost twice what others do. The
    draft is useless, so most rounds are few between plain stretches."""
    depth, is_behind_plain, emitted = kind(), True, 0
    while emitted < TOKENS:
        k = depth.choose()
        if k == 0:
            is_behind_plain = True
            emitted += depth.plain_tokens
            depth.record_plain(depth.plain_tokens, 60.0)
            continue
        split = 11.0 * k if depth.wants_split_costs else None
        waits = is_behind_plain or split is not None
        is_behind_plain = False
        emitted += 1
        depth.record_round(TimedRound(k, 1, 0, (2 if waits else 1) * (55.0 + 15.0 * k), split))
    believed_ms = depth.summary().verify_ms[2]
    assert (believed_ms == pytest.approx(70 - 11)) is (kind is AdaptiveDepth)


@pytest.mark.parametrize("checks", [True, False])
def test_plain_steps_that_were_slow_at_first_are_measured_again(
    checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A useless draft looks a bargain beside first plain steps that were held up, and is not."""
    if not checks:
        monkeypatch.setattr("mlxgen.speculative.depth._FIRST_CHECK_ROUNDS", 10**9)
    depth = AdaptiveDepth()
    plain_tokens = 0
    while sum(depth.summary().rounds_by_k.values()) + plain_tokens < 300:
        k = depth.choose()
        if k == 0:
            plain_ms = 180.0 if depth.summary().plain_ms is None else 60.0
            plain_tokens += depth.plain_tokens
            depth.record_plain(depth.plain_tokens, plain_ms)
        else:
            split = 11.0 * k if depth.wants_split_costs else None
            depth.record_round(TimedRound(k, 1, 0, 58.0 + 11 * k, split))
    assert (plain_tokens > 200) is checks


@pytest.mark.parametrize("checks", [True, False])
def test_plain_steps_are_measured_now_and_then_where_drafting_is_little_ahead(
    checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not checks:
        monkeypatch.setattr("mlxgen.speculative.depth._CHECKED_GAIN", 0.0)
    depth, generator = AdaptiveDepth(), random.Random(2)
    measured, rounds = 0, 0
    while rounds < 400:
        k = depth.choose()
        if k == 0:
            depth.record_plain(depth.plain_tokens, 60.0)
            measured += 1
            continue
        rounds += 1
        accepted = int(generator.random() < 0.7)
        split = 11.0 * k if depth.wants_split_costs else None
        depth.record_round(TimedRound(k, 1, accepted, 92.0 + 40.0 * (k - 1), split))
    assert (measured >= 5) is checks


class BelievesFirstCosts(AdaptiveDepth):
    """Wrong: takes the cost of the first rounds for what rounds will go on costing."""

    def record_round(self, timed: TimedRound) -> None:
        known = self._rounds.get(timed.k)
        if known is not None and known.is_trusted and known.ms is not None:
            timed = replace(timed, cost_ms=known.ms)
        super().record_round(timed)


@pytest.mark.parametrize("kind", [AdaptiveDepth, BelievesFirstCosts])
def test_a_cold_start_does_not_rule_out_drafting(kind: type[AdaptiveDepth]) -> None:
    """The first rounds run at two thirds of the speed of later ones, and plain steps do not. What
    the first ones rule out, a later probe finds."""
    drafted = []
    for seed in range(20):
        depth, generator = kind(), random.Random(seed)
        emitted, rounds, late_drafted = 0, 0, 0
        while emitted < 1000:
            k = depth.choose()
            if k == 0:
                emitted += depth.plain_tokens
                depth.record_plain(depth.plain_tokens, 50.0)
                continue
            rounds += 1
            accepted = 0
            while accepted < k and generator.random() < 0.5:
                accepted += 1
            emitted += accepted + 1
            late_drafted += accepted + 1 if emitted > 500 else 0
            split = 8.0 * k if depth.wants_split_costs else None
            slow = 1.5 if rounds < 6 else 1.0
            tested = min(accepted + 1, k)
            depth.record_round(TimedRound(k, tested, accepted, slow * (18.0 + 40.0 * k), split))
        drafted.append(late_drafted)
    assert (sum(drafted) / len(drafted) > 350) is (kind is AdaptiveDepth), drafted


@pytest.mark.parametrize("looks_again", [True, False])
def test_a_length_ruled_out_by_one_slow_round_gets_a_second_look(
    looks_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer rounds are best, and the first one of two proposals happened to be slow."""
    if not looks_again:
        for limit in ("_SECOND_LOOK_ROUNDS", "_PATIENCE_ROUNDS", "_TRIAL_GAIN"):
            monkeypatch.setattr(f"mlxgen.speculative.depth.{limit}", 10**9)
    depth, tried = AdaptiveDepth(), 0
    for _ in range(400):
        k = depth.choose()
        if k == 0:
            depth.record_plain(depth.plain_tokens, 10.0)
            continue
        slow = 1.9 if k == 2 and not tried else 1.0
        tried += k == 2
        split = 1.0 * k if depth.wants_split_costs else None
        depth.record_round(TimedRound(k, k, k, slow * (11.0 + k), split))
    assert (depth.choose() > 2) is looks_again


def test_decisions_depend_on_past_rounds_alone() -> None:
    """Two runs with the same past choose alike; `choose` changes nothing."""
    first, second = AdaptiveDepth(), AdaptiveDepth()
    generator = random.Random(5)
    for _ in range(300):
        assert first.choose() == first.choose() == second.choose()
        k = first.choose()
        if k == 0:
            tokens = first.plain_tokens
            for depth in (first, second):
                depth.record_plain(tokens, 10.0)
            continue
        accepted = generator.randint(0, k)
        for depth in (first, second):
            depth.record_round(TimedRound(k, min(accepted + 1, k), accepted, 12.0 + k, 1.0 * k))


def test_a_first_use_that_takes_seconds_does_not_rule_out_drafting() -> None:
    """The first round at a width may compile kernels."""
    regime = REGIMES["verification flat in width"]
    depth = AdaptiveDepth()
    seen: set[int] = set()
    rounds = 0
    while rounds < 60:
        k = depth.choose()
        if k == 0:
            count = depth.plain_tokens
            depth.record_plain(count, regime.plain)
            continue
        verify_ms = regime.verify(k + 1) if k in seen else 3000.0
        seen.add(k)
        draft_ms = k * regime.draft
        split = draft_ms if depth.wants_split_costs else None
        depth.record_round(TimedRound(k, k, k, draft_ms + verify_ms, split))
        rounds += 1
    assert depth.choose() >= 4


def test_the_summary_says_what_was_chosen_and_why() -> None:
    regime = REGIMES["middling draft"]
    depth = AdaptiveDepth()
    tokens_per_ms(regime, depth, 0)
    summary = depth.summary()
    assert summary.k > 0
    assert summary.plain_ms == pytest.approx(10)
    assert summary.draft_step_ms == pytest.approx(1)
    assert summary.verify_ms[2] == pytest.approx(11)
    assert summary.predicted_speedup is not None and summary.predicted_speedup > 1
    assert summary.break_even is not None and 0 < summary.break_even < 0.55
