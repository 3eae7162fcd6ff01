"""Which kind of drafter a checkpoint is, told from its config.json.

Never from `model_type` alone: DFlash drafters carry the model type of an ordinary model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxgen.errors import OptionError, PairError
from mlxgen.models.checkpoint import Checkpoint

KINDS = ("dflash", "mtp")
_MTP_MODEL_TYPES = frozenset({"gemma4_assistant", "gemma4_unified_assistant", "qwen3_5_mtp"})
_DFLASH_SPECULATORS = ("dflash", "dflash2", "dspark")
_SPECIAL_NAMES = {
    "dflash": "a DFlash drafter",
    "mtp": "an MTP drafter",
    "speculators": "a drafter in the speculators format",
}
_DEFAULT_BLOCK_SIZE = {"dflash": 16, "mtp": 4}


@dataclass(frozen=True)
class DrafterKind:
    """kind: `dflash` or `mtp`, where `dflash` is also the label of an ordinary model.

    block_size counts tokens; it means nothing to the classic loop.
    """

    kind: str
    block_size: int
    block_size_is_explicit: bool

    @property
    def line(self) -> str:
        """The line that the command prints."""
        origin = "explicit" if self.block_size_is_explicit else "default"
        return f"Resolved drafter kind: {self.kind} (block_size = {self.block_size}, {origin})"


CLASSIC_LINE = (
    "Drafter kind was auto-detected only; running the classic SpeculativeGenerator path "
    "(pass --draft-kind explicitly to select a kind-specific round loop)."
)


def special_kind(config: dict[str, Any]) -> str | None:
    """`mtp`, `dflash` or `speculators` for a drafter that is no full model, else None."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in _MTP_MODEL_TYPES:
        return "mtp"
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    is_dflash = isinstance(config.get("dflash_config"), dict) or any(
        isinstance(name, str) and name.startswith(("DFlash", "Qwen3DSpark", "Lfm2DSpark"))
        for name in names
    )
    if is_dflash or config.get("speculators_model_type") in _DFLASH_SPECULATORS:
        return "dflash"
    return "speculators" if config.get("speculators_model_type") else None


def check_kind_option(kind: str | None) -> None:
    """Refuse an explicit kind: none of the kind-specific loops exists yet."""
    if kind is None:
        return
    if kind == "internal-mtp":
        raise OptionError(
            "--draft-kind=internal-mtp is not user-selectable: it is detected from the target; "
            "pass dflash or mtp"
        )
    if kind not in KINDS:
        raise OptionError(f"--draft-kind={kind!r} is not recognised; accepted values: dflash, mtp")
    raise OptionError(
        f"--draft-kind {kind}: the {kind} round loop does not exist yet; leave --draft-kind out to "
        f"run the classic loop with a small full model as --draft-model"
    )


def resolve_kind(draft: Checkpoint, block_size: int | None) -> DrafterKind:
    """The kind of an auto-detected drafter. Raises `PairError` when it is no full model."""
    refuse_special(draft, "--draft-model")
    kind = "dflash"
    return DrafterKind(kind, block_size or _DEFAULT_BLOCK_SIZE[kind], block_size is not None)


def refuse_special(checkpoint: Checkpoint, option: str) -> None:
    """Refuse a DFlash or MTP drafter where a full model is needed."""
    kind = special_kind(checkpoint.config)
    if kind is not None:
        raise PairError(
            f"{option} {checkpoint.path} is {_SPECIAL_NAMES[kind]}, not a standalone model: it "
            f"borrows embeddings and head from its target, and mlxgen has no {kind} round loop "
            f"yet; pass a small full model of the target's vocabulary instead"
        )
