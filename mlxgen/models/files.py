"""The files of a model directory: looked at before anything reads them."""

from __future__ import annotations

import json
from pathlib import Path

_INDEX = "model.safetensors.index.json"
_SHOWN = 3


def irregular_file(directory: Path) -> str | None:
    """The name of an entry that is neither a file nor a directory, such as a pipe that nobody
    writes to: reading it might never end. A link counts as what it points to."""
    for path in sorted(directory.iterdir()):
        try:
            if path.exists() and not path.is_file() and not path.is_dir():
                return path.name
        except OSError:
            continue
    return None


def missing_shards(directory: Path) -> list[str]:
    """Weight files that the directory's index names and that are not there; at most three.

    mlx-lm loads the weight files it finds and does not look at the index, so this only explains
    why weights are missing. Names that lead out of the directory are not looked up.
    """
    try:
        index = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
        names = {str(name) for name in index["weight_map"].values()}
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return []
    inside = sorted(name for name in names if Path(name).name == name)
    return [name for name in inside if not (directory / name).is_file()][:_SHOWN]
