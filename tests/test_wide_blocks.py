"""Blocks that are filled up: the text, the caches and the rows are those of the block alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model

import mlxgen
from mlxgen import memory
from mlxgen.cache import wide_blocks
from mlxgen.cache.cached_model import CachedModel
from mlxgen.cache.sliding import SlidingKVCache
from mlxgen.cache.wide_blocks import WIDE_TOKENS, lengths_to_fill_up
from mlxgen.config import AcceptRule, CacheConfig, SamplingConfig
from tests.fixtures.runs import ModelStore, Settings

FILLED_UP = range(3, WIDE_TOKENS)
SAMPLED = SamplingConfig(temperature=0.9, top_p=0.95)
GPU = SimpleNamespace(type=mx.DeviceType.gpu)


def note_widths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Role and number of tokens of every forward from now on."""
    widths: list[tuple[str, int]] = []
    call = CachedModel._call

    def noted(self: CachedModel, ids: mx.array) -> mx.array:
        widths.append((self.role, ids.shape[0]))
        return call(self, ids)

    monkeypatch.setattr(CachedModel, "_call", noted)
    return widths


@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rule", AcceptRule)
@pytest.mark.parametrize("k", [1, 2, 4, 7, 8])
def test_filling_up_changes_no_text_and_leaves_nothing_in_the_caches(
    models: ModelStore,
    monkeypatch: pytest.MonkeyPatch,
    k: int,
    rule: AcceptRule,
    sampling: SamplingConfig,
) -> None:
    target, draft = models.llama(1), models.llama(seed=1, disturbance=0.1)
    settings = Settings(sampling=sampling, rule=rule, k=k)
    expected = settings.speculative(target, draft)
    ids = expected.ids(60)
    run = settings.but(filled_up=FILLED_UP).speculative(target, draft)
    widths = note_widths(monkeypatch)
    assert run.ids(60) == ids
    assert run.rounds == expected.rounds
    assert run.target.caches[0].offset == run.target.cached_tokens == len(settings.prompt) + 59
    of_target = {width for role, width in widths if role == "target"}
    assert of_target.isdisjoint(FILLED_UP)
    if k < WIDE_TOKENS:
        assert (WIDE_TOKENS in of_target) == (k >= 2)
    assert {width for role, width in widths if role == "draft"} <= {1, 2}


def rows_from_the_end(self: CachedModel, ids: mx.array) -> mx.array:
    """Wrong: the rows of what was added."""
    filled = mx.concatenate([ids, mx.zeros(WIDE_TOKENS - len(ids), dtype=ids.dtype)])
    return self._call(filled)[0, -len(ids) :]


def filled_up_in_front(self: CachedModel, ids: mx.array) -> mx.array:
    """Wrong: the block's own tokens see what was added."""
    filled = mx.concatenate([mx.zeros(WIDE_TOKENS - len(ids), dtype=ids.dtype), ids])
    return self._call(filled)[0, -len(ids) :]


@pytest.mark.parametrize("wrong", [rows_from_the_end, filled_up_in_front])
def test_a_wrong_filling_changes_the_text(
    models: ModelStore,
    monkeypatch: pytest.MonkeyPatch,
    wrong: Callable[[CachedModel, mx.array], mx.array],
) -> None:
    target, draft = models.llama(1), models.llama(seed=1, disturbance=0.1)
    settings = Settings(sampling=SAMPLED)
    ids = settings.speculative_ids(target, draft, 40)
    forward = CachedModel.forward

    def forward_or_wrong(self: CachedModel, block: mx.array) -> mx.array:
        return wrong(self, block) if len(block) in FILLED_UP else forward(self, block)

    monkeypatch.setattr(CachedModel, "forward", forward_or_wrong)
    assert settings.speculative_ids(target, draft, 40) != ids


def test_caches_that_would_keep_something_are_not_filled_up(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models.llama(1), models.llama(seed=1, disturbance=0.1)
    quantised = Settings(
        cache=CacheConfig(kv_bits=8, kv_group_size=32, quantized_kv_start=18), filled_up=FILLED_UP
    )
    widths = note_widths(monkeypatch)
    quantised.speculative_ids(target, draft, 40)
    cached = CachedModel(target, role="target", width=64, filled_up=FILLED_UP)
    cached.forward(mx.array([1, 2, 3, 4]))  # nobody said that it would be rewound
    cached.make_rewindable()
    cached.caches[0] = SlidingKVCache(max_size=16)
    cached.forward(mx.array([1, 2, 3, 4]))
    assert WIDE_TOKENS not in {width for _, width in widths}


def quantised_llama(models: ModelStore) -> Any:
    """A llama of its own with 4-bit weights."""
    model = load_model(models.llama_directory(1))[0]
    nn.quantize(model, group_size=32, bits=4)  # type: ignore[attr-defined]  # the stub lacks it
    return model


def test_large_quantised_models_on_cuda_are_filled_up_and_no_others(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantised_llama(models)
    for least_bytes, has_cuda, expected in (
        (1, True, range(4, 8)),
        (1, False, range(0)),
        (wide_blocks._LEAST_BYTES, True, range(0)),
    ):
        monkeypatch.setattr(wide_blocks, "_LEAST_BYTES", least_bytes)
        monkeypatch.setattr(mx.cuda, "is_available", lambda found=has_cuda: found)
        monkeypatch.setattr(mx, "default_device", lambda: GPU)
        assert lengths_to_fill_up(model) == expected
    monkeypatch.setattr(wide_blocks, "_LEAST_BYTES", 1)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
        assert lengths_to_fill_up(model) == range(0), "computed on the CPU all the same"
    assert lengths_to_fill_up(models.llama(1)) == range(0), "not quantised"
    model.model.layers[0].experts = SwitchLinear(64, 64, 2).to_quantized(group_size=32, bits=4)
    assert lengths_to_fill_up(model) == range(0), "a mixture of experts"


def test_only_targets_without_a_table_of_positions_are_filled_up(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = mlxgen.load(str(models.llama_directory(1)))
    asked: list[Any] = []

    def lengths(model: Any) -> range:
        asked.append(model)
        return FILLED_UP

    monkeypatch.setattr(memory, "lengths_to_fill_up", lengths)
    with_table = mlxgen.load(str(models.llama_directory(1)))
    vars(with_table)["position_rows"] = 100
    widths = note_widths(monkeypatch)
    for model, expected in ((loaded, WIDE_TOKENS), (with_table, 4)):
        cached = memory.fresh_target(model, CacheConfig())
        cached.make_rewindable()
        cached.forward(mx.array([1, 2, 3, 4]))
        assert widths.pop() == ("target", expected)
    assert asked == [loaded.model]
    draft = memory.fresh_draft(loaded, loaded, CacheConfig())
    draft.make_rewindable()
    draft.forward(mx.array([1, 2, 3, 4]))
    assert widths.pop() == ("draft", 4)
