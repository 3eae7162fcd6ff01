"""Sums over wide rows are accurate in float32, and do not depend on the rows beside them."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings

from mlxgen.sampling import sums
from mlxgen.sampling.chain import probabilities

WIDTHS = [1, 5, 255, 256, 257, 49_152, 150_000]


def weights(width: int) -> mx.array:
    """Two rows of weights in falling order, the worst case for a running sum."""
    logits = np.random.default_rng(width).normal(scale=3, size=(2, width))
    return mx.array(-np.sort(-np.exp(logits), axis=-1).astype(np.float32))


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_equal_float64(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = weights(width)
    wide = np.array(rows).astype(np.float64)
    np.testing.assert_allclose(sums.total(rows), wide.sum(-1, keepdims=True), rtol=5e-6)
    before = np.cumsum(wide, axis=-1) - wide
    largest = wide.sum(axis=-1).max()
    np.testing.assert_allclose(sums.sums_before(rows), before, rtol=5e-6, atol=5e-6 * largest)
    log_total = np.log(np.exp(wide).sum(-1, keepdims=True)) if width < 10 else None
    if log_total is not None:
        np.testing.assert_allclose(sums.log_sum_exp(rows), log_total, rtol=5e-6)
    logarithms = mx.log(rows)
    for one_by_one in (True, False):
        monkeypatch.setattr(sums, "computes_one_by_one", lambda way=one_by_one: way)
        log_sum = sums.log_sum_exp(logarithms)
        np.testing.assert_allclose(log_sum, np.log(wide.sum(-1, keepdims=True)), atol=5e-6)


@pytest.mark.parametrize("width", [1, 5, 256, 5000])
def test_single_operations_are_the_same_sums(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU computes; on a CPU these are running sums, so the width and the bound differ."""
    rows = weights(width)
    functions = (sums.total, sums.sums_before)
    expected = [np.array(function(rows)) for function in functions]
    log_sum = np.array(sums.log_sum_exp(mx.log(rows)))
    monkeypatch.setattr(sums, "_adds_in_parts", lambda: True)
    largest = np.array(sums.total(rows)).max()
    for function, values in zip(functions, expected, strict=True):
        np.testing.assert_allclose(function(rows), values, rtol=1e-4, atol=1e-4 * largest)
    np.testing.assert_allclose(sums.log_sum_exp(mx.log(rows)), log_sum, atol=1e-4)


