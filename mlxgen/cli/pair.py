"""Which target and draft a command runs on, and loading them with the lines that people expect."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from mlxgen.cli.streams import Streams
from mlxgen.errors import ModelError, OptionError
from mlxgen.models import default_pair
from mlxgen.models.checkpoint import Checkpoint, read_checkpoint
from mlxgen.models.drafter_kind import (
    CLASSIC_LINE,
    DrafterKind,
    refuse_special,
    resolve_kind,
)
from mlxgen.models.source import resolve_model

if TYPE_CHECKING:
    from mlxgen.models.loading import LoadedModel


@dataclass(frozen=True)
class PairChoice:
    """Checked by their config files, not loaded. kind: None without a draft."""

    target: Checkpoint
    draft: Checkpoint | None
    kind: DrafterKind | None
    is_default: bool


def choose_pair(
    model: str | None,
    revision: str | None,
    draft_model: str | None,
    draft_block_size: int | None = None,
) -> PairChoice:
    """Find the models that the options name. Without -m it is the default pair."""
    draft_path: Path | None = None
    if model is None:
        if revision is not None:
            raise OptionError("--revision needs -m with a hub id")
        if not default_pair.is_ready():
            raise ModelError(
                "no model given (-m), and the default pair is not set up: run `make pair` or "
                "`python scripts/fetch_default_pair.py` in a checkout of mlxgen, or pass -m"
            )
        target_path = default_pair.target_directory()
        draft_path = default_pair.draft_directory()
    else:
        target_path = resolve_model(model, revision, "-m")
    if draft_model is not None:
        draft_path = resolve_model(draft_model, None, "--draft-model")
    target = read_checkpoint(target_path, "target")
    refuse_special(target, "-m")
    if draft_path is None:
        return PairChoice(target, None, None, is_default=False)
    draft = read_checkpoint(draft_path, "draft")
    kind = resolve_kind(draft, draft_block_size)
    return PairChoice(target, draft, kind, is_default=model is None)


def load_pair(
    choice: PairChoice,
    streams: Streams,
    *,
    adapter: str | None = None,
    trust_remote_code: bool = False,
    verifies_blocks: bool = True,
    verbose: bool = False,
) -> tuple[LoadedModel, LoadedModel | None]:
    """Load both models; a draft that does not fit the target is an error here.

    verifies_blocks: False where nothing will be proposed.
    """
    from mlxgen.backend.allocator import allocator_in_use
    from mlxgen.backend.blas import use_fast_blas
    from mlxgen.backend.single_rows import takes_pairs
    from mlxgen.models.loading import load_checkpoint
    from mlxgen.models.vocabulary import compare_vocabularies

    if verbose:
        streams.note(_versions())
    if choice.is_default:
        draft_name = "no draft" if choice.draft is None else choice.draft.path.name
        streams.note(
            f"Using the default pair: {default_pair.TARGET_NAME} with {draft_name} "
            f"(-m chooses another model)"
        )
    streams.note(f'Loading model from "{choice.target.path}"...')
    target = load_checkpoint(
        choice.target,
        adapter=adapter,
        trust_remote_code=trust_remote_code,
        verifies_blocks=verifies_blocks,
        warn=streams.warn,
    )
    if verbose:
        pairs = ", single rows in pairs" if takes_pairs(target.model) else ""
        streams.note(f"Matrix products in float32 on the CPU: {use_fast_blas().detail}{pairs}")
        streams.note(f"Memory allocator: {allocator_in_use()}")
    if choice.draft is None or choice.kind is None:
        return target, None
    if choice.draft.path.resolve() == choice.target.path.resolve() and adapter is None:
        streams.note("The draft is the target itself; its weights are loaded once.")
        draft = target
    else:
        streams.note(f'Loading draft model from "{choice.draft.path}"...')
        draft = load_checkpoint(
            choice.draft, trust_remote_code=trust_remote_code, warn=streams.warn
        )
    for note in compare_vocabularies(target.vocabulary, draft.vocabulary):
        streams.note(f"note: {note}")
    streams.note("Draft model loaded.")
    streams.note(choice.kind.line)
    streams.note(CLASSIC_LINE)
    return target, draft


def _versions() -> str:
    known = []
    for name in ("mlxgen", "mlx", "mlx-lm", "transformers"):
        try:
            known.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            known.append(f"{name} (not installed as a package)")
    return f"{', '.join(known)}; Python {platform.python_version()} on {platform.platform()}"
