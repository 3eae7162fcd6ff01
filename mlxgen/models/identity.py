"""Telling one model's files from another's without reading all of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from mlxgen.models.checkpoint import Checkpoint

_WEIGHTS_AND_CODE = ("*.safetensors", "*.py")


def fingerprint(checkpoint: Checkpoint, adapter: Path | None = None) -> str:
    """A digest of a model's config, and of its weights' and code's names, sizes and dates.

    It changes with anything that changes what the model computes, and when files are written anew
    with the same contents. Where the directory lies does not matter. adapter: the directory of a
    LoRA adapter, if one is put on the model.
    """
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    _add_files(digest, checkpoint.path)
    if adapter is not None:
        digest.update((adapter / "adapter_config.json").read_bytes())
        _add_files(digest, adapter)
    return digest.hexdigest()


def _add_files(digest: hashlib._Hash, directory: Path) -> None:
    for pattern in _WEIGHTS_AND_CODE:
        for path in sorted(directory.glob(pattern)):
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
