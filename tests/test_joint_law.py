"""The first tokens of a text have the target's joint law under every rule, and wrong rules do not.

A rule that gets each position right by itself can still tie positions together, so the statistic is
Pearson's over whole texts of three or four tokens, of 20,000 runs with a seed each (0, 1, ...),
against the exact law of the target's Markov chain. False alarm 1e-4 for each statistic (`ALPHA`);
seeds are fixed, so a right program passes always. `tests.fixtures.many_runs` runs the rules, keys
and rows of mlxgen for all seeds in step; that its texts are those of the real loop is tested first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scipy.stats import chi2

from mlxgen.config import AcceptRule, SamplingConfig
from mlxgen.drafters.draft_model import DraftModel
from mlxgen.drafters.proposal import LengthPolicy, Proposal
from mlxgen.sampling.history import History
from mlxgen.sampling.randomness import KeyArray, Randomness, Stream
from mlxgen.speculative.loop import SpeculativeGenerator
from tests.fixtures.many_runs import (
    IntArray,
    Judge,
    ManyRuns,
    OneUniformKeyRing,
    PositionKeyRing,
    TableModel,
    Tables,
    block_judge,
    stochastic_judge,
)
from tests.fixtures.runs import Settings
from tests.fixtures.statistics import ALPHA, FloatArray
from tests.reference_rules import chain_law, expected_length, round_law

RUNS = 20_000
SMALLEST_EXPECTED_COUNT = 5
TWO_STATES = Tables(target=np.log([[0.6, 0.4], [0.3, 0.7]]), draft=np.log([[0.2, 0.8], [0.8, 0.2]]))


# The statistic


@dataclass(frozen=True)
class Fit:
    """Pearson's statistic of texts against a law, and its degrees of freedom."""

    statistic: float
    degrees: int

    @property
    def passes(self) -> bool:
        """At `ALPHA`."""
        return self.statistic < float(chi2.ppf(1 - ALPHA, self.degrees))


def fit(texts: IntArray, law: FloatArray) -> Fit:
    """Texts `[n, count]` against a law of shape `(V,) * count`.

    Texts that are expected fewer than five times share one cell. A text of probability 0 makes the
    statistic infinite.
    """
    counts = np.bincount(np.ravel_multi_index(texts.T, law.shape), minlength=law.size)
    expected = len(texts) * law.ravel()
    if counts[expected == 0].any():
        return Fit(math.inf, law.size - 1)
    is_rare = expected < SMALLEST_EXPECTED_COUNT
    pooled = expected[is_rare].sum()
    if 0 < pooled < SMALLEST_EXPECTED_COUNT:
        is_rare[np.flatnonzero(~is_rare)[expected[~is_rare].argmin()]] = True
    cells = [(counts[~is_rare], expected[~is_rare])]
    if expected[is_rare].sum() > 0:
        cells.append((counts[is_rare].sum(keepdims=True), expected[is_rare].sum(keepdims=True)))
    seen, wanted = (np.concatenate(part) for part in zip(*cells, strict=True))
    return Fit(float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1)


def fit_of(runs: ManyRuns, count: int) -> Fit:
    """Texts of the runs against the target's chain."""
    return fit(runs.texts(count), chain_law(runs.tables.p, runs.start, count))


def test_the_statistic_passes_draws_from_the_law_and_rejects_a_slight_change() -> None:
    rng = np.random.default_rng(1)
    law = chain_law(rng.dirichlet(np.ones(5), size=5), 0, 3)
    texts = np.stack(np.unravel_index(rng.choice(law.size, RUNS, p=law.ravel()), law.shape), axis=1)
    assert fit(texts.astype(np.int32), law).passes
    other = law * (1 + 0.2 * rng.standard_normal(law.shape).clip(-2, 2))
    assert not fit(texts.astype(np.int32), other / other.sum()).passes


def test_the_statistic_is_infinite_for_an_impossible_text() -> None:
    law = np.array([[0.5, 0.5], [0.0, 0.0]])
    assert fit(np.array([[0, 0], [1, 0]], dtype=np.int32), law).statistic == math.inf


# Pairs of tables, filters, and a selection of combinations


DRAFTS = ("near", "far", "partly disjoint")
FILTERS = {
    "none": SamplingConfig(temperature=1.0),
    "temperature": SamplingConfig(temperature=0.7),
    "top-k": SamplingConfig(temperature=1.0, top_k=3),
    "top-p": SamplingConfig(temperature=0.9, top_p=0.8),
    "min-p": SamplingConfig(temperature=1.3, min_p=0.15),
}


