"""The sampler chain: its order, and that draw and distribution come from the same weights."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlxgen.config import FILTER_NAMES, MLX_LM_ORDER, SamplingConfig
from mlxgen.errors import OptionError
from mlxgen.sampling.chain import (
    SamplerChain,
    effective_token_distribution,
    probabilities,
    rows_are_usable,
    sample_token_with_distribution,
)
from mlxgen.sampling.elementary import race
from mlxgen.sampling.randomness import Randomness, Stream, exponential
from mlxgen.sampling.target_draw import draw_by_position
from tests.fixtures.reference_sampling import (
    kept_by_min_p,
    kept_by_top_k,
    kept_by_top_n_sigma,
    kept_by_top_p,
    kept_by_typical_p,
    kept_by_xtc,
    naive_row,
)
from tests.fixtures.runs import forbid_random_numbers, global_random_state
from tests.fixtures.statistics import FloatArray, follows, softmax

EVERYTHING = SamplingConfig(
    temperature=0.8,
    top_k=5,
    top_p=0.95,
    min_p=0.02,
    typical_p=0.98,
    top_n_sigma=3.0,
    repetition_penalty=1.2,
    frequency_penalty=0.1,
    presence_penalty=0.2,
    dry_multiplier=0.3,
    dry_allowed_length=1,
    logit_bias=((0, 0.5),),
)


def distribution(
    config: SamplingConfig, logits: list[float], text: list[int] | None = None
) -> FloatArray:
    """The effective distribution after a text."""
    chain = SamplerChain(config, len(logits))
    row = effective_token_distribution(mx.array([logits]), chain, chain.new_history(text or [0]))
    return np.asarray(np.array(row)[0], dtype=np.float64)


def kept(config: SamplingConfig, logits: list[float]) -> list[int]:
    """Ids of positive probability."""
    return [int(token) for token in np.flatnonzero(distribution(config, logits))]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (FILTER_NAMES, [0]),  # temperature first: .867 already reaches .8
        (MLX_LM_ORDER, [0, 1]),  # temperature last: .665 + .245
        (("top_p", "temperature"), [0, 1]),
        (("temperature", "top_p"), [0]),
    ],
)
def test_filters_run_in_the_order_given(order: tuple[str, ...], expected: list[int]) -> None:
    config = SamplingConfig(temperature=0.5, top_p=0.8, order=order)
    assert kept(config, [3.0, 2.0, 1.0]) == expected
    weights = softmax(np.array([6.0, 4.0, 2.0])[expected])
    np.testing.assert_allclose(distribution(config, [3.0, 2.0, 1.0])[expected], weights, atol=1e-6)


def test_default_order_cuts_tempered_probabilities() -> None:
    config = SamplingConfig(temperature=0.5, top_p=0.9)
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    # Squared and normalised: .685, .247, .062, .007.
    assert kept(config, logits) == [0, 1]
    untempered = SamplingConfig(temperature=0.5, top_p=0.9, order=MLX_LM_ORDER)
    assert kept(untempered, logits) == [0, 1, 2]


REFERENCES = {
    "top_k": kept_by_top_k,
    "top_p": kept_by_top_p,
    "min_p": kept_by_min_p,
    "typical_p": kept_by_typical_p,
    "top_n_sigma": kept_by_top_n_sigma,
    "xtc": kept_by_xtc,
}
SHARES = st.floats(0.05, 0.99)
CONFIGS = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 2, 4, 100]),
    top_p=st.one_of(st.just(1.0), SHARES),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.5)),
    typical_p=st.one_of(st.just(1.0), SHARES),
    top_n_sigma=st.one_of(st.just(0.0), st.floats(0.5, 4)),
    xtc_probability=st.sampled_from([0.0, 1.0]),
    xtc_threshold=st.floats(0.05, 0.4),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([(), ((1, 3.0), (2, -math.inf))]),
    order=st.permutations(FILTER_NAMES).map(tuple),
)


def reference_distribution(
    config: SamplingConfig, logits: FloatArray, text: list[int]
) -> FloatArray:
    """The chain in float64, for one row whose XTC coin shows heads."""
    values = {
        "top_k": config.top_k,
        "top_p": config.top_p,
        "min_p": config.min_p,
        "typical_p": config.typical_p,
        "top_n_sigma": config.top_n_sigma,
        "xtc": config.xtc_threshold,
    }
    row = naive_row(logits, text, config, ())
    for name in config.order:
        if name not in config.active_filters:
            continue
        if name == "temperature":
            row = row / config.temperature
        else:
            row = np.where(REFERENCES[name](row, values[name]), row, -np.inf)
    return softmax(row)


@settings(max_examples=200)
@given(config=CONFIGS, seed=st.integers(0, 10_000), text=st.lists(st.integers(0, 7), min_size=1))
def test_whole_chain_equals_float64_in_any_order(
    config: SamplingConfig, seed: int, text: list[int]
) -> None:
    logits = np.random.default_rng(seed).normal(scale=2, size=8).astype(np.float32)
    wide = logits.astype(np.float64)
    expected = reference_distribution(config, wide, text)
    # Where shifted logits are cut otherwise, a cut lies too close to a token to be judged.
    nudge = np.random.default_rng(0).normal(scale=1e-5, size=(3, 8))
    for nudged in wide + nudge:
        nearby = reference_distribution(config, nudged, text)
        assume(np.array_equal(nearby > 0, expected > 0))
    chain = SamplerChain(config, 8)
    coins = mx.zeros((1,)) if chain.tosses_coins else None
    history = chain.new_history(text)
    row = effective_token_distribution(mx.array(logits)[None], chain, history, coins=coins)
    np.testing.assert_allclose(np.array(row)[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("order", "sorted_widths"),
    [
        (FILTER_NAMES, {4}),
        (("temperature", "top_k", "min_p", "top_p", "typical_p", "top_n_sigma", "xtc"), {30}),
        (("temperature", "top_p", "top_k", "min_p", "typical_p", "top_n_sigma", "xtc"), {30}),
    ],
    ids=["one behind the other", "another between them", "the other way round"],
)
def test_top_p_behind_top_k_sorts_k_values(
    order: tuple[str, ...], sorted_widths: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SamplingConfig(temperature=0.8, top_k=4, top_p=0.8, min_p=0.01, order=order)
    widths = set()
    sort = mx.sort

    def noted(rows: mx.array, axis: int) -> mx.array:
        widths.add(rows.shape[axis])
        return sort(rows, axis=axis)

    monkeypatch.setattr(mx, "sort", noted)
    chain = SamplerChain(config, 30)
    chain.weights(mx.random.normal((3, 30), key=mx.random.key(1)), chain.new_history([0]))
    assert widths == sorted_widths


@pytest.mark.parametrize("config", [EVERYTHING, SamplingConfig(temperature=1.0)])
def test_reported_distribution_is_that_of_the_weights_drawn_from(config: SamplingConfig) -> None:
    """False alarm 1e-4, fixed seed: the ids follow the very row that is reported."""
    count = 20_000
    chain = SamplerChain(config, 8)
    history = chain.new_history([0, 1, 2, 1])
    one = mx.random.normal((1, 8), key=mx.random.key(4)) * 1.5
    weights = chain.weights(one, history).rows
    row = effective_token_distribution(one, chain, history)
    assert mx.array_equal(row, probabilities(weights))
    wide = np.array(weights).astype(np.float64)
    np.testing.assert_allclose(np.array(row), wide / wide.sum(), atol=1e-6)

    noise = exponential(Randomness(5).position_keys(Stream.TARGET, 0, count), 8)
    ids, sampled_from = sample_token_with_distribution(one, chain, history, noise[:1])
    assert mx.array_equal(sampled_from, row) and ids.shape == (1,)
    drawn = np.array(race(mx.broadcast_to(weights, noise.shape), noise))
    assert drawn[0] == np.array(ids)[0]
    assert follows(drawn, np.array(row)[0].astype(np.float64))


def test_narrowing_a_chain_for_the_draft_leaves_the_targets_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are made of one chain, and the target's nucleus is not to be cut."""
    monkeypatch.setattr("mlxgen.sampling.filters.computes_one_by_one", lambda: True)
    chain = SamplerChain(SamplingConfig(temperature=1.0, top_p=0.99), 6)
    logits, history = mx.array([[3.0, 2.5, 2.0, 1.5, 1.0, -9.0]]), chain.new_history([0])
    narrow = chain.narrowed(2)
    assert (np.array(narrow.weights(logits, history).rows) > 0).sum() == 2
    assert (np.array(chain.weights(logits, history).rows) > 0).sum() == 5


