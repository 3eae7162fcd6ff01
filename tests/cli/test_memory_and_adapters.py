"""Memory options and adapters reach the run, and with a draft as without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.fixtures.command import mlxgen_here
from tests.fixtures.runs import ModelStore

PROMPT = "a prompt of some length, for the cache to hold"


@pytest.fixture
def target(models: ModelStore) -> Path:
    return models.llama_directory(1, head_scale=3.0)


@pytest.fixture
def draft(models: ModelStore) -> Path:
    return models.llama_directory(1, head_scale=3.0, disturbance=0.1)


def ids(target: Path, *more: object) -> list[int]:
    return mlxgen_here("generate", "-m", target, "-p", PROMPT, "-n", 40, "--json", *more).ids


@pytest.mark.parametrize(
    "options",
    [
        ["--kv-bits", 8, "--kv-group-size", 32],
        ["--kv-bits", 4, "--kv-group-size", 32],
        # Quantisation begins inside a block of the speculative run.
        ["--kv-bits", 4, "--kv-group-size", 32, "--quantized-kv-start", 60],
    ],
)
def test_quantised_cache_gives_the_same_ids_with_and_without_a_draft(
    target: Path, draft: Path, options: list[object]
) -> None:
    plain = ids(target, *options)
    for k in (1, 4):
        assert ids(target, *options, "--draft-model", draft, "--num-draft-tokens", k) == plain


def test_coarse_quantisation_changes_the_text_and_late_quantisation_does_not(target: Path) -> None:
    coarse = ["--kv-bits", 2, "--kv-group-size", 32]
    assert ids(target, *coarse) != ids(target)
    assert ids(target, *coarse, "--quantized-kv-start", 1000) == ids(target)


@pytest.mark.parametrize("step", [1, 7, 64])
@pytest.mark.parametrize("is_speculative", [False, True])
def test_prefill_in_steps_gives_the_same_ids(
    target: Path, draft: Path, step: int, is_speculative: bool
) -> None:
    more = ["--draft-model", draft] if is_speculative else []
    assert ids(target, "--prefill-step-size", step, *more) == ids(target)


def test_ring_of_the_newest_tokens_changes_the_text_when_it_is_short(target: Path) -> None:
    assert ids(target, "--max-kv-size", 16) != ids(target)
    assert ids(target, "--max-kv-size", 4096) == ids(target)


def test_ring_is_allowed_with_a_draft_that_is_not_used(target: Path, draft: Path) -> None:
    ring = ["--max-kv-size", 16]
    unused = ["--draft-model", draft, "--num-draft-tokens", 0]
    assert ids(target, *ring, *unused) == ids(target, *ring)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A LoRA adapter for the target that changes its text."""
    parameters = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.v_proj"]}
    content = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content), encoding="utf-8")
    weights: dict[str, Any] = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn.v_proj"
        weights[f"{prefix}.lora_a"] = mx.random.normal((64, 4), key=mx.random.key(layer))
        weights[f"{prefix}.lora_b"] = mx.random.normal((4, 64), key=mx.random.key(9 + layer)) / 10
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), weights)
    return tmp_path


def test_adapter_changes_the_target_alone(target: Path, draft: Path, adapter: Path) -> None:
    adapted = ids(target, "--adapter", adapter)
    assert adapted != ids(target)
    for other in (draft, target):
        assert ids(target, "--adapter", adapter, "--draft-model", other) == adapted


def test_draft_that_is_the_target_without_its_adapter_is_sometimes_wrong(
    target: Path, adapter: Path
) -> None:
    words = ["generate", "-m", target, "-p", PROMPT, "-n", 40, "--json", "--draft-model", target]
    bare = mlxgen_here(*words).document["speculative"]
    adapted = mlxgen_here(*words, "--adapter", adapter).document["speculative"]
    assert bare["per_position_acceptance"] == 1 > adapted["per_position_acceptance"]


def test_adapter_for_another_model_is_one_line(target: Path, adapter: Path) -> None:
    wrong = {"model.layers.0.self_attn.v_proj.lora_a": mx.zeros((3, 3))}
    mx.save_safetensors(str(adapter / "adapters.safetensors"), wrong)
    run = mlxgen_here("generate", "-m", target, "-p", "a", "--adapter", adapter)
    assert run.code == 2 and "cannot load the target model" in run.error
