"""Loading a model and its tokenizer through mlx-lm, with failures as one line.

On a CPU the weights are dequantised and computed in float32: MLX's quantised and half-precision
products are several times slower there. Float32 products go to a faster BLAS where there is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from mlxgen.backend.blas import use_fast_blas
from mlxgen.errors import MlxgenError, ModelError
from mlxgen.models.checkpoint import Checkpoint, read_checkpoint
from mlxgen.models.source import resolve_adapter, resolve_model

_LARGEST_SHARE_OF_MEMORY = 0.6


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. model: an mlx-lm module; tokenizer: mlx-lm's wrapper."""

    model: Any
    tokenizer: Any
    checkpoint: Checkpoint

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Token string to id, as the tokenizer has it."""
        vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        return vocabulary

    @property
    def drawable_ids(self) -> int:
        """Ids that can be drawn are below this: the tokenizer knows them and the head has a row."""
        known = max(self.vocabulary.values(), default=-1) + 1
        rows = self.checkpoint.vocabulary_rows
        return known if rows is None else min(known, rows)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The union of end-of-sequence ids of config, generation config and tokenizer."""
        own = self.tokenizer.eos_token_id
        return self.checkpoint.eos_ids | (frozenset() if own is None else {int(own)})

    def token_id(self, text: str) -> int | None:
        """The id of a token given by its string or as a number, or None."""
        if text in self.vocabulary:
            return self.vocabulary[text]
        is_number = text.isascii() and text.isdigit()
        return int(text) if is_number and int(text) < self.drawable_ids else None


def load(
    reference: str,
    *,
    revision: str | None = None,
    adapter: str | None = None,
    trust_remote_code: bool = False,
    role: str = "target",
) -> LoadedModel:
    """Load a model from a directory or a hub id.

    role: "target" or "draft", for messages. Raises `ModelError`, or `OptionError` for a revision
    of a local directory.
    """
    option = "-m" if role == "target" else "--draft-model"
    checkpoint = read_checkpoint(resolve_model(reference, revision, option), role)
    return load_checkpoint(checkpoint, adapter=adapter, trust_remote_code=trust_remote_code)


def load_checkpoint(
    checkpoint: Checkpoint,
    *,
    adapter: str | None = None,
    trust_remote_code: bool = False,
    warn: Callable[[str], None] = lambda message: None,
) -> LoadedModel:
    """Load what a checkpoint names. Raises `ModelError` with the reason in one line."""
    from mlx_lm import utils

    adapter_path = None if adapter is None else resolve_adapter(adapter)
    try:
        model, config = utils.load_model(
            checkpoint.path, lazy=True, trust_remote_code=trust_remote_code
        )
        if adapter_path is not None:
            model = utils.load_adapters(model, str(adapter_path))
            model.eval()
        if mx.default_device().type == mx.DeviceType.cpu:
            model = _in_float32(model, checkpoint, warn)
        mx.eval(model.parameters())
        tokenizer = utils.load_tokenizer(
            checkpoint.path,
            {"trust_remote_code": True} if trust_remote_code else None,
            eos_token_ids=config.get("eos_token_id"),
        )
    except (MlxgenError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:  # a bad file or a model module can raise anything
        raise ModelError(
            f"cannot load the {checkpoint.role} model from {checkpoint.path}: {one_line(error)}"
        ) from error
    return LoadedModel(model, tokenizer, checkpoint)


def _in_float32(model: Any, checkpoint: Checkpoint, warn: Callable[[str], None]) -> Any:
    from mlx_lm.utils import dequantize_model, get_total_parameters

    needed_bytes = 4 * int(get_total_parameters(model))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed_bytes > _LARGEST_SHARE_OF_MEMORY * memory_bytes:
        warn(
            f"the {checkpoint.role} model would take {needed_bytes / 2**30:.0f} GB in float32; it "
            f"is computed in its own precision, which is slow on a CPU"
        )
        return model
    use_fast_blas()
    # The scales first: dequantising in float16 would round every weight once more.
    model.set_dtype(mx.float32)
    return dequantize_model(model)


def one_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, KeyError):
        return f"missing key {lines[0]}"
    return lines[0] if len(lines[0]) <= 300 else lines[0][:297] + "..."