def tables(size: int, draft: str, filters: str, seed: int = 5) -> Tables:
    """A target chain and a draft that is near it, far from it, or lacks tokens that it has."""
    rng = np.random.default_rng(seed + size)
    target = rng.normal(scale=1.0, size=(size, size))
    if draft == "near":
        other = target + rng.normal(scale=0.4, size=target.shape)
    else:
        other = rng.normal(scale=1.0, size=target.shape)
    if draft == "partly disjoint":
        # Each side excludes a token that the other one has, and they share at least two.
        for row in range(size):
            first, second = rng.choice(size, 2, replace=False)
            target[row, first] = other[row, second] = -np.inf
    return Tables(target=target, draft=other, sampling=FILTERS[filters])


@dataclass(frozen=True)
class Combination:
    """One cell of rules x block lengths x drafts, with a vocabulary and filters assigned to it."""

    rule: AcceptRule
    k: int
    draft: str
    size: int
    filters: str

    def __str__(self) -> str:
        return f"{self.rule.value}-{self.k}-{self.draft}-{self.size}-{self.filters}"

    @property
    def count(self) -> int:
        """Tokens of a text: as many as leave most texts with five expected runs."""
        return 4 if self.size == 4 else 3

    def many(self, runs: int = RUNS, **options: Any) -> ManyRuns:
        """Runs of this combination."""
        pair = tables(self.size, self.draft, self.filters)
        return ManyRuns(tables=pair, rule=self.rule, k=self.k, runs=runs, **options)

    def loop_texts(self, runs: int, count: int) -> list[list[int]]:
        """The same by the real loop, one run a seed."""
        pair = tables(self.size, self.draft, self.filters)
        target, draft = TableModel(pair.target), TableModel(pair.draft)
        settings = Settings(
            prompt=(0,), width=self.size, sampling=pair.sampling, k=self.k, rule=self.rule
        )
        texts = []
        for seed in range(runs):
            run = settings.but(seed=seed).speculative(target, draft)
            # With k + 1 tokens to spare no round is cut short.
            texts.append(run.ids(count + self.k + 1)[:count])
        return texts


COMBINATIONS = [
    Combination(
        rule=rule,
        k=k,
        draft=draft,
        size=4 + (k + d) % 3,
        filters=list(FILTERS)[(3 * k + d + r) % len(FILTERS)],
    )
    for r, rule in enumerate(AcceptRule)
    for k in (1, 2, 3, 4)
    for d, draft in enumerate(DRAFTS)
]
"""Every rule with every k and every draft; vocabularies and filters rotate."""


def test_the_selection_covers_every_pair_of_choices() -> None:
    for choice in ("k", "draft", "size", "filters"):
        seen = {(c.rule, getattr(c, choice)) for c in COMBINATIONS}
        assert len(seen) == 4 * len({value for _, value in seen})
    assert {c.size for c in COMBINATIONS} == {4, 5, 6}
    assert {c.filters for c in COMBINATIONS} == set(FILTERS)


def test_partly_disjoint_tables_exclude_tokens_on_either_side() -> None:
    pair = tables(5, "partly disjoint", "none")
    assert ((pair.p > 0) & (pair.q == 0)).any(axis=1).all()
    assert ((pair.p == 0) & (pair.q > 0)).any(axis=1).all()


# The loop


@pytest.mark.slow
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_runs_in_step_emit_what_the_loop_emits(combination: Combination) -> None:
    """Seed by seed, four tokens: whatever is found below is found of the real loop."""
    seeds = 8
    texts = combination.many(runs=seeds).texts(4).tolist()
    assert combination.loop_texts(seeds, 4) == texts


@pytest.mark.slow
@pytest.mark.parametrize("rule", AcceptRule)
def test_longer_runs_in_step_emit_what_the_loop_emits(rule: AcceptRule) -> None:
    """100 seeds of ten tokens, so that every kind of round is among them."""
    combination = Combination(rule, 3, "near", 6, "top-p")
    texts = combination.many(runs=100).texts(10).tolist()
    assert combination.loop_texts(100, 10) == texts


@pytest.mark.slow
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_texts_have_the_joint_law_of_the_target(combination: Combination) -> None:
    """False alarm 1e-4 each, 20,000 seeds."""
    found = fit_of(combination.many(), combination.count)
    assert found.passes, found


def test_texts_of_one_pair_have_the_joint_law_of_the_target() -> None:
    """The quick one of the above, one rule after the other. False alarm 1e-4 each, 3,000 seeds."""
    for rule in AcceptRule:
        found = fit_of(Combination(rule, 2, "far", 4, "temperature").many(3000), 3)
        assert found.passes, (rule, found)


