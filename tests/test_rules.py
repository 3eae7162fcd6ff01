"""The acceptance rules as pure functions: what they accept, what they emit, and in what law.

Wrong rules are judged by the same statistics, so that a test that cannot fail would be noticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxgen.sampling.elementary import probability_of
from mlxgen.sampling.randomness import Randomness, Stream, exponential, uniform
from mlxgen.speculative import closed_forms
from mlxgen.speculative.rules import (
    RESIDUAL_FLOOR,
    Verdict,
    lacking,
    leading_run,
    match_draft_tokens,
    residual_resample,
    residual_weights,
    stochastic_hits,
    verify_draft_tokens,
)
from tests.fixtures.statistics import FloatArray, chi_square, follows, softmax, threshold

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]

TEMPERATURE = 0.7
P = softmax(np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0]) / TEMPERATURE)
Q = softmax(np.array([1.4, 1.3, 0.2, 0.6, -0.3, -0.8]) / TEMPERATURE)


def as_rows(*laws: FloatArray) -> mx.array:
    """Laws, one a row."""
    return mx.array(np.stack(laws).astype(np.float32))


def laws(width: int = 5) -> st.SearchStrategy[FloatArray]:
    """Laws of some width, with zeros and very small entries among them."""
    weights = st.lists(
        st.one_of(st.floats(0.01, 1), st.sampled_from([0.0, 0.0, 1e-6, 1e-12])),
        min_size=width,
        max_size=width,
    )
    return weights.filter(lambda row: max(row) > 0.005).map(
        lambda row: np.asarray(np.array(row) / sum(row))
    )


# The accept test


@given(q=st.floats(0, 1, width=32), u=st.floats(0, 1, exclude_max=True, width=32))
def test_tokens_outside_the_target_support_are_never_accepted(q: float, u: float) -> None:
    assert not stochastic_hits(mx.array([0.0]), mx.array([q]), mx.array([u])).item()


@pytest.mark.parametrize("u", [0.0, 1e-38, 0.5, 1 - 2.0**-24])
@pytest.mark.parametrize("q", [0.0, 1e-45, 1e-30, 1.0])
def test_underflowed_proposal_mass_does_not_bypass_the_target_support(u: float, q: float) -> None:
    p, q_row, uniforms = mx.array([0.0]), mx.array([q]), mx.array([u])
    assert not stochastic_hits(p, q_row, uniforms).item()


def test_accept_test_without_its_guard_would_accept_what_the_target_excludes() -> None:
    """The wrong version that the two tests above reject."""
    p, q, u = mx.array([0.0]), mx.array([0.0]), mx.array([0.5])
    assert (u * q <= p).item()
    assert (mx.array([0.0]) * mx.array([0.9]) <= p).item()


@given(
    q=st.floats(2.0**-20, 1, width=32),
    excess=st.floats(1, 100),
    u=st.floats(0, 1, exclude_max=True, width=32),
)
def test_proposals_that_the_target_likes_at_least_as_much_are_always_accepted(
    q: float, excess: float, u: float
) -> None:
    p = float(np.float32(q) * np.float32(excess))
    assert stochastic_hits(mx.array([p]), mx.array([q]), mx.array([u])).item()


@pytest.mark.parametrize("u", [0.5, 1e-7, 1e-8])
def test_ratio_that_float16_cannot_hold_is_not_an_acceptance(u: float) -> None:
    """Logits 20 apart: p(t) is 2e-9, which is 0 in float16."""
    p = mx.softmax(mx.array([[20.0, 0.0], [20.0, 0.0]]), axis=-1)
    q = as_rows(np.array([0.1, 0.9]))
    verdict = verify_draft_tokens(p, q, mx.array([1]), mx.array([u]), lambda offset: mx.ones((2,)))
    assert np.array(verdict.accepted) == 0 and np.array(verdict.next_id) == 0
    half = p[0].astype(mx.float16)
    assert half[1].item() == 0, "float16 would not tell this from a token that is excluded"


@pytest.mark.parametrize("token", range(6))
def test_acceptance_frequency_of_a_token_is_the_ratio(token: int) -> None:
    """Exact up to 1e-6: a grid of 1,000,000 uniforms stands for the integral over u."""
    grid = (mx.arange(1_000_000) + 0.5) / 1_000_000
    p, q = mx.full(grid.shape, P[token]), mx.full(grid.shape, Q[token])
    frequency = mx.mean(stochastic_hits(p, q, grid)).item()
    assert isinstance(frequency, float)
    assert abs(frequency - min(1, P[token] / Q[token])) < 2e-6


# The residual


def after_a_rejection(p: mx.array, q: mx.array) -> tuple[mx.array, mx.array]:
    """`residual_weights` of one position: `[V], [V]`."""
    rows, masses = lacking(p[None], q[None])
    return residual_weights(p, rows[0], masses[0], mx.array(True))


@given(p=laws(), q=laws())
def test_residual_has_mass_only_where_the_target_exceeds_the_draft(
    p: FloatArray, q: FloatArray
) -> None:
    p32, q32 = p.astype(np.float32), q.astype(np.float32)
    row, fell_back = after_a_rejection(mx.array(p32), mx.array(q32))
    weights = np.array(row)
    if fell_back.item():
        assert np.maximum(p - q, 0).sum() < 2 * RESIDUAL_FLOOR
        np.testing.assert_array_equal(weights, p32)
    else:
        assert not weights[p32 <= q32].any()
        np.testing.assert_allclose(weights, np.maximum(p - q, 0), atol=1e-7)


@given(p=laws(), q=laws())
def test_emitted_law_of_one_position_is_the_target_law(p: FloatArray, q: FloatArray) -> None:
    """min(p, q) from acceptances plus the residual from rejections is p, whatever q is."""
    weights, _ = after_a_rejection(mx.array(p.astype(np.float32)), mx.array(q.astype(np.float32)))
    residual = np.array(weights).astype(np.float64)
    accepted = q * np.minimum(1, np.divide(p, q, out=np.zeros_like(p), where=q > 0))
    emitted = accepted + (1 - accepted.sum()) * residual / residual.sum()
    np.testing.assert_allclose(emitted, p, atol=2e-6)


@pytest.mark.parametrize(
    "row",
    [P, np.array([1.0, 0, 0, 0, 0, 0]), np.full(6, 1 / 6)],
    ids=["ordinary", "one-hot", "flat"],
)
def test_equal_distributions_fall_back_to_the_target(row: FloatArray) -> None:
    p = mx.array(row.astype(np.float32))
    for q in (p, p * (1 + 1.2e-7), p * (1 - 1.2e-7)):
        weights, fell_back = after_a_rejection(p, q)
        assert fell_back.item() and mx.array_equal(weights, p)
    token, _ = residual_resample(p, p, mx.ones((6,)))
    assert np.array(token) == row.argmax()


@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_residual_that_is_not_finite_falls_back_to_the_target(damage: float) -> None:
    p = mx.array([0.5, 0.5])
    weights, fell_back = after_a_rejection(p, mx.array([-damage, 0.0]))
    assert fell_back.item() and mx.array_equal(weights, p)


@given(p=laws(), q=laws())
def test_behind_the_last_proposal_the_target_is_drawn_from(p: FloatArray, q: FloatArray) -> None:
    p32 = mx.array(p.astype(np.float32))
    rows, masses = lacking(p32[None], mx.array(q.astype(np.float32))[None])
    weights, fell_back = residual_weights(p32, rows[0], masses[0], mx.array(False))
    assert mx.array_equal(weights, p32) and not fell_back.item()


def residual_draws(p: FloatArray, q: FloatArray, count: int) -> IntArray:
    """Many draws by `residual_resample`."""
    noise = exponential(Randomness(21).position_keys(Stream.RESIDUAL, 0, count), len(p))
    p32, q32 = mx.array(p.astype(np.float32)), mx.array(q.astype(np.float32))
    return np.array(mx.vmap(lambda row: residual_resample(p32, q32, row)[0])(noise))


def test_residual_draw_follows_the_normalized_relu_difference() -> None:
    """False alarm 1e-4, fixed seed. A token with p <= q is never drawn."""
    residual = np.maximum(P - Q, 0)
    draws = residual_draws(P, Q, 6000)
    assert follows(draws, residual / residual.sum())
    assert not follows(draws, P), "the statistic tells the residual from p"


# Whole blocks


BlockRule = Callable[[mx.array, mx.array, mx.array, mx.array, mx.array], Verdict]


def judge(p: mx.array, q: mx.array, ids: mx.array, uniforms: mx.array, noise: mx.array) -> Verdict:
    """The rule, with noise `[k+1, V]` for all offsets."""
    return verify_draft_tokens(p, q, ids, uniforms, lambda offset: noise[offset])


def judge_resampling_from_the_target(
    p: mx.array, q: mx.array, ids: mx.array, uniforms: mx.array, noise: mx.array
) -> Verdict:
    """Wrong: a rejected position is drawn from p, not from the residual."""
    right = judge(p, q, ids, uniforms, noise)
    row = right.accepted
    return right._replace(next_id=mx.argmax(p[row] / noise[row]).astype(mx.int32))


def judge_by_argmax(
    p: mx.array, q: mx.array, ids: mx.array, uniforms: mx.array, noise: mx.array
) -> Verdict:
    """Wrong at temperature > 0: accepts iff the proposal is the target's most likely token."""
    return match_draft_tokens(ids, mx.argmax(p, axis=-1).astype(mx.int32))


