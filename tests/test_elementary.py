"""Elementary functions are accurate to float32 whichever way they are computed."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxgen.sampling import elementary


@pytest.fixture(params=[True, False], ids=["one by one", "MLX's own"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(elementary, "computes_one_by_one", lambda: request.param)
    return bool(request.param)


@pytest.mark.usefixtures("way")
def test_exp_is_accurate_and_keeps_what_is_not_finite() -> None:
    x = np.linspace(-87, 87, 100_001).astype(np.float32)
    result = np.array(elementary.exp(mx.array(x))).astype(np.float64)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(result / exact - 1) <= 4e-7 + 1e-7 * np.abs(x)).all()
    ends = np.array(elementary.exp(mx.array([0.0, -math.inf, math.inf, math.nan])))
    np.testing.assert_array_equal(ends, [1, 0, math.inf, math.nan])


NEAR_ZERO = 2.0 ** -np.arange(1, 60.0)
NEAR_ONE = 1 - 2.0 ** -np.arange(1, 25.0)


def negative_log1m_errors(negative_log1m: object) -> float:
    between = np.random.default_rng(1).random(100_000)
    u = np.concatenate([between, NEAR_ZERO, NEAR_ONE]).astype(np.float32)
    u = u[u < 1]
    result = np.array(negative_log1m(mx.array(u))).astype(np.float64)  # type: ignore[operator]
    return float(np.abs(result / -np.log1p(-u.astype(np.float64)) - 1).max())


@pytest.mark.usefixtures("way")
def test_negative_log1m_is_accurate_down_to_the_smallest_arguments() -> None:
    assert negative_log1m_errors(elementary.negative_log1m) < 5e-7


def test_the_same_comparison_rejects_the_log_of_the_difference() -> None:
    assert negative_log1m_errors(lambda u: -mx.log(1 - u)) > 0.1


def test_negative_log1m_of_nothing_is_nothing() -> None:
    assert elementary.negative_log1m(mx.array([0.0])).item() == 0


@given(ids=st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_one_hot_rows_have_their_one_at_the_id(ids: list[int]) -> None:
    rows = elementary.one_hot(mx.array(ids, dtype=mx.int32), 7)
    assert rows.dtype == mx.float32
    np.testing.assert_array_equal(np.array(rows), np.eye(7)[ids])
