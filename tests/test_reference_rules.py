"""Exact laws of the acceptance rules, by enumeration, and MLX's rules held against them.

Nothing here is sampled but one Monte Carlo check, so there is no false alarm to speak of elsewhere.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlxgen.config import AcceptRule
from mlxgen.sampling.elementary import race
from mlxgen.sampling.randomness import Randomness, Stream, exponential
from mlxgen.speculative import closed_forms
from mlxgen.speculative.rules import (
    Verdict,
    block_keep,
    lacking,
    match_draft_tokens,
    residual_weights,
    stochastic_hits,
    verify_draft_block,
    verify_draft_tokens,
)
from tests.fixtures.statistics import FloatArray
from tests.reference_rules import (
    RoundLaw,
    add_outcomes,
    block_outcomes,
    chain_law,
    expected_length,
    gumbel_joint,
    judge_block,
    match_outcomes,
    residual,
    round_law,
    rows_along,
    stochastic_outcomes,
    text_law,
)

FloatRows = npt.NDArray[np.float32]

P3, Q3 = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])


def random_chain(rng: np.random.Generator, size: int, sharpness: float, zeros: float) -> FloatArray:
    """Rows with logits of some spread and, on average, a share of excluded tokens."""
    weights = np.exp(sharpness * rng.standard_normal((size, size)))
    weights *= rng.random((size, size)) >= zeros
    weights[np.arange(size), rng.integers(size, size=size)] += 0.1
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class Pair:
    """Two chains and a block length."""

    p: FloatArray
    q: FloatArray
    k: int

    def round_laws(self, rule: AcceptRule) -> list[RoundLaw]:
        """Law of the round behind each token."""
        return [round_law(rule, self.p, self.q, last, self.k) for last in range(len(self.p))]


@st.composite
def pairs(draw: st.DrawFn, most_tokens: int = 6, most_proposals: int = 4) -> Pair:
    """Near, far and equal pairs, with and without excluded tokens on either side."""
    size = draw(st.integers(4, most_tokens))
    k = draw(st.integers(1, most_proposals))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sharpness = draw(st.sampled_from([0.3, 1.0, 3.0]))
    p = random_chain(rng, size, sharpness, draw(st.sampled_from([0.0, 0.4])))
    other = random_chain(rng, size, sharpness, draw(st.sampled_from([0.0, 0.4])))
    mix = draw(st.sampled_from([0.0, 0.2, 1.0]))
    return Pair(p, (1 - mix) * p + mix * other, k)


# The exact law


def check_exactness(pair: Pair, count: int) -> None:
    laws = {rule: pair.round_laws(rule) for rule in AcceptRule}
    for last in range(len(pair.p)):
        expected = chain_law(pair.p, last, count)
        lengths = {rule: expected_length(laws[rule][last]) for rule in AcceptRule}
        for rule in AcceptRule:
            assert sum(float(part.sum()) for part in laws[rule][last]) == pytest.approx(
                1, abs=1e-12
            )
            np.testing.assert_allclose(text_law(laws[rule], last, count), expected, atol=1e-12)
        assert lengths[AcceptRule.BLOCK] >= lengths[AcceptRule.STOCHASTIC] - 1e-12
        assert lengths[AcceptRule.STOCHASTIC] >= lengths[AcceptRule.GUMBEL_MATCH] - 1e-12
        assert lengths[AcceptRule.GUMBEL_MATCH] >= lengths[AcceptRule.SAMPLER_MATCH] - 1e-12
        if pair.k == 1:
            stochastic, block = laws[AcceptRule.STOCHASTIC][last], laws[AcceptRule.BLOCK][last]
            for one, other in zip(stochastic, block, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-12)


@settings(max_examples=40)
@given(pair=pairs(most_tokens=5, most_proposals=2), count=st.integers(3, 4))
def test_texts_of_every_rule_have_the_target_law_and_lengths_their_order(
    pair: Pair, count: int
) -> None:
    check_exactness(pair, count)


@pytest.mark.slow
@settings(max_examples=25)
@given(pair=pairs(), count=st.integers(3, 4))
def test_texts_of_longer_blocks_have_the_target_law_and_lengths_their_order(
    pair: Pair, count: int
) -> None:
    check_exactness(pair, count)


def test_block_verification_can_pass_the_ceiling_of_single_positions() -> None:
    """Two tokens and k = 2: a mean length of 11/9, where rejection sampling has 10/9."""
    p, q = np.tile([1 / 3, 2 / 3], (2, 1)), np.tile([2 / 3, 1 / 3], (2, 1))
    stochastic = expected_length(round_law(AcceptRule.STOCHASTIC, p, q, 0, 2))
    block = expected_length(round_law(AcceptRule.BLOCK, p, q, 0, 2))
    assert stochastic == pytest.approx(10 / 9)
    assert block == pytest.approx(11 / 9)


def test_enumeration_notices_a_residual_replaced_by_the_target() -> None:
    """The wrong law is the one that a hand computation gives, and it is far from the target."""
    size, law = 3, [np.zeros(3), np.zeros((3, 3))]
    for t in range(size):
        accept = min(1.0, P3[t] / Q3[t])
        outcomes = np.stack([(1 - accept) * P3, accept * P3])
        add_outcomes(law, [t], Q3[t] * outcomes)
    emitted = text_law([law] * size, 0, 1)
    np.testing.assert_allclose(emitted, np.minimum(P3, Q3) + 0.4 * P3)
    assert np.abs(emitted - P3).max() > 0.05


def test_dropping_a_weak_proposal_gives_the_wrong_law_that_the_code_states() -> None:
    """p = (.5, .3, .2), and proposals of probability below 0.2 are dropped once drawn.

    A dropped draw leaves the position to the target, so its token is drawn from p anew.
    """
    q = np.array([0.6, 0.1, 0.3])
    p_rows = np.stack([P3, P3])
    emitted = np.zeros(3)
    for t in range(3):
        if q[t] < 0.2:
            emitted += q[t] * P3
            continue
        outcomes = stochastic_outcomes(p_rows, q[None], [t])
        emitted += q[t] * outcomes[0]
        emitted[t] += q[t] * outcomes[1].sum()
    np.testing.assert_allclose(emitted, [0.55, 0.23, 0.22])


@settings(max_examples=200)
@given(pair=pairs())
def test_coupled_draws_keep_both_laws_and_agree_as_the_closed_form_says(pair: Pair) -> None:
    for p, q in zip(pair.p, pair.q, strict=True):
        joint = gumbel_joint(p, q)
        np.testing.assert_allclose(joint.sum(axis=1), p, atol=1e-12)
        np.testing.assert_allclose(joint.sum(axis=0), q, atol=1e-12)
        agreement, distance = float(np.trace(joint)), 1 - float(np.minimum(p, q).sum())
        assert agreement >= (1 - distance) / (1 + distance) - 1e-12
        assert agreement <= 1 - distance + 1e-12
        assert agreement >= (p * q).sum() - 1e-12


# MLX's rules against the reference


def rows32(laws: FloatArray) -> FloatRows:
    """Laws as the rules take them."""
    return laws.astype(np.float32)


class MlxPieces(NamedTuple):
    """weights `[B, k+1]`, keep `[B, k]`, residual laws `[B, k, V]` by weight and with weight 1."""

    weights: FloatArray
    keep: FloatArray
    block_residuals: FloatArray
    residuals: FloatArray


def mlx_pieces(p_rows: FloatArray, q_rows: FloatArray, ids: npt.NDArray[np.int32]) -> MlxPieces:
    """What MLX's rules compute for many blocks: `[B, k+1, V], [B, k, V], [B, k]`."""
    k = ids.shape[1]
    p32, q32 = mx.array(rows32(p_rows[:, :k])), mx.array(rows32(q_rows))
    weights, keep = mx.vmap(lambda p, q, t: block_keep(p, q, t)[:2])(p32, q32, mx.array(ids))

    def law(p: mx.array, q: mx.array, w: mx.array) -> mx.array:
        rows, masses = lacking(p[None], q[None], w[None])
        return residual_weights(p, rows[0], masses[0], mx.array(True))[0]

    each = mx.vmap(mx.vmap(law))
    by_weight = each(p32, q32, weights[:, :k])
    plain = each(p32, q32, mx.ones_like(weights[:, :k]))

    def normalised(rows: mx.array) -> FloatArray:
        values = np.array(rows).astype(np.float64)
        return np.asarray(values / values.sum(axis=-1, keepdims=True))

    return MlxPieces(
        np.array(weights).astype(np.float64),
        np.array(keep).astype(np.float64),
        normalised(by_weight),
        normalised(plain),
    )