def judge_with_another_proposal_law(
    p: mx.array, q: mx.array, ids: mx.array, uniforms: mx.array, noise: mx.array
) -> Verdict:
    """Wrong: q is taken at temperature 1 although the proposals were drawn at 0.7."""
    tempered = q**TEMPERATURE
    return judge(p, tempered / tempered.sum(axis=-1, keepdims=True), ids, uniforms, noise)


def judge_accepting_everything(
    p: mx.array, q: mx.array, ids: mx.array, uniforms: mx.array, noise: mx.array
) -> Verdict:
    """Wrong: no test at all."""
    return judge(p, q, ids, mx.zeros_like(uniforms), noise)


class Trials:
    """Many independent blocks judged by one rule: `accepted [n]`, `emitted [n, k+1]`.

    Row i of the target's laws is `p_rows[i]`, whatever was emitted before.
    """

    def __init__(
        self, rule: BlockRule, p_rows: list[FloatArray], q_rows: list[FloatArray], count: int
    ) -> None:
        k, width = len(q_rows), len(p_rows[0])
        p, q = as_rows(*p_rows), as_rows(*q_rows)
        keys = Randomness(31)

        def numbers(stream: Stream, each: int) -> mx.array:
            return keys.position_keys(stream, 0, count * each)

        draft_noise = exponential(numbers(Stream.DRAFT, k), width).reshape(count, k, width)
        ids = mx.argmax(q / draft_noise, axis=-1).astype(mx.int32)
        uniforms = uniform(numbers(Stream.ACCEPT, k)).reshape(count, k)
        noise = exponential(numbers(Stream.RESIDUAL, k + 1), width).reshape(count, k + 1, width)
        verdict = mx.vmap(lambda ids, uniforms, noise: rule(p, q, ids, uniforms, noise))(
            ids, uniforms, noise
        )
        self.ids: IntArray = np.array(ids)
        self.accepted: IntArray = np.array(verdict[0])
        self.emitted = np.concatenate([self.ids, np.zeros((count, 1), dtype=np.int32)], axis=1)
        self.emitted[np.arange(count), self.accepted] = np.array(verdict[1])
        self.tested = np.minimum(self.accepted + 1, k)

    def at(self, offset: int) -> IntArray:
        """Tokens emitted at an offset, in the trials that came that far."""
        return np.asarray(self.emitted[self.accepted >= offset, offset])


