"""Each filter keeps the tokens that an independent float64 computation keeps.

A cut can lie so close to a token that float32 may decide either way. Such examples are skipped:
the reference has to keep the same tokens for a slightly smaller and a slightly larger setting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mlxgen.sampling import filters, sums
from tests.fixtures.reference_sampling import (
    BoolArray,
    deviations_from_entropy,
    kept_by_min_p,
    kept_by_top_k,
    kept_by_top_n_sigma,
    kept_by_top_p,
    kept_by_typical_p,
    kept_by_xtc,
)
from tests.fixtures.statistics import FloatArray, softmax

Filter = Callable[[mx.array, float], mx.array]
Reference = Callable[[FloatArray, float], BoolArray]

SLACK = 1e-4
NO_PROTECTED = mx.zeros((0,), dtype=mx.int32)


def scores_of(rows: Any) -> mx.array:
    """Rows as filters take them, with a largest score of 0."""
    return filters.shifted(mx.array(np.array(rows, dtype=np.float32)))[0]


def xtc_with_coin(scores: mx.array, threshold: float) -> mx.array:
    """XTC with the coin of every row showing heads."""
    return filters.xtc(scores, mx.ones((len(scores),), dtype=mx.bool_), threshold, NO_PROTECTED)


VALUES = st.one_of(
    # The square of a smaller number than this would be 0 in float32.
    st.floats(-30, 30, width=32).map(lambda x: x if abs(x) > 1e-6 else 0.0),
    st.sampled_from([-8.0, -1.0, 0.0, 0.0, 1.0, 1.5, 6.0]),
    st.just(-np.inf),
)
ROWS = st.integers(2, 12).flatmap(
    lambda width: st.lists(
        st.lists(VALUES, min_size=width, max_size=width).filter(lambda row: max(row) > -np.inf),
        min_size=1,
        max_size=4,
    )
)
SHARES = st.floats(0.001, 0.999)


def probabilities(weights: FloatArray) -> FloatArray:
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def top_k(scores: mx.array, k: float) -> mx.array:
    """`filters.top_k` with a k as the other settings are typed."""
    return filters.top_k(scores, int(k))


CASES: dict[str, tuple[Filter, Reference, st.SearchStrategy[float]]] = {
    "top_k": (top_k, kept_by_top_k, st.integers(0, 14).map(float)),
    "top_p": (filters.top_p, kept_by_top_p, SHARES),
    "min_p": (filters.min_p, kept_by_min_p, SHARES),
    "typical_p": (filters.typical_p, kept_by_typical_p, SHARES),
    "top_n_sigma": (filters.top_n_sigma, kept_by_top_n_sigma, st.floats(0.01, 5)),
    "xtc": (xtc_with_coin, kept_by_xtc, SHARES),
}


def check(
    apply: Filter, reference: Reference, rows: list[list[float]], value: float, *, slack: float
) -> None:
    """Compare a filter with its reference on rows, and each row alone with the row in a block."""
    scores = scores_of(rows)
    result = np.array(apply(scores, value))
    for index, row in enumerate(np.array(scores).astype(np.float64)):
        expected = reference(row, value)
        if slack:
            for nearby in (value * (1 - slack), value * (1 + slack)):
                assume(np.array_equal(reference(row, nearby), expected))
        assert np.array_equal(np.isfinite(result[index]), expected)
        kept = np.array(scores)[index][expected]
        np.testing.assert_array_equal(result[index][expected], kept - kept.max())
        alone = np.array(apply(scores[index : index + 1], value))[0]
        np.testing.assert_array_equal(alone, result[index])


def is_clear_of_swaps(row: FloatArray) -> bool:
    """Whether no two scores on both sides of the entropy are so equally far that float32 may
    take the other one first."""
    deviation = deviations_from_entropy(row.astype(np.float64))
    at = np.sort([deviation[row == value][0] for value in np.unique(row)])
    at = at[np.isfinite(at)]
    return len(at) < 2 or bool(np.diff(at).min() > SLACK)


def is_clear_of_merges(row: FloatArray) -> bool:
    """Whether scores that differ have probabilities that differ in float32 too: top-p takes those
    for ties that do not."""
    at = np.unique(row[np.isfinite(row)])
    return len(at) < 2 or bool(np.diff(at).min() > SLACK)


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
def test_filter_keeps_what_float64_keeps(name: str, data: st.DataObject) -> None:
    apply, reference, settings = CASES[name]
    slack = 0.0 if name == "top_k" else SLACK
    rows = data.draw(ROWS)
    if name == "top_p":
        assume(all(is_clear_of_merges(np.array(row, dtype=np.float32)) for row in rows))
    if name == "typical_p":
        assume(all(is_clear_of_swaps(np.array(row, dtype=np.float32)) for row in rows))
    check(apply, reference, rows, data.draw(settings), slack=slack)


def kept_by_top_k_and_p(row: FloatArray, k: int, p: float) -> BoolArray:
    """The tokens that are left by both, one after the other."""
    left = kept_by_top_k(row, k)
    return left & kept_by_top_p(np.where(left, row, -np.inf), p)


def without_ties(scores: mx.array, k: int, p: float) -> mx.array:
    """Wrong: ties with the k-th token have no weight."""
    largest = mx.sort(scores, axis=-1)[:, -k:]
    mass = mx.exp(largest)
    least = sums.smallest_needed(mass, p * mass.sum(axis=-1, keepdims=True))
    return mx.where(mx.exp(scores) >= least, scores, -mx.inf)


def of_the_vocabulary(scores: mx.array, k: int, p: float) -> mx.array:
    """Wrong: the nucleus of all tokens, and not that of the k."""
    return filters.top_k(filters.top_p(scores, p), k)


def without_a_limit(scores: mx.array, k: int, p: float) -> mx.array:
    """Wrong: k does not matter."""
    return filters.top_p(scores, p)


@pytest.mark.parametrize("on_gpu", [False, True])
@given(rows=ROWS, k=st.integers(0, 14), p=SHARES | st.sampled_from([0.0, 1.0]))
def test_top_k_and_p_together_keep_what_one_after_the_other_keeps(
    on_gpu: bool, rows: list[list[float]], k: int, p: float
) -> None:
    assume(all(is_clear_of_merges(np.array(row, dtype=np.float32)) for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "_adds_in_parts", lambda: on_gpu)
        check(
            lambda scores, share: filters.top_k_and_p(scores, k, share),
            lambda row, share: kept_by_top_k_and_p(row, k, share),
            rows,
            p,
            slack=SLACK,
        )


@pytest.mark.parametrize("wrong", [without_ties, of_the_vocabulary, without_a_limit])
def test_a_wrong_way_to_take_top_k_and_p_together_is_told(
    wrong: Callable[[mx.array, int, float], mx.array],
) -> None:
    rows = [[3.0, 2.9, 2.5, 2.5, 2.5, 2.5], [2.0, 1.9, 1.8, 1.7, 1.6, 1.5]]
    differs = False
    for k, p in ((3, 0.5), (3, 0.6), (3, 0.35), (3, 0.7)):
        scores = scores_of(rows)
        expected = [kept_by_top_k_and_p(row, k, p) for row in np.array(scores).astype(np.float64)]
        right = np.isfinite(np.array(filters.top_k_and_p(scores, k, p)))
        assert np.array_equal(right, expected)
        differs |= not np.array_equal(np.isfinite(np.array(wrong(scores, k, p))), expected)
    assert differs


def nucleus_without_the_crossing_token(scores: mx.array, p: float) -> mx.array:
    """A wrong top-p: keeps only what stays below p, and nothing at all for a small p."""
    order = mx.argsort(-scores, axis=-1)
    mass = mx.cumsum(mx.take_along_axis(mx.softmax(scores, axis=-1), order, axis=-1), axis=-1)
    kept = mx.put_along_axis(mx.zeros_like(mass), order, (mass < p).astype(mx.float32), axis=-1)
    return mx.where(kept > 0, scores, -mx.inf)


WRONG: dict[str, tuple[Filter, float]] = {
    "top_k": (lambda scores, k: filters.top_k(scores, int(k) + 1), 2),
    "top_p": (nucleus_without_the_crossing_token, 0.7),
    "min_p": (lambda scores, p: filters.min_p(mx.softmax(scores, axis=-1), p), 0.3),
    "typical_p": (filters.top_p, 0.2),
    "top_n_sigma": (lambda scores, n: filters.top_n_sigma(scores, 2 * n), 0.4),
    "xtc": (lambda scores, t: mx.where(mx.softmax(scores, axis=-1) > t, -mx.inf, scores), 0.05),
}


@pytest.mark.parametrize("name", CASES)
def test_comparison_rejects_a_wrong_filter(name: str) -> None:
    right, reference, _ = CASES[name]
    rows = [[2.0, 1.5, 1.0, 0.5, 0.0, -3.0], [0.1, 3.0, 0.2, 2.9, -1.0, 2.8]]
    wrong, value = WRONG[name]
    check(right, reference, rows, value, slack=0.0)
    with pytest.raises(AssertionError):
        check(wrong, reference, rows, value, slack=0.0)


@given(
    rows=ROWS,
    value=st.one_of(st.floats(0.05, 50), st.sampled_from([1e-6, 1e-39, 5e-324, 1e30])),
)
def test_temperature_scales_log_weights_at_any_size(rows: list[list[float]], value: float) -> None:
    scores = scores_of(rows)
    result = np.array(filters.temperature(scores, value))
    assert not np.isnan(result).any()
    wide = np.array(scores).astype(np.float64)
    with np.errstate(over="ignore"):
        expected = softmax((wide - wide.max(axis=-1, keepdims=True)) / value)
    if value > 1e-30:
        np.testing.assert_allclose(softmax(result), expected, atol=1e-5)
    np.testing.assert_array_equal(result == 0, wide == wide.max(axis=-1, keepdims=True))
    np.testing.assert_array_equal(np.array(filters.temperature(scores[:1], value)), result[:1])


@pytest.mark.parametrize("value", [1e-6, 1e-39])
def test_tiny_temperature_leaves_only_the_top_token(value: float) -> None:
    row = filters.temperature(scores_of([[1.0, 3.0, 2.9999, -np.inf]]), value)
    # exp(-100) is a number to some devices.
    np.testing.assert_allclose(mx.softmax(row, axis=-1), [[0, 1, 0, 0]], rtol=0, atol=1e-40)


@pytest.mark.parametrize("value", [1e30, 1e46, 1e300])
def test_a_huge_temperature_is_flat_and_spares_what_is_banned(value: float) -> None:
    row = filters.temperature(scores_of([[1.0, 3.0, -np.inf, 0.0]]), value)
    probabilities = np.array(mx.softmax(row, axis=-1))[0]
    np.testing.assert_allclose(probabilities, [1 / 3, 1 / 3, 0, 1 / 3], atol=1e-6)


@pytest.mark.parametrize("p", [0.0, 1e-8])
def test_tiny_top_p_keeps_the_top_token(p: float) -> None:
    kept = np.isfinite(np.array(filters.top_p(scores_of([[0.5, 2.0, 1.9, -np.inf]]), p)))
    assert kept.tolist() == [[False, True, False, False]]


@pytest.mark.parametrize("k", [0, 4, 5, 1000])
def test_top_k_of_at_least_the_width_is_off(k: int) -> None:
    row = scores_of([[0.5, 2.0, -np.inf, 1.0]])
    assert mx.array_equal(filters.top_k(row, k), row)


@pytest.mark.parametrize(
    ("p", "kept"), [(0.499, 1), (0.501, 2), (0.6, 2), (0.799, 2), (0.801, 3), (0.96, 4), (1, 4)]
)
def test_nucleus_is_the_smallest_set_that_reaches_p(p: float, kept: int) -> None:
    row = scores_of(np.log([[0.3, 0.5, 0.05, 0.15]]))
    assert np.isfinite(np.array(filters.top_p(row, p))).sum() == kept


def test_ties_at_a_cut_are_all_kept() -> None:
    flat = mx.zeros((1, 4))
    for result in (filters.top_p(flat, 0.5), filters.top_k(flat, 2), filters.min_p(flat, 1.0)):
        assert mx.array_equal(result, flat)


@pytest.mark.parametrize("threshold", [0.51, 0.6, 1.0])
def test_xtc_above_one_half_removes_nothing(threshold: float) -> None:
    row = scores_of([[5.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert mx.array_equal(xtc_with_coin(row, threshold), row)


def test_xtc_needs_its_coin_and_spares_protected_tokens() -> None:
    rows = scores_of([[3.0, 2.9, 2.8, -5.0]] * 2)
    coins = mx.array([True, False])
    tossed = np.isfinite(np.array(filters.xtc(rows, coins, 0.1, NO_PROTECTED)))
    assert tossed.tolist() == [[False, False, True, True], [True] * 4]
    spared = np.isfinite(np.array(filters.xtc(rows, coins, 0.1, mx.array([0], dtype=mx.int32))))
    assert spared.tolist() == [[True, False, True, True], [True] * 4]


@pytest.mark.parametrize("one_by_one", [True, False])
@given(rows=ROWS, p=st.one_of(SHARES, st.sampled_from([0.0, 1.0])), among=st.integers(1, 14))
def test_weights_of_top_p_are_those_of_what_it_keeps(
    one_by_one: bool, rows: list[list[float]], p: float, among: int
) -> None:
    scores = scores_of(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "computes_one_by_one", lambda: one_by_one)
        for most in (None, among):
            kept = np.array(filters.top_p(scores, p, most))
            weights = np.array(filters.top_p_weights(scores, p, most))
            expected = np.exp(kept.astype(np.float64))
            np.testing.assert_array_equal(weights > 0, expected > 0)
            np.testing.assert_allclose(probabilities(weights), probabilities(expected), 1e-5)


@pytest.mark.parametrize("one_by_one", [True, False])
@given(rows=ROWS, p=SHARES, among=st.integers(1, 14))
def test_top_p_among_a_few_keeps_those_of_its_tokens(
    one_by_one: bool, rows: list[list[float]], p: float, among: int
) -> None:
    """It keeps no other, and all of its own where nothing is saved by keeping fewer."""
    assume(all(is_clear_of_merges(np.array(row, dtype=np.float32)) for row in rows))
    scores = scores_of(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "computes_one_by_one", lambda: one_by_one)
        whole = np.isfinite(np.array(filters.top_p(scores, p)))
        few = np.isfinite(np.array(filters.top_p(scores, p, among)))
    likeliest = np.stack([kept_by_top_k(row, among) for row in np.array(scores)])
    np.testing.assert_array_equal(few, whole & likeliest if one_by_one else whole)


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("p", [0.3, 0.5, 0.9, 0.99])
def test_top_p_of_a_large_bfloat16_vocabulary_equals_float64(
    p: float, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "computes_one_by_one", lambda: one_by_one)
    width = 150_000
    logits = np.random.default_rng(5).normal(scale=3, size=(1, width)).astype(np.float32)
    row = filters.shifted(mx.array(logits).astype(mx.bfloat16))[0]
    kept = np.isfinite(np.array(filters.top_p(row, p)))[0]
    values = np.array(row).astype(np.float64)[0]
    # The reference above is quadratic in the width; this one walks down the distinct values.
    distinct, index = np.unique(-values, return_inverse=True)
    mass = np.bincount(index, weights=softmax(values))
    mass_above = np.cumsum(mass) - mass
    assert np.abs(mass_above - p).min() > 1e-5, "no cut may be a matter of rounding"
    assert len(distinct) < width / 10
    np.testing.assert_array_equal(kept, (mass_above < p)[index])


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "top_n_sigma"])
@given(rows=ROWS, value=SHARES)
def test_most_likely_token_survives(name: str, rows: list[list[float]], value: float) -> None:
    scores = scores_of(rows)
    result = CASES[name][0](scores, 1.0 if name == "top_k" else value)
    assert mx.array_equal(mx.max(result, axis=-1), mx.max(scores, axis=-1))


@pytest.mark.parametrize("name", CASES)
@given(rows=ROWS, value=SHARES)
def test_no_filter_leaves_a_row_empty(name: str, rows: list[list[float]], value: float) -> None:
    scores = scores_of(rows)
    result = CASES[name][0](scores, 1.0 if name == "top_k" else value)
    assert mx.all(mx.any(mx.isfinite(result), axis=-1)).item()


@pytest.mark.parametrize("name", CASES)
def test_wide_rows_are_filtered_alike_alone_and_in_a_block(name: str) -> None:
    rows = scores_of(mx.random.normal((5, 5003), key=mx.random.key(3)) * 3)
    value = 40.0 if name == "top_k" else 0.01 if name == "xtc" else 0.9
    together = CASES[name][0](rows, value)
    assert not mx.array_equal(together, rows)
    for row in range(5):
        alone = CASES[name][0](rows[row : row + 1], value)
        assert mx.array_equal(alone[0], together[row])
