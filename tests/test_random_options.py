"""What holds whatever the options: random sets of them, on tiny models.

Four properties. At temperature 0 a draft changes no id; under the match rules it changes none
for a given seed; the counts of a run agree with each other; and any exit leaves both caches at the
last emitted token, which going on from them proves. Each check is also shown a program that is
wrong in one place, and has to object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from random import Random
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import mlxgen
from mlxgen import generation
from mlxgen.cache.cached_model import CachedModel
from mlxgen.config import (
    FILTER_NAMES,
    MLX_LM_ORDER,
    AcceptRule,
    CacheConfig,
    GenerationConfig,
    PromptLookupConfig,
    SamplingConfig,
    SpeculationConfig,
)
from mlxgen.decoding.tokens import FinishReason
from mlxgen.errors import GenerationError
from mlxgen.generation import Generation, build_generator, generate, stream_generate
from mlxgen.memory import fresh_draft, fresh_target
from mlxgen.models.loading import LoadedModel
from mlxgen.sampling.target_draw import draw_by_position
from mlxgen.speculative import verification
from mlxgen.speculative.loop import Round
from mlxgen.speculative.statistics import SpeculativeAcceptanceStats
from mlxgen.speculative.verification import Verification, Verifier
from tests.fixtures.model_directories import LlamaShape, Vocabulary
from tests.fixtures.runs import ModelStore

TOKENS = 24
"""Of a vocabulary, one of them the end of sequence."""
EOS = TOKENS - 1
VOCABULARY = Vocabulary(Vocabulary.of_size(TOKENS - 1).symbols, ("<eos>",), eos="<eos>")
SHAPE = LlamaShape(layers=2, hidden=32, heads=1, intermediate=32)
WINDOW = 8
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "padded": {"head_rows": 40},
    "sliding": {"sliding_window": WINDOW},
}
DRAFTS: dict[str, dict[str, Any]] = {
    "near": {"disturbance": 0.03},
    "far": {"disturbance": 2.0},
    "padded": {"disturbance": 0.2, "head_rows": 32},
    "short": {"disturbance": 0.2, "head_rows": 20},
    "sliding": {"disturbance": 0.2, "sliding_window": WINDOW},
}
FURTHER = 6
"""Tokens that a run goes on with after it was left."""
MATCH_RULES = (AcceptRule.SAMPLER_MATCH, AcceptRule.GUMBEL_MATCH)


# Random runs


def random_sampling(draw: Random, greedy: bool | None) -> SamplingConfig:
    """Most options as they are by default. greedy: None for either kind."""

    def sometimes(value: Any, default: Any) -> Any:
        return value if draw.random() < 0.3 else default

    def share(low: float = 0.0, high: float = 1.0) -> float:
        return round(draw.uniform(low, high), 2)

    is_greedy = draw.random() < 0.3 if greedy is None else greedy
    bias = {draw.randrange(TOKENS): share(-5, 5) for _ in range(draw.randrange(1, 4))}
    if draw.random() < 0.3:
        bias[draw.randrange(TOKENS)] = float("-inf")
    windows = (-1, -1, 0, 1, 3, 7, 100)
    return SamplingConfig(
        temperature=0.0 if is_greedy else draw.choice((0.3, 0.6, 0.8, 1.0, 1.7)),
        top_k=sometimes(draw.randrange(2, 30), 0),
        top_p=sometimes(share(), 1.0),
        min_p=sometimes(share(0, 0.6), 0.0),
        typical_p=sometimes(share(0.05), 1.0),
        top_n_sigma=sometimes(share(0.1, 3), 0.0),
        xtc_probability=sometimes(share(), 0.0),
        xtc_threshold=share(0.01, 0.4),
        repetition_penalty=sometimes(share(0.5, 2), 1.0),
        repeat_last_n=draw.choice(windows),
        frequency_penalty=sometimes(share(-1, 1), 0.0),
        presence_penalty=sometimes(share(-1, 1), 0.0),
        dry_multiplier=sometimes(share(0.1, 2), 0.0),
        dry_base=share(1, 3),
        dry_allowed_length=draw.randrange(1, 5),
        dry_penalty_last_n=draw.choice(windows),
        logit_bias=sometimes(tuple(bias.items()), ()),
        order=draw.choice((FILTER_NAMES, MLX_LM_ORDER, FILTER_NAMES[::-1])),
    )


def random_speculation(
    draw: Random, rules: tuple[AcceptRule, ...], is_greedy: bool
) -> SpeculationConfig:
    """A fixed or an adaptive length, and lookup now and then."""
    lookup = PromptLookupConfig(
        ngram_min=draw.randrange(1, 3),
        ngram_max=draw.randrange(2, 5),
        max_draft=draw.randrange(1, 10),
    )
    return SpeculationConfig(
        num_draft_tokens=draw.randrange(1, 8),
        adapts_depth=draw.random() < 0.25,
        prompt_lookup=lookup if draw.random() < 0.3 else None,
        accept_rule=draw.choice(rules),
        diagnostics=draw.random() < 0.5,
        draft_temperature=None if is_greedy else draw.choice((None, None, 0.0, 0.5, 1.5)),
    )


@dataclass(frozen=True)
class Setup:
    """A pair by name, a prompt and everything that a run is told."""

    target: str
    draft: str
    prompt: tuple[int, ...]
    config: GenerationConfig

    def but(self, **changes: Any) -> Setup:
        """A copy with another configuration."""
        return replace(self, config=replace(self.config, **changes))

    @property
    def plain(self) -> GenerationConfig:
        """The configuration of the same run without anything that drafts."""
        return replace(self.config, speculation=SpeculationConfig(num_draft_tokens=0))


def random_setup(draw: Random, greedy: bool | None, rules: tuple[AcceptRule, ...]) -> Setup:
    """A random run that the configuration allows."""
    sampling = random_sampling(draw, greedy)
    target, draft = draw.choice(list(TARGETS)), draw.choice(list(DRAFTS))
    # mlx-lm cannot quantise the rotating cache of a sliding window.
    is_quantised = draw.random() < 0.3 and "sliding" not in (target, draft)
    config = GenerationConfig(
        sampling=sampling,
        speculation=random_speculation(draw, rules, sampling.is_greedy),
        cache=CacheConfig(
            kv_bits=draw.choice((4, 8)) if is_quantised else None,
            kv_group_size=32,
            quantized_kv_start=draw.choice((0, 0, 5, 12, 20)),
            prefill_step_tokens=draw.choice((1, 4, 2048)),
        ),
        max_tokens=draw.choice((26, 26, draw.randrange(26))),
        stop=draw.choice(((), (), (), ("a",), ("b", "d"), ("ce",), ("g", "hi", "k"))),
        ignore_eos=draw.random() < 0.4,
        extra_eos_ids=draw.choice(((), (), (3,), (7, 12))),
        dry_sequence_breakers=draw.choice(((), ("c",))),
        seed=draw.getrandbits(64),
        logprobs=draw.choice((0, 0, 2)),
    )
    # Few different tokens, so that lookup and DRY find repetitions.
    prompt = tuple(draw.randrange(6) for _ in range(draw.randrange(1, 17)))
    return Setup(target, draft, prompt, config)


def setups(
    *, greedy: bool | None = None, rules: tuple[AcceptRule, ...] = tuple(AcceptRule)
) -> st.SearchStrategy[Setup]:
    """Random runs. Each has a seed of its own: drawn option by option they resemble each other."""
    randoms = st.randoms(use_true_random=True)
    return st.builds(random_setup, randoms, st.just(greedy), st.just(rules))


@dataclass(frozen=True)
class Pairs:
    """The loaded models by name."""

    targets: dict[str, LoadedModel]
    drafts: dict[str, LoadedModel]

    def plain(self, setup: Setup) -> Generation:
        """The run without a draft."""
        return generate(self.targets[setup.target], setup.prompt, setup.plain)

    def speculative(
        self, setup: Setup, on_round: Callable[[Round], None] | None = None
    ) -> Generation:
        """The run with it."""
        return generate(
            self.targets[setup.target],
            setup.prompt,
            setup.config,
            draft=self.drafts[setup.draft],
            on_round=on_round,
        )


@pytest.fixture(scope="module")
def pairs(models: ModelStore) -> Pairs:
    """All of them small versions of one llama, whose distributions are neither flat nor sure."""

    def load(role: str, **options: Any) -> LoadedModel:
        directory = models.llama_directory(
            3, shape=SHAPE, vocabulary=VOCABULARY, head_scale=3.0, eos_token_id=EOS, **options
        )
        return mlxgen.load(str(directory), role=role)

    return Pairs(
        {name: load("target", **options) for name, options in TARGETS.items()},
        {name: load("draft", **options) for name, options in DRAFTS.items()},
    )


def examples(count: int) -> settings:
    """The same examples in every run."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


