"""Sums, rates and verdicts from records, worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mlxgen.experiment.arms import PLAIN
from mlxgen.experiment.plan import Phase
from mlxgen.experiment.summary import NO_ROUND, Verdict, summarise
from tests.experiment.experiments import MS_A_TOKEN, experiment, record, records


def test_counts_and_rates_of_an_arm() -> None:
    planned = experiment()
    plain, _, stochastic, _ = summarise(planned, records(planned)).arms
    assert (plain.rule, plain.acceptance, plain.theory) == (PLAIN, None, None)
    assert (stochastic.runs, stochastic.tokens) == (12, 360)
    assert stochastic.tokens_per_forward == pytest.approx(30 / 16)
    acceptance, theory = stochastic.acceptance, stochastic.theory
    assert acceptance is not None and theory is not None
    assert (acceptance.rounds, acceptance.positions_tested) == (12 * 14, 12 * 26)
    assert acceptance.per_position_acceptance == 0.5
    assert acceptance.mean_accepted_len == pytest.approx(13 / 14)
    assert acceptance.tested_by_offset == [12 * 14, 12 * 8, 12 * 4]
    assert acceptance.accepted_by_offset == [12 * 8, 12 * 4, 12]
    assert (theory.runs, theory.positions_tested, theory.accepted) == (6, 6 * 26, 6 * 13)
    assert theory.closed_form == pytest.approx(0.5)
    assert theory.standard_error == pytest.approx((6 * 6.5) ** 0.5 / (6 * 26))
    assert theory.z == 0 and theory.is_consistent and theory.repeats_timed
    assert theory.closed_form_sum_min == pytest.approx(15 / 26)
    assert theory.expected_accepted_len == pytest.approx(13 / 14)


def test_speeds_are_ratios_of_sums() -> None:
    planned = experiment()
    comparison = summarise(planned, records(planned))
    for arm in comparison.arms:
        mean_pace = MS_A_TOKEN[arm.name] * 1.25
        timing = arm.timing
        assert timing.decode_tokens_per_s == pytest.approx(1e3 / mean_pace)
        assert timing.ratio_to_first == pytest.approx(20 / MS_A_TOKEN[arm.name])
        assert timing.prefill_ms == 5 and timing.prefill_tokens_per_s == pytest.approx(2e3)
    assert comparison.arms[0].timing.verdict is None
    assert comparison.arms[1].timing.verdict is Verdict.FASTER
    assert [(pair.first, pair.second) for pair in comparison.pairs] == [
        ("plain", "sampler-match"),
        ("plain", "stochastic"),
        ("plain", "block"),
        ("sampler-match", "stochastic"),
        ("sampler-match", "block"),
        ("stochastic", "block"),
    ]
    last = comparison.pairs[-1].timing
    assert last.ratio == pytest.approx(15 / 14.5) and last.verdict is Verdict.FASTER


def test_bounds_are_pooled_over_arms_that_sample_and_draft_alike() -> None:
    planned = experiment("plain,sampler-match,stochastic", ["stochastic,temp=1.0"])
    first, second = summarise(planned, records(planned)).bounds
    assert (first.arms, second.arms) == (["sampler-match", "stochastic"], ["stochastic,temp=1.0"])
    assert first.positions_tested == 2 * second.positions_tested == 2 * 6 * 26
    assert first.ratio == pytest.approx(15 / 12)


def test_only_what_every_arm_has_run_is_compared() -> None:
    planned = experiment()
    runs = [record(planned, key) for key in planned.schedule()[: 4 * 7 + 2]]
    comparison = summarise(planned, runs)
    assert not comparison.complete and (comparison.runs, comparison.planned_runs) == (30, 66)
    assert {arm.runs for arm in comparison.arms} == {7} and comparison.prompts == 6
    assert summarise(planned, []).prompts == 0


def test_the_order_in_which_runs_were_made_does_not_matter() -> None:
    planned = experiment()
    runs = [
        replace(run, sum_min=run.sum_min + 0.1 * i / 3) for i, run in enumerate(records(planned))
    ]
    assert summarise(planned, runs) == summarise(planned, runs[::-1])


def test_identical_arms_show_no_difference() -> None:
    planned = experiment("stochastic", ["stochastic,name=again"])
    ms = {"stochastic": 16.0, "again": 16.0}
    runs = [
        replace(run, decode_ms=ms[planned.arms[run.key.arm].name] * (20 + run.key.prompt))
        for run in records(planned)
    ]
    (pair,) = summarise(planned, runs).pairs
    assert pair.timing.interval is not None and pair.timing.interval.covers(1)
    assert pair.timing.verdict is Verdict.NO_DIFFERENCE


def test_arms_that_wrote_the_same_are_named() -> None:
    planned = experiment()
    runs = [
        replace(run, text_sha256="other") if run.key.arm == 3 else run for run in records(planned)
    ]
    comparison = summarise(planned, runs)
    assert comparison.text_groups == [["plain", "sampler-match", "stochastic"]]


def test_runs_that_differ_when_made_again_are_noticed() -> None:
    planned = experiment()
    runs = [
        replace(run, accepted=12) if run.key.phase is Phase.THEORY and run.key.arm == 2 else run
        for run in records(planned)
    ]
    repeats = [
        arm.theory.repeats_timed for arm in summarise(planned, runs).arms if arm.theory is not None
    ]
    assert repeats == [True, False, True]


def test_an_arm_in_which_no_round_ran_has_no_rule() -> None:
    planned = experiment("plain,block", theory_seeds=0)
    runs = [
        replace(run, rounds=0, positions_tested=0, accepted=0, tested_by_offset=())
        for run in records(planned)
    ]
    arm = summarise(planned, runs).arms[1]
    assert arm.rule == NO_ROUND and arm.acceptance is not None and arm.theory is None
    assert arm.acceptance.per_position_acceptance == arm.acceptance.mean_accepted_len == 0


def test_few_prompts_have_no_interval() -> None:
    planned = experiment(prompts=4)
    comparison = summarise(planned, records(planned))
    assert comparison.arms[1].timing.ratio_interval is None
    assert {pair.timing.verdict for pair in comparison.pairs} == {Verdict.NO_INTERVAL}
    assert comparison.arms[1].timing.ratio_to_first == pytest.approx(20 / 18)


def test_records_survive_json_so_resuming_changes_no_digit() -> None:
    planned = experiment()
    runs = records(planned)
    again = [type(run).from_json(json.loads(json.dumps(run.as_json()))) for run in runs]
    assert summarise(planned, again) == summarise(planned, runs)