def mlx_round_law(rule: AcceptRule, pair: Pair, last: int) -> RoundLaw:
    """The law of a round with what MLX's functions compute in float32 put together exactly."""
    size, k = len(pair.p), pair.k
    blocks = list(itertools.product(range(size), repeat=k))
    p_rows = np.stack([rows_along(pair.p, last, ids) for ids in blocks])
    q_rows = np.stack([rows_along(pair.q, last, ids)[:k] for ids in blocks])
    ids = np.array(blocks, dtype=np.int32)
    q_of_ids = np.take_along_axis(q_rows, ids[:, :, None], axis=2)[:, :, 0]
    possible = q_of_ids.prod(axis=1) > 0
    p_rows, q_rows, ids = p_rows[possible], q_rows[possible], ids[possible]
    pieces = mlx_pieces(p_rows, q_rows, ids)
    law = [np.zeros((size,) * (a + 1)) for a in range(k + 1)]
    for b, block in enumerate(ids):
        if rule is AcceptRule.BLOCK:
            keep, residuals = pieces.keep[b], pieces.block_residuals[b]
            chances = [np.prod(1 - keep)]
            chances += [keep[i] * np.prod(1 - keep[i + 1 :]) for i in range(k)]
        else:
            p_of = np.float32(p_rows[b, np.arange(k), block])
            q_of = np.float32(q_rows[b, np.arange(k), block])
            accept = np.minimum(1, p_of / q_of).astype(np.float64)
            residuals = pieces.residuals[b]
            chances = [np.prod(accept[:i]) * (1 - accept[i]) for i in range(k)]
            chances.append(np.prod(accept))
        outcomes = np.zeros((k + 1, size))
        for i in range(k):
            outcomes[i] = chances[i] * residuals[i]
        outcomes[k] = chances[k] * p_rows[b, k]
        chance = q_of_ids[possible][b].prod()
        add_outcomes(law, block.tolist(), chance * outcomes)
    return law


