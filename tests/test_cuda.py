"""Settings of the CUDA backend are made where the user has made none, and models loaded for it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import get_total_parameters

import mlxgen
from mlxgen.backend.cuda import SETTINGS, SETTINGS_FOR_BLOCKS, prepare_cuda
from mlxgen.models import default_pair, loading
from tests.fixtures.command import mlxgen_here
from tests.fixtures.runs import ModelStore

ALL_SETTINGS = SETTINGS | SETTINGS_FOR_BLOCKS


@pytest.mark.parametrize("verifies_blocks", [True, False])
@pytest.mark.parametrize("variable", ALL_SETTINGS)
@pytest.mark.parametrize("own", [None, "", "1", "50"])
def test_a_setting_of_the_user_stays(
    variable: str, own: str | None, verifies_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALL_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(variable, own)
    prepare_cuda(verifies_blocks=verifies_blocks)
    expected: dict[str, str] = dict(ALL_SETTINGS if verifies_blocks else SETTINGS)
    if own is not None:
        expected[variable] = own
    assert {n: os.environ[n] for n in ALL_SETTINGS if n in os.environ} == expected


@pytest.mark.parametrize(
    ("options", "verifies_blocks"),
    [
        ([], False),
        (["--draft-model", "DRAFT"], True),
        (["--draft-model", "DRAFT", "--num-draft-tokens", "0"], False),
        (["--prompt-lookup"], True),
    ],
    ids=["plain", "draft", "draft unused", "lookup"],
)
def test_only_commands_that_verify_blocks_do_without_cudnn(
    models: ModelStore,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    verifies_blocks: bool,
) -> None:
    asked = set()
    monkeypatch.setattr(loading, "prepare_cuda", lambda **how: asked.add(how["verifies_blocks"]))
    draft = str(models.llama_directory(2))
    words = [draft if option == "DRAFT" else option for option in options]
    run = mlxgen_here("generate", "-m", models.llama_directory(1), "-p", "h", "-n", 3, *words)
    assert (run.code, asked) == (0, {verifies_blocks})


@pytest.mark.parametrize("options", [{}, {"verifies_blocks": True}, {"verifies_blocks": False}])
def test_a_program_says_whether_it_verifies_blocks(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    asked = set()
    monkeypatch.setattr(loading, "prepare_cuda", lambda **how: asked.add(how["verifies_blocks"]))
    mlxgen.load(str(models.llama_directory(1)), **options)
    assert asked == {options.get("verifies_blocks", True)}


def load_for_gpu(
    monkeypatch: pytest.MonkeyPatch, largest_bytes: int, *, is_cuda: bool = True
) -> Any:
    """The default draft, as it is loaded where the default device is a GPU."""
    gpu = SimpleNamespace(type=mx.DeviceType.gpu)
    with monkeypatch.context() as patch:
        patch.setattr(mx, "default_device", lambda: gpu)
        patch.setattr(mx.cuda, "is_available", lambda: is_cuda)
        patch.setattr(loading, "_LARGEST_DEQUANTISED_BYTES", largest_bytes)
        return mlxgen.load(str(default_pair.draft_directory()), role="draft").model


def test_small_quantised_models_are_dequantised_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no larger ones: with a limit of one byte less than it takes the same model stays as it
    was. float32 is what a CPU computes in."""
    plain = load_for_gpu(monkeypatch, loading._LARGEST_DEQUANTISED_BYTES)
    assert plain.model.embed_tokens.weight.dtype == mx.float16
    assert not any("scales" in module for module in plain.modules())
    size_bytes = 2 * int(get_total_parameters(plain))
    quantised = load_for_gpu(monkeypatch, size_bytes - 1)
    assert any("scales" in module for module in quantised.modules())
    exactly = load_for_gpu(monkeypatch, size_bytes)
    assert not any("scales" in module for module in exactly.modules())
    on_metal = load_for_gpu(monkeypatch, size_bytes, is_cuda=False)
    assert any("scales" in module for module in on_metal.modules())
    ids = mx.arange(1, 9)[None]
    exact = mlxgen.load(str(default_pair.draft_directory()), role="draft").model(ids)
    np.testing.assert_allclose(plain(ids).astype(mx.float32), exact, atol=0.1)
