"""Bias and penalties of a block's rows equal a plain computation on each row's own history."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.config import SamplingConfig
from mlxgen.errors import OptionError
from mlxgen.sampling.chain import SamplerChain
from mlxgen.sampling.history import History
from tests.fixtures.reference_sampling import naive_row
from tests.fixtures.statistics import FloatArray

WIDTH = 6


@dataclass(frozen=True)
class Case:
    """A history, proposals after it, how many rows see how many of them, and a configuration."""

    text: list[int]
    proposals: list[int]
    rows: int
    config: SamplingConfig
    breakers: frozenset[int]


CONFIGS = st.builds(
    SamplingConfig,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    repeat_last_n=st.integers(-1, 8),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    dry_multiplier=st.sampled_from([0.0, 0.8]),
    dry_base=st.sampled_from([1.0, 1.75]),
    dry_allowed_length=st.integers(1, 3),
    dry_penalty_last_n=st.integers(-1, 12),
    logit_bias=st.sampled_from([(), ((0, 2.0),), ((1, -1.5), (5, 4.0))]),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few different tokens, so that they repeat; a prompt may hold ids past the width."""
    proposals = draw(st.lists(st.integers(0, 3), max_size=5))
    return Case(
        text=draw(st.lists(st.sampled_from([0, 1, 2, 3, WIDTH + 2]), min_size=1, max_size=25)),
        proposals=proposals,
        rows=draw(st.integers(1, len(proposals) + 1)),
        config=draw(CONFIGS),
        breakers=draw(st.sampled_from([frozenset(), frozenset({1}), frozenset({0, 3})])),
    )


def expected_rows(case: Case, logits: FloatArray) -> FloatArray:
    """The plain computation of every row."""
    rows = []
    for row in range(case.rows):
        seen = len(case.proposals) - (case.rows - 1 - row)
        text = case.text + case.proposals[:seen]
        rows.append(naive_row(logits[row], text, case.config, case.breakers))
    return np.stack(rows)


def adjusted(case: Case, logits: FloatArray) -> FloatArray:
    """What the chain makes of the rows."""
    chain = SamplerChain(case.config, logits.shape[-1], breakers=case.breakers)
    history = chain.new_history(case.text)
    proposals = mx.array(case.proposals, dtype=mx.int32)
    rows = chain.adjusted_logits(mx.array(logits.astype(np.float32)), history, proposals)
    assert rows.dtype == mx.float32
    return np.array(rows).astype(np.float64)


@settings(max_examples=400)
@given(case=cases(), seed=st.integers(0, 9))
def test_each_row_of_a_block_sees_its_own_history(case: Case, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(scale=3, size=(case.rows, WIDTH))
    np.testing.assert_allclose(adjusted(case, logits), expected_rows(case, logits), atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(repetition_penalty=1.3),
        SamplingConfig(frequency_penalty=0.5, repeat_last_n=2),
        SamplingConfig(dry_multiplier=0.8, dry_allowed_length=1),
    ],
)
def test_comparison_rejects_rows_that_share_one_history(config: SamplingConfig) -> None:
    case = Case([1, 2, 3, 1], [4, 3], 3, config, frozenset())
    logits = np.ones((3, WIDTH))
    expected = expected_rows(case, logits)
    np.testing.assert_allclose(adjusted(case, logits), expected, atol=1e-6)
    chain = SamplerChain(config, WIDTH)
    for text in (case.text, case.text + case.proposals):
        shared = chain.adjusted_logits(mx.ones((1, WIDTH)), chain.new_history(text))
        assert np.abs(np.array(shared) - expected).max() > 0.1


@given(case=cases())
def test_history_grown_by_commits_equals_history_made_at_once(case: Case) -> None:
    logits = np.ones((1, WIDTH))
    at_once = Case(case.text + case.proposals, [], 1, case.config, case.breakers)
    chain = SamplerChain(case.config, WIDTH, breakers=case.breakers)
    history = chain.new_history(case.text)
    for token in case.proposals:
        history.extend([token])
    grown = chain.adjusted_logits(mx.array(logits.astype(np.float32)), history)
    np.testing.assert_array_equal(np.array(grown), adjusted(at_once, logits))


def test_rejected_proposals_leave_no_trace() -> None:
    config = SamplingConfig(repetition_penalty=1.5, dry_multiplier=1.0, frequency_penalty=1.0)
    chain = SamplerChain(config, WIDTH)
    history = chain.new_history([1, 2, 1, 2])
    row = mx.arange(6).astype(mx.float32)[None]
    before = chain.adjusted_logits(row, history)
    mx.eval(chain.adjusted_logits(mx.concatenate([row] * 3), history, mx.array([1, 2])))
    assert len(history) == 4
    assert mx.array_equal(chain.adjusted_logits(row, history), before)


