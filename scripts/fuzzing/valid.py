"""The valid files that damage starts from, and the commands that read them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = b'"abc"\n{"prompt": "bca", "id": "x", "category": "c"}\n{"prompt": "cab", "more": [1]}\n'
PROMPT = "abc abd 0123\nabc"
COMPARE = (
    *("compare", "-m", "target", "--draft-model", "draft", "--arms", "plain,block"),
    *("--prompts", "prompts.jsonl", "-n", "3"),
)
JOURNAL = (*COMPARE, "--resume", "journal.jsonl")
"""The command whose journal is damaged."""
KEEPING = (
    *("generate", "-m", "target", "--draft-model", "draft", "-f", "prompt.txt", "-n", "4"),
    *("--prompt-cache", "prompt.cache"),
)
"""The command whose prompt cache is damaged."""


def write_valid_files(directory: Path) -> None:
    """Write all of them, and the modules that this took. It computes, so it needs a child."""
    import mlx.core as mx
    import numpy as np

    from mlxgen.cli.app import app
    from tests.fixtures.model_directories import LlamaShape, Vocabulary, write_llama

    vocabulary = Vocabulary(
        "abcdefghijklmnopqrstuvwxyz0123456789 \n", ("<eos>", "<s>"), eos="<eos>"
    )
    shape = LlamaShape(layers=2, hidden=32, heads=1, intermediate=32)
    for name, disturbance in (("target", 0.0), ("draft", 0.1)):
        path = write_llama(
            directory / name,
            1,
            shape=shape,
            vocabulary=vocabulary,
            head_scale=3.0,
            disturbance=disturbance,
            eos_token_id=38,
            config={"max_position_embeddings": 64},
        )
        generation = json.dumps(
            {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "eos_token_id": [38]}
        )
        (path / "generation_config.json").write_text(generation, encoding="utf-8")
        weights: Any = mx.load(str(path / "model.safetensors"))
        index = {
            "metadata": {"total_size": 1},
            "weight_map": dict.fromkeys(sorted(weights), "model.safetensors"),
        }
        (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    adapter = directory / "adapter"
    adapter.mkdir()
    parameters = {"rank": 2, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.v_proj"]}
    content = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (adapter / "adapter_config.json").write_text(json.dumps(content), encoding="utf-8")
    draws = np.random.default_rng(1)
    mx.save_safetensors(
        str(adapter / "adapters.safetensors"),
        {
            f"model.layers.{layer}.self_attn.v_proj.lora_{side}": mx.array(
                draws.standard_normal(size).astype(np.float32)
            )
            for layer in range(2)
            for side, size in (("a", (32, 2)), ("b", (2, 32)))
        },
    )
    (directory / "prompts.jsonl").write_bytes(PROMPTS)
    (directory / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    for words in (JOURNAL, KEEPING):
        app(list(words), prog_name="mlxgen", standalone_mode=False)
    (directory / "modules").write_text("\n".join(sys.modules), encoding="utf-8")
