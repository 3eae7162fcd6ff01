"""Rules whose text is that of plain decoding, seed by seed, and what the draft's temperature does.

Everything is in float32, where parity is exact.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

import mlxgen
from mlxgen.config import AcceptRule, GenerationConfig, SamplingConfig, SpeculationConfig
from mlxgen.drafters.draft_model import DraftModel
from mlxgen.errors import OptionError
from mlxgen.generation import Generation
from mlxgen.sampling.randomness import Randomness
from tests.fixtures.command import mlxgen_here
from tests.fixtures.many_runs import TableModel
from tests.fixtures.model_directories import Vocabulary, iid_table
from tests.fixtures.runs import ModelStore, Settings
from tests.fixtures.statistics import FloatArray, softmax

MATCH_RULES = (AcceptRule.SAMPLER_MATCH, AcceptRule.GUMBEL_MATCH)
SMALL = Vocabulary.of_size(12)
DRAFTS: dict[str, dict[str, Any]] = {
    "equal": {"seed": 1},
    "near": {"seed": 1, "disturbance": 0.1},
    "far": {"seed": 2},
}
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.3,
    "dry_multiplier": 0.8,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.9},
    "penalties": {"temperature": 0.9, **PENALTIES},
    "xtc": {"temperature": 1.1, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "bias": {"temperature": 1.0, "logit_bias": ((2, 2.0), (5, -100.0))},
    "all": {
        "temperature": 1.1,
        "top_p": 0.9,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.1,
        "logit_bias": ((2, 1.0), (5, -100.0)),
        **PENALTIES,
    },
}


def llama(models: ModelStore, draft: str = "equal") -> Any:
    """A llama of 12 tokens and spread-out distributions."""
    return models.llama(vocabulary=SMALL, head_scale=2.0, **DRAFTS[draft])


def settings_for(options: str, **changes: Any) -> Settings:
    """Settings of a set of options."""
    return Settings(width=12, sampling=SamplingConfig(**OPTIONS[options]), **changes)


# Parity


@pytest.mark.slow
@pytest.mark.parametrize("rule", MATCH_RULES)
@pytest.mark.parametrize("options", OPTIONS)
def test_ids_are_those_of_plain_decoding_whatever_the_draft_and_k(
    models: ModelStore, rule: AcceptRule, options: str
) -> None:
    target = llama(models)
    settings = settings_for(options, rule=rule)
    plain = settings.plain_ids(target, 28)
    for draft in DRAFTS:
        for k in (1, 3, 7):
            run = settings.but(k=k).speculative(target, llama(models, draft))
            assert run.ids(28) == plain, (draft, k)
            assert run.statistics.rule.id == rule.value


@pytest.mark.parametrize("rule", MATCH_RULES)
@pytest.mark.parametrize("draft_temperature", [0.0, 0.4, 2.5])
def test_ids_do_not_depend_on_the_temperature_of_the_draft(
    models: ModelStore, rule: AcceptRule, draft_temperature: float
) -> None:
    target = llama(models)
    for options in ("all", "temperature"):
        settings = settings_for(options, rule=rule, k=3)
        run = settings.speculative(
            target,
            llama(models, "near"),
            draft_sampling=settings.sampling.for_draft(draft_temperature),
        )
        assert run.ids(40) == settings.plain_ids(target, 40)


def test_parity_is_not_that_of_rules_which_draw_by_round(models: ModelStore) -> None:
    """The comparison can fail: under `stochastic` and `block` the same seed gives another text."""
    target, draft = llama(models), llama(models, "far")
    settings = settings_for("temperature", k=3)
    plain = settings.plain_ids(target, 40)
    for rule in (AcceptRule.STOCHASTIC, AcceptRule.BLOCK):
        assert settings.but(rule=rule).speculative_ids(target, draft, 40) != plain


# Equal models


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("k", [1, 4])
def test_coupled_draws_of_equal_models_are_always_accepted(
    models: ModelStore, options: str, k: int
) -> None:
    """Noise and XTC coins are shared, so both sides draw the same token from the same row."""
    settings = settings_for(options, rule=AcceptRule.GUMBEL_MATCH, k=k, diagnostics=True)
    run = settings.speculative(llama(models), llama(models))
    run.ids(60)
    stats = run.statistics
    assert stats.accepted == stats.proposed == stats.positions_tested >= 29
    assert stats.closed_form_gumbel == pytest.approx(1, abs=1e-4)
    assert stats.check.is_consistent


def test_independent_draws_of_equal_models_often_differ(models: ModelStore) -> None:
    """What coupling is for: sum p^2 where the coupled rule has 1."""
    settings = settings_for("temperature", rule=AcceptRule.SAMPLER_MATCH, k=4, diagnostics=True)
    run = settings.speculative(llama(models), llama(models))
    run.ids(60)
    assert run.statistics.per_position_acceptance < 0.95
    assert run.statistics.closed_form_gumbel == pytest.approx(1, abs=1e-4)
    assert run.statistics.closed_form_sum_prod < 0.95


@pytest.mark.parametrize("rule", [AcceptRule.STOCHASTIC, AcceptRule.BLOCK])
@pytest.mark.parametrize("options", [name for name in OPTIONS if name not in ("xtc", "all")])
def test_rules_by_distribution_accept_all_of_an_equal_model_too(
    models: ModelStore, rule: AcceptRule, options: str
) -> None:
    settings = settings_for(options, rule=rule, k=4, diagnostics=True)
    run = settings.speculative(llama(models), llama(models))
    run.ids(60)
    assert run.statistics.accepted == run.statistics.proposed > 40
    assert run.statistics.check.is_consistent


# The draft's own temperature


TARGET = [2.0, 1.0, 0.5, 0.0, -0.5, -1.0]
DRAFT = [0.4, 1.3, 0.2, 0.6, -0.3, -0.8]
TEMPERATURE = 0.7
P = softmax(np.array(TARGET) / TEMPERATURE)


def generation(
    models: ModelStore, rule: AcceptRule, draft_temperature: float | None, count: int
) -> Generation:
    """A run of independent tokens through the public function."""
    loaded = [mlxgen.load(str(models.table_directory(iid_table(row)))) for row in (TARGET, DRAFT)]
    config = GenerationConfig(
        sampling=SamplingConfig(temperature=TEMPERATURE),
        speculation=SpeculationConfig(
            num_draft_tokens=3,
            accept_rule=rule,
            diagnostics=True,
            draft_temperature=draft_temperature,
        ),
        max_tokens=count,
        seed=3,
    )
    return mlxgen.generate(loaded[0], [0], config, draft=loaded[1])


def draft_law(temperature: float) -> FloatArray:
    """The drafter's distribution at its own temperature; one-hot at 0."""
    if temperature == 0:
        return np.asarray(np.eye(6)[int(np.argmax(DRAFT))])
    return softmax(np.array(DRAFT) / temperature)


