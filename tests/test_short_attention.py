"""Attention in pieces: the same numbers, the same text, and only where it is asked for."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen import memory
from mlxgen.backend import cuda
from mlxgen.cache import short_attention
from mlxgen.cache.short_attention import Attention, attention_in_pieces
from mlxgen.config import AcceptRule, CacheConfig, SamplingConfig
from tests.fixtures.model_directories import LlamaShape
from tests.fixtures.runs import ModelStore, Settings

WHOLE = mx.fast.scaled_dot_product_attention
WIDE_HEADS = LlamaShape(head_dim=64)


def without_cut(
    queries: mx.array, keys: mx.array, values: mx.array, *, mask: Any, **options: Any
) -> mx.array:
    """Wrong: every piece sees all keys."""
    pieces = [
        WHOLE(queries[:, :, i : i + 3], keys, values, mask=mask, **options)
        for i in range(0, queries.shape[2], 3)
    ]
    return mx.concatenate(pieces, axis=2)


def without_mask(
    queries: mx.array, keys: mx.array, values: mx.array, *, mask: Any, **options: Any
) -> mx.array:
    """Wrong: a query sees those behind it in its piece."""
    count, pieces = queries.shape[2], []
    for first in range(0, count, 3):
        seen = keys.shape[2] - count + min(first + 3, count)
        part = queries[:, :, first : first + 3]
        pieces.append(WHOLE(part, keys[:, :, :seen], values[:, :, :seen], mask=None, **options))
    return mx.concatenate(pieces, axis=2)


def largest_difference(
    attention: Attention, count: int, before: int, heads: int, size: int, mask: Any, seed: int
) -> float:
    """Between this attention and MLX's, over random queries, keys and values."""
    random = np.random.default_rng(seed)

    def normal(heads: int, tokens: int) -> mx.array:
        return mx.array(random.standard_normal((1, heads, tokens, size)).astype(np.float32))

    queries, keys, values = (
        normal(heads, count),
        normal(heads // 2, before + count),
        normal(heads // 2, before + count),
    )
    sinks = normal(heads, 1)[0, :, 0, 0]
    options = {"scale": size**-0.5, "mask": mask, "sinks": sinks}
    expected = WHOLE(queries, keys, values, **options)
    found = attention(queries, keys, values, **options)
    assert found.shape == expected.shape
    return float(np.abs(np.array(found - expected)).max())


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 14),
    before=st.integers(0, 40),
    heads=st.sampled_from([2, 4, 6]),
    size=st.sampled_from([16, 64, 96, 128]),
    causal=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_pieces_are_the_whole(
    count: int, before: int, heads: int, size: int, causal: bool, seed: int
) -> None:
    mask = "causal" if causal else None
    pieces = partial(attention_in_pieces, WHOLE)
    difference = largest_difference(pieces, count, before, heads, size, mask, seed)
    # Products of float32 may be rounded to 10 bits on CUDA.
    assert difference < 5e-3


@pytest.mark.parametrize("wrong", [without_cut, without_mask])
def test_pieces_that_see_too_much_are_told(wrong: Attention) -> None:
    assert largest_difference(wrong, 5, 7, 4, 64, "causal", 1) > 0.1


def sizes_attended_to(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of queries of every call of MLX's attention from now on."""
    sizes: list[int] = []

    def noted(queries: mx.array, *others: Any, **options: Any) -> mx.array:
        sizes.append(queries.shape[2])
        return WHOLE(queries, *others, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
    return sizes


@pytest.mark.parametrize(
    ("count", "length", "size", "mask", "expected"),
    [
        (1, 5, 64, None, [1]),
        (3, 7, 64, "causal", [3]),
        (4, 8, 64, "causal", [3, 1]),
        (8, 8, 96, "causal", [3, 3, 2]),
        (12, 4096, 128, "causal", [3, 3, 3, 3]),
        (12, 4097, 128, "causal", [12]),
        (5, 20000, 64, "causal", [3, 2]),
        (13, 20, 64, "causal", [13]),
        (5, 9, 80, "causal", [5]),
        (5, 9, 64, None, [5]),
    ],
    ids=str,
)
def test_which_attention_goes_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    length: int,
    size: int,
    mask: Any,
    expected: list[int],
) -> None:
    sizes = sizes_attended_to(monkeypatch)
    queries, keys = mx.zeros((1, 2, count, size)), mx.zeros((1, 2, length, size))
    with short_attention.short_attention():
        mx.fast.scaled_dot_product_attention(q=queries, k=keys, v=keys, mask=mask, scale=1.0)
        assert sizes == expected
        sizes.clear()
        own = mx.ones((count, length)) > 0
        mx.fast.scaled_dot_product_attention(queries, keys, keys, mask=own, scale=1.0)
        assert sizes == [count], "a mask of its own"
        sizes.clear()
        narrow = mx.zeros((1, 2, length, 32))
        mx.fast.scaled_dot_product_attention(queries, keys, narrow, mask=mask, scale=1.0)
        assert sizes == [count], "values of another size than the keys"


@pytest.mark.parametrize("rule", AcceptRule)
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_pieces_change_no_text_and_serve_blocks_alone(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch, rule: AcceptRule, temperature: float
) -> None:
    target = models.llama(1, shape=WIDE_HEADS)
    draft = models.llama(1, shape=WIDE_HEADS, disturbance=0.1)
    run = Settings(sampling=SamplingConfig(temperature=temperature, top_p=0.95), rule=rule, k=5)
    expected = run.speculative(target, draft)
    ids = expected.ids(60)
    sizes = sizes_attended_to(monkeypatch)
    in_pieces = run.but(attends_in_pieces=True).speculative(target, draft)
    taken_in = [size for size in sizes if size > 3]
    sizes.clear()
    assert in_pieces.ids(60) == ids
    assert in_pieces.rounds == expected.rounds
    assert max(sizes) == 3
    assert taken_in, "the prompt is taken in as it always was"


def test_mlx_has_its_own_attention_back(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Settings(attends_in_pieces=True).cached(models.llama(1, shape=WIDE_HEADS), "target")
    target.forward(mx.array([1, 2, 3, 4, 5]))
    assert mx.fast.scaled_dot_product_attention is WHOLE
    with short_attention.short_attention():
        outer = mx.fast.scaled_dot_product_attention
        with short_attention.short_attention():
            pass
        assert mx.fast.scaled_dot_product_attention is outer

    def fail(*arguments: Any, **options: Any) -> mx.array:
        raise KeyboardInterrupt

    monkeypatch.setattr(short_attention, "attention_in_pieces", fail)
    with pytest.raises(KeyboardInterrupt):
        target.forward(mx.array([1, 2, 3, 4, 5]))
    assert mx.fast.scaled_dot_product_attention is WHOLE


GPU, CPU = (SimpleNamespace(type=kind) for kind in (mx.DeviceType.gpu, mx.DeviceType.cpu))


@pytest.mark.parametrize(
    ("has_cuda", "device", "cudnn", "expected"),
    [
        (True, GPU, "0", True),
        (True, GPU, "1", False),
        (True, GPU, None, False),
        (True, CPU, "0", False),
        (False, GPU, "0", False),
    ],
)
def test_cuda_without_cudnn_lacks_the_attention_of_blocks(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, device: Any, cudnn: str | None, expected: bool
) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(mx, "default_device", lambda: device)
    monkeypatch.delenv("MLX_CUDA_USE_CUDNN_SDPA", raising=False)
    if cudnn is not None:
        monkeypatch.setenv("MLX_CUDA_USE_CUDNN_SDPA", cudnn)
    assert cuda.lacks_block_attention() is expected


@pytest.mark.parametrize("in_pieces", [True, False])
def test_a_loaded_target_says_how_it_attends(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch, in_pieces: bool
) -> None:
    from mlxgen.models import loading

    monkeypatch.setattr(loading, "lacks_block_attention", lambda: in_pieces)
    loaded = loading.load(str(models.llama_directory(1, shape=WIDE_HEADS)))
    sizes = sizes_attended_to(monkeypatch)
    memory.fresh_target(loaded, CacheConfig()).forward(mx.array([1, 2, 3, 4, 5]))
    assert set(sizes) == ({3, 2} if in_pieces else {5})