# Wrong versions


def resampling_from_the_target(
    p: mx.array, q: mx.array, ids: mx.array, uniforms: mx.array, noise: mx.array
) -> tuple[mx.array, mx.array]:
    """Wrong: p where the residual belongs."""
    accepted, _ = stochastic_judge(p, q, ids, uniforms, noise)
    return accepted, mx.argmax(p[accepted] / noise[accepted]).astype(mx.int32)


def block_resampling_from_the_target(
    p: mx.array, q: mx.array, ids: mx.array, uniforms: mx.array, noise: mx.array
) -> tuple[mx.array, mx.array]:
    """Wrong: p where the residual of the block belongs."""
    accepted, _ = block_judge(p, q, ids, uniforms, noise)
    return accepted, mx.argmax(p[accepted] / noise[accepted]).astype(mx.int32)


def argmax_against_argmax(
    p: mx.array, q: mx.array, ids: mx.array, uniforms: mx.array, noise: mx.array
) -> tuple[mx.array, mx.array]:
    """Wrong: a proposal is kept iff it is the target's most likely token, else p is drawn from."""
    hits = ids == mx.argmax(p[:-1], axis=-1)
    accepted = mx.cumprod(hits.astype(mx.int32)).sum().astype(mx.int32)
    return accepted, mx.argmax(p[accepted] / noise[accepted]).astype(mx.int32)


WRONG = Combination(AcceptRule.STOCHASTIC, 3, "far", 4, "temperature")
WRONG_BLOCK = Combination(AcceptRule.BLOCK, 3, "far", 4, "temperature")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("combination", "judge"),
    [
        (WRONG, resampling_from_the_target),
        (WRONG_BLOCK, block_resampling_from_the_target),
        (WRONG, argmax_against_argmax),
    ],
)
def test_wrong_judgements_fail_the_same_statistic(combination: Combination, judge: Judge) -> None:
    assert fit_of(combination.many(), combination.count).passes
    assert not fit_of(combination.many(judge=judge), combination.count).passes


@pytest.mark.slow
@pytest.mark.parametrize("combination", [WRONG, WRONG_BLOCK], ids=str)
def test_q_of_another_temperature_fails_the_same_statistic(combination: Combination) -> None:
    """Proposals are drawn at 0.7 and reported as drawn at 1.0, and the other way round."""
    for drawn, reported in ((0.7, 1.0), (1.0, 0.7)):
        pair = tables(combination.size, combination.draft, combination.filters)
        wrong = Tables(
            target=pair.target,
            draft=pair.draft,
            sampling=pair.sampling,
            draft_sampling=SamplingConfig(temperature=drawn),
            reported=SamplingConfig(temperature=reported),
        )
        runs = ManyRuns(tables=wrong, rule=combination.rule, k=combination.k, runs=RUNS)
        assert not fit_of(runs, combination.count).passes


@pytest.mark.slow
@pytest.mark.parametrize("rule", [AcceptRule.STOCHASTIC, AcceptRule.BLOCK])
def test_one_shared_uniform_fails_the_same_statistic(rule: AcceptRule) -> None:
    """Under `stochastic` each position is right by itself then; only the joint law shows it."""
    right = ManyRuns(tables=TWO_STATES, rule=rule, k=3, runs=RUNS)
    assert fit_of(right, 4).passes
    assert not fit_of(replace(right, keys=OneUniformKeyRing), 4).passes


def kept_before_a_weak_one(chances: FloatArray) -> IntArray:
    """How many proposals come before the first of probability below 0.2."""
    is_weak = chances < 0.2
    kept = np.where(is_weak.any(axis=1), is_weak.argmax(axis=1), chances.shape[1])
    return np.asarray(kept, dtype=np.int32)


def kept_through_a_weak_one(chances: FloatArray) -> IntArray:
    """The same, and the weak one too."""
    return np.minimum(kept_before_a_weak_one(chances) + 1, chances.shape[1]).astype(np.int32)


@pytest.mark.slow
def test_dropping_a_weak_proposal_fails_the_same_statistic_and_stopping_behind_it_passes() -> None:
    assert fit_of(WRONG.many(drops=kept_through_a_weak_one), WRONG.count).passes
    assert not fit_of(WRONG.many(drops=kept_before_a_weak_one), WRONG.count).passes


