"""The speculative loop: parity with plain decoding, caches in lock-step, exact ends."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest

from mlxgen.cache import caches as cache_ops
from mlxgen.cache.cached_model import CachedModel
from mlxgen.config import MLX_LM_ORDER, AcceptRule, CacheConfig, SamplingConfig
from mlxgen.decoding import steps
from mlxgen.decoding.tokens import FinishReason
from mlxgen.drafters.draft_model import DraftModel
from mlxgen.errors import NonFiniteError, PairError
from mlxgen.sampling.chain import rows_are_usable
from mlxgen.sampling.randomness import Randomness, Stream
from mlxgen.sampling.target_draw import draw_by_position
from mlxgen.speculative import loop
from mlxgen.speculative.loop import Round
from tests.fixtures.model_directories import LlamaShape, Vocabulary, successor_table
from tests.fixtures.runs import (
    ModelStore,
    ScriptedDrafter,
    Settings,
    Speculation,
    forbid_random_numbers,
    global_random_state,
)

SAMPLED = SamplingConfig(temperature=0.9)
RULES = (AcceptRule.SAMPLER_MATCH, AcceptRule.STOCHASTIC)
PATH_BY_PATH = (AcceptRule.SAMPLER_MATCH, AcceptRule.GUMBEL_MATCH)
"""Rules under which the ids are those of plain decoding with the same seed."""

DRAFTS: dict[str, dict[str, Any]] = {
    "always": {"seed": 1},
    "sometimes": {"seed": 1, "disturbance": 0.1},
    "never": {"seed": 2},
}
"""Drafts by how often they agree, greedily, with the llama of seed 1."""


def draft_of(models: ModelStore, agreement: str, **options: Any) -> Any:
    """A draft that agrees with the llama of seed 1 always, sometimes or (nearly) never."""
    return models.llama(**DRAFTS[agreement], **options)


# Temperature 0


@pytest.mark.parametrize("agreement", DRAFTS)
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_temperature_zero_stream_is_identical_to_greedy_target_only(
    models: ModelStore, agreement: str, k: int
) -> None:
    target, settings = models.llama(1), Settings(k=k)
    run = settings.speculative(target, draft_of(models, agreement))
    assert run.ids(60) == settings.plain_ids(target, 60)
    assert run.statistics.rule.id == "greedy-argmax"
    rate = run.statistics.per_position_acceptance
    assert {"always": rate == 1, "sometimes": 0.2 < rate < 0.9, "never": rate < 0.2}[agreement]


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_greedy_walk_of_a_table_is_kept_by_any_draft(models: ModelStore, k: int, step: int) -> None:
    """Target t+1 mod 6. Drafts: the same, 2t+1 (agrees on one token in six), t+4 (never)."""
    successors = {1: [(t + 1) % 6 for t in range(6)], 2: [(2 * t + 1) % 6 for t in range(6)]}
    successors[4] = [(t + 4) % 6 for t in range(6)]
    target = models.table(successor_table(successors[1]))
    settings = Settings(prompt=(0,), width=6, k=k)
    run = settings.speculative(target, models.table(successor_table(successors[step])))
    assert run.ids(48) == [(t + 1) % 6 for t in range(48)]
    assert run.statistics.per_position_acceptance == {1: 1.0, 4: 0.0}.get(
        step, run.statistics.per_position_acceptance
    )


def test_the_mixed_draft_agrees_on_exactly_one_token_in_six() -> None:
    assert [t for t in range(6) if (2 * t + 1) % 6 == (t + 1) % 6] == [0]


def test_equal_top_logits_are_resolved_alike_on_both_paths(models: ModelStore) -> None:
    table = successor_table([1, 2, 3, 0])
    table[:, 2] = 20.0
    target = models.table(table)
    settings = Settings(prompt=(0,), width=4)
    plain = settings.plain_ids(target, 30)
    assert plain[0] == 1, "the first of two equal logits"
    assert settings.speculative_ids(target, models.table(table), 30) == plain
    assert settings.speculative_ids(target, models.table(successor_table([3] * 4)), 30) == plain


@pytest.mark.parametrize("temperature", [1e-6, 1e-39])
@pytest.mark.parametrize("rule", RULES)
def test_tiny_temperature_behaves_like_zero(
    models: ModelStore, temperature: float, rule: AcceptRule
) -> None:
    target, draft = models.llama(1), draft_of(models, "sometimes")
    greedy = Settings().plain_ids(target, 40)
    settings = Settings(sampling=SamplingConfig(temperature=temperature), rule=rule)
    assert settings.speculative_ids(target, draft, 40) == greedy


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=2, top_k=1)])
@pytest.mark.parametrize("diagnostics", [False, True])
def test_no_random_number_is_drawn_when_greedy(
    models: ModelStore,
    monkeypatch: pytest.MonkeyPatch,
    sampling: SamplingConfig,
    diagnostics: bool,
) -> None:
    target, draft = models.llama(1), draft_of(models, "sometimes")
    settings = Settings(sampling=sampling, rule=AcceptRule.STOCHASTIC, diagnostics=diagnostics)
    forbid_random_numbers(monkeypatch)
    assert settings.speculative_ids(target, draft, 30) == Settings().plain_ids(target, 30)
    with pytest.raises(AssertionError, match="random number"):
        settings.but(sampling=SAMPLED).speculative_ids(target, draft, 30)


def test_draft_equal_to_the_target_accepts_everything(models: ModelStore) -> None:
    run = Settings(k=4).speculative(models.llama(1), models.llama(1))
    assert len(run.ids(200)) == 200
    stats = run.statistics
    assert stats.accepted == stats.positions_tested == stats.proposed > 150
    assert stats.acceptance_rate == stats.per_position_acceptance == 1
    assert stats.mean_accepted_len > 3.9


def test_first_proposal_is_verified_like_all_others(models: ModelStore) -> None:
    target = models.llama(1)
    settings = Settings(k=1)
    run = settings.speculative(target, ScriptedDrafter(lambda text: 0))
    assert run.ids(40) == settings.plain_ids(target, 40)


# Seeds and parity at a temperature


@pytest.mark.parametrize("rule", AcceptRule)
def test_same_seed_gives_the_same_ids(models: ModelStore, rule: AcceptRule) -> None:
    target, draft = models.llama(1, head_scale=3.0), models.llama(2, head_scale=3.0)
    settings = Settings(sampling=SAMPLED, rule=rule)
    first = settings.speculative_ids(target, draft, 30)
    assert settings.speculative_ids(target, draft, 30) == first
    assert settings.but(seed=8).speculative_ids(target, draft, 30) != first


def test_plain_and_sampled_speculative_runs_leave_the_global_random_state_alone(
    models: ModelStore,
) -> None:
    target, draft = models.llama(1), models.llama(2)
    mx.random.seed(99)
    before = global_random_state()
    for rule in RULES:
        settings = Settings(sampling=SAMPLED, rule=rule)
        settings.speculative_ids(target, draft, 10)
        settings.plain_ids(target, 10)
    assert global_random_state() == before


@pytest.mark.parametrize("rule", [AcceptRule.STOCHASTIC, AcceptRule.BLOCK])
def test_no_key_serves_two_draws_of_a_run(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch, rule: AcceptRule
) -> None:
    """Residual draws with the draft's noise, say, bias the text by less than chi-square sees."""
    keys: list[tuple[int, int]] = []

    def kept(name: str) -> None:
        make: Any = getattr(Randomness, name)

        def record(*arguments: Any) -> Any:
            made = make(*arguments)
            # Those of acceptance are made for many rounds at once.
            if arguments[1] is not Stream.ACCEPT:
                keys.extend((int(first), int(second)) for first, second in made)
            return made

        monkeypatch.setattr(Randomness, name, record)

    uniforms, words_of = Randomness.accept_uniforms, Randomness._round_words

    def of_round(self: Randomness, start: int, count: int) -> mx.array:
        made = words_of(self, Stream.ACCEPT, start, range(count))
        keys.extend((int(first), int(second)) for first, second in made)
        return uniforms(self, start, count)

    kept("_position_words")
    kept("_round_words")
    monkeypatch.setattr(Randomness, "accept_uniforms", of_round)
    sampling = SamplingConfig(temperature=0.9, xtc_probability=0.5)
    settings = Settings(sampling=sampling, rule=rule, k=3)
    settings.speculative(models.llama(1), draft_of(models, "sometimes")).ids(60)
    assert len(keys) > 200
    assert len(set(keys)) == len(keys)


