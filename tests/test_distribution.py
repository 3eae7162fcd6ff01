"""The text of the speculative loop follows the target's law, and is accepted as theory says.

Table models make the law known: with equal rows the tokens are independent draws from one
categorical distribution, with different rows they form a Markov chain. Each statistic has a
false-alarm rate of 1e-4 (a rate of acceptance within 5 standard deviations: 6e-7); seeds are fixed,
so a right program passes always. Wrong versions of the rules are judged by the same statistics.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxgen.config import AcceptRule, SamplingConfig
from mlxgen.sampling import chain as chain_module
from mlxgen.sampling.chain import Draws
from mlxgen.sampling.target_draw import draw_by_position
from mlxgen.speculative import rules as rules_module
from tests.fixtures.model_directories import iid_table
from tests.fixtures.runs import ModelStore, Settings, Speculation
from tests.fixtures.statistics import (
    DISTRIBUTION_SAMPLES,
    FloatArray,
    chi_square,
    follows,
    softmax,
    threshold,
    transitions_follow,
)

TARGET_LOGITS = [2.0, 1.0, 0.5, 0.0, -0.5, -1.0]
DRAFT_LOGITS = [1.4, 1.3, 0.2, 0.6, -0.3, -0.8]
TEMPERATURE = 0.7
P = softmax(np.array(TARGET_LOGITS) / TEMPERATURE)
Q = softmax(np.array(DRAFT_LOGITS) / TEMPERATURE)
SAMPLED = Settings(
    prompt=(0,), width=6, seed=1234, sampling=SamplingConfig(temperature=TEMPERATURE)
)


def run_on(models: ModelStore, settings: Settings, **options: Any) -> Speculation:
    """A run of the pair whose tokens are independent."""
    target = models.table(iid_table(TARGET_LOGITS))
    return settings.speculative(target, models.table(iid_table(DRAFT_LOGITS)), **options)


def check_acceptance(run: Speculation, expected: float) -> None:
    """Within 5 standard deviations of the closed form, over the positions tested."""
    stats = run.statistics
    deviation = math.sqrt(stats.positions_tested * expected * (1 - expected))
    assert abs(stats.accepted - stats.positions_tested * expected) < 5 * deviation


def check_stream(models: ModelStore, rule: AcceptRule, k: int, count: int) -> Speculation:
    """Tokens, pairs and acceptance of a long run."""
    run = run_on(models, SAMPLED.but(rule=rule, k=k))
    ids = run.ids(count)
    assert len(ids) == count
    assert run.statistics.rule.id == rule.value
    assert follows(ids, P), chi_square(ids, P)
    assert transitions_follow(ids, np.tile(P, (6, 1)))
    return run


@pytest.mark.slow
def test_speculative_stream_matches_the_target_distribution(models: ModelStore) -> None:
    run = check_stream(models, AcceptRule.STOCHASTIC, 4, DISTRIBUTION_SAMPLES)
    check_acceptance(run, np.minimum(P, Q).sum())
    # The mean length of a chain of four with that rate at each link.
    rate = float(np.minimum(P, Q).sum())
    expected = sum(rate**i for i in range(1, 5))
    assert run.statistics.mean_accepted_len == pytest.approx(expected, rel=0.12)


@pytest.mark.slow
def test_speculative_stream_matches_the_target_distribution_at_block_size_one(
    models: ModelStore,
) -> None:
    run = check_stream(models, AcceptRule.STOCHASTIC, 1, DISTRIBUTION_SAMPLES // 2)
    check_acceptance(run, np.minimum(P, Q).sum())


@pytest.mark.slow
def test_the_default_sampler_match_rule_also_matches_the_target_distribution(
    models: ModelStore,
) -> None:
    run = check_stream(models, AcceptRule.SAMPLER_MATCH, 2, DISTRIBUTION_SAMPLES // 3)
    check_acceptance(run, (P * Q).sum())


@pytest.mark.slow
@pytest.mark.parametrize("rule", [AcceptRule.BLOCK, AcceptRule.GUMBEL_MATCH])
def test_further_rules_also_match_the_target_distribution(
    models: ModelStore, rule: AcceptRule
) -> None:
    check_stream(models, rule, 3, DISTRIBUTION_SAMPLES // 6)


@pytest.mark.parametrize("rule", AcceptRule)
def test_diagnosed_closed_forms_are_those_of_the_two_laws(
    models: ModelStore, rule: AcceptRule
) -> None:
    run = run_on(models, SAMPLED.but(rule=rule, k=3, diagnostics=True))
    run.ids(60)
    stats = run.statistics
    assert stats.closed_form_sum_min == pytest.approx(np.minimum(P, Q).sum(), abs=1e-4)
    assert stats.closed_form_sum_prod == pytest.approx((P * Q).sum(), abs=1e-4)


def random_table(seed: int) -> FloatArray:
    """Different rows, each with all six tokens likely enough to be counted."""
    return np.random.default_rng(seed).normal(scale=0.6, size=(6, 6))


@pytest.mark.slow
def test_speculative_text_of_a_markov_chain_has_its_transitions(models: ModelStore) -> None:
    """Every row of a block needs its own p and q: a mix-up of rows is seen here, not above."""
    table = random_table(1)
    laws = softmax(table / TEMPERATURE)
    settings = SAMPLED.but(rule=AcceptRule.STOCHASTIC, k=3)
    run = settings.speculative(models.table(table), models.table(random_table(2)))
    ids = run.ids(DISTRIBUTION_SAMPLES // 3)
    assert transitions_follow(ids, laws)
    assert not transitions_follow(ids, np.roll(laws, 1, axis=0)), "the statistic tells rows apart"


@pytest.mark.slow
@pytest.mark.parametrize("rule", [AcceptRule.STOCHASTIC, AcceptRule.BLOCK])
def test_a_draft_with_a_narrower_nucleus_leaves_the_law_alone(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch, rule: AcceptRule
) -> None:
    """The target keeps four of six tokens, the draft proposes two of them."""
    monkeypatch.setattr("mlxgen.sampling.filters.computes_one_by_one", lambda: True)
    monkeypatch.setattr("mlxgen.drafters.draft_model._NUCLEUS_TOKENS", 2)
    sampling = SamplingConfig(temperature=TEMPERATURE, top_p=0.95)
    run = run_on(models, SAMPLED.but(sampling=sampling, rule=rule, k=3))
    kept = np.where(np.arange(6) < 4, P, 0)
    assert follows(run.ids(4000), kept / kept.sum())
    proposable = np.where(np.arange(6) < 2, Q, 0)
    if rule is AcceptRule.STOCHASTIC:
        q = proposable / proposable.sum()
        check_acceptance(run, float(np.minimum(kept / kept.sum(), q).sum()))


@pytest.mark.slow
def test_filtered_target_support_is_never_violated(models: ModelStore) -> None:
    """A top_k = 2 target against an unfiltered draft: not one token outside, in 1,500."""
    filtered = SamplingConfig(temperature=TEMPERATURE, top_k=2)
    law = P * (np.arange(6) < 2)
    for draft_sampling, count in ((SAMPLED.sampling, 1500), (filtered, 300)):
        settings = SAMPLED.but(sampling=filtered, rule=AcceptRule.STOCHASTIC)
        ids = run_on(models, settings, draft_sampling=draft_sampling).ids(count)
        assert set(ids) == {0, 1}
        assert follows(ids, law / law.sum())


def test_a_draft_that_shares_no_token_with_the_target_is_never_accepted(models: ModelStore) -> None:
    sampling = SamplingConfig(temperature=TEMPERATURE, top_k=3)
    settings = SAMPLED.but(sampling=sampling, rule=AcceptRule.STOCHASTIC)
    target, draft = iid_table(TARGET_LOGITS), iid_table(TARGET_LOGITS[::-1])
    run = settings.speculative(models.table(target), models.table(draft))
    assert set(run.ids(100)) == {0, 1, 2}
    assert run.statistics.accepted == 0


@pytest.mark.slow
def test_a_draft_that_proposes_greedily_has_a_one_hot_distribution(models: ModelStore) -> None:
    """Draft at temperature 0, target not: q is one-hot, and acceptance is p(argmax q)."""
    settings = SAMPLED.but(rule=AcceptRule.STOCHASTIC, diagnostics=True)
    run = run_on(models, settings, draft_sampling=SamplingConfig())
    assert follows(run.ids(1500), P)
    check_acceptance(run, P[0])
    assert run.statistics.closed_form_sum_min == pytest.approx(P[0], abs=1e-4)


@pytest.mark.slow
def test_padding_of_either_head_leaves_the_law_alone(models: ModelStore) -> None:
    """The padding's logits are the largest, so a run that did not cut them off would emit them."""
    for target_rows, draft_rows in ((8, 6), (6, 11)):
        target = models.table(iid_table(TARGET_LOGITS), head_rows=target_rows)
        draft = models.table(iid_table(DRAFT_LOGITS), head_rows=draft_rows)
        run = SAMPLED.but(rule=AcceptRule.STOCHASTIC, diagnostics=True).speculative(target, draft)
        assert follows(run.ids(1000), P)
        check_acceptance(run, np.minimum(P, Q).sum())