@pytest.mark.parametrize(
    "config", [SamplingConfig(), SamplingConfig(temperature=1.3, top_k=1, min_p=0.5)]
)
def test_greedy_distribution_is_one_hot_at_the_first_top_token(config: SamplingConfig) -> None:
    assert config.is_greedy and not config.active_filters
    assert distribution(config, [1.0, 3.0, 3.0, 2.0]).tolist() == [0, 1, 0, 0]
    chain = SamplerChain(config, 4)
    noise = mx.array([[0.01, 1.0, 1.0, 1.0]])
    ids, row = sample_token_with_distribution(
        mx.array([[1.0, 3.0, 3.0, 2.0]]), chain, chain.new_history([0]), noise
    )
    assert np.array(ids).tolist() == [1] and np.array(row).tolist() == [[0, 1, 0, 0]]


def test_greedy_choice_sees_bias_and_penalties() -> None:
    config = SamplingConfig(logit_bias=((0, 5.0),), frequency_penalty=3.0)
    assert distribution(config, [0.0, 4.0, 3.5], [1]).tolist() == [1, 0, 0]
    assert distribution(config, [0.0, 4.0, 3.5], [0, 1]).tolist() == [0, 0, 1]


@pytest.mark.parametrize("temperature", [0.01, 1e-6, 1e-39])
def test_filters_compose_without_an_empty_set(temperature: float) -> None:
    config = SamplingConfig(temperature=temperature, top_k=2, top_p=0.8, min_p=0.9, typical_p=0.5)
    assert distribution(config, [1.0, 3.0, 2.5, -math.inf]).tolist() == [0, 1, 0, 0]


