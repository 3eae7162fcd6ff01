"""Where a model reference points: a local directory, or a snapshot of a Hub repository."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mlxgen.errors import ModelError, OptionError

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_SNAPSHOT_PATTERNS = [
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
]


def resolve_model(reference: str, revision: str | None, option: str) -> Path:
    """The directory of a model.

    An existing path is always local. What looks like a path but is missing is an error and never
    a Hub call. `owner/name` is fetched through the Hub cache; with HF_HUB_OFFLINE=1 only the cache
    is looked at. option: the flag the reference came from, for messages.
    """
    if not reference.strip():
        raise OptionError(f"{option} needs a directory or a hub id (owner/name)")
    path = expand_home(reference)
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise ModelError(
            f"{option} {reference[:100]}: no such directory ({error.strerror})"
        ) from error
    if is_directory:
        if revision is not None:
            raise OptionError(f"--revision is for hub ids, and {option} {reference} is a directory")
        return path
    if exists:
        raise ModelError(f"{option} {reference}: is a file; pass the model's directory")
    if not _HUB_ID.fullmatch(reference):
        hint = "" if _looks_like_a_path(reference) else ", and not a hub id (owner/name)"
        raise ModelError(f"{option} {reference}: no such directory{hint}")
    return _snapshot(reference, revision, option)


def expand_home(reference: str) -> Path:
    """A path with a leading `~` replaced; one that names no user's home stays as it is."""
    # Path.expanduser raises for an unknown user, and takes ./~name for one.
    return Path(os.path.expanduser(reference))  # noqa: PTH111


def resolve_adapter(reference: str) -> Path:
    """The directory of a LoRA adapter. Raises `ModelError` when there is none."""
    path = expand_home(reference)
    if not os.path.isfile(path / "adapter_config.json"):  # noqa: PTH113 - Path's may raise
        raise ModelError(f"--adapter {reference}: no such directory with an adapter_config.json")
    return path


def _looks_like_a_path(reference: str) -> bool:
    return reference.startswith((".", "~", os.sep)) or reference.count("/") > 1


def _snapshot(repository: str, revision: str | None, option: str) -> Path:
    import huggingface_hub
    from huggingface_hub import constants, errors

    at = f" at revision {revision}" if revision else ""
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=_SNAPSHOT_PATTERNS,
                local_files_only=constants.HF_HUB_OFFLINE,
            )
        )
    except errors.LocalEntryNotFoundError as error:
        reason = (
            "HF_HUB_OFFLINE is set and the Hub cache does not hold it; unset it or fetch it first"
            if constants.HF_HUB_OFFLINE
            else "the Hub cannot be reached and its cache does not hold it; check the network"
        )
        raise ModelError(
            f"{option} {repository}{at}: no such directory here, and {reason}"
        ) from error
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{option} {repository}: the repository is gated; ask for access on its page and set "
            f"HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{option} {repository}: no such revision: {revision}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{option} {repository}: no such directory here and no such repository on the Hub "
            f"(a private one needs HF_TOKEN)"
        ) from error
    except (OSError, errors.HfHubHTTPError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{option} {repository}{at}: cannot fetch it: {reason}") from error