# The same statistics on wrong rules


FAR_P = softmax([4.0, 1.0, 0.5, 0.0, 0.0, 0.0])
FAR = SAMPLED.but(sampling=SamplingConfig(temperature=1.0), rule=AcceptRule.STOCHASTIC, k=2)


def far_apart(models: ModelStore, settings: Settings = FAR) -> list[int]:
    """1,000 tokens of a pair that agrees rarely, where a wrong rule misses by much."""
    target = models.table(iid_table([4.0, 1.0, 0.5, 0.0, 0.0, 0.0]))
    draft = models.table(iid_table([0.0, 3.0, 0.5, 1.0, 0.0, 0.0]))
    return settings.speculative(target, draft).ids(1000)


@pytest.mark.slow
def test_right_rules_pass_where_wrong_ones_are_rejected(models: ModelStore) -> None:
    assert follows(far_apart(models), FAR_P)
    assert follows(far_apart(models, FAR.but(rule=AcceptRule.SAMPLER_MATCH)), FAR_P)


def resample_from_the_target(p: mx.array, q: mx.array, *_: Any) -> tuple[mx.array, mx.array]:
    """Wrong: p where the residual belongs."""
    return p, mx.array(False)


def accept_without_a_test(p: mx.array, q: mx.array, uniforms: mx.array) -> mx.array:
    """Wrong: every proposal is accepted."""
    return p >= 0


