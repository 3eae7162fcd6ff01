"""Loading a model and its tokenizer through mlx-lm, with failures as one line.

On a CPU the weights are dequantised and computed in float32: MLX's quantised and half-precision
products are several times slower there. Float32 products go to a faster BLAS where there is one.

On CUDA small models are dequantised, to the precision of their scales: MLX compiles a kernel for
every kind of quantised product the first time it meets one, 20 seconds each, and keeps it in a
temporary folder. Where that folder is empty, the default pair would begin to answer after minutes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxgen.backend.blas import use_fast_blas
from mlxgen.backend.cuda import lacks_block_attention, prepare_cuda
from mlxgen.backend.rotary_tables import share_rotary_tables
from mlxgen.backend.single_rows import pair_single_rows
from mlxgen.errors import MlxgenError, ModelError
from mlxgen.models.checkpoint import Checkpoint, read_checkpoint
from mlxgen.models.files import irregular_file, missing_shards
from mlxgen.models.source import resolve_adapter, resolve_model
from mlxgen.models.tables import check_masked_ids, position_rows, token_rows

_LARGEST_SHARE_OF_MEMORY = 0.6
_LARGEST_DEQUANTISED_BYTES = 2**30
"""On CUDA; next to the memory of such a device this is nothing."""
_CURES = {
    "model": "config.json and weights are damaged, incomplete, or not of a kind that mlx-lm can "
    "run; fetch the model again or choose another",
    "adapter": "--adapter needs one that was made for this model",
    "tokenizer": "the tokenizer's files or config.json are damaged or missing; fetch the model "
    "again",
}
"""For each stage of loading, what a failure means and what helps."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. model: an mlx-lm module; tokenizer: mlx-lm's wrapper;
    attends_in_pieces: whether blocks attend so on this device and in this process
    (`mlxgen.cache.short_attention`)."""

    model: Any
    tokenizer: Any
    checkpoint: Checkpoint
    attends_in_pieces: bool = False

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Token string to id, as the tokenizer has it."""
        vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        return vocabulary

    @property
    def drawable_ids(self) -> int:
        """Ids that can be drawn are below this: the tokenizer knows them and the head has a row."""
        known = max(self.vocabulary.values(), default=-1) + 1
        rows = self.embedding_rows
        return known if rows is None else min(known, rows)

    @cached_property
    def embedding_rows(self) -> int | None:
        """Ids that can be embedded are below this; looking up another would read wild memory."""
        rows = token_rows(self.model)
        return self.checkpoint.vocabulary_rows if rows is None else rows

    @cached_property
    def position_rows(self) -> int | None:
        """Most tokens of a text, where positions are looked up in a table; None where they are
        computed and any number will do."""
        return position_rows(self.model)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The union of end-of-sequence ids of config, generation config and tokenizer."""
        own = self.tokenizer.eos_token_id
        return self.checkpoint.eos_ids | (frozenset() if own is None else {int(own)})

    def token_id(self, text: str) -> int | None:
        """The id of a token given by its string or as a number, or None."""
        if text in self.vocabulary:
            return self.vocabulary[text]
        # Python reads no number of thousands of digits.
        is_number = text.isascii() and text.isdigit() and len(text) < 20
        return int(text) if is_number and int(text) < self.drawable_ids else None


def load(
    reference: str,
    *,
    revision: str | None = None,
    adapter: str | None = None,
    trust_remote_code: bool = False,
    role: str = "target",
    verifies_blocks: bool = True,
) -> LoadedModel:
    """Load a model from a directory or a hub id.

    role: "target" or "draft", for messages. verifies_blocks: whether this process will speculate;
    CUDA is set up for it once, before the first model. Raises `ModelError`, or `OptionError` for a
    revision of a local directory.
    """
    option = "-m" if role == "target" else "--draft-model"
    checkpoint = read_checkpoint(resolve_model(reference, revision, option), role)
    return load_checkpoint(
        checkpoint,
        adapter=adapter,
        trust_remote_code=trust_remote_code,
        verifies_blocks=verifies_blocks,
    )


def load_checkpoint(
    checkpoint: Checkpoint,
    *,
    adapter: str | None = None,
    trust_remote_code: bool = False,
    verifies_blocks: bool = True,
    warn: Callable[[str], None] = lambda message: None,
) -> LoadedModel:
    """Load what a checkpoint names; verifies_blocks as in `load`.

    Raises `ModelError` with the reason in one line.
    """
    from mlx_lm import utils

    adapter_path = None if adapter is None else resolve_adapter(adapter)
    _check_files(checkpoint, adapter_path, trust_remote_code)
    prepare_cuda(verifies_blocks=verifies_blocks)
    stage = "model"
    try:
        with _without_advice():
            model, _ = utils.load_model(
                checkpoint.path, lazy=True, trust_remote_code=trust_remote_code
            )
            check_masked_ids(model)
            if adapter_path is not None:
                stage = "adapter"
                model = utils.load_adapters(model, str(adapter_path))
                model.eval()
                stage = "model"
            if mx.default_device().type == mx.DeviceType.cpu:
                model = _in_float32(model, checkpoint, warn)
            elif mx.cuda.is_available():
                model = _without_small_quantisation(model)
            mx.eval(model.parameters())
            stage = "tokenizer"
            tokenizer = utils.load_tokenizer(
                checkpoint.path,
                # Left out, transformers asks on the terminal, and takes piped text for an answer.
                {"trust_remote_code": trust_remote_code},
                eos_token_ids=sorted(checkpoint.eos_ids) or None,
            )
            tokenizer.encode("a")
            stage = "model"
            _try_out(model)
    except (MlxgenError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a bad file, a model module, a panic in Rust: anything
        with_adapter = f" with --adapter {adapter}" if stage == "adapter" else ""
        raise ModelError(
            f"cannot load the {checkpoint.role} model from {checkpoint.path}{with_adapter}: "
            f"{_reason(error, stage, checkpoint)}"
        ) from error
    return LoadedModel(model, tokenizer, checkpoint, attends_in_pieces=lacks_block_attention())


def _check_files(checkpoint: Checkpoint, adapter: Path | None, trust_remote_code: bool) -> None:
    """Refuse what must not even be opened: files that are none, and code nobody asked for."""
    start = f"cannot load the {checkpoint.role} model from {checkpoint.path}: "
    for directory in [checkpoint.path] if adapter is None else [checkpoint.path, adapter]:
        if (name := irregular_file(directory)) is not None:
            raise ModelError(f"{start}{directory / name} is no regular file; remove or replace it")
    code = checkpoint.config.get("model_file")
    if code is None:
        return
    if not trust_remote_code:
        raise ModelError(
            f"{start}it brings code of its own (model_file {code!r}), which runs only with "
            f"--trust-remote-code"
        )
    if not isinstance(code, str) or Path(code).is_absolute() or ".." in Path(code).parts:
        raise ModelError(f"{start}model_file {code!r} is not inside its directory")


def _reason(error: BaseException, stage: str, checkpoint: Checkpoint) -> str:
    reason = one_line(error)
    if stage == "tokenizer" and "custom code" in reason:
        return "its tokenizer brings code of its own, which runs only with --trust-remote-code"
    if stage == "model" and (missing := missing_shards(checkpoint.path)):
        reason = f"{', '.join(missing)} is missing, which its index names ({reason})"
    return f"{reason} ({_CURES[stage]})"


@contextmanager
def _without_advice() -> Iterator[None]:
    """Keep transformers from advising on stderr about config files; errors are raised."""
    from transformers import utils

    logging: Any = utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.set_verbosity(level)


def _try_out(model: Any) -> None:
    """Build the graph of a forward, computing nothing.

    mlx-lm takes values of any type from the config files, and only their first use fails.
    """
    from mlx_lm.models.cache import make_prompt_cache

    model(mx.array([[0]]), cache=make_prompt_cache(model))


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
    model = dequantize_model(model)
    pair_single_rows(model)
    share_rotary_tables(model)
    return model


def _without_small_quantisation(model: Any) -> Any:
    from mlx_lm.utils import dequantize_model, get_total_parameters

    is_small = 2 * int(get_total_parameters(model)) <= _LARGEST_DEQUANTISED_BYTES
    # Other modes than the affine one have no scales of the model's own precision.
    modes = {module.mode for module in model.modules() if "scales" in module}
    return dequantize_model(model) if is_small and modes <= {"affine"} else model


def one_line(error: BaseException) -> str:
    """An error's message as one line of at most 250 characters, or its type where it says
    nothing."""
    message = " ".join(str(error).split())
    if not message:
        return type(error).__name__
    if isinstance(error, KeyError):
        return f"missing key {message}"
    return message if len(message) <= 250 else message[:247] + "..."
