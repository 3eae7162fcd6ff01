"""What a model directory says of itself, read before anything heavy is imported or loaded."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlxgen.errors import ModelError

FALLBACK_CONTEXT_TOKENS = 4096

_LARGEST_SIZE = (1 << 31) - 1
_MOST_LAYERS = 2_000
# Zero of these would leave no model; of others some families have zero or none.
_AT_LEAST_ONE = ("vocab_size", "hidden_size", "num_hidden_layers")
_SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), _LARGEST_SIZE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), _LARGEST_SIZE),
    **dict.fromkeys(("n_embd", "n_head", "n_positions", "d_model"), _LARGEST_SIZE),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), _MOST_LAYERS),
}
"""What counts something in config.json, and its largest value that is not a mistake."""


@dataclass(frozen=True)
class Checkpoint:
    """A model directory and its parsed config.json. role: "target" or "draft"."""

    path: Path
    role: str
    config: dict[str, Any]

    @property
    def vocabulary_rows(self) -> int | None:
        """Rows of the embedding and the head, padding included, as the config has it."""
        return self._positive("vocab_size")

    @property
    def declared_context_tokens(self) -> int | None:
        """The context window, where the config names one."""
        return self._positive("max_position_embeddings") or self._positive("n_positions")

    @property
    def context_tokens(self) -> int:
        """The context window, or 4096 where the config does not say."""
        return self.declared_context_tokens or FALLBACK_CONTEXT_TOKENS

    def _positive(self, key: str) -> int | None:
        nested = self.config.get("text_config")
        for source in (self.config, nested if isinstance(nested, dict) else {}):
            value = source.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The parsed generation_config.json; empty when there is none."""
        path = self.path / "generation_config.json"
        return _read_object(path) if path.is_file() else {}

    @property
    def eos_ids(self) -> frozenset[int]:
        """End-of-sequence ids of config.json and generation_config.json together."""
        found: set[int] = set()
        nested = self.config.get("text_config")
        for source in (self.config, nested, self.generation_config):
            value = source.get("eos_token_id") if isinstance(source, dict) else None
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
                    found.add(item)
        return frozenset(found)

    def sampling_defaults(self) -> dict[str, float | int]:
        """temperature, top_p and top_k that the model's authors recommend, where usable.

        Nothing when they say `do_sample: false`, which means greedy decoding.
        """
        declared = self.generation_config
        if declared.get("do_sample") is False:
            return {}
        usable: dict[str, float | int] = {}
        for name, smallest, largest in (
            ("temperature", 0.0, sys.float_info.max),
            ("top_p", 0.0, 1.0),
            ("top_k", 0.0, sys.float_info.max),
        ):
            value = declared.get(name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if smallest <= value <= largest:
                usable[name] = int(value) if name == "top_k" else float(value)
        return usable


def read_checkpoint(path: Path, role: str) -> Checkpoint:
    """Read a directory's config.json.

    Raises `ModelError` when it is missing or not an object, or has sizes that no model has.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"the {role} model {path} has no config.json: not a model directory")
    config = _read_object(file)
    for source in (config, config.get("text_config")):
        if isinstance(source, dict):
            _check_sizes(source, role, file)
    return Checkpoint(path, role, config)


def _check_sizes(config: dict[str, Any], role: str, file: Path) -> None:
    """mlx-lm builds what it is told to: a million layers as well as a fraction of one."""
    for key, largest in _SIZES.items():
        value = config.get(key)
        # Some families have a size for each layer, or none.
        if value is None or isinstance(value, list):
            continue
        smallest = 1 if key in _AT_LEAST_ONE else 0
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not is_number or not smallest <= value <= largest:
            shown = str(value) if isinstance(value, int | float) else repr(value)
            shown = shown if len(shown) <= 40 else shown[:37] + "..."
            raise ModelError(
                f"the {role} model's config.json says {key} = {shown}, where a whole number from "
                f"{smallest} to {largest} is needed: {file} is damaged; fetch the model again"
            )


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"cannot read {file}: {reason}") from error
    if not isinstance(value, dict):
        raise ModelError(f"cannot read {file}: a JSON object is needed, not {type(value).__name__}")
    return value
