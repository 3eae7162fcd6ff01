"""Everything a run can be told, as frozen values checked when they are made.

The command line and the Python API build these once, at the edge; nothing further in looks up a
flag or an environment variable. Messages name the option as a user types it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from mlxgen.errors import OptionError

MAX_SEED = 2**64 - 1
FILTER_NAMES = ("top_n_sigma", "typical_p", "xtc", "temperature", "top_k", "top_p", "min_p")
"""Filters in the default order. `top_n_sigma` and `typical_p` are off unless asked for."""
MLX_LM_ORDER = ("top_n_sigma", "typical_p", "top_p", "min_p", "xtc", "top_k", "temperature")
"""The order of mlx-lm's sampler, which divides by the temperature last."""

MAX_KV_SIZE_WITH_DRAFT = (
    "--max-kv-size keeps a rotating cache, which cannot be rewound after a rejected draft: drop "
    "it, or decode without a draft (--num-draft-tokens 0)"
)


class AcceptRule(str, Enum):
    """The acceptance rule that a user asks for; see `mlxgen.speculative.selection`."""

    SAMPLER_MATCH = "sampler-match"
    STOCHASTIC = "stochastic"
    BLOCK = "block"
    GUMBEL_MATCH = "gumbel-match"


def _check(holds: bool, option: str, value: object, allowed: str) -> None:
    if not holds:
        raise OptionError(f"{option} must be {allowed}, not {value}")


