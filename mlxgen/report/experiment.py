"""The document of `mlxgen compare --json`, and reading one back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mlxgen.errors import InputError
from mlxgen.experiment.intervals import Interval
from mlxgen.experiment.plan import Experiment
from mlxgen.experiment.setting import Machine
from mlxgen.experiment.summary import (
    Acceptance,
    ArmSummary,
    Bound,
    Comparison,
    PairSummary,
    PairTiming,
    Theory,
    Timing,
    Verdict,
)

FORMAT = "mlxgen compare 1"


@dataclass(frozen=True)
class Report:
    """A comparison and what it was made on.

    settings: what all arms share. models: names of target and draft, by role. device: what MLX
    computed on.
    """

    comparison: Comparison
    command: str
    settings: dict[str, Any]
    models: dict[str, str]
    machine: Machine
    device: str

    @property
    def first(self) -> str:
        """The arm that the others are compared with."""
        return self.comparison.arms[0].name

    def document(self) -> dict[str, Any]:
        """Strict JSON. What depends on the clock stands under keys called "timing"."""
        comparison = asdict(self.comparison)
        document = {
            "format": FORMAT,
            "command": self.command,
            "complete": comparison.pop("complete"),
            "settings": self.settings,
            "models": self.models,
            "machine": {**asdict(self.machine), "device": self.device},
            **comparison,
        }
        strict: dict[str, Any] = _strict(document)
        return strict


def report_of(experiment: Experiment, comparison: Comparison, device: str) -> Report:
    """The report of an experiment."""
    config = experiment.arms[0].config
    settings = {
        "prompts": len(experiment.prompts),
        "categories": sorted({prompt.category for prompt in experiment.prompts} - {""}),
        "first_seed": experiment.first_seed,
        "seeds": experiment.seeds,
        "theory_seeds": experiment.theory_seeds,
        "max_tokens": config.max_tokens,
        "ignore_eos": config.ignore_eos,
        "chat_template": experiment.use_template,
    }
    return Report(
        comparison,
        experiment.command,
        settings,
        experiment.model_names,
        experiment.machine,
        device,
    )


def read_report(document: Mapping[str, Any]) -> Report:
    """The report that a document was made of. Raises `InputError` for another document."""
    if not isinstance(document, Mapping) or document.get("format") != FORMAT:
        raise InputError("this is not the document of `mlxgen compare --json`")
    try:
        machine = dict(document["machine"])
        device = machine.pop("device")
        return Report(
            Comparison(
                complete=document["complete"],
                runs=document["runs"],
                planned_runs=document["planned_runs"],
                prompts=document["prompts"],
                bounds=[Bound(**bound) for bound in document["bounds"]],
                arms=[_arm(arm) for arm in document["arms"]],
                pairs=[_pair(pair) for pair in document["pairs"]],
                text_groups=document["text_groups"],
            ),
            document["command"],
            document["settings"],
            document["models"],
            Machine(**machine),
            device,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"a document of `mlxgen compare` that cannot be read: {error}") from error


def _arm(arm: Mapping[str, Any]) -> ArmSummary:
    acceptance, theory, timing = arm["acceptance"], arm["theory"], dict(arm["timing"])
    for name in ("decode_interval", "ratio_interval"):
        timing[name] = _interval(timing[name])
    verdict = timing["verdict"]
    timing["verdict"] = None if verdict is None else Verdict(verdict)
    parts = {
        "acceptance": None if acceptance is None else Acceptance(**acceptance),
        "theory": None if theory is None else Theory(**theory),
        "timing": Timing(**timing),
    }
    return ArmSummary(**{**arm, **parts})


def _pair(pair: Mapping[str, Any]) -> PairSummary:
    timing = pair["timing"]
    return PairSummary(
        first=pair["first"],
        second=pair["second"],
        timing=PairTiming(
            ratio=timing["ratio"],
            interval=_interval(timing["interval"]),
            verdict=Verdict(timing["verdict"]),
        ),
    )


def _interval(ends: Mapping[str, float] | None) -> Interval | None:
    return None if ends is None else Interval(**ends)


def _strict(value: Any) -> Any:
    """Numbers that are not finite become null, enumerations their values."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.value if isinstance(value, Verdict) else value
