"""Damaged model directories and adapters."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from fuzzing.child import Case
from fuzzing.mutations import damaged_bytes, damaged_json, damaged_safetensors
from fuzzing.valid import PROMPT

_CONFIG_EXTRA: dict[str, Any] = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0},
    "quantization": {"group_size": 32, "bits": 4, "mode": "affine"},
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32},
    "text_config": {"vocab_size": 66, "eos_token_id": 1, "max_position_embeddings": 64},
    "eos_token_id": [64, 65],
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention"],
    "model_type": "qwen2",
    "architectures": ["DFlashDraftModel"],
    "dflash_config": {},
    "speculators_model_type": "eagle3",
    "model_file": "model.py",
    "attention_bias": True,
    "tie_word_embeddings": True,
    "rope_traditional": True,
    "tokenizer_class": "LlamaTokenizer",
}
_GENERATION = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "do_sample": True,
    "eos_token_id": [65],
    "max_length": 20,
    "transformers_version": "4.0.0",
}
_TOKENIZER_EXTRA: dict[str, Any] = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "a"}],
    },
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": "a|b"},
        "behavior": "Isolated",
        "invert": False,
    },
    "decoder": {"type": "ByteFallback"},
    "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
    "padding": {
        "strategy": {"Fixed": 10},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    },
}
_TOKENIZER_CONFIG_EXTRA: dict[str, Any] = {
    "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "tokenizer_class": "LlamaTokenizerFast",
    "auto_map": {"AutoTokenizer": ["x.Y", None]},
    "added_tokens_decoder": {"64": {"content": "<eos>", "special": True}},
    "additional_special_tokens": ["<eos>", "<more>"],
    "extra_special_tokens": {"image_token": "<image>"},
    "eos_token": {
        "content": "<eos>",
        "__type": "AddedToken",
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
    },
    "pad_token": "<pad>",
    "unk_token": "a",
    "tool_parser_type": "x",
    "model_max_length": 8,
    "add_bos_token": True,
    "legacy": False,
    "padding_side": "left",
    "chat_template_type": "x",
}
_TEMPLATES = (
    *(
        "{{ messages }}",
        "{{ messages[0].content }}",
        "{{ messages[5].content }}",
        "{{ raise_exception('a\nb') }}",
    ),
    *(
        "{{ 1 / 0 }}",
        "{{ 'a' * 10**9 }}",
        "{% for i in range(10**9) %}a{% endfor %}",
        "{{ x }",
        "{%",
    ),
    *(
        "{% include 'x' %}",
        "{{ messages.__class__.__mro__ }}",
        "{{ bos_token + eos_token }}",
        "",
        "\x00",
    ),
    *(
        "{{ strftime_now('%Y') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ '\\ud800' }}",
    ),
    *("{{ messages | tojson }}", "{% generation %}a{% endgeneration %}", "{{ tools | length }}"),
    *("{{ [messages] * 100000 }}", "a" * 5000, "{{ '" + "(" * 10_000 + "' }}", "{{" + "(" * 10_000),
)


def _damaged_file(draw: Random, base: Path, name: str) -> bytes:
    """A file of a model directory, damaged the way that suits its kind."""
    kind = name.rpartition("/")[2]
    if kind == "chat_template.jinja":
        template = draw.choice(_TEMPLATES).encode()
        return damaged_bytes(draw, template) if draw.random() < 0.3 else template
    data = (base / name).read_bytes()
    if kind.endswith(".safetensors"):
        return damaged_safetensors(draw, data)
    if draw.random() < 0.15:
        return damaged_bytes(draw, data)
    extra: dict[str, dict[str, Any]] = {
        "config.json": _CONFIG_EXTRA,
        "generation_config.json": _GENERATION,
        "tokenizer.json": _TOKENIZER_EXTRA,
        "tokenizer_config.json": _TOKENIZER_CONFIG_EXTRA,
    }
    return damaged_json(draw, data, extra.get(kind, {}))


_MODEL_FILES = (
    *("config.json",) * 4,
    *("tokenizer.json",) * 3,
    *("tokenizer_config.json",) * 3,
    *("generation_config.json", "chat_template.jinja", "model.safetensors.index.json"),
    "model.safetensors",
)


def model_directory(draw: Random, base: Path) -> Case:
    """A pair, or a model with an adapter, with one to three of their files damaged."""
    words = ["generate", "-m", "target", "-p", PROMPT, "-n", "4"]
    directories = ["target", "target", "target"]
    if draw.random() < 0.5:
        words += ["--draft-model", "draft"]
        directories.append("draft")
    for more in (["--temp", "0.8"], ["--json"], ["--logprobs", "2"], ["--xtc-probability", "0.5"]):
        words += more if draw.random() < 0.2 else []
    files: dict[str, bytes] = {}
    if draw.random() < 0.1:
        words += ["--adapter", "adapter"]
        name = draw.choice(("adapter/adapter_config.json",) * 3 + ("adapter/adapters.safetensors",))
        files[name] = _damaged_file(draw, base, name)
    while not files or draw.random() < 0.2:
        name = f"{draw.choice(directories)}/{draw.choice(_MODEL_FILES)}"
        files[name] = _damaged_file(draw, base, name)
    return Case(tuple(words), files=tuple(files.items()))