@pytest.mark.slow
@pytest.mark.parametrize("rule", AcceptRule)
@pytest.mark.parametrize("draft_temperature", [0.0, 0.3, TEMPERATURE, 2.0])
def test_q_is_the_distribution_of_the_draft_at_its_own_temperature(
    models: ModelStore, rule: AcceptRule, draft_temperature: float
) -> None:
    """The closed forms are those of that q, and the run is accepted as they say (|z| < 4.9)."""
    stats = generation(models, rule, draft_temperature, 150).statistics
    assert stats is not None
    q = draft_law(draft_temperature)
    assert stats.closed_form_sum_min == pytest.approx(np.minimum(P, q).sum(), abs=1e-5)
    assert stats.closed_form_sum_prod == pytest.approx((P * q).sum(), abs=1e-5)
    assert stats.check.is_consistent


@pytest.mark.slow
def test_a_greedy_draft_matches_as_often_as_the_target_draws_its_choice(
    models: ModelStore,
) -> None:
    """P(accept) = p(argmax q) for `sampler-match`, within 5 standard deviations (6e-7)."""
    stats = generation(models, AcceptRule.SAMPLER_MATCH, 0.0, 600).statistics
    assert stats is not None
    expected = float(P[int(np.argmax(DRAFT))])
    assert stats.closed_form_sum_prod == pytest.approx(expected, abs=1e-5)
    deviation = np.sqrt(expected * (1 - expected) / stats.positions_tested)
    assert abs(stats.per_position_acceptance - expected) < 5 * deviation


def test_without_a_temperature_of_its_own_the_draft_has_the_targets(models: ModelStore) -> None:
    own = generation(models, AcceptRule.STOCHASTIC, TEMPERATURE, 40)
    default = generation(models, AcceptRule.STOCHASTIC, None, 40)
    assert own.token_ids == default.token_ids
    other = generation(models, AcceptRule.STOCHASTIC, 2.0, 40)
    assert other.token_ids != default.token_ids