@pytest.mark.parametrize("width", WIDTHS)
def test_probabilities_sum_to_one(width: int) -> None:
    rows = np.array(probabilities(weights(width))).astype(np.float64)
    np.testing.assert_allclose(rows.sum(axis=-1), 1, atol=5e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_do_not_depend_on_their_block(width: int) -> None:
    rows = weights(width)
    for function in (sums.total, sums.sums_before, sums.log_sum_exp):
        assert mx.array_equal(function(rows)[1:], function(rows[1:]))


def test_rows_without_weight_have_the_log_of_nothing() -> None:
    rows = mx.full((2, 300), -mx.inf)
    assert np.array(sums.log_sum_exp(rows)).tolist() == [[-np.inf]] * 2


def test_log_weight_is_log_sum_exp_of_shifted_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = mx.log(weights(5000))
    scores = scores - scores.max(axis=-1, keepdims=True)
    for one_by_one in (True, False):
        monkeypatch.setattr(sums, "computes_one_by_one", lambda way=one_by_one: way)
        np.testing.assert_allclose(sums.log_weight(scores), sums.log_sum_exp(scores), rtol=1e-6)


@pytest.mark.parametrize("adds_in_parts", [True, False])
def test_weights_are_in_proportion_and_add_up_to_their_sum(
    adds_in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "_adds_in_parts", lambda: adds_in_parts)
    scores = mx.array([[0.0, -1.5, -mx.inf, -20.0], [-3.0, 0.0, 0.0, -0.25]])
    weights, whole = sums.weights(scores)
    np.testing.assert_allclose(np.array(weights.sum(axis=-1, keepdims=True) / whole), 1, rtol=1e-6)
    expected = np.exp(np.array(scores))
    np.testing.assert_allclose(
        np.array(weights / whole), expected / expected.sum(-1)[:, None], 1e-5
    )


def is_smallest_needed(cut: float, row: Any, enough: float) -> bool:
    """Whether the entries from the cut on reach `enough`, or are all there are, and those above it
    do not, up to the rounding of float32."""
    wide = row.astype(np.float64)
    slack = 5e-6 * wide.sum()
    if cut == 0:
        return bool(0 in row and enough >= wide.sum() - slack)
    reaches = wide[row >= cut].sum() >= enough - slack or cut == row[row > 0].min()
    is_needed = wide[row > cut].sum() < enough + slack
    return bool(cut in row and cut > 0 and reaches and is_needed)


@pytest.mark.parametrize("adds_in_parts", [True, False])
@settings(deadline=None, max_examples=60)
@given(
    width=st.sampled_from([1, 2, 255, 256, 257, 512, 700, 3000]),
    seed=st.integers(0, 2**32 - 1),
    zeros=st.floats(0, 1),
    ties=st.booleans(),
    share=st.floats(1e-6, 1),
)
def test_smallest_needed_is_needed_and_enough(
    adds_in_parts: bool, width: int, seed: int, zeros: float, ties: bool, share: float
) -> None:
    random = np.random.default_rng(seed)
    rows = np.exp(random.normal(scale=3, size=(2, width))).astype(np.float32)
    if ties:
        rows = np.maximum(np.round(rows), 1)
    rows[:, : int(zeros * (width - 1))] = 0
    rows = np.sort(rows, axis=-1)
    enough = (share * rows.sum(axis=-1, keepdims=True)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "_adds_in_parts", lambda: adds_in_parts)
        cuts = np.array(sums.smallest_needed(mx.array(rows), mx.array(enough)))
    for cut, row, goal in zip(cuts[:, 0], rows, enough[:, 0], strict=True):
        assert is_smallest_needed(cut, row, goal)


@pytest.mark.parametrize("adds_in_parts", [True, False])
@settings(deadline=None, max_examples=100)
@given(
    counts=st.tuples(*[st.sampled_from([0, 1, 3, 128, 255, 256, 257, 512])] * 4),
    halves=st.integers(0, 2 * 4000),
    at_an_end=st.booleans(),
)
@example(counts=(0, 256, 256, 256), halves=1, at_an_end=True)
@example(counts=(512, 128, 128, 0), halves=8000, at_an_end=False)
def test_smallest_needed_of_small_integers_is_exact(
    adds_in_parts: bool, counts: tuple[int, ...], halves: int, at_an_end: bool
) -> None:
    """Sums of these are exact, so it matters whether a sum reaches its goal or just falls short."""
    row = np.repeat(np.arange(4), counts)
    positive = row[row > 0][::-1]
    if not len(positive):
        return
    reached = np.cumsum(positive)
    ends = np.flatnonzero(np.diff(positive, append=0))
    enough = float(reached[ends[halves % len(ends)]]) if at_an_end else halves / 2
    needed = int((reached < enough).sum())
    expected = positive[min(needed, len(positive) - 1)]
    if adds_in_parts and enough > row.sum():
        expected = row[0]  # more than there is: all of them, zeros included
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "_adds_in_parts", lambda: adds_in_parts)
        rows = mx.array(row[None].astype(np.float32))
        assert sums.smallest_needed(rows, mx.array([[enough]])).item() == expected


def test_the_neighbours_of_the_smallest_needed_are_rejected() -> None:
    row = np.arange(1, 1001, dtype=np.float32)
    cut = np.array(sums.smallest_needed(mx.array(row[None]), mx.array([[250_000.0]]))).item()
    assert is_smallest_needed(cut, row, 250_000)
    assert not is_smallest_needed(cut - 1, row, 250_000)
    assert not is_smallest_needed(cut + 1, row, 250_000)


@pytest.mark.parametrize("adds_in_parts", [True, False])
@pytest.mark.parametrize("width", [3, 700])
def test_the_largest_entry_is_always_needed(
    adds_in_parts: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "_adds_in_parts", lambda: adds_in_parts)
    rows = mx.arange(width, dtype=mx.float32)[None]
    assert sums.smallest_needed(rows, mx.array([[0.0]])).item() == width - 1
