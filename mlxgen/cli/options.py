"""The options of `generate` as they were typed, and their meaning.

`None` means that an option was not given, which is not the same as its default: the model's own
recommendations and the environment come in between.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxgen.cli import environment
from mlxgen.config import (
    FILTER_NAMES,
    MLX_LM_ORDER,
    AcceptRule,
    CacheConfig,
    PromptLookupConfig,
    SamplingConfig,
    SpeculationConfig,
)
from mlxgen.errors import OptionError

DEFAULT_DRAFT_TOKENS = 3
COMPARE_TOKENS, COMPARE_TEMPERATURE = 128, 0.7
VERIFY_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """One field for each option, in the order of the help text."""

    model: str | None
    revision: str | None
    adapter: str | None
    trust_remote_code: bool
    prompt: str | None
    file: str | None
    system: str | None
    no_chat_template: bool
    chat_template_args: str | None
    max_tokens: int
    stop: list[str]
    ignore_eos: bool
    extra_eos_token: list[str]
    temp: float | None
    top_k: int | None
    top_p: float | None
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    repetition_penalty: float
    repeat_last_n: int
    frequency_penalty: float
    presence_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breaker: list[str]
    logit_bias: list[str]
    seed: str | None
    samplers: str | None
    no_generation_config: bool
    draft_model: str | None
    num_draft_tokens: str | None
    prompt_lookup: bool
    prompt_lookup_ngram_max: int | None
    prompt_lookup_ngram_min: int | None
    prompt_lookup_max_draft: int | None
    draft_kind: str | None
    draft_block_size: int | None
    accept_rule: str | None
    accept_diag: bool | None
    draft_temp: float | None
    json: bool
    quiet: bool
    profile: bool
    show_draft: bool
    logprobs: int
    verbose: bool
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    max_kv_size: int | None
    prefill_step_size: int
    prompt_cache: str | None

    def sampling(self, recommended: Mapping[str, float | int]) -> SamplingConfig:
        """recommended: the model's own temperature, top_p and top_k, for flags not given."""

        def chosen(name: str, given: float | None, default: float) -> float:
            return given if given is not None else recommended.get(name, default)

        return SamplingConfig(
            temperature=chosen("temperature", self.temp, 0.0),
            top_k=int(chosen("top_k", self.top_k, 0)),
            top_p=chosen("top_p", self.top_p, 1.0),
            min_p=self.min_p,
            typical_p=self.typical_p,
            top_n_sigma=self.top_n_sigma,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            repetition_penalty=self.repetition_penalty,
            repeat_last_n=self.repeat_last_n,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            dry_multiplier=self.dry_multiplier,
            dry_base=self.dry_base,
            dry_allowed_length=self.dry_allowed_length,
            dry_penalty_last_n=self.dry_penalty_last_n,
            logit_bias=tuple(parse_logit_bias(text) for text in self.logit_bias),
            order=parse_samplers(self.samplers),
        )

    def ungiven_recommendations(
        self, recommended: Mapping[str, float | int]
    ) -> dict[str, float | int]:
        """The recommendations that take effect, since their flags were not given."""
        flags = {"temperature": self.temp, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in recommended.items() if flags[name] is None}

    def cache(self) -> CacheConfig:
        """The memory options."""
        return CacheConfig(
            kv_bits=self.kv_bits,
            kv_group_size=self.kv_group_size,
            quantized_kv_start=self.quantized_kv_start,
            max_kv_size=self.max_kv_size,
            prefill_step_tokens=self.prefill_step_size,
        )

    def speculation(
        self, variables: Mapping[str, str], warn: Callable[[str], None]
    ) -> SpeculationConfig:
        """The rule and its block. Flags win over the environment."""
        if self.accept_rule is None:
            rule = environment.accept_rule(variables, warn)
        else:
            rule = parse_accept_rule(self.accept_rule)
        diagnostics = self.accept_diag
        if diagnostics is None:
            diagnostics = environment.diagnostics(variables)
        adapts = self.num_draft_tokens == "auto"
        return SpeculationConfig(
            num_draft_tokens=parse_draft_tokens(None if adapts else self.num_draft_tokens),
            adapts_depth=adapts,
            prompt_lookup=self._prompt_lookup(),
            accept_rule=rule,
            diagnostics=diagnostics,
            draft_temperature=self.draft_temp,
        )

    def _prompt_lookup(self) -> PromptLookupConfig | None:
        given = {
            "ngram_max": self.prompt_lookup_ngram_max,
            "ngram_min": self.prompt_lookup_ngram_min,
            "max_draft": self.prompt_lookup_max_draft,
        }
        numbers = {name: value for name, value in given.items() if value is not None}
        if self.prompt_lookup:
            return PromptLookupConfig(**numbers)
        if numbers:
            option = "--prompt-lookup-" + next(iter(numbers)).replace("_", "-")
            raise OptionError(f"{option} needs --prompt-lookup")
        return None

    def draft_only_option(self) -> str | None:
        """The first given option that means nothing without a draft.

        Prompt lookup is a draft to the rules, but not a model.
        """
        given = {
            "--num-draft-tokens": self.num_draft_tokens not in (None, "0"),
            "--draft-kind": self.draft_kind is not None,
            "--draft-block-size": self.draft_block_size is not None,
            "--draft-temp": self.draft_temp is not None,
        }
        if not self.prompt_lookup:
            given["--accept-rule"] = self.accept_rule is not None
            given["--accept-diag"] = self.accept_diag is True
            given["--show-draft"] = self.show_draft
        return next((option for option, is_given in given.items() if is_given), None)


def parse_accept_rule(text: str) -> AcceptRule:
    """A rule id. Raises `OptionError` naming the ids there are."""
    try:
        return AcceptRule(text)
    except ValueError:
        known = ", ".join(rule.value for rule in AcceptRule)
        raise OptionError(
            f"--accept-rule {text!r} is not known; it takes {known} (lossless, all of them)"
        ) from None


def parse_draft_tokens(text: str | None) -> int:
    """`--num-draft-tokens` as a number, 3 when not given."""
    if text is None:
        return DEFAULT_DRAFT_TOKENS
    try:
        return int(text)
    except ValueError:
        raise OptionError(
            f"--num-draft-tokens must be a whole number or auto, not {text!r}"
        ) from None


def parse_seed(text: str | None) -> int:
    """The seed; fresh entropy when none was given. The range is checked by the configuration."""
    if text is None:
        return secrets.randbits(64)
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"--seed must be a whole number, not {text!r}") from None


def parse_logit_bias(text: str) -> tuple[int, float]:
    """`ID:VALUE` as a token id and what is added to its logit."""
    token, separator, value = text.partition(":")
    try:
        if not separator:
            raise ValueError
        return int(token), float(value)
    except ValueError:
        raise OptionError(f"--logit-bias must be ID:VALUE, such as 42:-1.5, not {text!r}") from None


def parse_samplers(text: str | None) -> tuple[str, ...]:
    """The order of the filter chain: names separated by `;`, or a preset."""
    if text is None:
        return FILTER_NAMES
    if text.strip() == "mlx-lm":
        return MLX_LM_ORDER
    return tuple(name.strip() for name in re.split(r"[;,]", text) if name.strip())


def parse_template_args(text: str | None) -> dict[str, Any] | None:
    """`--chat-template-args`: a JSON object."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise OptionError(f"--chat-template-args is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise OptionError("--chat-template-args must be a JSON object, such as '{\"key\": true}'")
    return value