@settings(max_examples=40)
@given(pair=pairs(most_tokens=4, most_proposals=3))
@pytest.mark.parametrize("rule", [AcceptRule.STOCHASTIC, AcceptRule.BLOCK])
def test_what_mlx_computes_adds_up_to_the_target_law(rule: AcceptRule, pair: Pair) -> None:
    """The whole law of three tokens from MLX's float32 numbers, to 1e-5."""
    laws = [mlx_round_law(rule, pair, last) for last in range(len(pair.p))]
    for last in range(len(pair.p)):
        expected = chain_law(pair.p, last, 3)
        np.testing.assert_allclose(text_law(laws, last, 3), expected, atol=1e-5)


class Block(NamedTuple):
    """A drafted block with the random numbers that judge it."""

    p_rows: FloatArray
    q_rows: FloatArray
    ids: list[int]
    uniforms: FloatRows
    noise: FloatRows


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """Rows of any kind: ordinary, equal, one-hot, of disjoint support, underflowing."""
    size, k = draw(st.integers(2, 6)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    p_rows, q_rows = np.zeros((k + 1, size)), np.zeros((k, size))
    for i in range(k + 1):
        p_rows[i] = rng.dirichlet(np.full(size, draw(st.sampled_from([0.2, 1.0, 5.0]))))
        kind = draw(st.sampled_from(["other", "equal", "one-hot", "disjoint", "tiny"]))
        q = rng.dirichlet(np.ones(size))
        if kind == "equal":
            q = p_rows[i].copy()
        elif kind == "one-hot":
            q = np.eye(size)[rng.integers(size)]
        elif kind == "disjoint":
            half = np.arange(size) < size // 2
            p_rows[i], q = np.where(half, p_rows[i] + 0.01, 0), np.where(half, 0, q + 0.01)
        elif kind == "tiny":
            p_rows[i, rng.integers(size)] *= 1e-30
            q[rng.integers(size)] *= 1e-30
        p_rows[i] /= p_rows[i].sum()
        if i < k:
            q_rows[i] = q / q.sum()
    ids = [int(rng.choice(size, p=row)) for row in q_rows]
    uniforms = np.float32(rng.random(k))
    return Block(p_rows, q_rows, ids, uniforms, np.float32(rng.exponential(size=(k + 1, size))))


def mlx_verdict(rule: AcceptRule, block: Block) -> Verdict:
    """The rule on a block, with noise for all offsets."""
    noise = mx.array(block.noise)
    verify = verify_draft_block if rule is AcceptRule.BLOCK else verify_draft_tokens
    return verify(
        mx.array(rows32(block.p_rows)),
        mx.array(rows32(block.q_rows)),
        mx.array(block.ids, dtype=mx.int32),
        mx.array(block.uniforms),
        lambda offset: noise[offset],
    )


@settings(max_examples=150)
@given(block=blocks())
@pytest.mark.parametrize("rule", [AcceptRule.STOCHASTIC, AcceptRule.BLOCK])
def test_verdicts_equal_those_of_the_reference(rule: AcceptRule, block: Block) -> None:
    """Blocks with a uniform or a choice closer to a threshold than rounding are left out."""
    k = len(block.ids)
    judged = judge_block(block.p_rows, block.q_rows, block.ids)
    if rule is AcceptRule.BLOCK:
        limits = judged.keep
    else:
        limits = [
            min(1.0, block.p_rows[i, t] / block.q_rows[i, t]) for i, t in enumerate(block.ids)
        ]
    u = block.uniforms.astype(np.float64)
    assume(all(abs(u[i] - limits[i]) > 1e-4 for i in range(k)))
    hits = [u[i] <= limits[i] and limits[i] > 0 for i in range(k)]
    accepted = [*hits, False].index(False)
    if rule is AcceptRule.BLOCK:
        accepted = max((i + 1 for i in range(k) if hits[i]), default=0)
    row = block.p_rows[accepted]
    if accepted < k:
        weight = judged.weights[accepted] if rule is AcceptRule.BLOCK else 1.0
        rest = np.maximum(weight * block.p_rows[accepted] - block.q_rows[accepted], 0)
        # Below the floor p takes over, which happens as rarely as the residual is small.
        assume(not 1e-8 < rest.sum() < 1e-4)
        row = residual(block.p_rows[accepted], block.q_rows[accepted], weight)
        row = block.p_rows[accepted] if rest.sum() <= 1e-8 else row
    with np.errstate(divide="ignore"):
        scores = np.log(row / block.noise[accepted])
    ranked = np.sort(scores)
    # A weight of one rounding error is 0 in one precision and not in the other.
    assume(len(ranked) < 2 or ranked[-1] - ranked[-2] > 1e-2)
    verdict = mlx_verdict(rule, block)
    assert np.array(verdict.accepted) == accepted
    assert np.array(verdict.next_id) == scores.argmax()


@settings(max_examples=200)
@given(block=blocks())
def test_block_weights_and_keep_probabilities_equal_the_reference(block: Block) -> None:
    judged = judge_block(block.p_rows, block.q_rows, block.ids)
    k = len(block.ids)
    kept = block_keep(
        mx.array(rows32(block.p_rows[:k])),
        mx.array(rows32(block.q_rows)),
        mx.array(block.ids, dtype=mx.int32),
    )
    weights, keep = np.array(kept.weights), np.array(kept.keep)
    np.testing.assert_allclose(weights, judged.weights, atol=1e-5)
    assert ((keep >= 0) & (keep <= 1)).all()
    for i in range(k):
        slack = 1.0
        if i < k - 1:
            mass = np.maximum(judged.weights[i + 1] * block.p_rows[i + 1] - block.q_rows[i + 1], 0)
            slack = mass.sum() + 1 - judged.weights[i + 1]
        # s / (s + 1 - w) of two rounding errors is anything; the length is then decided further on.
        if slack > 1e-3:
            assert keep[i] == pytest.approx(judged.keep[i], abs=max(1e-5, 2e-6 / slack))


@settings(max_examples=200)
@given(block=blocks())
def test_expected_block_length_equals_the_reference(block: Block) -> None:
    """The closed form that the theory check uses, from MLX's own h."""
    judged = judge_block(block.p_rows, block.q_rows, block.ids)
    k = len(block.ids)
    kept = block_keep(
        mx.array(rows32(block.p_rows[:k])),
        mx.array(rows32(block.q_rows)),
        mx.array(block.ids, dtype=mx.int32),
    )
    survival = np.array(closed_forms.block_survival(kept.keep))
    law = judged.length_law
    assert sum(law) == pytest.approx(1)
    assert (np.diff(survival) <= 1e-6).all()
    inner = [
        np.maximum(judged.weights[i] * block.p_rows[i] - block.q_rows[i], 0).sum()
        + 1
        - judged.weights[i]
        for i in range(1, k)
    ]
    if min(inner, default=1.0) > 1e-3:
        expected = [sum(law[i:]) for i in range(1, k + 1)]
        np.testing.assert_allclose(survival, expected, atol=1e-3)


@pytest.mark.parametrize("rule", [AcceptRule.STOCHASTIC, AcceptRule.BLOCK])
@pytest.mark.parametrize("k", [1, 3])
def test_equal_rows_are_accepted_whole_whatever_the_uniforms(rule: AcceptRule, k: int) -> None:
    rows = np.tile(P3, (k + 1, 1))
    for u in (0.0, 0.5, 1 - 2.0**-24):
        noise = np.ones((k + 1, 3), dtype=np.float32)
        ids = [i % 3 for i in range(k)]
        block = Block(rows, rows[:k], ids, np.full(k, u, dtype=np.float32), noise)
        verdict = mlx_verdict(rule, block)
        assert np.array(verdict.accepted) == k and np.array(verdict.next_id) == 0
        assert not verdict.fell_back.item()


@pytest.mark.parametrize("rule", [AcceptRule.STOCHASTIC, AcceptRule.BLOCK])
def test_disjoint_rows_are_rejected_at_once_and_the_target_is_drawn(rule: AcceptRule) -> None:
    p_rows, q_rows = np.tile([0.0, 0.4, 0.6], (3, 1)), np.tile([1.0, 0.0, 0.0], (2, 1))
    noise = np.ones((3, 3), dtype=np.float32)
    for u in (0.0, 0.5):
        block = Block(p_rows, q_rows, [0, 0], np.full(2, u, dtype=np.float32), noise)
        verdict = mlx_verdict(rule, block)
        assert np.array(verdict.accepted) == 0 and np.array(verdict.next_id) == 2


def test_block_length_never_includes_a_token_that_the_target_excludes() -> None:
    """w stays 0 behind such a token, whatever follows and even at uniforms of exactly 0."""
    p_rows = np.array([[0.5, 0.5, 0.0], *[[0.2, 0.2, 0.6]] * 4])
    q_rows = np.array([[0.2, 0.2, 0.6], *[[0.5, 0.4, 0.1]] * 3])
    noise = np.ones((5, 3), dtype=np.float32)
    block = Block(p_rows, q_rows, [2, 2, 2, 2], np.zeros(4, dtype=np.float32), noise)
    verdict = mlx_verdict(AcceptRule.BLOCK, block)
    assert np.array(verdict.accepted) == 0 and np.array(verdict.next_id) in (0, 1)


def test_probabilities_that_underflow_accept_nothing_and_break_nothing() -> None:
    """p(t) of e^-200 is 0 in float32; so is q elsewhere. Nothing becomes NaN."""
    p = mx.exp(mx.array([[0.0, -200.0], [math.log(0.5)] * 2]))
    q = mx.exp(mx.array([[-200.0, 0.0]]))
    for verify in (verify_draft_tokens, verify_draft_block):
        for u in (0.0, 0.5):
            verdict = verify(p, q, mx.array([1]), mx.array([u]), lambda _: mx.ones((2,)))
            assert np.array(verdict.accepted) == 0 and np.array(verdict.next_id) == 0
    kept = block_keep(p[:1], q, mx.array([1]))
    assert np.array(kept.keep).tolist() == [0.0]
    assert np.array(closed_forms.gumbel_overlap(p[:1], q)).tolist() == [0.0]


@given(
    ids=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    data=st.data(),
)
def test_match_verdict_is_the_event_whose_chance_the_reference_states(
    ids: list[int], data: st.DataObject
) -> None:
    """Summed over all target draws, weighted with their chances, verdicts give the same law."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    p_rows = rng.dirichlet(np.ones(3), size=len(ids) + 1)
    outcomes = np.zeros_like(p_rows)
    draws = np.array(list(itertools.product(range(3), repeat=len(ids) + 1)), dtype=np.int32)
    proposed = mx.array(ids, dtype=mx.int32)
    verdicts = mx.vmap(lambda y: tuple(match_draft_tokens(proposed, y))[:2])(mx.array(draws))
    accepted, following = np.array(verdicts[0]), np.array(verdicts[1])
    chances = np.take_along_axis(p_rows[None], draws[:, :, None], axis=2)[:, :, 0].prod(axis=1)
    np.add.at(outcomes, (accepted, following), chances)
    np.testing.assert_allclose(outcomes, match_outcomes(p_rows, ids), atol=1e-12)


@given(pair=pairs())
def test_accept_test_flips_at_the_ratio(pair: Pair) -> None:
    p, q = np.float32(pair.p.ravel()), np.float32(pair.q.ravel())
    ratio = np.divide(p, q, out=np.zeros_like(p), where=q > 0)
    inside = (ratio > 1e-6) & (ratio < 1)
    below = stochastic_hits(mx.array(p), mx.array(q), mx.array(ratio * np.float32(1 - 1e-5)))
    above = stochastic_hits(mx.array(p), mx.array(q), mx.array(ratio * np.float32(1 + 1e-5)))
    assert np.array(below)[inside].all() and not np.array(above)[inside].any()


# Closed forms against the reference


def quadratic_overlap(p: FloatArray, q: FloatArray) -> float:
    """The Gumbel form as it is written: one sum over y for each x."""
    both = (p > 0) & (q > 0)
    return sum(1 / float(np.maximum(p / p[x], q / q[x]).sum()) for x in np.flatnonzero(both))


def edge_pairs() -> dict[str, tuple[FloatArray, FloatArray]]:
    """Rows at which a formula with ratios can go wrong."""
    row, other = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.1, 0.0, 0.6, 0.3])
    hot, cold = np.eye(4)[1], np.eye(4)[2]
    tiny = np.array([1 - 3e-30, 1e-30, 1e-30, 1e-30])
    return {
        "equal": (row, row),
        "other": (row, other),
        "one-hot p": (hot, row),
        "one-hot q": (row, hot),
        "both one-hot, equal": (hot, hot),
        "both one-hot, different": (hot, cold),
        "disjoint": (np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.5, 0.5])),
        "tiny": (tiny, tiny[::-1].copy()),
        "flat": (np.full(4, 0.25), np.full(4, 0.25)),
    }


@pytest.mark.parametrize("name", edge_pairs())
def test_gumbel_form_at_the_edges(name: str) -> None:
    p, q = edge_pairs()[name]
    form = closed_forms.gumbel_overlap(mx.array(rows32(p[None])), mx.array(rows32(q[None])))
    assert np.array(form)[0] == pytest.approx(quadratic_overlap(p, q), abs=1e-6)
    assert np.trace(gumbel_joint(p, q)) == pytest.approx(quadratic_overlap(p, q), abs=1e-12)


@settings(max_examples=100)
@given(
    width=st.sampled_from([2, 5, 37, 300, 1000]),
    seed=st.integers(0, 2**32 - 1),
    concentration=st.sampled_from([0.02, 0.3, 3.0]),
    share=st.sampled_from([0.0, 0.5]),
)
def test_sorted_gumbel_form_equals_the_quadratic_one(
    width: int, seed: int, concentration: float, share: float
) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.dirichlet(np.full(width, concentration), size=(2, 3)) + 1e-12
    rows[:, :, 1:] *= rng.random((2, 3, width - 1)) >= share
    p, q = rows / rows.sum(axis=-1, keepdims=True)
    form = np.array(closed_forms.gumbel_overlap(mx.array(rows32(p)), mx.array(rows32(q))))
    expected = [quadratic_overlap(*pair) for pair in zip(p, q, strict=True)]
    np.testing.assert_allclose(form, expected, atol=1e-5)
    sum_min = np.array(closed_forms.sum_min(mx.array(rows32(p)), mx.array(rows32(q))))
    sum_prod = np.array(closed_forms.sum_prod(mx.array(rows32(p)), mx.array(rows32(q))))
    np.testing.assert_allclose(sum_min, np.minimum(p, q).sum(axis=-1), atol=1e-5)
    np.testing.assert_allclose(sum_prod, (p * q).sum(axis=-1), atol=1e-5)
    assert (sum_prod <= form + 1e-6).all() and (form <= sum_min + 1e-6).all()


def test_gumbel_form_is_the_frequency_of_coupled_agreement() -> None:
    """Within 5 standard deviations (6e-7 each), 200,000 draws, fixed seed."""
    rng, count, width = np.random.default_rng(3), 200_000, 6
    noise = exponential(Randomness(17).position_keys(Stream.TARGET, 0, count), width)
    for concentration in (0.3, 1.0, 5.0):
        p, q = rng.dirichlet(np.full(width, concentration), size=2)
        p_row, q_row = mx.array(rows32(p[None])), mx.array(rows32(q[None]))
        x, y = np.array(race(p_row, noise)), np.array(race(q_row, noise))
        expected = float(np.array(closed_forms.gumbel_overlap(p_row, q_row))[0])
        deviation = math.sqrt(expected * (1 - expected) / count)
        assert abs(np.mean(x == y) - expected) < 5 * deviation + 1e-6
        joint = gumbel_joint(p, q)
        for pair in itertools.product(range(width), repeat=2):
            chance = joint[pair]
            seen = np.mean((x == pair[0]) & (y == pair[1]))
            assert abs(seen - chance) < 5 * math.sqrt(chance / count) + 5 / count


def test_outcomes_of_a_block_add_up_to_one() -> None:
    """Of every rule, on a block that exercises acceptance, rejection and the bonus."""
    p_rows, q_rows = np.tile(P3, (4, 1)), np.tile(Q3, (3, 1))
    ids = [2, 0, 2]
    for outcomes in (
        match_outcomes(p_rows, ids),
        stochastic_outcomes(p_rows, q_rows, ids),
        block_outcomes(p_rows, q_rows, ids),
    ):
        assert outcomes.sum() == pytest.approx(1, abs=1e-12) and (outcomes >= 0).all()
