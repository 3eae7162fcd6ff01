"""Keys and noise: reproducible, prefix-stable, separate by purpose, and without global state."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxgen.config import MAX_SEED
from mlxgen.sampling.elementary import race
from mlxgen.sampling.randomness import Randomness, Stream, exponential, uniform
from tests.fixtures.runs import global_random_state
from tests.fixtures.statistics import follows, softmax

SEEDS = st.one_of(st.integers(0, 5), st.integers(0, MAX_SEED), st.just(MAX_SEED))
POSITIONS = st.one_of(st.integers(0, 100), st.integers(0, 2**33))


def rows(keys: mx.array) -> list[tuple[int, int]]:
    """Keys as pairs."""
    return [(int(first), int(second)) for first, second in np.array(keys)]


@given(seed=SEEDS, first=POSITIONS, count=st.integers(1, 9), stream=st.sampled_from(Stream))
def test_key_of_a_position_does_not_depend_on_the_block(
    seed: int, first: int, count: int, stream: Stream
) -> None:
    together = Randomness(seed).position_keys(stream, first, count)
    assert together.dtype == mx.uint32
    alone = [Randomness(seed).position_keys(stream, first + i, 1) for i in range(count)]
    assert rows(together) == [pair for key in alone for pair in rows(key)]


@given(seed=SEEDS, start=POSITIONS, count=st.integers(1, 9), stream=st.sampled_from(Stream))
def test_key_of_an_offset_does_not_depend_on_the_block_length(
    seed: int, start: int, count: int, stream: Stream
) -> None:
    together = Randomness(seed).round_keys(stream, start, range(count))
    alone = [Randomness(seed).round_keys(stream, start, range(i, i + 1)) for i in range(count)]
    assert rows(together) == [pair for key in alone for pair in rows(key)]


@given(seed=SEEDS, position=POSITIONS, stream=st.sampled_from(Stream), offset=st.integers(0, 8))
def test_keys_are_those_of_the_hashed_seed(
    seed: int, position: int, stream: Stream, offset: int
) -> None:
    """A seed shall give the same text with every version, so its keys are pinned down."""

    def expected(name: str) -> tuple[int, int]:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        base = int.from_bytes(digest[4:8], "little")
        return int.from_bytes(digest[:4], "little"), (base + position) % 2**32

    keys = Randomness(seed)
    # Asked for before: what is kept of one stream and length must not answer for another.
    for other in Stream:
        keys.round_keys(other, 3, range(2))
        keys.round_keys(other, 3, range(1, 10))
    assert rows(keys.position_keys(stream, position, 1)) == [expected(stream.value)]
    of_round = rows(keys.round_keys(stream, position, range(offset + 1)))
    assert of_round == [expected(f"{stream.value}/{i}") for i in range(offset + 1)]


def test_no_two_keys_of_a_run_are_equal() -> None:
    keys = Randomness(3)
    seen = []
    for stream in Stream:
        seen += rows(keys.position_keys(stream, 0, 200))
        for start in range(200):
            seen += rows(keys.round_keys(stream, start, range(9)))
    assert len(set(seen)) == len(seen) == 6 * 200 * 10


def test_same_position_in_another_round_has_another_key() -> None:
    """A rule may look at a draw and reject its position; the next round must draw anew."""
    keys = Randomness(3)
    for stream in Stream:
        first = keys.round_keys(stream, 10, range(4))
        second = keys.round_keys(stream, 12, range(4))
        assert rows(first)[2] != rows(second)[0]
        assert not set(rows(first)) & set(rows(second))


CALLS = st.lists(
    st.tuples(st.integers(0, 200) | st.integers(2**32 - 70, 2**32 + 70), st.integers(1, 4)),
    min_size=1,
    max_size=8,
)


def are_those_of_the_keys(uniforms: Callable[..., mx.array], calls: list[tuple[int, int]]) -> bool:
    """Whether all of these calls, one after the other, give the uniforms of the keys."""
    keys = Randomness(11)
    return all(
        mx.array_equal(
            uniforms(keys, start, count),
            uniform(keys.round_keys(Stream.ACCEPT, start, range(count))),
        )
        for start, count in calls
    )


@settings(deadline=None)
@given(calls=CALLS)
@example(calls=[(5, 3), (68, 3), (5, 3), (69, 3)])
@example(calls=[(5, 3), (4, 3)])
def test_uniforms_made_for_many_rounds_are_those_of_each(calls: list[tuple[int, int]]) -> None:
    assert are_those_of_the_keys(Randomness.accept_uniforms, calls)


@pytest.mark.parametrize("wrong", ["another start", "what was asked first"])
def test_uniforms_of_other_rounds_are_told(wrong: str) -> None:
    first: dict[int, mx.array] = {}

    def wrongly(keys: Randomness, start: int, count: int) -> mx.array:
        if wrong == "another start":
            return keys.accept_uniforms(start + 1, count)
        return first.setdefault(count, keys.accept_uniforms(start, count))

    calls = [(5, 3), (8, 3), (80, 3)]
    assert are_those_of_the_keys(Randomness.accept_uniforms, calls)
    assert not are_those_of_the_keys(wrongly, calls)


@pytest.mark.parametrize("other", [1, 2**32, MAX_SEED])
def test_seeds_give_different_keys(other: int) -> None:
    for stream in Stream:
        first = Randomness(0).position_keys(stream, 5, 1)
        assert rows(first) != rows(Randomness(other).position_keys(stream, 5, 1))


@given(seed=SEEDS, count=st.integers(1, 7), width=st.integers(1, 130))
def test_draws_over_many_keys_equal_one_key_at_a_time(seed: int, count: int, width: int) -> None:
    keys = Randomness(seed).position_keys(Stream.TARGET, 4, count)
    numbers, noise = uniform(keys), exponential(keys, width)
    assert numbers.shape == (count,) and noise.shape == (count, width)
    for row in range(count):
        assert mx.array_equal(uniform(keys[row : row + 1])[0], numbers[row])
        assert mx.array_equal(exponential(keys[row : row + 1], width)[0], noise[row])


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    """False alarm 1e-4: chi-square over 20 cells, fixed seed."""
    numbers = np.array(uniform(Randomness(11).position_keys(Stream.ACCEPT, 0, 20_000)))
    assert numbers.min() >= 0 and numbers.max() < 1
    assert follows((numbers * 20).astype(np.int32), np.full(20, 1 / 20))


def test_uniform_numbers_of_neighbouring_positions_and_streams_are_unrelated() -> None:
    """False alarm below 1e-4 each: correlations of 20,000 pairs within 4 standard errors."""
    keys = Randomness(12)
    numbers = np.array(uniform(keys.position_keys(Stream.ACCEPT, 0, 20_001)))
    others = np.array(uniform(keys.position_keys(Stream.RESIDUAL, 0, 20_001)))
    bound = 4 / math.sqrt(20_000)
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < bound
    assert abs(np.corrcoef(numbers, others)[0, 1]) < bound


LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -4.0, -np.inf])


def draws_at(temperature: float) -> npt.NDArray[np.int32]:
    """Tokens drawn in proportion to weights at a temperature."""
    keys = Randomness(13).position_keys(Stream.TARGET, 0, 40_000)
    weights = np.exp(LOGITS / temperature).astype(np.float32)
    return np.array(race(mx.array(weights), exponential(keys, len(LOGITS))))


def test_draws_are_in_proportion_to_the_weights() -> None:
    """False alarm 1e-4, fixed seed. A token of weight 0 is never drawn."""
    assert follows(draws_at(1.0), softmax(LOGITS))


def test_statistic_rejects_draws_of_another_temperature() -> None:
    assert not follows(draws_at(1.1), softmax(LOGITS))


def is_standard_exponential(noise: mx.array) -> bool:
    """By a chi-square test over 20 cells of equal probability: false alarm 1e-4."""
    cells = (-20 * np.expm1(-np.array(noise).astype(np.float64))).astype(np.int32)
    return follows(cells.ravel(), np.full(20, 1 / 20))


def test_noise_is_standard_exponential() -> None:
    noise = exponential(Randomness(15).position_keys(Stream.TARGET, 0, 20), 2001)
    assert is_standard_exponential(noise)
    assert not is_standard_exponential(1.05 * noise)


def test_unlikely_tokens_are_drawn_as_often_as_they_should() -> None:
    """Noise that is coarse at its small end draws such tokens too rarely, or never.

    3,000,000 draws of a token of probability 1e-5: within 5 standard deviations of 30.
    """
    row = mx.array([1.0] + [1e-5] * 3)
    keys = Randomness(14).position_keys(Stream.TARGET, 0, 1_000_000)
    ids = np.array(race(row, exponential(keys, 4)))
    unlikely = int((ids > 0).sum())
    assert abs(unlikely - 30) < 5 * math.sqrt(30)


def noise_where_the_generator_gives(bits: int) -> float:
    """The noise that comes of these 32 bits."""

    def stuck(key: mx.array, num: int) -> mx.array:
        # Depends on the key, as the real one does.
        return mx.full((num, 2), bits, dtype=mx.uint32) + 0 * key.sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.random, "split", stuck)
        noise = np.array(exponential(Randomness(1).position_keys(Stream.TARGET, 0, 3), 5))
    assert noise.shape == (3, 5) and len(np.unique(noise)) == 1
    return float(noise[0, 0])


EXTREMES = [0, 1, 2**32 - 129, 2**32 - 1]


def test_noise_is_positive_and_finite_at_the_ends_of_the_generator() -> None:
    """Otherwise 0/0 or x/0 would choose a token that has no weight."""
    for bits in EXTREMES:
        assert 0 < noise_where_the_generator_gives(bits) < math.inf


def test_numbers_that_are_rounded_to_one_make_noise_that_is_infinite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wrong version that the test above rejects."""
    monkeypatch.setattr("mlxgen.sampling.randomness._BELOW_ONE", 2.0**-32)
    assert max(noise_where_the_generator_gives(bits) for bits in EXTREMES) == math.inf