SMALL = Vocabulary.of_size(12)
"""Few tokens, so that the text repeats itself and the penalties have something to do."""

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": ({}, {"temperature": 0.6}),
    "top_k": ({}, {"top_k": 3}),
    "top_p": ({}, {"top_p": 0.6}),
    "min_p": ({}, {"min_p": 0.3}),
    "typical_p": ({}, {"typical_p": 0.5}),
    "top_n_sigma": ({}, {"top_n_sigma": 1.0}),
    "xtc_probability": ({}, {"xtc_probability": 0.5}),
    "xtc_threshold": ({"xtc_probability": 1.0}, {"xtc_threshold": 0.2}),
    "repetition_penalty": ({}, {"repetition_penalty": 1.8}),
    "repeat_last_n": ({"repetition_penalty": 1.8}, {"repeat_last_n": 3}),
    "frequency_penalty": ({}, {"frequency_penalty": 0.7}),
    "presence_penalty": ({}, {"presence_penalty": 2.0}),
    "dry_multiplier": ({}, {"dry_multiplier": 2.0}),
    "dry_base": ({"dry_multiplier": 1.0, "dry_allowed_length": 1}, {"dry_base": 4.0}),
    "dry_allowed_length": ({"dry_multiplier": 2.0}, {"dry_allowed_length": 1}),
    "dry_penalty_last_n": ({"dry_multiplier": 2.0}, {"dry_penalty_last_n": 8}),
    "logit_bias": ({}, {"logit_bias": ((2, 3.0), (5, -100.0))}),
    "order": ({"temperature": 0.5, "top_p": 0.8}, {"order": MLX_LM_ORDER}),
    "breakers": ({"dry_multiplier": 3.0, "dry_allowed_length": 1}, {}),
    "protected": ({"xtc_probability": 1.0, "xtc_threshold": 0.05}, {}),
}
"""For each option: the settings it acts upon, and the option itself."""
LISTS = {"breakers": (0, 3, 4, 7), "protected": (0, 1, 2, 3, 4)}
EVERYTHING: dict[str, Any] = {
    "temperature": 1.2,
    "top_k": 9,
    "top_p": 0.97,
    "min_p": 0.02,
    "typical_p": 0.98,
    "top_n_sigma": 3.0,
    "xtc_probability": 0.3,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.3,
    "dry_multiplier": 0.8,
    "repeat_last_n": 20,
    "logit_bias": ((2, 1.0),),
}
PAIRS = (("always", 4), ("sometimes", 3), ("never", 1))