TRIALS = 20_000
BLOCK_P = [P, np.roll(P, 2), P[::-1].copy(), np.full(6, 1 / 6)]
BLOCK_Q = [Q, P, np.roll(Q, 3)]


@pytest.mark.parametrize("offset", range(4))
def test_every_offset_of_a_block_follows_the_target(offset: int) -> None:
    """False alarm 1e-4 for each offset, fixed seed. The last offset is the bonus token.

    Whether an offset is reached depends on the offsets before it alone, so the tokens seen there
    are independent draws from the target's row.
    """
    trials = Trials(judge, BLOCK_P, BLOCK_Q, TRIALS)
    tokens = trials.at(offset)
    assert len(tokens) > 500
    assert follows(tokens, BLOCK_P[offset])


def test_chi_square_rejects_known_wrong_acceptance_rules() -> None:
    """At 4,000 trials, where the right rule passes."""

    def statistic(rule: BlockRule) -> float:
        return chi_square(Trials(rule, [P, P], [Q], 4000).at(0), P)

    assert statistic(judge) < threshold(5)
    for wrong in (
        judge_resampling_from_the_target,
        judge_by_argmax,
        judge_with_another_proposal_law,
        judge_accepting_everything,
    ):
        assert statistic(wrong) > threshold(5), wrong.__name__


