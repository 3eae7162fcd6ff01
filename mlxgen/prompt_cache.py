"""A file that keeps a run's caches, so that the next one takes up what its prompt shares with it.

The file is in the safetensors format. Its metadata say which model and which cache options it was
written with; anything else refuses it. It is written beside its place and then moved there, so it
is the old one or the new one, never half of one.
"""

from __future__ import annotations

import json
import secrets
import zlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxgen.config import CacheConfig
from mlxgen.errors import GenerationError, InputError, ModelError, OptionError

if TYPE_CHECKING:
    from mlxgen.cache.kept import KeptCache
    from mlxgen.memory import Memory
    from mlxgen.models.loading import LoadedModel

OPTION = "--prompt-cache"
_FORMAT = 1
_CONTENTS, _CHECKSUM = "mlxgen_prompt_cache", "crc32"
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class PromptCache:
    """The file of one command. Nothing of it is read before `check`.

    name: as the user typed it, for messages. target, draft: fingerprints of the models. config:
    the cache options of the run, checked by `check_options`.
    """

    path: Path
    name: str
    target: str
    draft: str | None
    config: CacheConfig

    def check(self) -> None:
        """Refuse, without loading anything, a file that this run cannot use.

        A file that is not there yet is fine. Raises `InputError`.
        """
        if not self.path.parent.is_dir():
            raise self._error(f"no such directory: {self.path.parent}")
        if not self.path.exists():
            return
        if not self.path.is_file():
            raise self._error("is not a file")
        self._read_contents()

    def load(self, memory: Memory, target: LoadedModel, draft: LoadedModel | None) -> None:
        """Put what the file holds into the memory of these models.

        A state of another draft is left aside; the draft prefills itself then. Raises `InputError`
        for a file that is damaged, `ModelError` for a model whose caches cannot be stored.
        """
        self._require_storable(memory)
        if not self.path.exists():
            return
        contents = self._read_contents()
        stored = contents["target"]
        if stored["dtypes"] != _dtypes(target.model):
            raise self._error(
                f"was written by a model computed in {', '.join(stored['dtypes'])}; it is "
                f"{', '.join(_dtypes(target.model))} now"
            )
        self._fill(memory.target, stored)
        stored = contents["draft"]
        usable = (
            memory.draft is not None
            and draft is not None
            and stored is not None
            and stored["model"] == self.draft
            and stored["dtypes"] == _dtypes(draft.model)
        )
        if memory.draft is not None and usable:
            self._fill(memory.draft, stored)

    def save(self, memory: Memory, target: LoadedModel, draft: LoadedModel | None) -> None:
        """Write what the memory holds. Raises `GenerationError` when that fails; the file is as
        it was then."""
        import mlx.core as mx

        arrays: dict[str, mx.array] = {}
        contents: dict[str, Any] = {
            "format": _FORMAT,
            "mlx_lm": metadata.version("mlx-lm"),
            "kv": self._kv_options(),
            "target": _packed(memory.target, self.target, target, "target", arrays),
            "draft": None,
        }
        if contents["target"] is None:
            raise self._failure("the run left nothing to keep")
        if memory.draft is not None and draft is not None:
            contents["draft"] = _packed(memory.draft, self.draft, draft, "draft", arrays)
        text = json.dumps(contents)
        header = {_CONTENTS: text, _CHECKSUM: str(zlib.crc32(text.encode()))}
        # MLX appends the suffix to a name without it.
        beside = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.safetensors")
        try:
            mx.save_safetensors(str(beside), arrays, metadata=header)
            if self.path.exists():
                beside.chmod(self.path.stat().st_mode)
            beside.replace(self.path)
        except (OSError, RuntimeError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise self._failure(reason or (str(error).splitlines() or ["?"])[0]) from error
        finally:
            beside.unlink(missing_ok=True)

    def _require_storable(self, memory: Memory) -> None:
        from mlxgen.cache.kept import NO_IDS
        from mlxgen.cache.packing import pack

        for kept in memory.caches:
            empty = kept.empty()
            try:
                pack(empty, NO_IDS, "check")
                reason = None if kept.is_keepable else "it cannot be rewound exactly"
            except GenerationError as error:
                reason = str(error)
            if reason is not None:
                names = ", ".join(sorted({type(cache).__name__ for cache in empty.caches}))
                raise ModelError(
                    f"{OPTION}: the state of the {empty.role} model's {names} cannot be kept: "
                    f"{reason}"
                )

    def _fill(self, kept: KeptCache, stored: dict[str, Any]) -> None:
        import mlx.core as mx

        from mlxgen.cache.packing import unpack

        cached = kept.empty()
        try:
            arrays: Any = mx.load(str(self.path), format="safetensors")
            ids = unpack(cached, self.config, arrays, stored)
        except ValueError as error:
            raise self._damaged(str(error)) from error
        except (OSError, RuntimeError, KeyError, TypeError) as error:
            raise self._damaged("its data cannot be read") from error
        kept.put(cached, ids)

    def _read_contents(self) -> dict[str, Any]:
        contents = self._contents_of(self._read_header())
        if contents["target"]["model"] != self.target:
            raise self._error(
                "was written for another model, or the model's files have changed since; delete "
                "it or use another"
            )
        if contents["kv"] != self._kv_options():
            raise self._error(
                "was written with other values of --kv-bits or --kv-group-size; use the same, or "
                "another file"
            )
        if contents["mlx_lm"] != metadata.version("mlx-lm"):
            raise self._error(
                f"was written with mlx-lm {contents['mlx_lm']}, and this is "
                f"{metadata.version('mlx-lm')}; delete it or use another"
            )
        return contents

    def _read_header(self) -> dict[str, Any]:
        """The JSON in front of the data, and a look at whether all of the data is there."""
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                if not 2 <= length <= size - _LENGTH_BYTES:
                    raise self._foreign()
                header = json.loads(file.read(length))
            if not isinstance(header, dict):
                raise self._foreign()
            end = max(
                (entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"),
                default=0,
            )
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError, KeyError, TypeError, IndexError) as error:
            raise self._foreign() from error
        if end != size - _LENGTH_BYTES - length:
            raise self._damaged("its end is missing")
        return header

    def _contents_of(self, header: dict[str, Any]) -> dict[str, Any]:
        own = header.get("__metadata__")
        if not isinstance(own, dict) or not isinstance(own.get(_CONTENTS), str):
            raise self._foreign()
        text = own[_CONTENTS]
        if own.get(_CHECKSUM) != str(zlib.crc32(text.encode("utf-8", "surrogatepass"))):
            raise self._damaged("its description has changed since it was written")
        try:
            contents: dict[str, Any] = json.loads(text)
            if contents["format"] == _FORMAT:
                # What this version has described and nobody has changed is whole.
                return contents
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise self._foreign() from error
        raise self._error("was written by another version of mlxgen; delete it or use another")

    def _kv_options(self) -> dict[str, int | None]:
        bits = self.config.kv_bits
        return {"bits": bits, "group_size": None if bits is None else self.config.kv_group_size}

    def _foreign(self) -> InputError:
        return self._error("is not a prompt cache of mlxgen, or damaged; use another file")

    def _damaged(self, reason: str) -> InputError:
        return self._error(f"is damaged ({reason}); delete it or use another")

    def _error(self, reason: str) -> InputError:
        return InputError(f"{OPTION} {self.name}: {reason}")

    def _failure(self, reason: str) -> GenerationError:
        return GenerationError(f"{OPTION} {self.name}: cannot write it: {reason}")


def check_options(config: CacheConfig) -> None:
    """Refuse cache options under which no state can be taken up exactly. Raises `OptionError`."""
    if config.max_kv_size is not None:
        raise OptionError(
            f"{OPTION} and --max-kv-size exclude each other: a ring has forgotten what another "
            f"prompt would share with it; drop one"
        )
    if config.kv_bits is not None and config.quantized_kv_start > 0:
        raise OptionError(
            f"{OPTION} needs --quantized-kv-start 0: a cache that was quantised halfway differs "
            f"from one that another prompt would have filled"
        )


def _packed(
    kept: KeptCache,
    model: str | None,
    loaded: LoadedModel,
    name: str,
    arrays: dict[str, Any],
) -> dict[str, Any] | None:
    from mlxgen.cache.packing import pack

    if kept.held is None:
        return None
    packed, description = pack(kept.held, kept.ids, name)
    arrays.update(packed)
    return {"model": model, "dtypes": _dtypes(loaded.model), **description}


def _dtypes(model: Any) -> list[str]:
    """The types of a model's weights, by name."""
    from mlx.utils import tree_flatten

    weights: Any = tree_flatten(model.parameters())
    return sorted({str(value.dtype).removeprefix("mlx.core.") for _, value in weights})
