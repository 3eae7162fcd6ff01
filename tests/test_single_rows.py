"""Single rows as pairs: the same numbers, where that pays and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import QuantizedLinear

from mlxgen.backend import single_rows
from mlxgen.backend.single_rows import PairedEmbedding, PairedLinear, pair_single_rows, takes_pairs
from mlxgen.models.loading import load
from tests.fixtures.runs import ModelStore


@pytest.fixture(autouse=True)
def _decided_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    probe = single_rows.pairs_pay
    probe.cache_clear()
    monkeypatch.setattr(single_rows, "_LEAST_WEIGHTS", 0)
    yield
    probe.cache_clear()


class Layers(Module):
    """One layer of each kind that matters here."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embedding = Embedding(40, 16)
        self.wide = Linear(16, 48)
        self.square = Linear(16, 16, bias=False)
        self.narrow = Linear(48, 16)
        self.half = Linear(16, 48)
        self.half.set_dtype(mx.float16)
        self.quantised = QuantizedLinear(64, 64)
        self.norm = RMSNorm(16)


def largest_difference(shape: list[int], bias: bool) -> float:
    """Between the layers as they are and paired ones, relative to the size of the numbers."""
    x = mx.random.normal((*shape, 16), key=mx.random.key(1))
    layers = Layers()
    layer = layers.wide if bias else layers.square
    pairs = [
        (layer(x), single_rows._with_pairs(layer)(x)),
        (layers.embedding.as_linear(x), single_rows._with_pairs(layers.embedding).as_linear(x)),
    ]
    for wanted, found in pairs:
        assert found.shape == wanted.shape
    return max(float(mx.abs(a - b).max() / mx.abs(a).max()) for a, b in pairs)


@settings(max_examples=30, deadline=None)
@given(shape=st.lists(st.integers(1, 3), max_size=3), bias=st.booleans())
def test_a_paired_layer_gives_what_the_layer_gives(shape: list[int], bias: bool) -> None:
    assert largest_difference(shape, bias) < 1e-5


def test_a_pair_of_two_different_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: the row is not the first of the pair."""

    def wrong(x: mx.array) -> mx.array:
        return mx.concatenate([mx.zeros_like(x), x], axis=-2)

    monkeypatch.setattr(single_rows, "_twice", wrong)
    assert largest_difference([1, 1], bias=True) > 1e-2


def kinds(layers: Layers) -> dict[str, type]:
    return {name: type(module) for name, module in layers.items() if isinstance(module, Module)}


def test_only_wide_float32_layers_are_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_rows, "pairs_pay", lambda: True)
    monkeypatch.setattr(single_rows, "ways_agree", lambda _: True)
    layers = Layers()
    before = kinds(layers)
    weight = layers.wide.weight
    pair_single_rows(layers)
    changed = {"embedding": PairedEmbedding, "wide": PairedLinear, "square": PairedLinear}
    assert kinds(layers) == before | changed
    assert mx.array_equal(layers.wide.weight, weight).item() and "bias" not in layers.square


@pytest.mark.parametrize(("pays", "agrees"), [(False, True), (True, False)])
def test_nothing_changes_where_it_does_not_pay_or_agree(
    pays: bool, agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_rows, "pairs_pay", lambda: pays)
    monkeypatch.setattr(single_rows, "ways_agree", lambda _: agrees)
    layers = Layers()
    before = kinds(layers)
    pair_single_rows(layers)
    assert kinds(layers) == before


def test_a_small_model_is_not_worth_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_rows, "_LEAST_WEIGHTS", 10**6)
    monkeypatch.setattr(single_rows, "pairs_pay", lambda: pytest.fail("it was timed"))
    layers = Layers()
    before = kinds(layers)
    pair_single_rows(layers)
    assert kinds(layers) == before


@pytest.mark.parametrize(("pair_s", "pays"), [(0.5, True), (0.89, True), (0.91, False), (2, False)])
def test_a_clear_gain_in_time_is_asked_for(
    pair_s: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row takes one second of this clock, a pair pair_s."""
    calls, now_s = count(), [0.0]

    def clock() -> float:
        call = next(calls) % 4
        now_s[0] += {1: 1.0, 3: pair_s}.get(call, 0.0)
        return now_s[0]

    monkeypatch.setattr(time, "perf_counter", clock)
    assert single_rows.pairs_pay() is pays


@pytest.mark.parametrize("factor", [1, 1 + 2**-20])
def test_ways_that_round_differently_do_not_agree(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair that is off by a few units in the last place stands for another order of a sum."""
    twice = single_rows._twice
    monkeypatch.setattr(single_rows, "_twice", lambda x: twice(x) * factor)
    # One number a sum, so that both ways round alike whatever the library.
    matrix = mx.random.normal((32, 1), key=mx.random.key(0))
    assert single_rows.ways_agree(matrix) is (factor == 1)


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="for the CPU alone")
def test_a_loaded_model_gives_the_same_logits(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = []
    for pays in (False, True):
        monkeypatch.setattr(single_rows, "pairs_pay", lambda pays=pays: pays)
        monkeypatch.setattr(single_rows, "ways_agree", lambda _: True)
        model = load(str(models.llama_directory(1))).model
        assert takes_pairs(model) is pays
        logits.append(np.array(model(mx.array([[3]]))))
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-4, atol=1e-5)