def test_one_draw_outside_the_target_support_is_noticed() -> None:
    """Accepting without the guard emits what the target excludes, and the statistic is infinite."""
    p = np.array([0.5, 0.5, 0.0])
    q = np.array([0.3, 0.3, 0.4])

    def unguarded(
        p: mx.array, q: mx.array, ids: mx.array, uniforms: mx.array, noise: mx.array
    ) -> Verdict:
        p_of_ids = mx.take_along_axis(p[:-1], ids[:, None], axis=-1)[:, 0]
        q_of_ids = mx.zeros_like(p_of_ids)  # Underflowed.
        accepted = leading_run(uniforms * q_of_ids <= p_of_ids)
        return Verdict(accepted, mx.argmax(p[accepted] / noise[accepted]), mx.array(False))

    assert chi_square(Trials(unguarded, [p, p], [q], 1000).at(0), p) == math.inf
    assert chi_square(Trials(judge, [p, p], [q], 1000).at(0), p) < threshold(1)


@pytest.mark.parametrize("q", [Q, P, np.array([0, 0, 0, 0, 0, 1.0]), np.full(6, 1 / 6)])
def test_acceptance_frequency_is_the_sum_of_minima(q: FloatArray) -> None:
    """Within 5 standard deviations: false alarm 6e-7, fixed seed."""
    trials = Trials(judge, [P, P], [q], TRIALS)
    expected = np.minimum(P, q).sum()
    deviation = math.sqrt(TRIALS * expected * (1 - expected))
    assert abs(trials.accepted.sum() - TRIALS * expected) <= 5 * deviation + 1e-6


def test_per_position_acceptance_of_a_block_is_the_sum_of_minima() -> None:
    """Within 5 standard deviations, over the positions that were tested."""
    trials = Trials(judge, [P] * 5, [Q] * 4, TRIALS)
    tested, accepted = int(trials.tested.sum()), int(trials.accepted.sum())
    expected = np.minimum(P, Q).sum()
    assert abs(accepted - tested * expected) < 5 * math.sqrt(tested * expected * (1 - expected))


def test_proposal_of_one_hundredth_is_accepted_one_time_in_a_hundred() -> None:
    """A draft that always proposes a token of p = 0.01. Within 5 standard deviations."""
    p = np.array([0.01, 0.59, 0.4])
    trials = Trials(judge, [p, p], [np.array([1.0, 0, 0])], TRIALS)
    assert abs(trials.accepted.sum() - 200) < 5 * math.sqrt(200)
    assert follows(trials.at(0), p)


def test_far_apart_distributions_still_give_the_target_law() -> None:
    """False alarm 1e-4, fixed seed. Drawing from p after a rejection misses by far here."""
    p, q = np.array([0.7, 0.1, 0.1, 0.1]), np.array([0.1, 0.7, 0.1, 0.1])
    assert follows(Trials(judge, [p, p], [q], TRIALS).at(0), p)
    wrong = Trials(judge_resampling_from_the_target, [p, p], [q], TRIALS).at(0)
    assert chi_square(wrong, p) > 50 * threshold(3)


# The match rule


@given(
    ids=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    data=st.data(),
)
def test_match_rule_emits_the_target_tokens_up_to_the_first_difference(
    ids: list[int], data: st.DataObject
) -> None:
    length = len(ids) + 1
    target = data.draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))
    agreeing = next((i for i, t in enumerate(ids) if t != target[i]), len(ids))
    verdict = match_draft_tokens(mx.array(ids, dtype=mx.int32), mx.array(target, dtype=mx.int32))
    assert np.array(verdict.accepted) == agreeing
    assert np.array(verdict.next_id) == target[agreeing]
    assert not verdict.fell_back.item()


@given(hits=st.lists(st.booleans(), min_size=1, max_size=9))
def test_leading_run_ends_at_the_first_miss(hits: list[bool]) -> None:
    assert np.array(leading_run(mx.array(hits))) == (*hits, False).index(False)


# Closed forms


@given(p=laws(), q=laws())
def test_closed_forms_equal_their_definitions_and_keep_their_order(
    p: FloatArray, q: FloatArray
) -> None:
    rows = as_rows(p), as_rows(q)
    sum_min = np.array(closed_forms.sum_min(*rows))
    sum_prod = np.array(closed_forms.sum_prod(*rows))
    np.testing.assert_allclose(sum_min, [np.minimum(p, q).sum()], atol=1e-6)
    np.testing.assert_allclose(sum_prod, [(p * q).sum()], atol=1e-6)
    assert (sum_min >= sum_prod).all()


def test_closed_form_acceptance_matches_the_hand_computed_values() -> None:
    p, q = as_rows(P), as_rows(Q)
    assert np.array(closed_forms.sum_min(p, q))[0] == pytest.approx(0.705326, abs=1e-5)
    assert np.array(closed_forms.sum_prod(p, q))[0] == pytest.approx(0.343798, abs=1e-5)
    probability = probability_of(mx.array([1]), q)
    assert np.array(probability)[0] == pytest.approx(Q[1], abs=1e-6)