def rejected(strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Among random runs there is one that a check objects to."""

    @settings(examples(60), phases=(Phase.generate,), report_multiple_bugs=False)
    @given(run=strategy)
    def every_run_passes(run: Any) -> None:
        check(run)

    with pytest.raises((AssertionError, GenerationError, ValueError)):
        every_run_passes()


KINDS: dict[str, Callable[[Generation, SpeculativeAcceptanceStats], bool]] = {
    "stop string": lambda run, stats: run.stop_string is not None,
    "end of sequence": lambda run, stats: (
        run.finish_reason is FinishReason.STOP and run.stop_string is None and stats.accepted > 0
    ),
    "all accepted": lambda run, stats: stats.accepted == stats.proposed > 4,
    "all rejected": lambda run, stats: stats.accepted == 0 and stats.proposed > 4,
    "both drafters": lambda run, stats: len(stats.by_drafter) == 2,
    "closed forms": lambda run, stats: stats.has_closed_forms,
}
RULE_IDS = ("greedy-argmax", *(rule.value for rule in AcceptRule))


@pytest.mark.parametrize("kind", [*KINDS, *RULE_IDS])
def test_random_runs_are_of_many_kinds(pairs: Pairs, kind: str) -> None:
    def is_another(setup: Setup) -> None:
        run = pairs.speculative(setup)
        assert (stats := run.statistics) is not None
        if kind in KINDS:
            assert not KINDS[kind](run, stats)
        else:
            assert stats.rule.id != kind or stats.rounds < 3

    rejected(setups(), is_another)


# Parity


def check_parity(pairs: Pairs, setup: Setup) -> None:
    """The draft changes no id, no end and no text."""
    plain, run = pairs.plain(setup), pairs.speculative(setup)
    assert run.token_ids == plain.token_ids
    assert (run.finish_reason, run.stop_string) == (plain.finish_reason, plain.stop_string)
    assert run.text == plain.text
    assert run.statistics is not None


@pytest.mark.slow
@examples(100)
@given(setup=setups(greedy=True))
def test_at_temperature_0_a_draft_changes_nothing(pairs: Pairs, setup: Setup) -> None:
    check_parity(pairs, setup)


@pytest.mark.slow
@examples(100)
@given(setup=setups(greedy=False, rules=MATCH_RULES))
def test_under_the_match_rules_a_draft_changes_nothing(pairs: Pairs, setup: Setup) -> None:
    check_parity(pairs, setup)


GREEDY, MATCHED = setups(greedy=True), setups(greedy=False, rules=MATCH_RULES)


def accepts_everything(verifier: Verifier, *arguments: Any) -> Verification:
    """Wrong: the whole block counts as accepted."""
    checked = right_verify(verifier, *arguments)
    proposed = arguments[-1].ids.shape[0]
    return replace(checked, verdict=checked.verdict._replace(accepted=mx.array(proposed)))


right_verify = Verifier.verify


def one_position_late(*arguments: Any) -> Any:
    """Wrong: the target's draws in a block have the keys of the next positions."""
    return right_draw(*arguments[:-1], arguments[-1] + 1)


right_draw: Any = draw_by_position


@pytest.mark.parametrize("strategy", [GREEDY, MATCHED], ids=["greedy", "matched"])
def test_parity_rejects_a_rule_that_accepts_everything(
    pairs: Pairs, strategy: st.SearchStrategy[Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Verifier, "verify", accepts_everything)
    rejected(strategy, lambda setup: check_parity(pairs, setup))


def test_parity_rejects_draws_keyed_by_another_position(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "draw_by_position", one_position_late)
    rejected(MATCHED, lambda setup: check_parity(pairs, setup))


# Counts


def check_counts(pairs: Pairs, setup: Setup) -> None:
    """What a run counted hangs together, with its tokens, and with what its rounds settled."""
    rounds: list[Round] = []
    run = pairs.speculative(setup, rounds.append)
    stats = run.statistics
    assert stats is not None
    assert stats.rounds == len(rounds)
    assert stats.proposed == sum(settled.proposed for settled in rounds)
    assert stats.accepted == sum(settled.accepted for settled in rounds)
    assert stats.accepted <= stats.positions_tested <= stats.proposed

    from_draft = sum(token.from_draft for token in run.tokens)
    from_target = len(run.tokens) - from_draft
    assert len(run.tokens) <= setup.config.max_tokens
    # Each round ends with a token of the target. A stop string or an end of sequence hides what
    # the newest round settled behind it.
    hidden = 0
    if run.finish_reason is FinishReason.STOP and rounds:
        hidden = rounds[-1].accepted + 1
    assert stats.accepted - hidden <= from_draft <= stats.accepted
    assert stats.rounds <= from_target + (hidden > 0)
    for counts, total in (
        (stats.tested_by_offset, stats.positions_tested),
        (stats.accepted_by_offset, stats.accepted),
    ):
        assert sum(counts) == total
        assert all(earlier >= later for earlier, later in pairwise(counts))
    pairs_by_offset = zip(stats.tested_by_offset, stats.accepted_by_offset, strict=True)
    assert all(accepted <= tested for tested, accepted in pairs_by_offset)
    # A chain is judged on where it was accepted before, so what is tested at an offset was accepted
    # at the one before, unless the block ended there.
    for accepted, tested in zip(stats.accepted_by_offset, stats.tested_by_offset[1:], strict=False):
        assert tested <= accepted
    assert not stats.tested_by_offset or stats.tested_by_offset[0] == stats.rounds
    for name in ("rounds", "proposed", "positions_tested", "accepted"):
        by_drafter = [getattr(counts, name) for counts in stats.by_drafter.values()]
        assert sum(by_drafter) == getattr(stats, name)
    assert_ratio(stats.per_position_acceptance, stats.accepted, stats.positions_tested)
    assert_ratio(stats.acceptance_rate, stats.accepted, stats.proposed)
    assert_ratio(stats.mean_accepted_len, stats.accepted, stats.rounds)
    assert 0 <= stats.residual_fallbacks <= stats.positions_tested - stats.accepted
    if stats.has_closed_forms:
        assert -1e-4 <= stats.closed_form_sum_prod <= stats.closed_form_sum_min + 1e-4 <= 1 + 2e-4
        assert stats.check.observed == stats.accepted


def assert_ratio(ratio: float, numerator: int, denominator: int) -> None:
    """A rate, 0 where nothing was counted."""
    assert ratio == pytest.approx(numerator / denominator if denominator else 0)


@pytest.mark.slow
@examples(100)
@given(setup=setups())
def test_counts_agree_under_every_rule(pairs: Pairs, setup: Setup) -> None:
    check_counts(pairs, setup)


@pytest.mark.parametrize("name", ["proposed", "tested", "accepted"])
@pytest.mark.parametrize("by", [-1, 1])
def test_counts_reject_a_counter_off_by_one(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, name: str, by: int
) -> None:
    right = SpeculativeAcceptanceStats.record_round

    def wrong(stats: SpeculativeAcceptanceStats, **counts: Any) -> None:
        right(stats, **{**counts, name: max(0, counts[name] + by)})

    monkeypatch.setattr(SpeculativeAcceptanceStats, "record_round", wrong)
    rejected(setups(), lambda setup: check_counts(pairs, setup))


# Caches


@contextmanager
def cached_models(made: list[CachedModel], given: CachedModel | None = None) -> Iterator[None]:
    """Runs that begin now note their models with empty caches, or get one that holds something."""

    def noting(make: Callable[..., CachedModel]) -> Callable[..., CachedModel]:
        def note(*arguments: Any) -> CachedModel:
            made.append(given or make(*arguments))
            return made[-1]

        return note

    with (
        mock.patch.object(generation, "fresh_target", noting(fresh_target)),
        mock.patch.object(generation, "fresh_draft", noting(fresh_draft)),
    ):
        yield


def ids_from(
    cached: CachedModel, target: LoadedModel, text: list[int], config: GenerationConfig
) -> list[int]:
    """What plain decoding writes after a text, on a model whose cache may hold some of it."""
    with cached_models([], cached):
        generator = build_generator(target, config, prompt=text)
    generator.prefill(text)
    return [token.id for token in generator.tokens(FURTHER)]


def check_exit(pairs: Pairs, setup: Setup, taken: int) -> None:
    """A run that is left after some pieces of text, if it has not ended before.

    Both caches hold prompt and tokens but the newest, and are as good to go on from as new ones.
    """
    target, draft = pairs.targets[setup.target], pairs.drafts[setup.draft]
    cached: list[CachedModel] = []
    with cached_models(cached):
        stream = stream_generate(target, setup.prompt, setup.config, draft=draft)
    with closing(iter(stream)) as pieces:
        for _ in islice(pieces, taken):
            pass
    begun = stream.result.token_ids
    text = [*setup.prompt, *begun]
    of_target, of_draft = cached
    assert of_target.cached_tokens == len(text) - 1 >= of_draft.cached_tokens
    for held in cached:
        offsets = [cache.offset for cache in held.caches]
        assert offsets == [held.cached_tokens] * SHAPE.layers

    config = replace(setup.plain, stop=(), ignore_eos=True, logprobs=0)
    further = ids_from(of_target, target, text, config)
    has_plain_ids = setup.config.sampling.is_greedy or (
        setup.config.speculation.accept_rule in MATCH_RULES
    )
    if has_plain_ids:
        whole = replace(config, max_tokens=len(begun) + FURTHER)
        assert generate(target, setup.prompt, whole).token_ids == begun + further
    # A cold run takes in more at once, so it begins to quantise elsewhere.
    if config.cache.kv_bits is None or config.cache.quantized_kv_start == 0:
        new = (fresh_target(target, config.cache), fresh_draft(target, draft, config.cache))
        assert ids_from(new[0], target, text, config) == further
        assert ids_from(of_draft, target, text, config) == ids_from(new[1], target, text, config)


LEAVING = st.tuples(setups(), st.integers(1, 30))


@pytest.mark.slow
@examples(100)
@given(left=LEAVING)
def test_any_exit_leaves_caches_to_go_on_from(pairs: Pairs, left: tuple[Setup, int]) -> None:
    check_exit(pairs, *left)


def keeps_everything(cached: CachedModel, length: int) -> None:
    """Wrong: nothing is taken back."""


def says_one_more(cached: CachedModel, length: int) -> None:
    """Wrong: one token too many is taken back, unknown to the count."""
    right_rewind(cached, max(length - 1, 0))
    cached._fed_tokens = length


def takes_one_less(cached: CachedModel, length: int) -> None:
    """Wrong: one token too few is taken back."""
    right_rewind(cached, min(length + 1, cached.cached_tokens))


def forgets_the_last_layer(cached: CachedModel, length: int) -> None:
    """Wrong: as a trim that looks at the first layer alone."""
    kept = cached.caches
    cached.caches = kept[:1]
    right_rewind(cached, length)
    cached.caches = kept


right_rewind = CachedModel.rewind


@pytest.mark.parametrize(
    "wrong", [keeps_everything, says_one_more, takes_one_less, forgets_the_last_layer]
)
def test_exits_reject_a_wrong_rewind(
    pairs: Pairs,
    monkeypatch: pytest.MonkeyPatch,
    wrong: Callable[[CachedModel, int], None],
) -> None:
    monkeypatch.setattr(CachedModel, "rewind", wrong)
    rejected(LEAVING, lambda left: check_exit(pairs, *left))