def test_distribution_consumes_no_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    before = global_random_state()
    forbid_random_numbers(monkeypatch)
    config = SamplingConfig(temperature=0.7, xtc_probability=0.5, top_p=0.9)
    chain = SamplerChain(config, 4)
    row = effective_token_distribution(
        mx.array([[1.0, 2.0, 3.0, 0.0]]), chain, chain.new_history([0]), coins=mx.array([0.4])
    )
    mx.eval(row)
    assert global_random_state() == before


def test_guard_against_random_numbers_works(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_random_numbers(monkeypatch)
    with pytest.raises(AssertionError, match="random number"):
        exponential(Randomness(0).position_keys(Stream.TARGET, 0, 1), 4)


def test_every_row_tosses_its_own_coin() -> None:
    chain = SamplerChain(SamplingConfig(temperature=1.0, xtc_probability=0.5), 3)
    assert chain.tosses_coins
    logits = mx.array([[2.0, 1.9, -9.0]] * 3)
    weights = chain.weights(logits, chain.new_history([0]), coins=mx.array([0.49, 0.5, 0.2])).rows
    assert (np.array(weights) > 0)[:, 0].tolist() == [False, True, False]
    with pytest.raises(ValueError, match="coin"):
        chain.weights(logits, chain.new_history([0]))


def test_xtc_leaves_end_of_sequence_tokens_possible() -> None:
    config = SamplingConfig(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.1)
    chain = SamplerChain(config, 4, protected=[0, 99])
    weights = chain.weights(
        mx.array([[3.0, 2.9, 2.8, 0.0]]), chain.new_history([1]), coins=mx.zeros((1,))
    ).rows
    assert (np.array(weights) > 0)[0].tolist() == [True, False, True, True]


def test_target_draws_do_not_depend_on_the_block() -> None:
    """Rows drawn at once equal rows drawn one by one: why match rules emit plain decoding's ids."""
    config = SamplingConfig(temperature=0.9, xtc_probability=0.5, repetition_penalty=1.2, top_k=9)
    chain, randomness = SamplerChain(config, 32), Randomness(6)
    logits = mx.random.normal((5, 32), key=mx.random.key(1))
    proposals = [3, 8, 3, 1]
    text = [5, 6, 7]
    block = draw_by_position(
        chain, randomness, logits, chain.new_history(text), mx.array(proposals), len(text)
    )
    for row in range(5):
        history = chain.new_history(text + proposals[:row])
        one = draw_by_position(
            chain, randomness, logits[row : row + 1], history, None, len(history)
        )
        assert mx.array_equal(one.rows[0], block.rows[row])
        assert np.array(one.ids)[0] == np.array(block.ids)[row]


@pytest.mark.parametrize(
    ("row", "usable"),
    [
        ([1.0, 2.0, 0.0], True),
        ([1.0, -math.inf, -math.inf], True),
        ([math.nan, 2.0, 0.0], False),
        ([1.0, 2.0, math.nan], False),
        ([-math.inf] * 3, False),
        ([math.inf, 2.0, 0.0], False),
        ([math.nan] * 3, False),
    ],
)
@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(),
        SamplingConfig(temperature=1.0),
        SamplingConfig(temperature=0.7, top_k=2, top_p=0.5, min_p=0.1, typical_p=0.9),
        SamplingConfig(temperature=0.7, top_n_sigma=1.0),
        SamplingConfig(temperature=1.0, top_k=2),  # would mask a NaN and go on
    ],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_rows_that_are_not_finite_are_noticed(
    config: SamplingConfig, row: list[float], usable: bool, dtype: mx.Dtype
) -> None:
    chain = SamplerChain(config, 3)
    logits = mx.array([[0.0, 0.0, 1.0], row]).astype(dtype)
    history = chain.new_history([0])
    scored = chain.choose(logits, history) if config.is_greedy else chain.weights(logits, history)
    assert rows_are_usable(scored.tops) is usable
    if usable and not config.is_greedy:
        total = scored.rows.sum(axis=-1)
        assert mx.all((total > 0) & (total < mx.inf)).item()


