"""Made-up experiments and records, so that nothing here needs a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from mlxgen.config import GenerationConfig, SamplingConfig
from mlxgen.experiment.arms import parse_arms
from mlxgen.experiment.plan import Experiment, Phase, RunKey
from mlxgen.experiment.prompts import Prompt
from mlxgen.experiment.records import RunRecord
from mlxgen.experiment.setting import Machine
from mlxgen.experiment.summary import summarise
from mlxgen.report.experiment import Report, report_of

MACHINE = Machine(processor="a processor", cores=4, system="an OS", versions={"mlx": "1.2"})
MS_A_TOKEN = {"plain": 20.0, "sampler-match": 18.0, "stochastic": 15.0, "block": 14.5}
ACCEPTANCE = 0.5


def experiment(
    listed: str = "plain,sampler-match,stochastic,block",
    specs: Iterable[str] = (),
    *,
    prompts: int = 6,
    seeds: int = 2,
    theory_seeds: int = 1,
    max_tokens: int = 32,
) -> Experiment:
    """A small experiment on models that do not exist."""
    base = GenerationConfig(sampling=SamplingConfig(temperature=0.7), max_tokens=max_tokens)
    return Experiment(
        arms=parse_arms(listed, list(specs), base, has_draft=True),
        prompts=tuple(Prompt(f"p{i}", f"prompt {i}", "chat") for i in range(prompts)),
        first_seed=10,
        seeds=seeds,
        theory_seeds=theory_seeds,
        use_template=True,
        machine=MACHINE,
        model_names={"target": "big", "draft": "small"},
        model_fingerprints={"target": "1", "draft": "2"},
        command="mlxgen compare -m big --draft-model small",
    )


def record(planned: Experiment, key: RunKey) -> RunRecord:
    """A run of 30 tokens that depends on its key alone; arms differ in speed only."""
    arm = planned.arms[key.arm]
    pace = MS_A_TOKEN.get(arm.name, 16.0) * (1 + 0.1 * key.prompt)
    values = RunRecord(
        key=key,
        rule="plain",
        prompt_tokens=11,
        tokens=30,
        target_forwards=30,
        finish_reason="length",
        text_sha256=f"text {key.prompt} {key.seed}",
        prefill_ms=5.0,
        decode_ms=30 * pace,
    )
    if not arm.speculates:
        return values
    forms: dict[str, Any] = {
        "sum_min": 15.0,
        "sum_prod": 12.0,
        "gumbel": 14.0,
        "expected": 13.0,
        "variance": 6.5,
    }
    return replace(
        values,
        rule=arm.config.speculation.accept_rule.value,
        target_forwards=16,
        rounds=14,
        proposed=42,
        positions_tested=26,
        accepted=13,
        tested_by_offset=(14, 8, 4),
        accepted_by_offset=(8, 4, 1),
        **(forms if key.phase is Phase.THEORY else {}),
    )


def records(planned: Experiment) -> list[RunRecord]:
    """All runs."""
    return [record(planned, key) for key in planned.schedule()]


def report(planned: Experiment, runs: list[RunRecord] | None = None) -> Report:
    """The report of all runs, or of these."""
    found = summarise(planned, records(planned) if runs is None else runs)
    return report_of(planned, found, "CPU, a processor")