def probabilities_at_another_temperature(weights: mx.array) -> mx.array:
    """Wrong as q: not the distribution that the proposals were drawn from."""
    return chain_module.probabilities(mx.sqrt(weights))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        ("mlxgen.speculative.rules.residual_weights", resample_from_the_target),
        ("mlxgen.speculative.rules.stochastic_hits", accept_without_a_test),
        (
            "mlxgen.drafters.draft_model.probabilities",
            probabilities_at_another_temperature,
        ),
    ],
)
def test_chi_square_rejects_known_wrong_acceptance_rules(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch, place: str, wrong: Any
) -> None:
    monkeypatch.setattr(place, wrong)
    assert chi_square(far_apart(models), FAR_P) > 2 * threshold(5)


@pytest.mark.slow
def test_chi_square_rejects_argmax_against_argmax(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Any = draw_by_position

    def argmax(*arguments: Any) -> Draws:
        drawn: Draws = right(*arguments)
        return drawn._replace(ids=mx.argmax(drawn.rows, axis=-1).astype(mx.int32))

    monkeypatch.setattr("mlxgen.speculative.verification.draw_by_position", argmax)
    settings = FAR.but(rule=AcceptRule.SAMPLER_MATCH)
    assert chi_square(far_apart(models, settings), FAR_P) > 4 * threshold(5)


def test_support_check_rejects_a_rule_without_its_guard(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """u <= p / q with u = 0 and p = 0: the guard is what keeps the token out."""
    assert (
        rules_module.stochastic_hits(mx.zeros((1,)), mx.ones((1,)), mx.zeros((1,))).item() is False
    )
    monkeypatch.setattr(
        "mlxgen.speculative.rules.stochastic_hits",
        lambda p, q, uniforms: mx.floor(uniforms * 8) * q <= p,
    )
    filtered = SamplingConfig(temperature=TEMPERATURE, top_k=2)
    settings = SAMPLED.but(sampling=filtered, rule=AcceptRule.STOCHASTIC)
    assert set(run_on(models, settings, draft_sampling=SAMPLED.sampling).ids(100)) > {0, 1}


@pytest.mark.slow
def test_transitions_reject_rows_shifted_by_one(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: position i is judged with the target's row of position i + 1."""
    verify = rules_module.verify_draft_tokens

    def shifted(p: mx.array, *others: Any) -> Any:
        wrong: Any = verify
        return wrong(mx.concatenate([p[1:], p[-1:]]), *others)

    table = random_table(1)
    laws = softmax(table / TEMPERATURE)
    settings = SAMPLED.but(rule=AcceptRule.STOCHASTIC, k=3)
    draft = models.table(random_table(2))
    monkeypatch.setattr("mlxgen.speculative.verification.verify_draft_tokens", shifted)
    ids = settings.speculative(models.table(table), draft).ids(1500)
    assert not transitions_follow(ids, laws)