def small(models: ModelStore, agreement: str = "always") -> Any:
    """A llama of 12 tokens and spread-out distributions."""
    return draft_of(models, agreement, vocabulary=SMALL, head_scale=2.0)


def settings_for(option: str, *, on: bool) -> Settings:
    """Settings with an option on or off."""
    if option == "everything":
        values = EVERYTHING if on else {}
    else:
        base, change = OPTIONS[option]
        values = base | change if on else base
    settings = Settings(sampling=SamplingConfig(**{"temperature": 1.0, **values}), width=12)
    return settings.but(**{option: LISTS[option]}) if on and option in LISTS else settings


@pytest.mark.parametrize("option", [*OPTIONS, "everything"])
def test_every_sampling_option_acts_on_speculative_output_as_on_plain_output(
    models: ModelStore, option: str
) -> None:
    target = small(models)
    settings = settings_for(option, on=True)
    plain = settings.plain_ids(target, 40)
    assert plain != settings_for(option, on=False).plain_ids(target, 40), "it has an effect"
    for agreement, k in PAIRS:
        run = settings.but(k=k).speculative(target, small(models, agreement))
        assert run.ids(40) == plain, (agreement, k)
        assert run.statistics.rule.id == "sampler-match"
    coupled = settings.but(rule=AcceptRule.GUMBEL_MATCH, k=3)
    assert coupled.speculative_ids(target, small(models, "sometimes"), 40) == plain


GREEDY_OPTIONS = [
    "repetition_penalty",
    "repeat_last_n",
    "frequency_penalty",
    "presence_penalty",
    "dry_multiplier",
    "dry_allowed_length",
    "logit_bias",
]


@pytest.mark.parametrize("option", GREEDY_OPTIONS)
def test_bias_and_penalties_act_on_greedy_speculation_as_on_greedy_decoding(
    models: ModelStore, option: str
) -> None:
    def greedy(on: bool) -> Settings:
        base, change = OPTIONS[option]
        return Settings(sampling=SamplingConfig(**base, **(change if on else {})), width=12)

    target = small(models)
    plain = greedy(True).plain_ids(target, 40)
    assert plain != greedy(False).plain_ids(target, 40), "it has an effect"
    for agreement, k in PAIRS:
        settings = greedy(True).but(k=k)
        assert settings.speculative_ids(target, small(models, agreement), 40) == plain


@pytest.mark.parametrize(
    "option",
    [name for name in OPTIONS if "xtc_probability" not in OPTIONS[name][0] | OPTIONS[name][1]],
)
def test_target_and_draft_filter_alike_so_equal_models_are_always_accepted(
    models: ModelStore, option: str
) -> None:
    """p == q at every position under rejection sampling; XTC tosses separate coins."""
    settings = settings_for(option, on=True).but(rule=AcceptRule.STOCHASTIC, k=4)
    run = settings.speculative(small(models), small(models))
    run.ids(60)
    assert run.statistics.accepted == run.statistics.proposed > 40


@pytest.mark.parametrize("rule", PATH_BY_PATH)
@pytest.mark.parametrize("agreement", DRAFTS)
@pytest.mark.parametrize("k", [1, 4, 8])
def test_path_by_path_rules_emit_plain_ids_whatever_the_draft_and_k(
    models: ModelStore, rule: AcceptRule, agreement: str, k: int
) -> None:
    target = models.llama(1, head_scale=4.0)
    settings = Settings(sampling=SAMPLED, rule=rule, k=k)
    draft = draft_of(models, agreement, head_scale=4.0)
    assert settings.speculative_ids(target, draft, 60) == settings.plain_ids(target, 60)


