"""The tables that a loaded model looks ids and positions up in.

MLX checks no bounds when it gathers or scatters: an id or a position behind the end of a table
reads or writes other memory. What config.json says of them is not what was loaded.
"""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding

_POSITIONS = re.compile(r"(^|\.)wpe$")
# Indexed by hashes that are taken modulo their own sizes.
_HASHED = re.compile(r"\.ngram_embeddings\.embedders\.")
_BESIDE = re.compile(r"\.embed_tokens_per_layer$")
# It replaces ids behind the end of this second table by 0.
_GUARDS_ITS_SECOND_TABLE = "mlx_lm.models.gemma3n"


def token_rows(model: Any) -> int | None:
    """Rows of the token embedding, of the smallest where there are several; None without one."""
    guarded = type(model).__module__ == _GUARDS_ITS_SECOND_TABLE
    return min(
        (
            rows
            for path, rows in _tables(model).items()
            if not _POSITIONS.search(path)
            and not _HASHED.search(path)
            and not (guarded and _BESIDE.search(path))
        ),
        default=None,
    )


def position_rows(model: Any) -> int | None:
    """Number of positions a model has learned vectors for; None where they are computed."""
    return min(
        (rows for path, rows in _tables(model).items() if _POSITIONS.search(path)), default=None
    )


def check_masked_ids(model: Any) -> None:
    """Raise `ValueError` where a model masks ids of its own that its logits do not have."""
    masked = getattr(model, "_dummy_tokenizer_ids", None)
    rows = token_rows(model)
    if not isinstance(masked, mx.array) or masked.size == 0 or rows is None:
        return
    largest = int(np.array(masked).max())
    if largest >= rows:
        raise ValueError(
            f"mlx-lm's code for this model type needs a vocabulary of more than {largest} tokens, "
            f"and vocab_size is {rows}"
        )


def _tables(model: Any) -> dict[str, int]:
    """Rows of every embedding, by its path in the model."""
    if not isinstance(model, Module):
        return {}
    return {
        path: int(module.weight.shape[0])
        for path, module in model.named_modules()
        if isinstance(module, Embedding | QuantizedEmbedding)
    }
