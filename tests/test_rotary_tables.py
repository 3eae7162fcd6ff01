"""Rotations that share their tables: the bits of a forward in fewer operations."""

from __future__ import annotations

import io
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.cache import make_prompt_cache

from mlxgen.backend import rotary_tables
from mlxgen.backend.rotary_tables import (
    RotaryTables,
    Setting,
    Span,
    TabledRoPE,
    agrees,
    share_rotary_tables,
)
from mlxgen.models.loading import load
from tests.fixtures.model_directories import LlamaShape
from tests.fixtures.runs import ModelStore

on_cpu = pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.cpu, reason="a GPU has a kernel for rotations"
)


class Rotations(Module):
    """Rotations of several kinds."""

    def __init__(self, **kinds: Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        for name, kind in kinds.items():
            setattr(self, name, kind)


@on_cpu
@given(
    half=st.integers(1, 64),
    untouched=st.sampled_from([0, 1, 16]),
    base=st.one_of(st.sampled_from([1e4, 1e5, 5e5, 1e6]), st.floats(2, 1e7)),
    scale=st.sampled_from([1.0, 0.25, 1 / 3, 2.0]),
    calls=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 6)), min_size=1, max_size=4),
    dtype=st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
)
def test_a_rotation_by_table_has_the_bits_of_mlxs(
    half: int,
    untouched: int,
    base: float,
    scale: float,
    calls: list[tuple[int, int]],
    dtype: mx.Dtype,
) -> None:
    """Of queries and keys in turn, at spans that come and go and come again."""
    own = RoPE(2 * half, base=base, scale=scale)
    layers = Rotations(first=own, second=RoPE(2 * half, base=base, scale=scale))
    share_rotary_tables(layers)
    if not agrees(own):
        assert layers.first is own
        return
    size = 2 * half + untouched
    for first, length in [*calls, *calls]:
        x = mx.random.normal((2, 3, length, size), key=mx.random.key(first)).astype(dtype)
        wanted = own(x, offset=first)
        for layer in (layers.first, layers.second):
            assert isinstance(layer, TabledRoPE)
            found = layer(x, offset=first)
            assert found.dtype == dtype and mx.array_equal(found, wanted)


@on_cpu
def test_common_rotations_agree() -> None:
    for dims in (32, 64, 80, 128):
        for base in (1e4, 1e5, 5e5, 1e6):
            assert agrees(RoPE(dims, base=base))


def test_a_table_serves_one_span_alone() -> None:
    tables, setting, span = RotaryTables(), Setting(8, 1e4, 1.0), Span(3, 2, mx.float32)
    table = tables.at(setting, span)
    assert tables.at(setting, span) is table
    others = (span._replace(first=4), span._replace(length=3), span._replace(dtype=mx.float16))
    for other in others:
        assert tables.at(setting, other) is not table
        table = tables.at(setting, span)
    assert tables.at(Setting(8, 1e5, 1.0), span) is not table
    # The other setting has a newest table of its own.
    assert tables.at(setting, span) is table


@on_cpu
def test_rotations_that_tables_do_not_serve_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnRoPE(RoPE):
        pass

    kinds = {
        "traditional": RoPE(8, traditional=True),
        "odd": RoPE(7),
        "derived": OwnRoPE(8),
    }
    layers = Rotations(**kinds, plain=RoPE(8))
    share_rotary_tables(layers)
    assert all(getattr(layers, name) is kind for name, kind in kinds.items())
    assert isinstance(layers.plain, TabledRoPE)

    def off_by_one(setting: Setting, span: Span) -> Any:
        return table(setting, span._replace(first=span.first + 1))

    table = rotary_tables._table
    monkeypatch.setattr(rotary_tables, "_table", off_by_one)
    layers = Rotations(plain=RoPE(8))
    share_rotary_tables(layers)
    assert type(layers.plain) is RoPE


@on_cpu
def test_offsets_that_are_arrays_go_mlxs_way() -> None:
    x = mx.random.normal((2, 1, 3, 8), key=mx.random.key(0))
    offsets: Any = mx.array([2, 5])
    layer = TabledRoPE(RoPE(8), RotaryTables())
    assert mx.array_equal(layer(x, offset=offsets), RoPE(8)(x, offset=offsets))


@on_cpu
def test_a_loaded_model_has_the_same_logits_in_fewer_operations(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = str(models.llama_directory(3, shape=LlamaShape(layers=4)))
    shared = load(directory).model
    monkeypatch.setattr("mlxgen.models.loading.share_rotary_tables", lambda _: None)
    own = load(directory).model
    assert sum(isinstance(module, TabledRoPE) for module in shared.modules()) == 4
    assert not any(isinstance(module, TabledRoPE) for module in own.modules())
    assert shared.parameters().keys() == own.parameters().keys()
    caches = [make_prompt_cache(shared), make_prompt_cache(own)]
    counts = []
    for ids in ([[1, 2, 3]], [[4]], [[5, 6]]):
        logits = [
            model(mx.array(ids), cache=cache)
            for model, cache in zip((shared, own), caches, strict=True)
        ]
        counts.append([_operations(each) for each in logits])
        np.testing.assert_array_equal(np.array(logits[0]), np.array(logits[1]))
    assert all(fewer < 0.85 * more for fewer, more in counts[1:]), counts


def _operations(array: mx.array) -> int:
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return graph.getvalue().count("shape=rectangle")