@pytest.mark.slow
def test_dropping_a_weak_proposal_gives_the_law_that_the_code_states() -> None:
    """p = (.5, .3, .2) and q = (.6, .1, .3): the text's law becomes (.55, .23, .22)."""
    law = np.array([0.5, 0.3, 0.2])
    pair = Tables(target=np.log(np.tile(law, (3, 1))), draft=np.log([[0.6, 0.1, 0.3]] * 3))
    runs = ManyRuns(
        tables=pair,
        rule=AcceptRule.STOCHASTIC,
        k=1,
        runs=RUNS,
        drops=kept_before_a_weak_one,
        starts_with_target=False,
    )
    texts = runs.texts(1)
    assert fit(texts, np.array([0.55, 0.23, 0.22])).passes
    assert not fit(texts, law).passes


@pytest.mark.slow
def test_draws_keyed_by_position_alone_fail_under_block() -> None:
    """A two-state chain, k = 3, 60,000 runs of three tokens from the first round on.

    Seven degrees of freedom, false alarm 1e-4 at 29.9. By (round start, offset) the statistic is
    6.6, by position 69.8.
    """
    right = ManyRuns(
        tables=TWO_STATES, rule=AcceptRule.BLOCK, k=3, runs=60_000, starts_with_target=False
    )
    found, by_position = fit_of(right, 3), fit_of(replace(right, keys=PositionKeyRing), 3)
    assert found.degrees == by_position.degrees == 7
    assert found.passes and by_position.statistic > 60
    # Blocks of two tie more texts to a draw met before: a third of the runs shows it far better.
    shorter = replace(right, k=2, runs=RUNS)
    assert fit_of(shorter, 3).passes
    assert fit_of(replace(shorter, keys=PositionKeyRing), 3).statistic > 300


@pytest.mark.slow
def test_the_loop_with_draws_keyed_by_position_alone_fails_under_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wrong keys put into mlxgen itself give the texts of the wrong keys above."""
    combination = WRONG_BLOCK

    def by_position(self: Randomness, stream: Stream, start: int, offsets: range) -> KeyArray:
        return np.array(self.position_keys(stream, start + offsets.start, len(offsets)))

    monkeypatch.setattr(Randomness, "_round_words", by_position)
    texts = combination.loop_texts(30, 4)
    monkeypatch.undo()
    assert texts == combination.many(runs=30, keys=PositionKeyRing).texts(4).tolist()
    assert texts != combination.many(runs=30).texts(4).tolist()


# Accepted lengths


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("size", [4, 5, 6])
def test_mean_accepted_lengths_are_those_of_theory_and_in_order(
    size: int, draft: str, k: int
) -> None:
    """20,000 independent rounds a rule, within 4 standard errors (6e-5) of the exact mean."""
    pair = tables(size, draft, "none")
    means, errors = {}, {}
    for rule in AcceptRule:
        accepted = ManyRuns(tables=pair, rule=rule, k=k, runs=RUNS).first_round().accepted
        means[rule] = float(accepted.mean())
        errors[rule] = float(accepted.std()) / math.sqrt(RUNS)
        if size**k <= 700:
            exact = expected_length(round_law(rule, pair.p, pair.q, 0, k))
            assert abs(means[rule] - exact) < 4 * errors[rule] + 1e-9, rule
    for more, less in (
        (AcceptRule.BLOCK, AcceptRule.STOCHASTIC),
        (AcceptRule.STOCHASTIC, AcceptRule.GUMBEL_MATCH),
        (AcceptRule.GUMBEL_MATCH, AcceptRule.SAMPLER_MATCH),
    ):
        assert means[more] >= means[less] - 4 * math.hypot(errors[more], errors[less])


# What a drafter may decide


class LookingDrafter:
    """A draft model that cuts its block by what it has drawn: under `FIXED` never.

    Under `PREFIX` it stops behind a token of probability below 0.2, under `VALUE` before it, and
    then proposes at least one all the same.
    """

    name = "looking"
    reports_distribution = True

    def __init__(self, inner: DraftModel, policy: LengthPolicy, *, shorten: bool = False) -> None:
        self._inner = inner
        self.length_policy = policy
        self._shorten = shorten

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the draft's cache."""
        return self._inner.cached_tokens

    def prefill(self, prompt: Any) -> None:
        """Take in all prompt tokens but the last."""
        self._inner.prefill(prompt)

    def plan(self, history: History, k: int, limit: int) -> int:
        """As the inner draft."""
        return self._inner.plan(history, k, limit)

    def record(self, proposed: int, accepted: int) -> None:
        """Nothing to learn."""

    def propose(
        self, history: History, k: int, *, want_distribution: bool, coupled: bool
    ) -> Proposal:
        """Propose by the policy."""
        whole = self._inner.propose(history, k, want_distribution=True, coupled=coupled)
        assert whole.q is not None
        q = np.array(mx.take_along_axis(whole.q, whole.ids[:, None], axis=1))[:, 0]
        kept = k
        if self._shorten:
            kept = k - 1
        elif self.length_policy is LengthPolicy.PREFIX:
            kept = int(kept_through_a_weak_one(q[None])[0])
        elif self.length_policy is LengthPolicy.VALUE:
            kept = max(1, int(kept_before_a_weak_one(q[None])[0]))
        # The inner draft forwarded all but its last proposal; what was cut off is forgotten.
        self._inner.rewind(len(history) + kept - 1)
        return Proposal(whole.ids[:kept], whole.q[:kept], whole.tops)

    def rewind(self, length: int) -> None:
        """Forget what lies behind the first `length` tokens."""
        self._inner.rewind(length)


