"""Where the default pair lives: SmolLM2-135M-Instruct and the draft model made for it.

Only the standard library is imported, so asking costs nothing when the answer is no.
"""

from __future__ import annotations

import os
from pathlib import Path

from mlxgen.models.source import expand_home

TARGET_NAME = "smollm2-135m-instruct"
DRAFT_NAME = "smollm2-draft"
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def cache_directory() -> Path:
    """`$MLXGEN_CACHE`, else `mlxgen` in the user's cache directory."""
    if chosen := os.environ.get("MLXGEN_CACHE"):
        return expand_home(chosen)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "mlxgen"
    return Path.home() / ".cache" / "mlxgen"


def target_directory() -> Path:
    """Name the target's directory, whether it has been fetched or not."""
    return cache_directory() / TARGET_NAME


def draft_directory() -> Path:
    """Name the draft's directory, which is part of the package."""
    return Path(__file__).resolve().parent.parent / "data" / DRAFT_NAME


def is_ready() -> bool:
    """Whether the target has been fetched; its directory appears whole or not at all."""
    directory = target_directory()
    return all((directory / name).is_file() for name in MODEL_FILES)
