"""From a trained draft to the quantised directory that mlx-lm loads, with MLX alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx

from .config import AffineFormat, LlamaConfig
from .dequantise import copy_tokenizer


def export_draft(source: Path, tokenizer: Path, out: Path, form: AffineFormat) -> int:
    """Quantise the draft of a checkpoint to out; returns the bytes of its model.safetensors.

    source holds config.json and model.safetensors in float16, tokenizer is a directory with the
    target's tokenizer.json. Every matrix becomes weight (packed uint32), scales and biases
    (float16); the norms stay float16.
    """
    config = LlamaConfig.read(source)
    form.check(config)
    loaded = mx.load(str(source / "model.safetensors"))
    assert isinstance(loaded, dict)
    weights: dict[str, mx.array] = {}
    for name, shape in config.weight_shapes().items():
        array = loaded[name].astype(mx.float16)
        if len(shape) == 1:
            weights[name] = array
            continue
        layer = name.removesuffix(".weight")
        weights[name], weights[f"{layer}.scales"], weights[f"{layer}.biases"] = mx.quantize(
            array, group_size=form.group_size, bits=form.bits
        )

    out.mkdir(parents=True, exist_ok=True)
    model = out / "model.safetensors"
    mx.save_safetensors(str(model), weights, {"format": "mlx"})
    config.write(out, "float16")
    raw = json.loads((out / "config.json").read_text(encoding="utf-8"))
    raw["quantization"] = {**asdict(form), "mode": "affine"}
    (out / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    copy_tokenizer(tokenizer, out)
    return model.stat().st_size