def test_bias_that_bans_every_token_is_noticed() -> None:
    config = SamplingConfig(temperature=1.0, logit_bias=((0, -math.inf), (1, -math.inf)))
    chain = SamplerChain(config, 2)
    logits = mx.zeros((1, 2))
    assert not rows_are_usable(chain.weights(logits, chain.new_history([0])).tops)


def test_flat_model_emits_every_token() -> None:
    chain = SamplerChain(SamplingConfig(temperature=1.0), 6)
    seen = set()
    for seed in range(300):
        drawn = draw_by_position(
            chain, Randomness(seed), mx.zeros((1, 6)), chain.new_history([0]), None, 1
        )
        seen.add(int(np.array(drawn.ids)[0]))
    assert seen == set(range(6))


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 1.5},
        {"top_p": math.nan},
        {"top_p": -0.1},
        {"min_p": 1.1},
        {"typical_p": 0.0},
        {"top_n_sigma": -1.0},
        {"xtc_threshold": 0.0},
        {"xtc_probability": 2.0},
        {"repetition_penalty": 0.0},
        {"repeat_last_n": -2},
        {"frequency_penalty": math.inf},
        {"dry_base": 0.5},
        {"dry_allowed_length": 0},
        {"order": ("temperature", "unheard_of")},
        {"order": ("temperature",), "temperature": 0.5, "top_p": 0.5},
        {"order": ("temperature", "temperature")},
    ],
)
def test_value_out_of_range_is_refused_in_one_line(values: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as raised:
        SamplingConfig(**values)
    assert str(raised.value).startswith("--") and "\n" not in str(raised.value)