def test_small_noise_comes_from_the_fine_end_of_the_generator() -> None:
    """Numbers near 0 are 2^-31 apart, near 1 they are 2^-24 apart: noise made from those would
    hardly ever reach what lifts a token of probability 1e-7."""
    for exponent in (8, 20, 24, 28, 31):
        bits = 2 ** (32 - exponent)
        noise = noise_where_the_generator_gives(bits)
        assert noise == pytest.approx(-math.log1p(-(bits + 1) / 2**32), rel=1e-6)


def first_noise_that_differs(
    randomness: Randomness, requests: list[tuple[int, int, int]]
) -> tuple[int, int, int] | None:
    """The first request for the target's noise whose rows are not those of its positions."""
    for first, count, width in requests:
        noise = randomness.target_noise(first, count, width)
        keys = Randomness(randomness.seed).position_keys(Stream.TARGET, first, count)
        if not mx.array_equal(noise, exponential(keys, width)):
            return first, count, width
    return None


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 20), st.sampled_from([1, 1, 2, 3, 4, 5]), st.sampled_from([6, 6, 6, 9])
    ),
    max_size=8,
)


@pytest.mark.parametrize("one_by_one", [True, False])
@settings(deadline=None)
@given(requests=REQUESTS)
def test_noise_of_a_position_does_not_depend_on_what_was_asked_before(
    one_by_one: bool, requests: list[tuple[int, int, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxgen.sampling.randomness.computes_one_by_one", lambda: one_by_one)
        assert first_noise_that_differs(Randomness(5), requests) is None


def test_the_same_comparison_rejects_rows_kept_for_other_positions() -> None:
    class KeepsByRow(Randomness):
        def target_noise(self, first: int, count: int, width: int) -> mx.array:
            self._first_noisy = first
            return super().target_noise(first, count, width)

    assert first_noise_that_differs(KeepsByRow(5), [(0, 4, 6), (1, 2, 6)]) == (1, 2, 6)


class NoisyRound(NamedTuple):
    """Where a round starts, how much it drafts, what is drawn from besides, how wide rows are, and
    whether the draft draws with noise at all: a prompt lookup does not."""

    start: int
    k: int
    beside: Stream
    width: int = 6
    drafts: bool = True


ROUNDS = st.lists(
    st.builds(
        NoisyRound,
        st.integers(0, 8),
        st.integers(1, 4),
        st.sampled_from([Stream.TARGET, Stream.RESIDUAL]),
        st.sampled_from([6, 6, 9]),
        st.booleans(),
    ),
    max_size=8,
)


def first_round_that_differs(randomness: Randomness, rounds: list[NoisyRound]) -> NoisyRound | None:
    """The first of these rounds that draws with other noise than that of its keys."""
    for noisy in rounds:
        start, k, beside, width, drafts = noisy
        keys = Randomness(randomness.seed)
        pairs = []
        if drafts:
            drafted = randomness.draft_noise(start, k, width, beside=beside)
            pairs = [(drafted, exponential(keys.round_keys(Stream.DRAFT, start, range(k)), width))]
        if beside is Stream.TARGET:
            noise = randomness.target_noise(start, k + 1, width)
            pairs += [(noise, exponential(keys.position_keys(beside, start, k + 1), width))]
        else:
            noise_at = randomness.residual_noise(start, k + 1, width)
            rows = exponential(keys.round_keys(beside, start, range(k + 1)), width)
            pairs += [(noise_at(mx.array(i)), rows[i]) for i in range(k + 1)]
        if not all(mx.array_equal(found, expected) for found, expected in pairs):
            return noisy
    return None


@pytest.mark.parametrize("one_by_one", [True, False])
@settings(deadline=None)
@given(rounds=ROUNDS)
@example(
    rounds=[NoisyRound(1, 3, Stream.RESIDUAL), NoisyRound(2, 3, Stream.RESIDUAL, drafts=False)]
)
@example(
    rounds=[NoisyRound(1, 3, Stream.RESIDUAL), NoisyRound(1, 2, Stream.RESIDUAL, drafts=False)]
)
@example(
    rounds=[NoisyRound(1, 3, Stream.RESIDUAL), NoisyRound(1, 3, Stream.RESIDUAL, 9, drafts=False)]
)
def test_noise_of_a_round_is_that_of_its_keys_however_it_is_made(
    one_by_one: bool, rounds: list[NoisyRound]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxgen.sampling.randomness.computes_one_by_one", lambda: one_by_one)
        assert first_round_that_differs(Randomness(5), rounds) is None


def test_noise_kept_from_another_round_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxgen.sampling.randomness.computes_one_by_one", lambda: False)

    class Stale(Randomness):
        def draft_noise(self, round_start: int, k: int, width: int, *, beside: Stream) -> mx.array:
            before = self._residual
            noise = super().draft_noise(round_start, k, width, beside=beside)
            if before[0] >= 0:
                self._residual = round_start, before[1]
            return noise

    rounds = [NoisyRound(1, 3, Stream.RESIDUAL), NoisyRound(3, 3, Stream.RESIDUAL)]
    assert first_round_that_differs(Randomness(5), rounds) is None
    assert first_round_that_differs(Stale(5), rounds) == rounds[1]


@pytest.mark.parametrize("one_by_one", [True, False])
def test_noise_of_a_round_is_made_at_once_where_operations_cost(
    one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(keys: mx.array, width: int) -> mx.array:
        calls.append(len(keys))
        return exponential(keys, width)

    monkeypatch.setattr("mlxgen.sampling.randomness.computes_one_by_one", lambda: one_by_one)
    monkeypatch.setattr("mlxgen.sampling.randomness.exponential", counted)
    randomness = Randomness(5)
    randomness.draft_noise(7, 4, 6, beside=Stream.TARGET)
    randomness.target_noise(7, 5, 6)
    assert calls == ([4, 5] if one_by_one else [9])
    calls.clear()
    randomness.draft_noise(9, 4, 6, beside=Stream.RESIDUAL)
    randomness.residual_noise(9, 5, 6)(mx.array(2))
    assert calls == ([4, 1] if one_by_one else [9])
    calls.clear()
    # Of the three rows for positions 9 to 11 that the first round left, none is made again.
    randomness.draft_noise(9, 4, 6, beside=Stream.TARGET)
    assert calls == ([4] if one_by_one else [4 + 2])
    calls.clear()
    for position in range(20, 40):
        randomness.target_noise(position, 1, 6)
    assert calls == ([1] * 20 if one_by_one else [8] * 3)
    calls.clear()
    # A round asks for no more than it needs.
    randomness.target_noise(60, 5, 6)
    assert calls == [5]


def test_noise_depends_on_the_width_of_the_row() -> None:
    """Why both sides of a comparison draw at the target's width."""
    keys = Randomness(1).position_keys(Stream.TARGET, 0, 1)
    assert not mx.array_equal(exponential(keys, 7)[:, :6], exponential(keys, 6))


def test_global_random_state_is_untouched() -> None:
    mx.random.seed(123)
    before = global_random_state()
    keys = Randomness(1)
    mx.eval(uniform(keys.position_keys(Stream.TARGET, 0, 5)))
    mx.eval(exponential(keys.round_keys(Stream.DRAFT, 3, range(4)), 9))
    assert global_random_state() == before
    mx.eval(mx.random.uniform())
    assert global_random_state() != before