def test_proposals_of_a_greedy_draft_are_its_argmax_with_a_one_hot_q() -> None:
    settings = Settings(prompt=(0,), width=6, sampling=SamplingConfig())
    drafter = DraftModel(
        settings.cached(TableModel(iid_table(DRAFT)), "draft"), settings.chain(), Randomness(0)
    )
    history = settings.chain().new_history([0])
    for coupled in (False, True):
        drafter.rewind(0)
        proposal = drafter.propose(history, 3, want_distribution=True, coupled=coupled)
        assert np.array(proposal.ids).tolist() == [1, 1, 1]
        assert proposal.q is not None
        assert np.array(proposal.q).tolist() == [np.eye(6)[1].tolist()] * 3


class WideModel:
    """A model without weights whose rows of logits are large."""

    width = 400_000
    layers = (None,)
    args = SimpleNamespace(vocab_size=width)

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        cache[0].offset += ids.shape[1]
        return mx.sin(ids[..., None] + mx.arange(self.width))


def rows_held_behind_a_proposal() -> float:
    """How many rows of logits are still there when a greedy draft has proposed four tokens."""
    settings = Settings(prompt=(0,), width=WideModel.width, sampling=SamplingConfig())
    drafter = DraftModel(settings.cached(WideModel(), "draft"), settings.chain(), Randomness(0))
    mx.synchronize()
    before_bytes = mx.get_active_memory()
    proposal = drafter.propose(
        settings.chain().new_history([0]), 4, want_distribution=False, coupled=False
    )
    mx.synchronize()
    held_bytes = mx.get_active_memory() - before_bytes
    assert len(proposal.tops) == 4
    return held_bytes / (4 * WideModel.width)


def test_a_greedy_draft_keeps_no_logits_behind_its_proposal() -> None:
    assert rows_held_behind_a_proposal() < 0.5


def test_a_draft_whose_tops_wait_for_the_judgement_keeps_all_its_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wrong version that the test above rejects."""
    evaluate: Any = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda ids, *_: evaluate(ids))
    assert rows_held_behind_a_proposal() > 3.5


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 1}])
def test_a_sampling_draft_under_a_greedy_target_is_refused(sampling: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="--draft-temp above 0"):
        GenerationConfig(
            sampling=SamplingConfig(**sampling),
            speculation=SpeculationConfig(draft_temperature=0.5),
        )
    greedy = SpeculationConfig(draft_temperature=0.0)
    GenerationConfig(sampling=SamplingConfig(**sampling), speculation=greedy)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_temperature_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(OptionError, match="--draft-temp"):
        SpeculationConfig(draft_temperature=value)


def pair_of_directories(models: ModelStore) -> tuple[Path, Path]:
    """Target and draft of independent tokens."""
    return models.table_directory(iid_table(TARGET)), models.table_directory(iid_table(DRAFT))


def test_the_command_takes_the_drafts_temperature(models: ModelStore) -> None:
    target, draft = pair_of_directories(models)
    options = [
        *("generate", "-m", target, "--draft-model", draft, "-p", "a", "-n", 20),
        *("--temp", TEMPERATURE, "--seed", 1, "--accept-diag", "--json"),
    ]
    section = mlxgen_here(*options, "--draft-temp", 0).document["speculative"]
    assert section["closed_form_sum_prod"] == pytest.approx(P[1], abs=1e-5)
    section = mlxgen_here(*options).document["speculative"]
    assert section["closed_form_sum_prod"] == pytest.approx(
        float((P * draft_law(TEMPERATURE)).sum()), abs=1e-5
    )


def test_the_command_refuses_a_drafts_temperature_that_does_nothing(models: ModelStore) -> None:
    target, draft = pair_of_directories(models)
    alone = mlxgen_here("generate", "-m", target, "-p", "a", "--temp", 1, "--draft-temp", 0.5)
    assert alone.code == 2 and alone.error == "--draft-temp needs --draft-model"
    pair = ("generate", "-m", target, "--draft-model", draft, "-p", "a")
    greedy = mlxgen_here(*pair, "--temp", 0, "--draft-temp", 0.5)
    assert greedy.code == 2 and greedy.error.startswith("--draft-temp above 0")
    assert mlxgen_here(*pair, "-n", 2, "--temp", 0, "--draft-temp", 0).code == 0