def test_parity_check_rejects_draws_keyed_by_another_position(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models.llama(1, head_scale=4.0), models.llama(2, head_scale=4.0)
    settings = Settings(sampling=SAMPLED)
    plain = settings.plain_ids(target, 30)
    assert settings.speculative_ids(target, draft, 30) == plain

    right: Any = draw_by_position

    def one_off(*arguments: Any) -> Any:
        *others, position = arguments
        return right(*others, position + 1)

    monkeypatch.setattr("mlxgen.speculative.verification.draw_by_position", one_off)
    assert settings.speculative_ids(target, draft, 30) != plain


# Caches


def check_lock_step(run: Speculation, prompt_length: int, committed: Round) -> None:
    """Both caches against what they must hold after a round, in every layer."""
    emitted = 1 + sum(len(r.emitted) for r in run.rounds)
    boundary = prompt_length + emitted - 1
    # The last proposal of a round accepted as a whole was never forwarded by the draft.
    owed = int(committed.accepted == committed.proposed)
    assert run.draft is not None
    assert committed.target_cache_tokens == boundary
    assert (committed.draft_cache_tokens or 0) + committed.owed_tokens == boundary
    assert committed.owed_tokens == owed
    assert [cache.offset for cache in run.target.caches] == [boundary] * 2
    assert [cache.offset for cache in run.draft.caches] == [boundary - owed] * 2


def run_in_lock_step(models: ModelStore, settings: Settings, agreement: str) -> Speculation:
    """A run of 40 tokens that is checked after every round."""
    runs: list[Speculation] = []
    run = settings.speculative(
        models.llama(1, head_scale=6.0),
        draft_of(models, agreement, head_scale=6.0),
        on_round=lambda committed: check_lock_step(runs[0], len(settings.prompt), committed),
    )
    runs.append(run)
    assert len(run.ids(40)) == 40
    return run


@pytest.mark.parametrize("agreement", DRAFTS)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize(
    ("temperature", "rule"),
    [(0.0, AcceptRule.SAMPLER_MATCH), *((0.9, rule) for rule in AcceptRule)],
)
def test_caches_are_in_lock_step_after_every_round(
    models: ModelStore, agreement: str, k: int, temperature: float, rule: AcceptRule
) -> None:
    settings = Settings(sampling=SamplingConfig(temperature=temperature), rule=rule, k=k)
    run = run_in_lock_step(models, settings, agreement)
    regimes = {"all" if r.accepted == r.proposed else "part" for r in run.rounds}
    if agreement == "sometimes":
        assert regimes == {"all", "part"}, "the run is mixed"
    if agreement == "always" and temperature == 0:
        assert regimes == {"all"}


Rewind = Callable[[Any, int], None]


def keeps_one_token_too_few(drafter: Any, length: int) -> None:
    """Wrong: the draft's cache falls behind by one token more with every rejection."""
    drafter._model.rewind(min(length, drafter._model.cached_tokens) - 1)


def keeps_rejected_tokens(drafter: Any, length: int) -> None:
    """Wrong: the draft's cache is not rewound at all."""


def rewinds_the_count_alone(drafter: Any, length: int) -> None:
    """Wrong: what the cache says it holds is right, what it holds is not."""
    drafter._model._fed_tokens = min(length, drafter._model.cached_tokens)


@pytest.mark.parametrize(
    "wrong", [keeps_one_token_too_few, keeps_rejected_tokens, rewinds_the_count_alone]
)
def test_lock_step_check_rejects_a_draft_cache_rewound_wrongly(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch, wrong: Rewind
) -> None:
    monkeypatch.setattr(DraftModel, "rewind", wrong)
    with pytest.raises(AssertionError):
        run_in_lock_step(models, Settings(k=3), "sometimes")


def test_lock_step_check_rejects_a_rewind_of_the_first_layer_alone(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewind = cache_ops.rewind
    monkeypatch.setattr(
        cache_ops, "rewind", lambda caches, length, role: rewind(caches[:1], length, role)
    )
    with pytest.raises(AssertionError):
        run_in_lock_step(models, Settings(k=3), "sometimes")


def test_a_fully_accepted_round_owes_its_last_proposal_and_the_next_round_pays_it(
    models: ModelStore,
) -> None:
    run = Settings(k=2).speculative(models.llama(1), models.llama(1))
    tokens = run.generator.tokens(7)
    for _ in range(2):
        next(tokens)
    assert [r.owed_tokens for r in run.rounds] == [1]
    assert run.rounds[0].draft_cache_tokens == len(Settings().prompt) + 2
    assert len(list(tokens)) == 5
    assert [r.accepted for r in run.rounds] == [2, 2]


def test_caches_hold_what_a_fresh_forward_of_the_text_would_put_there(models: ModelStore) -> None:
    """Not only the lengths: after rejections both models go on as if nothing had been drafted."""
    target, draft = models.llama(1), draft_of(models, "sometimes")
    settings = Settings(k=4)
    run = settings.speculative(target, draft)
    text = [*settings.prompt, *run.ids(40)]
    assert 0 < run.statistics.acceptance_rate < 1 and run.draft is not None
    for cached, model in ((run.target, target), (run.draft, draft)):
        owed = mx.array(text[cached.cached_tokens :])
        continued = cached.forward(owed)[-1]
        fresh = model(mx.array([text]))[0, -1]
        assert mx.allclose(continued, fresh, rtol=1e-4, atol=1e-3).item()


def test_steps_without_a_draft_leave_no_gap_in_its_cache(models: ModelStore) -> None:
    """Budgets of one token run no round; acceptance must not suffer afterwards."""
    target, settings = models.llama(1), Settings(k=3)
    run = settings.speculative(target, models.llama(1))
    ids = [token for budget in (5, 1, 1, 1, 9, 1, 8) for token in run.ids(budget)]
    assert ids == settings.plain_ids(target, 26)
    assert run.statistics.acceptance_rate == 1 and run.statistics.rounds > 4


# Where a run ends


@pytest.mark.parametrize("k", range(1, 7))
@pytest.mark.parametrize("agreement", ["always", "sometimes"])
def test_exactly_the_tokens_asked_for_are_emitted(
    models: ModelStore, k: int, agreement: str
) -> None:
    target, settings = models.llama(1), Settings(k=k)
    plain = settings.plain_ids(target, 12)
    for count in range(1, 13):
        run = settings.speculative(target, draft_of(models, agreement))
        assert run.ids(count) == plain[:count]
        assert run.generator.finish_reason is FinishReason.LENGTH
        assert run.target.cached_tokens == len(settings.prompt) + count - 1
        assert run.statistics.accepted <= count


def test_no_token_is_emitted_on_an_empty_budget(models: ModelStore) -> None:
    for settings in (Settings(), Settings(sampling=SAMPLED)):
        assert settings.plain_ids(models.llama(1), 0) == []
        assert settings.speculative_ids(models.llama(1), models.llama(1), 0) == []


def first_occurrence(ids: list[int], least: int) -> tuple[int, int]:
    """A token that stands at or behind a position and nowhere before, and its position."""
    return next((t, i) for i, t in enumerate(ids) if i >= least and t not in ids[:i])


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("agreement", DRAFTS)
def test_end_of_sequence_inside_a_block_ends_the_text_there(
    models: ModelStore, k: int, agreement: str
) -> None:
    target = models.llama(1)
    plain = Settings().plain_ids(target, 30)
    end, position = first_occurrence(plain, 4)
    absent = next(token for token in range(64) if token not in plain)
    settings = Settings(k=k, eos_ids=frozenset({end, absent}))
    expected = plain[:position]
    run = settings.speculative(target, draft_of(models, agreement))
    assert run.ids(30) == expected
    assert run.generator.finish_reason is FinishReason.STOP
    assert run.target.cached_tokens == len(settings.prompt) + len(expected) - 1
    assert [cache.offset for cache in run.target.caches] == [run.target.cached_tokens] * 2
    assert run.draft is not None and run.draft.cached_tokens <= run.target.cached_tokens
    assert sum(len(r.emitted) for r in run.rounds) == len(expected) - 1
    generator = settings.plain(target)
    assert [token.id for token in generator.tokens(30)] == expected
    assert generator.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rule", RULES)
def test_end_of_sequence_as_the_first_token_gives_empty_text(
    models: ModelStore, temperature: float, rule: AcceptRule
) -> None:
    target = models.llama(1)
    settings = Settings(sampling=SamplingConfig(temperature=temperature), rule=rule)
    settings = settings.but(eos_ids=frozenset(settings.plain_ids(target, 1)))
    run = settings.speculative(target, models.llama(1))
    assert run.ids(20) == settings.plain_ids(target, 20) == []
    assert run.generator.finish_reason is FinishReason.STOP
    assert run.statistics.rounds == run.statistics.accepted == 0
    assert run.target.cached_tokens == len(settings.prompt) - 1


def test_end_of_sequence_that_the_target_refuses_ends_nothing(models: ModelStore) -> None:
    target = models.llama(1)
    plain = Settings().plain_ids(target, 40)
    end = next(token for token in range(64) if token not in plain)
    settings = Settings(eos_ids=frozenset({end}))
    run = settings.speculative(target, ScriptedDrafter(lambda text: end))
    assert run.ids(40) == plain
    assert run.generator.finish_reason is FinishReason.LENGTH
    assert run.statistics.accepted == 0


def test_nothing_behind_an_accepted_end_of_sequence_counts(models: ModelStore) -> None:
    target = models.table(successor_table([1, 2, 3, 4, 5, 0]))
    settings = Settings(prompt=(0,), width=6, k=5, eos_ids=frozenset({4}))
    run = settings.speculative(target, target)
    assert run.ids(20) == [1, 2, 3]
    stats = run.statistics
    # One round: 2, 3 and the end accepted; a drafted end ends what counts as drafted.
    assert (stats.rounds, stats.proposed, stats.positions_tested, stats.accepted) == (1, 3, 3, 3)


@pytest.mark.parametrize("taken", range(1, 9))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_closing_the_iterator_leaves_both_caches_at_the_last_token_taken(
    models: ModelStore, taken: int, temperature: float
) -> None:
    target = models.llama(1, head_scale=6.0)
    settings = Settings(sampling=SamplingConfig(temperature=temperature), k=4)
    plain = settings.plain_ids(target, 30)
    run = settings.speculative(target, draft_of(models, "sometimes", head_scale=6.0))
    tokens = run.generator.tokens(30)
    begun = [next(tokens).id for _ in range(taken)]
    tokens.close()
    boundary = len(settings.prompt) + taken - 1
    assert run.target.cached_tokens == boundary
    assert run.draft is not None and run.draft.cached_tokens <= boundary
    for cached in (run.target, run.draft):
        assert [cache.offset for cache in cached.caches] == [cached.cached_tokens] * 2
    assert begun + run.ids(30 - taken) == plain


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_closing_plain_decoding_leaves_its_cache_at_the_last_token_taken(
    models: ModelStore, taken: int
) -> None:
    target, settings = models.llama(1), Settings()
    plain = settings.plain_ids(target, 20)
    generator = settings.plain(target)
    tokens = generator.tokens(20)
    begun = [next(tokens).id for _ in range(taken)]
    tokens.close()
    assert begun + [token.id for token in generator.tokens(20 - taken)] == plain


def test_an_exception_of_the_observer_leaves_both_caches_at_the_last_token(
    models: ModelStore,
) -> None:
    target, settings = models.llama(1), Settings(k=4)
    calls = 0

    def fail_once(_: Round) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("observer")

    run = settings.speculative(target, draft_of(models, "sometimes"), on_round=fail_once)
    begun: list[int] = []
    with pytest.raises(RuntimeError, match="observer"):
        for token in run.generator.tokens(40):
            begun.append(token.id)
    assert len(begun) == 1 + sum(len(committed.emitted) for committed in run.rounds[:2])
    assert run.target.cached_tokens == len(settings.prompt) + len(begun) - 1
    assert begun + run.ids(40 - len(begun)) == settings.plain_ids(target, 40)


class Interrupted:
    """A model whose given forward stops after its first layer, as Ctrl-C can make it."""

    def __init__(self, model: Any, stop_at: int) -> None:
        self._model = model
        self._calls_left = stop_at
        self.args = model.args
        self.layers = model.layers
        self.make_cache = model.make_cache

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        self._calls_left -= 1
        if self._calls_left == 0:
            entries = mx.zeros((1, 2, ids.shape[1], 32))
            cache[0].update_and_fetch(entries, entries)
            raise KeyboardInterrupt
        logits: mx.array = self._model(ids, cache=cache)
        return logits


@pytest.mark.parametrize("interrupted", ["target", "draft"])
@pytest.mark.parametrize("stop_at", [4, 5, 6, 7])
def test_an_interrupt_inside_a_forward_leaves_both_caches_at_the_last_token(
    models: ModelStore, interrupted: str, stop_at: int
) -> None:
    target, draft = models.llama(1), draft_of(models, "sometimes")
    settings = Settings(k=3)
    plain = settings.plain_ids(target, 40)
    if interrupted == "target":
        run = settings.speculative(Interrupted(target, stop_at), draft)
    else:
        run = settings.speculative(target, Interrupted(draft, stop_at))
    begun: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        for token in run.generator.tokens(40):
            begun.append(token.id)
    assert 0 < len(begun) < 40
    assert run.target.cached_tokens == len(settings.prompt) + len(begun) - 1
    assert begun + run.ids(40 - len(begun)) == plain


# Failures


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("weight", ["lm_head.weight", "model.layers.1.mlp.down_proj.weight"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_damaged_model_ends_the_run_with_its_role_and_step(
    models: ModelStore, temperature: float, rule: AcceptRule, weight: str, role: str
) -> None:
    damaged, sound = models.llama(1, nan_weight=weight), models.llama(1)
    settings = Settings(sampling=SamplingConfig(temperature=temperature), rule=rule)
    target, draft = (damaged, sound) if role == "target" else (sound, damaged)
    run = settings.speculative(target, draft)
    begun: list[int] = []
    with pytest.raises(NonFiniteError, match=f"the {role} model") as raised:
        for token in run.generator.tokens(20):
            begun.append(token.id)
    assert raised.value.role == role
    # The first token is the target's alone; the draft's fault shows in the round after it.
    assert len(begun) == (role == "draft")
    assert raised.value.step == len(settings.prompt) + len(begun)
    assert begun == settings.plain_ids(sound, 20)[: len(begun)]


class Spoiled:
    """A model whose logits behind one token of the text are no numbers, and that notes which rows
    were asked of it in every forward of a few tokens."""

    def __init__(self, model: Any, at: int = -1) -> None:
        self._model = model
        self._at = at
        self.rows: list[range] = []

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        first = cache[0].offset
        self.rows.append(range(first, first + ids.shape[1]))
        logits = self._model(ids, cache=cache)
        is_spoiled = mx.arange(first, first + ids.shape[1]) == self._at
        return mx.where(is_spoiled[None, :, None], mx.nan, logits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.mark.parametrize(
    ("sampling", "rule"),
    [
        (SamplingConfig(), AcceptRule.SAMPLER_MATCH),
        *[(SamplingConfig(temperature=0.9, top_p=0.9), rule) for rule in AcceptRule],
    ],
    ids=["greedy", *[rule.value for rule in AcceptRule]],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_no_row_that_is_drawn_from_may_be_spoiled(
    models: ModelStore, sampling: SamplingConfig, rule: AcceptRule, role: str
) -> None:
    """Wherever in a block it is: the first and last proposal, the bonus row behind them."""
    model = models.llama(1)
    settings = Settings(sampling=sampling, rule=rule, k=3)

    def run(at: int) -> tuple[Speculation, Spoiled]:
        spoiled = Spoiled(model, at)
        pair = (spoiled, model) if role == "target" else (model, spoiled)
        return settings.speculative(*pair), spoiled

    sound, watched = run(-1)
    before = len(watched.rows)
    assert len(sound.ids(13)) == 13
    # A draft's forward of two tokens draws from the second row alone.
    drawn_from = [at for rows in watched.rows[before:] for at in rows[role == "draft" and -1 :]]
    assert len(set(drawn_from)) > 8
    for at in drawn_from:
        with pytest.raises(NonFiniteError, match=f"the {role} model"):
            run(at)[0].ids(13)


@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rule", RULES)
def test_a_round_looks_at_nothing_that_it_has_not_waited_for(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch, sampling: SamplingConfig, rule: AcceptRule
) -> None:
    """Reading what was not evaluated is another synchronisation."""
    evaluated: list[mx.array] = []
    looked_at: list[mx.array] = []

    def evaluate(*arrays: mx.array) -> None:
        evaluated.extend(arrays)
        mx.async_eval(*arrays)
        mx.synchronize()

    def usable(tops: mx.array) -> bool:
        looked_at.append(tops)
        return rows_are_usable(tops)

    for module in (loop, steps):
        monkeypatch.setattr(module, "rows_are_usable", usable)
    monkeypatch.setattr(mx, "eval", evaluate)
    settings = Settings(sampling=sampling, rule=rule)
    settings.speculative(models.llama(1), draft_of(models, "sometimes")).ids(20)
    settings.plain_ids(models.llama(1), 5)
    known = {id(array) for array in evaluated}
    assert len(looked_at) > 15
    assert all(id(tops) in known for tops in looked_at)


def test_a_damaged_model_ends_plain_decoding(models: ModelStore) -> None:
    damaged = models.llama(1, nan_weight="lm_head.weight")
    for settings in (Settings(), Settings(sampling=SAMPLED)):
        with pytest.raises(NonFiniteError, match="the target model"):
            settings.plain_ids(damaged, 5)


@pytest.mark.parametrize("filled_up", [range(0), range(2, 8)], ids=["", "filled up"])
def test_a_damaged_embedding_is_noticed_when_its_token_is_met(
    models: ModelStore, filled_up: range
) -> None:
    """Token 0 alone is damaged, and bias makes it the first token."""
    damaged = models.llama(1, nan_weight="model.embed_tokens.weight")
    settings = Settings(sampling=SamplingConfig(logit_bias=((0, 1000.0),)), filled_up=filled_up)
    tokens = settings.speculative(damaged, models.llama(1)).generator.tokens(9)
    assert next(tokens).id == 0
    with pytest.raises(NonFiniteError) as raised:
        next(tokens)
    assert (raised.value.role, raised.value.step) == ("target", len(settings.prompt) + 1)
    elsewhere = settings.but(sampling=SamplingConfig(logit_bias=((0, -1000.0),)))
    assert len(elsewhere.speculative(damaged, models.llama(1)).ids(20)) == 20


def test_bias_that_bans_every_token_ends_the_run(models: ModelStore) -> None:
    sampling = SamplingConfig(logit_bias=tuple((i, -float("inf")) for i in range(64)))
    with pytest.raises(NonFiniteError, match="--logit-bias"):
        Settings(sampling=sampling).plain_ids(models.llama(1), 5)


# Vocabularies, caches, shapes


@pytest.mark.parametrize("target_rows", [64, 80])
@pytest.mark.parametrize("draft_rows", [60, 64, 80])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_heads_of_other_widths_change_nothing(
    models: ModelStore, target_rows: int, draft_rows: int, temperature: float
) -> None:
    target = models.llama(1, head_rows=target_rows, head_scale=4.0)
    draft = models.llama(2, head_rows=draft_rows, head_scale=4.0)
    # Ids that the narrow draft cannot embed are in the text.
    settings = Settings(prompt=(61, 62, 63, 1), sampling=SamplingConfig(temperature=temperature))
    plain = settings.plain_ids(target, 40)
    assert max(plain) < 64
    assert settings.speculative_ids(target, draft, 40) == plain
    stochastic = settings.but(rule=AcceptRule.STOCHASTIC, k=3)
    assert max(stochastic.speculative_ids(target, draft, 40)) < 64


@pytest.mark.parametrize("step", [1, 7, 64, 512])
def test_any_prefill_step_gives_the_same_ids(models: ModelStore, step: int) -> None:
    target, draft = models.llama(1), draft_of(models, "sometimes")
    prompt = tuple((7 * i) % 64 for i in range(100))
    expected = Settings(prompt=prompt).plain_ids(target, 20)
    settings = Settings(prompt=prompt, cache=CacheConfig(prefill_step_tokens=step))
    assert settings.plain_ids(target, 20) == expected
    assert settings.speculative_ids(target, draft, 20) == expected


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("start", [0, 20])
@pytest.mark.parametrize("agreement", DRAFTS)
def test_quantised_caches_keep_parity_with_plain_decoding(
    models: ModelStore, bits: int, start: int, agreement: str
) -> None:
    target = models.llama(1)
    cache = CacheConfig(kv_bits=bits, kv_group_size=32, quantized_kv_start=start)
    settings = Settings(cache=cache)
    run = settings.speculative(target, draft_of(models, agreement))
    assert run.ids(40) == settings.plain_ids(target, 40)
    assert {type(layer).__name__ for layer in run.target.caches} == {"QuantizedKVCache"}


def test_no_block_crosses_the_token_where_quantisation_starts(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its later tokens would attend to full keys where plain decoding has quantised ones."""
    forward = CachedModel.forward
    spans: list[tuple[int, int]] = []

    def watched(model: CachedModel, ids: mx.array) -> mx.array:
        if model.role == "target":
            spans.append((model.cached_tokens, model.cached_tokens + ids.shape[0]))
        return forward(model, ids)

    monkeypatch.setattr(CachedModel, "forward", watched)
    cache = CacheConfig(kv_bits=4, kv_group_size=32, quantized_kv_start=18)
    Settings(k=4, cache=cache).speculative(models.llama(1), models.llama(1)).ids(40)
    assert any(end == 18 for _, end in spans)
    assert not any(start < 18 < end for start, end in spans)


@pytest.mark.parametrize("role", ["target", "draft", "both"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sliding_windows_keep_parity_with_plain_decoding(
    models: ModelStore, role: str, temperature: float
) -> None:
    """A window of 8 tokens has long wrapped when drafts are rejected."""
    shape = LlamaShape(layers=3)
    full = models.llama(1, shape=shape, head_scale=6.0)
    sliding = models.llama(1, shape=shape, head_scale=6.0, sliding_window=8)
    target = full if role == "draft" else sliding
    draft = full if role == "target" else sliding
    settings = Settings(sampling=SamplingConfig(temperature=temperature), k=3)
    run = settings.speculative(target, draft)
    assert run.ids(60) == settings.plain_ids(target, 60)
    assert run.statistics.rounds > 5


def test_a_ring_that_loses_tokens_is_refused_by_name(models: ModelStore) -> None:
    model, settings = models.llama(1), Settings(cache=CacheConfig(max_kv_size=32))
    with pytest.raises(PairError, match="RotatingKVCache"):
        settings.speculative(model, model)
    assert len(settings.plain_ids(model, 60)) == 60


def test_a_draft_length_of_zero_decodes_plainly(models: ModelStore) -> None:
    target, settings = models.llama(1), Settings(sampling=SAMPLED, k=0)
    run = settings.speculative(target, models.llama(2))
    assert run.ids(20) == settings.plain_ids(target, 20)
    assert run.statistics.rounds == run.statistics.proposed == 0


def test_state_is_per_run(models: ModelStore) -> None:
    target, draft = models.llama(1), draft_of(models, "sometimes")
    settings = Settings(k=5)
    runs = [settings.speculative(target, draft) for _ in range(2)]
    assert runs[0].ids(40) == runs[1].ids(40)
    assert runs[0].rounds == runs[1].rounds
    assert runs[0].statistics == runs[1].statistics
    assert runs[0].rounds[0].proposed == 5


# Statistics


@pytest.mark.parametrize("agreement", DRAFTS)
@pytest.mark.parametrize(
    ("temperature", "rule"),
    [(0.0, AcceptRule.SAMPLER_MATCH), *((0.9, rule) for rule in AcceptRule)],
)
def test_counts_add_up(
    models: ModelStore, agreement: str, temperature: float, rule: AcceptRule
) -> None:
    settings = Settings(sampling=SamplingConfig(temperature=temperature), rule=rule, k=4)
    settings = settings.but(diagnostics=True)
    run = settings.speculative(models.llama(1), draft_of(models, agreement))
    tokens = list(run.generator.tokens(40))
    stats = run.statistics
    assert stats.rounds == len(run.rounds)
    assert stats.proposed == sum(r.proposed for r in run.rounds)
    assert stats.accepted == sum(r.accepted for r in run.rounds)
    assert stats.positions_tested == sum(min(r.accepted + 1, r.proposed) for r in run.rounds)
    assert stats.accepted == sum(token.from_draft for token in tokens)
    # Every other token is the target's own: one a round, and those of steps without a draft.
    assert len(tokens) - stats.accepted >= stats.rounds
    assert sum(stats.accepted_by_offset) == stats.accepted
    assert sum(stats.tested_by_offset) == stats.positions_tested
    assert all(earlier >= later for earlier, later in pairwise(stats.accepted_by_offset))
    assert stats.closed_form_sum_min >= stats.closed_form_sum_prod


@pytest.mark.parametrize("k", [1, 3, 5])
def test_acceptance_accounting_is_exact_in_both_deterministic_regimes(
    models: ModelStore, k: int
) -> None:
    target = models.table(successor_table([(t + 1) % 6 for t in range(6)]))
    never = models.table(successor_table([(t + 4) % 6 for t in range(6)]))
    settings = Settings(prompt=(0,), width=6, k=k)
    rejecting = settings.speculative(target, never)
    rejecting.ids(20)
    stats = rejecting.statistics
    assert stats.positions_tested == stats.rounds and stats.accepted == 0
    assert stats.acceptance_rate == stats.mean_accepted_len == 0
    accepting = settings.speculative(target, target)
    accepting.ids(1 + 4 * (k + 1))
    stats = accepting.statistics
    assert (stats.rounds, stats.proposed, stats.accepted) == (4, 4 * k, 4 * k)
    assert stats.per_position_acceptance == 1 and stats.mean_accepted_len == k


def test_diagnostics_do_not_change_the_text(models: ModelStore) -> None:
    target, draft = models.llama(1, head_scale=4.0), models.llama(2, head_scale=4.0)
    for rule in RULES:
        settings = Settings(sampling=SAMPLED, rule=rule)
        with_them = settings.but(diagnostics=True).speculative_ids(target, draft, 40)
        assert settings.speculative_ids(target, draft, 40) == with_them
