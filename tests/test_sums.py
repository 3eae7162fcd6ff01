"""Sums over wide rows are accurate in float32, and do not depend on the rows beside them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxgen.sampling import sums
from mlxgen.sampling.chain import log_probabilities

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
    behind = np.cumsum(wide[:, ::-1], axis=-1)[:, ::-1] - wide
    largest = wide.sum(axis=-1).max()
    np.testing.assert_allclose(sums.sums_before(rows), before, rtol=5e-6, atol=5e-6 * largest)
    np.testing.assert_allclose(sums.sums_behind(rows), behind, rtol=5e-6, atol=5e-6 * largest)
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
    functions = (sums.total, sums.sums_before, sums.sums_behind)
    expected = [np.array(function(rows)) for function in functions]
    log_sum = np.array(sums.log_sum_exp(mx.log(rows)))
    monkeypatch.setattr(sums, "_adds_in_parts", lambda: True)
    largest = np.array(sums.total(rows)).max()
    for function, values in zip(functions, expected, strict=True):
        np.testing.assert_allclose(function(rows), values, rtol=1e-4, atol=1e-4 * largest)
    np.testing.assert_allclose(sums.log_sum_exp(mx.log(rows)), log_sum, atol=1e-4)


@pytest.mark.parametrize("width", WIDTHS)
def test_probabilities_sum_to_one(width: int) -> None:
    rows = np.array(mx.exp(log_probabilities(mx.log(weights(width))))).astype(np.float64)
    np.testing.assert_allclose(rows.sum(axis=-1), 1, atol=5e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_do_not_depend_on_their_block(width: int) -> None:
    rows = weights(width)
    for function in (sums.total, sums.sums_before, sums.sums_behind, sums.log_sum_exp):
        assert mx.array_equal(function(rows)[1:], function(rows[1:]))


def test_rows_without_weight_have_the_log_of_nothing() -> None:
    rows = mx.full((2, 300), -mx.inf)
    assert np.array(sums.log_sum_exp(rows)).tolist() == [[-np.inf]] * 2