LARGEST_FACTOR = 1e30
"""No logit, bias or factor beyond it: what float32 makes of their products stays finite."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How a row of logits becomes a distribution. One configuration serves target and draft.

    Bias and penalties come first, then the filters in `order`. Raises `OptionError` when a value
    is out of range or a filter that is on is missing from `order`.
    """

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k most likely tokens and those tied with the k-th; 0 or at least V is off."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose mass reaches top_p, ties included; 1 is off."""
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    repeat_last_n: int = -1
    """Window in tokens of the three penalties, prompt included: -1 all, 0 none."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and value added to its logit; -inf bans the token."""
    order: tuple[str, ...] = FILTER_NAMES

    def __post_init__(self) -> None:
        t = self.temperature
        _check(math.isfinite(t) and t >= 0, "--temp", t, "a finite number of at least 0")
        _check(self.top_k >= 0, "--top-k", self.top_k, "0 (off) or more")
        _check(0 <= self.top_p <= 1, "--top-p", self.top_p, "between 0 and 1")
        _check(0 <= self.min_p <= 1, "--min-p", self.min_p, "between 0 and 1")
        _check(0 < self.typical_p <= 1, "--typical-p", self.typical_p, "above 0, at most 1")
        sigma = self.top_n_sigma
        _check(
            0 <= sigma <= LARGEST_FACTOR,
            "--top-n-sigma",
            sigma,
            f"between 0 (off) and {LARGEST_FACTOR:g}",
        )
        _check(
            0 <= self.xtc_probability <= 1,
            "--xtc-probability",
            self.xtc_probability,
            "between 0 and 1",
        )
        _check(
            0 < self.xtc_threshold <= 1,
            "--xtc-threshold",
            self.xtc_threshold,
            "above 0, at most 1 (above 0.5 nothing is ever removed)",
        )
        penalty = self.repetition_penalty
        _check(
            1 / LARGEST_FACTOR <= penalty <= LARGEST_FACTOR,
            "--repetition-penalty",
            penalty,
            f"above 0 (1 is off), between {1 / LARGEST_FACTOR:g} and {LARGEST_FACTOR:g}",
        )
        _check(self.repeat_last_n >= -1, "--repeat-last-n", self.repeat_last_n, "-1 (all) or more")
        for option, value in (
            ("--frequency-penalty", self.frequency_penalty),
            ("--presence-penalty", self.presence_penalty),
        ):
            _check(
                abs(value) <= LARGEST_FACTOR,
                option,
                value,
                f"a finite number, at most {LARGEST_FACTOR:g} either way",
            )
        _check(
            0 <= self.dry_multiplier <= LARGEST_FACTOR,
            "--dry-multiplier",
            self.dry_multiplier,
            f"between 0 (off) and {LARGEST_FACTOR:g}",
        )
        _check(
            1 <= self.dry_base <= LARGEST_FACTOR,
            "--dry-base",
            self.dry_base,
            f"at least 1, at most {LARGEST_FACTOR:g}",
        )
        _check(
            self.dry_allowed_length >= 1,
            "--dry-allowed-length",
            self.dry_allowed_length,
            "at least 1",
        )
        _check(
            self.dry_penalty_last_n >= -1,
            "--dry-penalty-last-n",
            self.dry_penalty_last_n,
            "-1 (all) or more",
        )
        self._check_bias()
        self._check_order()

    def _check_bias(self) -> None:
        seen: set[int] = set()
        for token, value in self.logit_bias:
            _check(token >= 0, "--logit-bias", f"{token}:{value}", "ID:VALUE with an ID from 0")
            _check(
                abs(value) <= LARGEST_FACTOR or value == -math.inf,
                "--logit-bias",
                f"{token}:{value}",
                f"ID:VALUE with a finite VALUE or -inf, at most {LARGEST_FACTOR:g} either way",
            )
            if token in seen:
                raise OptionError(f"--logit-bias names token {token} twice; give it once")
            seen.add(token)

    def _check_order(self) -> None:
        for name in self.order:
            if name not in FILTER_NAMES:
                raise OptionError(
                    f"--samplers does not know {name!r}; it takes {';'.join(FILTER_NAMES)} "
                    f"or mlx-lm"
                )
        if len(set(self.order)) != len(self.order):
            raise OptionError(f"--samplers names a filter twice: {';'.join(self.order)}")
        for name in self.active_filters:
            if name not in self.order:
                option = "--temp" if name == "temperature" else "--" + name.replace("_", "-")
                raise OptionError(f"{option} is set but --samplers leaves out {name}; add it there")

    def for_draft(self, temperature: float | None) -> SamplingConfig:
        """The draft's configuration: the same chain, with a temperature of its own if given."""
        if temperature is None or temperature == self.temperature:
            return self
        return replace(self, temperature=temperature)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken, with no draw."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def active_filters(self) -> frozenset[str]:
        """The filters that can change a row; empty under greedy sampling."""
        if self.is_greedy:
            return frozenset()
        on = {
            "temperature": self.temperature != 1,
            "top_k": self.top_k > 0,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "typical_p": self.typical_p < 1,
            "top_n_sigma": self.top_n_sigma > 0,
            "xtc": self.xtc_probability > 0,
        }
        return frozenset(name for name, is_on in on.items() if is_on)

    @property
    def counts_tokens(self) -> bool:
        """Whether a repetition, frequency or presence penalty needs token counts."""
        penalised = self.repetition_penalty != 1 or bool(
            self.frequency_penalty or self.presence_penalty
        )
        return penalised and self.repeat_last_n != 0

    @property
    def uses_dry(self) -> bool:
        """Whether the DRY penalty is on."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0


@dataclass(frozen=True, kw_only=True)
class PromptLookupConfig:
    """Drafting from the text itself. Numbers count tokens."""

    ngram_max: int = 3
    ngram_min: int = 2
    max_draft: int = 7

    def __post_init__(self) -> None:
        low, high = self.ngram_min, self.ngram_max
        _check(low >= 1, "--prompt-lookup-ngram-min", low, "at least 1")
        _check(low <= high, "--prompt-lookup-ngram-max", high, f"at least the minimum, {low}")
        _check(high <= 16, "--prompt-lookup-ngram-max", high, "at most 16")
        draft = self.max_draft
        _check(1 <= draft <= 64, "--prompt-lookup-max-draft", draft, "between 1 and 64")


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How drafts are proposed and judged."""

    num_draft_tokens: int = 3
    """k, the most tokens that the draft model proposes in a round; 0 leaves it out."""
    adapts_depth: bool = False
    """Let measured costs and acceptance choose k, 0 included; `num_draft_tokens` is not used."""
    prompt_lookup: PromptLookupConfig | None = None
    accept_rule: AcceptRule = AcceptRule.SAMPLER_MATCH
    diagnostics: bool = False
    """Compute the closed forms of acceptance at the tested positions."""
    draft_temperature: float | None = None
    """The draft's own temperature; None is the target's, 0 proposes the most likely token."""

    def __post_init__(self) -> None:
        _check(
            0 <= self.num_draft_tokens <= 256,
            "--num-draft-tokens",
            self.num_draft_tokens,
            "between 0 and 256",
        )
        t = self.draft_temperature
        usable = t is None or (math.isfinite(t) and t >= 0)
        _check(usable, "--draft-temp", t, "a finite number of at least 0")

    @property
    def drafts_with_model(self) -> bool:
        """Whether a draft model has anything to do."""
        return self.adapts_depth or self.num_draft_tokens > 0


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How keys and values are kept."""

    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0
    """Number of cached tokens from which on the cache is quantised."""
    max_kv_size: int | None = None
    prefill_step_tokens: int = 2048

    def __post_init__(self) -> None:
        _check(self.kv_bits in (None, 2, 3, 4, 6, 8), "--kv-bits", self.kv_bits, "2, 3, 4, 6 or 8")
        _check(
            self.kv_group_size in (32, 64, 128),
            "--kv-group-size",
            self.kv_group_size,
            "32, 64 or 128",
        )
        start = self.quantized_kv_start
        _check(start >= 0, "--quantized-kv-start", start, "0 or more")
        size = self.max_kv_size
        # The ring keeps the first four tokens, so a smaller one could not turn.
        _check(size is None or size >= 8, "--max-kv-size", size, "at least 8")
        _check(
            self.prefill_step_tokens >= 1,
            "--prefill-step-size",
            self.prefill_step_tokens,
            "at least 1",
        )
        if self.max_kv_size is not None and self.kv_bits is not None:
            raise OptionError(
                "--max-kv-size and --kv-bits exclude each other: mlx-lm cannot quantise a "
                "rotating cache; drop one"
            )


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """One run: sampling, speculation, caches, where it ends, and its seed."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    extra_eos_ids: tuple[int, ...] = ()
    dry_sequence_breakers: tuple[str, ...] = ()
    """Texts that end a DRY match; every token whose text holds one counts."""
    seed: int = 0
    logprobs: int = 0
    """Report the log-probability of each token and of this many alternatives; 0 is off."""

    def __post_init__(self) -> None:
        _check(self.max_tokens >= 0, "--max-tokens", self.max_tokens, "0 or more here")
        _check(0 <= self.seed <= MAX_SEED, "--seed", self.seed, f"between 0 and {MAX_SEED}")
        _check(0 <= self.logprobs <= 100, "--logprobs", self.logprobs, "between 0 and 100")
        if self.sampling.is_greedy and self.speculation.draft_temperature:
            raise OptionError(
                "--draft-temp above 0 does nothing but lower acceptance when the target is greedy: "
                "drop it, or set --temp"
            )
        changes_temperature = self.speculation.draft_temperature not in (
            None,
            self.sampling.temperature,
            0.0,
            1.0,
        )
        if changes_temperature and "temperature" not in self.sampling.order:
            raise OptionError(
                "--draft-temp is set but --samplers leaves out temperature; add it there"
            )
        if isinstance(self.stop, str):
            raise OptionError("--stop: a sequence of texts is needed, not one text")
        if any(not text for text in self.stop):
            raise OptionError("--stop needs a text; an empty one would stop at once")
