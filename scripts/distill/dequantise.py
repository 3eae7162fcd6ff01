"""From mlx-lm's quantised directory to a Hugging Face checkpoint, with MLX alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def dequantise_directory(source: Path, out: Path, dtype_name: str) -> int:
    """Write source's model to out with all weights of one dtype; returns how many were packed.

    source holds config.json, model.safetensors and tokenizer.json as mlx-lm writes them. Its
    config may give single layers a quantisation of their own, as for an 8-bit embedding.
    """
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if "quantization" not in config:
        raise ValueError(f"{source / 'config.json'} names no quantization")
    common = config.pop("quantization")
    config.pop("quantization_config", None)
    loaded = mx.load(str(source / "model.safetensors"))
    assert isinstance(loaded, dict)
    stored: dict[str, mx.array] = loaded

    weights, packed = {}, 0
    for name, array in stored.items():
        layer, _, kind = name.rpartition(".")
        if kind in ("scales", "biases") and f"{layer}.weight" in stored:
            continue
        if f"{layer}.scales" in stored:
            form = common | common.get(layer, {})
            if form.get("mode", "affine") != "affine":
                raise ValueError(f"{layer} is quantised as {form['mode']}; only affine is known")
            # In float32, where a code times its scale plus the bias is all but exact.
            array = mx.dequantize(
                array,
                stored[f"{layer}.scales"].astype(mx.float32),
                stored[f"{layer}.biases"].astype(mx.float32),
                group_size=form["group_size"],
                bits=form["bits"],
            )
            packed += 1
        weights[name] = array.astype(DTYPES[dtype_name])

    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "pt"})
    config["torch_dtype"] = dtype_name
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    copy_tokenizer(source, out)
    return packed


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy tokenizer.json, and tokenizer_config.json where there is one."""
    if not (source / "tokenizer.json").exists():
        raise ValueError(f"{source} holds no tokenizer.json")
    for name in _TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)
