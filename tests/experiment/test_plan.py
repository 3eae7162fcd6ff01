"""Which runs are made, in which order, and what makes two experiments the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from mlxgen.experiment.plan import Experiment, Phase
from mlxgen.experiment.prompts import Prompt
from mlxgen.experiment.records import RunRecord
from tests.experiment.experiments import experiment, records


def test_every_arm_meets_every_prompt_and_seed_once() -> None:
    planned = experiment(prompts=3, seeds=2, theory_seeds=1)
    runs = planned.schedule()
    assert len(set(runs)) == len(runs) == 4 * 3 * 2 + 3 * 3
    timed = [run for run in runs if run.phase is Phase.SPEED]
    assert timed == runs[: len(timed)], "nothing is timed after diagnostics have begun"
    assert Counter(run.arm for run in timed) == dict.fromkeys(range(4), 6)
    repeated = {replace(run, phase=Phase.SPEED) for run in runs if run.phase is Phase.THEORY}
    assert repeated == {run for run in timed[: 4 * 3] if run.arm > 0}


def test_arms_share_seeds_and_prompts_do_not() -> None:
    runs = [run for run in experiment(prompts=3, seeds=2).schedule() if run.phase is Phase.SPEED]
    seeds = {(run.prompt, run.seed) for run in runs}
    assert len(seeds) == 6 and {seed for _, seed in seeds} == set(range(10, 16))
    for arm in range(4):
        assert {(run.prompt, run.seed) for run in runs if run.arm == arm} == seeds


def test_arms_take_turns_in_going_first() -> None:
    planned = experiment(prompts=4, seeds=4, theory_seeds=0)
    runs = planned.schedule()
    blocks = [runs[start : start + 4] for start in range(0, len(runs), 4)]
    for block in blocks:
        assert len({(run.prompt, run.seed) for run in block}) == 1
        assert {run.arm for run in block} == set(range(4))
    assert Counter(block[0].arm for block in blocks) == dict.fromkeys(range(4), 4)
    first_at_prompt_0 = {block[0].arm for block in blocks if block[0].prompt == 0}
    assert first_at_prompt_0 == set(range(4)), "with other seeds another arm begins"


def test_closed_forms_are_asked_for_in_untimed_runs_only() -> None:
    planned = experiment()
    for run in planned.schedule():
        config = planned.config_of(run)
        assert config.seed == run.seed
        assert config.speculation.diagnostics is (run.phase is Phase.THEORY)


@pytest.mark.parametrize(
    "changed",
    [
        experiment("plain,sampler-match,block,stochastic"),
        experiment("plain,sampler-match,stochastic"),
        experiment("plain,sampler-match,stochastic", ["block,k=4"]),
        experiment(seeds=3),
        experiment(theory_seeds=2),
        experiment(max_tokens=33),
        experiment(prompts=7),
        replace(experiment(), use_template=False),
        replace(experiment(), model_fingerprints={"target": "1", "draft": "3"}),
        replace(experiment(), prompts=(*experiment().prompts[:-1], Prompt("p5", "another"))),
    ],
)
def test_fingerprint_changes_with_what_is_run(changed: Experiment) -> None:
    assert changed.fingerprint != experiment().fingerprint == experiment().fingerprint


def test_fingerprint_is_of_the_models_and_not_of_their_place() -> None:
    moved = replace(experiment(), model_names={"target": "elsewhere"}, command="mlxgen compare")
    assert moved.fingerprint == experiment().fingerprint


def test_records_come_back_from_the_journal_as_they_were() -> None:
    for run in records(experiment(prompts=1)):
        assert RunRecord.from_json(run.as_json()) == run
        assert set(run.as_json()["timing"]) == {"prefill_ms", "decode_ms"}