def looking_generator(
    rule: AcceptRule, policy: LengthPolicy, *, seed: int = 0, shorten: bool = False
) -> SpeculativeGenerator:
    """A prefilled generator with such a drafter, on the tables of the wrong versions."""
    pair = tables(4, "far", "temperature")
    settings = Settings(prompt=(0,), width=4, sampling=pair.sampling, seed=seed, k=3, rule=rule)
    randomness = Randomness(seed)
    draft = DraftModel(
        settings.cached(TableModel(pair.draft), "draft"), settings.chain(), randomness
    )
    generator = SpeculativeGenerator(
        settings.cached(TableModel(pair.target), "target"),
        LookingDrafter(draft, policy, shorten=shorten),
        settings.chain(),
        randomness,
        num_draft_tokens=3,
        accept_rule=rule,
        diagnostics=True,
    )
    generator.prefill([0])
    return generator


ALLOWED = {
    AcceptRule.SAMPLER_MATCH: LengthPolicy.VALUE,
    AcceptRule.GUMBEL_MATCH: LengthPolicy.VALUE,
    AcceptRule.STOCHASTIC: LengthPolicy.PREFIX,
    AcceptRule.BLOCK: LengthPolicy.FIXED,
}


@pytest.mark.parametrize("rule", AcceptRule)
@pytest.mark.parametrize("policy", LengthPolicy)
def test_a_drafter_that_decides_on_more_than_the_rule_allows_cannot_be_built(
    rule: AcceptRule, policy: LengthPolicy
) -> None:
    if policy > ALLOWED[rule]:
        with pytest.raises(ValueError, match=f"{policy.name} is not lossless under the rule"):
            looking_generator(rule, policy)
    else:
        assert len(list(looking_generator(rule, policy).tokens(12))) == 12


@pytest.mark.parametrize("rule", AcceptRule)
def test_a_drafter_that_breaks_its_fixed_length_is_an_error(rule: AcceptRule) -> None:
    generator = looking_generator(rule, LengthPolicy.FIXED, shorten=True)
    with pytest.raises(ValueError, match="proposed 2 tokens where 3 were asked for"):
        list(generator.tokens(12))


@pytest.mark.parametrize("rule", [AcceptRule.SAMPLER_MATCH, AcceptRule.GUMBEL_MATCH])
@pytest.mark.parametrize("policy", LengthPolicy)
def test_any_drafting_policy_leaves_the_text_alone_under_the_match_rules(
    rule: AcceptRule, policy: LengthPolicy
) -> None:
    pair = tables(4, "far", "temperature")
    for seed in range(5):
        settings = Settings(prompt=(0,), width=4, sampling=pair.sampling, seed=seed)
        plain = settings.plain_ids(TableModel(pair.target), 30)
        generator = looking_generator(rule, policy, seed=seed)
        assert [token.id for token in generator.tokens(30)] == plain


@pytest.mark.slow
def test_stopping_behind_a_weak_proposal_keeps_the_law_in_the_loop() -> None:
    """`PREFIX` under `stochastic`: transitions of a text of 2,000 tokens. False alarm 1e-4."""
    generator = looking_generator(AcceptRule.STOCHASTIC, LengthPolicy.PREFIX, seed=11)
    text = [0, *(token.id for token in generator.tokens(2000))]
    stats = generator.statistics
    assert stats.proposed < 3 * stats.rounds - 100, "blocks are cut short"
    assert stats.check.is_consistent
    p = tables(4, "far", "temperature").p
    pairs = np.array([text[:-1], text[1:]])
    statistic, degrees = 0.0, 0
    for state in range(4):
        after = pairs[1, pairs[0] == state][:, None].astype(np.int32)
        found = fit(after, p[state])
        statistic, degrees = statistic + found.statistic, degrees + found.degrees
    assert Fit(statistic, degrees).passes
