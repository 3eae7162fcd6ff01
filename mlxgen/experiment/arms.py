"""The arms of a comparison: what stands in `--arms` and `--arm`, as configurations of a run.

An arm is a rule, or `plain`, with settings behind it: `stochastic,k=8,temp=1.0,lookup`. What it
does not set comes from the command's own options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxgen.config import (
    AcceptRule,
    GenerationConfig,
    PromptLookupConfig,
    SamplingConfig,
    SpeculationConfig,
)
from mlxgen.errors import OptionError

PLAIN = "plain"
DEFAULT_ARMS = (PLAIN, *(rule.value for rule in AcceptRule))
_RULES = {rule.value: rule for rule in AcceptRule}
_NUMBERS: dict[str, Callable[[str], float]] = {
    "temp": float,
    "top-p": float,
    "top-k": int,
    "min-p": float,
    "draft-temp": float,
}
_SAMPLING_FIELDS = {"temp": "temperature", "top-p": "top_p", "top-k": "top_k", "min-p": "min_p"}
_DRAFT_KEYS = ("k", "draft-temp", "lookup")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """name: what it is called in every table. config: of its runs, but for seed and diagnostics.

    needs_draft: the draft model has something to do in it.
    """

    name: str
    config: GenerationConfig
    speculates: bool
    needs_draft: bool

    @property
    def facts(self) -> dict[str, Any]:
        """What it was told, for documents."""
        sampling, speculation = self.config.sampling, self.config.speculation
        facts: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        }
        if self.speculates:
            facts["accept_rule"] = speculation.accept_rule.value
            facts["num_draft_tokens"] = (
                "auto" if speculation.adapts_depth else speculation.num_draft_tokens
            )
            facts["draft_temperature"] = speculation.draft_temperature
            facts["prompt_lookup"] = speculation.prompt_lookup is not None
        return facts


def parse_arms(
    listed: str | None, specs: Sequence[str], base: GenerationConfig, *, has_draft: bool
) -> tuple[Arm, ...]:
    """The arms in order: those of `--arms`, then each `--arm`; every rule where neither is given.

    base: what an arm does not set. has_draft: there is a draft model. Raises `OptionError` for an
    arm that is unknown, that cannot run, or that is there twice.
    """
    texts = [] if listed is None else [text.strip() for text in listed.split(",")]
    for text in texts:
        if text not in _RULES and text != PLAIN:
            hint = "; settings belong to --arm" if "=" in text or text == "lookup" else ""
            raise OptionError(f"--arms does not know {text!r}; it takes {_known()}{hint}")
    texts += list(specs)
    if not texts:
        texts = list(DEFAULT_ARMS)
    arms: list[Arm] = []
    for text in texts:
        arm, is_named = _parse(text, base)
        if arm.needs_draft and not has_draft:
            raise OptionError(f"arm {text!r} needs --draft-model, or lookup with k=0")
        for other in arms:
            _refuse_twice(arm, other, is_named)
        arms.append(arm)
    return tuple(arms)


def _known() -> str:
    return ", ".join(DEFAULT_ARMS)


def _refuse_twice(arm: Arm, other: Arm, is_named: bool) -> None:
    if arm.name == other.name:
        raise OptionError(f"arm {arm.name!r} is there twice; name=... makes a second one of it")
    if not is_named and _essence(arm) == _essence(other):
        why = "at temperature 0 all rules are " if arm.config.sampling.is_greedy else ""
        raise OptionError(
            f"arms {other.name!r} and {arm.name!r} are {why}one and the same; drop one, or add "
            f"name=... to measure the noise between them"
        )


def _essence(arm: Arm) -> tuple[object, ...]:
    """Equal for arms that do the same, however they are spelled."""
    sampling, speculation = arm.config.sampling, arm.config.speculation
    if not arm.speculates:
        return (PLAIN, sampling)
    return (
        "greedy" if sampling.is_greedy else speculation.accept_rule,
        sampling,
        "auto" if speculation.adapts_depth else speculation.num_draft_tokens,
        sampling.for_draft(speculation.draft_temperature) if arm.needs_draft else None,
        speculation.prompt_lookup,
    )


def _parse(text: str, base: GenerationConfig) -> tuple[Arm, bool]:
    """An arm, and whether it has a name of its own."""
    head, *items = (item.strip() for item in text.split(","))
    if head not in _RULES and head != PLAIN:
        raise OptionError(f"arm {text!r}: {head!r} is no rule; it takes {_known()}")
    values = _values(text, items)
    given_name = values.pop("name", None)
    if head == PLAIN:
        for key in _DRAFT_KEYS:
            if key in values:
                raise OptionError(f"arm {text!r}: {key} means nothing without a draft")
    try:
        config = _configure(head, values, base)
    except OptionError as error:
        raise OptionError(f"arm {text!r}: {error}") from error
    speculation = config.speculation
    needs_draft = head != PLAIN and speculation.drafts_with_model
    if head != PLAIN and not needs_draft and speculation.prompt_lookup is None:
        raise OptionError(f"arm {text!r}: k=0 proposes nothing; add lookup, or take plain")
    arm = Arm(
        name=given_name or ",".join([head, *items]),
        config=config,
        speculates=head != PLAIN,
        needs_draft=needs_draft,
    )
    return arm, given_name is not None


def _values(text: str, items: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for item in items:
        key, equals, value = (part.strip() for part in item.partition("="))
        if key == "lookup" and not equals:
            value = "on"
        elif key not in ("k", "name", *_NUMBERS):
            known = ", ".join(f"{key}=" for key in ("k", *_NUMBERS, "name"))
            raise OptionError(f"arm {text!r}: {item!r} is not known; it takes {known}, lookup")
        elif not value:
            raise OptionError(f"arm {text!r}: {key} needs a value")
        if key in values:
            raise OptionError(f"arm {text!r} sets {key} twice")
        values[key] = value
    return values


def _configure(head: str, values: dict[str, str], base: GenerationConfig) -> GenerationConfig:
    numbers = {key: _number(key, values[key]) for key in _NUMBERS if key in values}
    changes: dict[str, Any] = {
        field: numbers[key] for key, field in _SAMPLING_FIELDS.items() if key in numbers
    }
    sampling: SamplingConfig = replace(base.sampling, **changes)
    if head == PLAIN:
        return replace(base, sampling=sampling, speculation=SpeculationConfig(num_draft_tokens=0))
    speculation: dict[str, Any] = {"accept_rule": _RULES[head]}
    if "k" in values:
        speculation["adapts_depth"] = values["k"] == "auto"
        if values["k"] != "auto":
            speculation["num_draft_tokens"] = _whole("k", values["k"], " or auto")
    if "draft-temp" in numbers:
        speculation["draft_temperature"] = numbers["draft-temp"]
    if "lookup" in values:
        speculation["prompt_lookup"] = PromptLookupConfig()
    return replace(base, sampling=sampling, speculation=replace(base.speculation, **speculation))


def _number(key: str, text: str) -> float:
    if _NUMBERS[key] is int:
        return _whole(key, text, "")
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"{key} must be a number, not {text!r}") from None


def _whole(key: str, text: str, alternative: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"{key} must be a whole number{alternative}, not {text!r}") from None
