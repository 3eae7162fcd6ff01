"""The state of a model's caches as named arrays and a description that JSON can hold, and back.

Every cache is described by its type and its attributes, so one of a kind that is not known here
either round-trips as it is or is refused.
"""

from __future__ import annotations

import zlib
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache

from mlxgen.cache import caches as cache_ops
from mlxgen.cache.cached_model import CachedModel
from mlxgen.cache.sliding import SlidingKVCache
from mlxgen.config import CacheConfig
from mlxgen.errors import GenerationError
from mlxgen.sampling.history import IntArray

Description = dict[str, Any]
Arrays = dict[str, mx.array]


def pack(cached: CachedModel, ids: IntArray, name: str) -> tuple[Arrays, Description]:
    """The arrays of a model's caches, named `name.*`, and what is needed to put them back.

    ids: the tokens that the caches hold, `[n] int32`. Raises `GenerationError` for a cache with
    something in it that cannot be stored.
    """
    arrays: Arrays = {}
    description = {
        "ids": _encode(mx.array(ids), f"{name}.ids", arrays),
        "layers": [
            {
                "type": type(cache).__name__,
                "state": _encode(_used_part(cache), f"{name}.{layer}", arrays),
            }
            for layer, cache in enumerate(cache_ops.flattened(cached.caches))
        ],
    }
    return arrays, description


def unpack(
    cached: CachedModel, config: CacheConfig, arrays: Arrays, description: Description
) -> IntArray:
    """Fill an empty model's caches with a packed state; returns the ids that they hold then.

    config: the options that the model was made with. Raises `ValueError` when the state belongs to
    other caches, or is not what was packed.
    """
    ids: IntArray = np.array(_decode(description["ids"], arrays), dtype=np.int32)
    if len(ids) == 0:
        # Nothing went through these caches, quantisation neither.
        return ids
    cache_ops.quantize_if_due(cached.caches, config)
    caches = cache_ops.flattened(cached.caches)
    types = [type(cache).__name__ for cache in caches]
    if [layer["type"] for layer in description["layers"]] != types:
        raise ValueError("it holds caches of other types")
    for cache, layer in zip(caches, description["layers"], strict=True):
        vars(cache).update(_decode(layer["state"], arrays))
        if cache_ops.is_trimmable(cache) and not cache.empty() and cache.offset != len(ids):
            raise ValueError("its layers hold different numbers of tokens")
    cached.adopt(len(ids))
    return ids


def _used_part(cache: Any) -> dict[str, Any]:
    """A cache's attributes, without the room behind its newest token."""
    attributes = dict(vars(cache))
    used_tokens = None
    if type(cache) in (KVCache, QuantizedKVCache):
        used_tokens = cache.offset
    elif isinstance(cache, ChunkedKVCache):
        used_tokens = cache.offset - cache.start_position
    elif type(cache) is SlidingKVCache:
        used_tokens = cache._idx
    if used_tokens is not None:
        for name in ("keys", "values"):
            attributes[name] = _cut(attributes[name], used_tokens)
    return attributes


def _cut(entries: Any, tokens: int) -> Any:
    if isinstance(entries, list | tuple):
        return type(entries)(_cut(part, tokens) for part in entries)
    return None if entries is None else entries[..., :tokens, :]


def _encode(value: Any, name: str, arrays: Arrays) -> Description:
    if isinstance(value, mx.array):
        array = mx.contiguous(value)
        arrays[name] = array
        return {
            "array": name,
            "shape": list(array.shape),
            "dtype": str(array.dtype),
            "crc32": _checksum(array),
        }
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{name}.{i}", arrays) for i, item in enumerate(value)]
        return {type(value).__name__: items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {
            "dict": {key: _encode(item, f"{name}.{key}", arrays) for key, item in value.items()}
        }
    raise GenerationError(f"a cache holds a {type(value).__name__}, which cannot be stored")


def _decode(encoded: Description, arrays: Arrays) -> Any:
    if "array" in encoded:
        array = arrays[encoded["array"]]
        found = (list(array.shape), str(array.dtype))
        if found != (encoded["shape"], encoded["dtype"]) or _checksum(array) != encoded["crc32"]:
            raise ValueError("its data has changed since it was written")
        return array
    if "list" in encoded:
        return [_decode(item, arrays) for item in encoded["list"]]
    if "tuple" in encoded:
        return tuple(_decode(item, arrays) for item in encoded["tuple"])
    if "dict" in encoded:
        return {key: _decode(item, arrays) for key, item in encoded["dict"].items()}
    return encoded["value"]


def _checksum(array: mx.array) -> int:
    if array.size == 0:
        return 0
    return zlib.crc32(np.array(array.reshape(-1).view(mx.uint8)).data)