def one_row(config: SamplingConfig, logits: list[float], text: list[int]) -> list[float]:
    """The adjusted logits after a text."""
    chain = SamplerChain(config, len(logits))
    row = chain.adjusted_logits(mx.array([logits]), chain.new_history(text))
    return [float(value) for value in np.array(row)[0]]


def test_repetition_penalty_lowers_both_signs() -> None:
    config = SamplingConfig(repetition_penalty=2.0)
    assert one_row(config, [-2.0, 2.0, 3.0], [0, 1]) == [-4.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("last_n", "expected"), [(-1, [0.0, 0.0, 3.0]), (0, [2.0, 2.0, 4.0]), (1, [2.0, 2.0, 3.0])]
)
def test_repeat_window_counts_from_the_end(last_n: int, expected: list[float]) -> None:
    config = SamplingConfig(frequency_penalty=1.0, repeat_last_n=last_n)
    assert one_row(config, [2.0, 2.0, 4.0], [0, 0, 1, 1, 2]) == expected


def test_penalties_count_the_prompt() -> None:
    # As the mirrored tool does, and as docs/speculative-acceptance.md says.
    config = SamplingConfig(presence_penalty=1.0)
    assert one_row(config, [0.0, 0.0], [1]) == [0.0, -1.0]


def test_dry_penalty_grows_with_the_length_of_the_match() -> None:
    text = [1, 2, 3, 4, 1, 2, 3]
    for allowed, expected in ((1, 0.5 * 2**2), (2, 0.5 * 2), (3, 0.5), (4, 0.0)):
        config = SamplingConfig(dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=allowed)
        assert one_row(config, [0.0] * 6, text) == [0, 0, 0, 0, -expected, 0]


def test_dry_breakers_end_a_match() -> None:
    config = SamplingConfig(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1)
    chain = SamplerChain(config, 6, breakers=[2])
    row = chain.adjusted_logits(mx.zeros((1, 6)), chain.new_history([1, 2, 3, 4, 1, 2, 3]))
    assert np.array(row)[0].tolist() == [0, 0, 0, 0, -1, 0]


@pytest.mark.parametrize("multiplier", [1.0, 1e30])
def test_dry_stays_finite_on_a_5000_token_repeat(multiplier: float) -> None:
    config = SamplingConfig(dry_multiplier=multiplier)
    row = one_row(config, [0.0, 0.0, 0.0], [1] * 5000)
    assert all(math.isfinite(value) for value in row)
    assert row[1] < -1e29 and row[0] == row[2] == 0


def test_histories_grow_past_their_first_buffer() -> None:
    text = [int(token) for token in np.random.default_rng(0).integers(0, 3, 3000)]
    history = History(text, track_matches=True)
    assert history.tokens.tolist() == text and len(history.match_lengths) == 3000
    config = SamplingConfig(dry_multiplier=1.0, frequency_penalty=0.01)
    expected = naive_row(np.zeros(3), text, config, ())
    np.testing.assert_allclose(one_row(config, [0.0] * 3, text), expected, rtol=1e-5)


def test_bias_moves_its_token_alone_and_minus_infinity_bans_it() -> None:
    config = SamplingConfig(logit_bias=((0, 1.5), (2, -math.inf)))
    assert one_row(config, [1.0, 1.0, 1.0], [0]) == [2.5, 1.0, -math.inf]


@pytest.mark.parametrize("bias", [((WIDTH, 1.0),), ((1_000_000, 5.0),)])
def test_bias_past_the_vocabulary_is_refused(bias: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(OptionError, match="ids 0 to 5"):
        SamplerChain(SamplingConfig(logit_bias=bias), WIDTH)


@pytest.mark.parametrize(
    "bias", [((-1, 5.0),), ((3, math.nan),), ((3, math.inf),), ((3, 1.0), (3, 2.0))]
)
def test_unusable_bias_is_refused(bias: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(OptionError, match="--logit-bias"):
        SamplingConfig(logit_bias=bias)


def test_frequency_penalty_works_at_any_width() -> None:
    config = SamplingConfig(frequency_penalty=2.0)
    row = one_row(config, [0.0] * 70_000, [69_999] * 10)
    assert row[-1] == -20.0 and not any(row[:-1])
