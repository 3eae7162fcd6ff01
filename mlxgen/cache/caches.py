"""Making, measuring and rewinding mlx-lm's key/value caches.

The boundary invariant of this project: between rounds and after any exit a cache holds prompt plus
every emitted token except the newest. Rewinding is therefore by target length, never by a count of
rejected tokens that several places would have to agree on.

A model has a list of caches, one for each layer or so; a `CacheList` holds several for one layer.
Here each of those is a cache in its own right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlxgen.cache.chunked import LongChunkedKVCache
from mlxgen.cache.sliding import SlidingKVCache
from mlxgen.config import CacheConfig
from mlxgen.errors import GenerationError, OptionError, PairError

_TRIMMABLE = (KVCache, QuantizedKVCache, SlidingKVCache, ChunkedKVCache, LongChunkedKVCache)
_KEPT_AT_RING_START_TOKENS = 4


def make_caches(model: Any, config: CacheConfig) -> list[Any]:
    """The model's own caches. Raises `OptionError` for options that they do not allow."""
    caches: list[Any] = make_prompt_cache(model)
    if config.max_kv_size is not None:
        size = config.max_kv_size
        if not any(type(cache) is KVCache for cache in flattened(caches)):
            raise OptionError(
                f"--max-kv-size: this model has no cache that it limits (it has "
                f"{_type_names(caches)}); drop it"
            )

        # mlx-lm drops the size for models that make their own caches, llama among them.
        def ring(cache: Any) -> Any:
            if type(cache) is not KVCache:
                return cache
            return RotatingKVCache(max_size=size, keep=_KEPT_AT_RING_START_TOKENS)

        replace_caches(caches, ring)
    if config.kv_bits is not None:
        for cache in caches:
            if type(cache) not in (KVCache, ArraysCache):
                raise OptionError(
                    f"--kv-bits: mlx-lm cannot quantise this model's {type(cache).__name__}; "
                    f"drop --kv-bits"
                )
        if not any(type(cache) is KVCache for cache in caches):
            raise OptionError("--kv-bits: this model has no keys and values; drop --kv-bits")
    return caches


def flattened(caches: list[Any]) -> list[Any]:
    """All caches, those inside a `CacheList` one by one."""
    found: list[Any] = []
    for cache in caches:
        found.extend(flattened(list(cache.caches)) if isinstance(cache, CacheList) else [cache])
    return found


def replace_caches(caches: list[Any], replacement: Callable[[Any], Any]) -> None:
    """Put `replacement(cache)` in the place of every cache."""
    for index, cache in enumerate(caches):
        if isinstance(cache, CacheList):
            inner = list(cache.caches)
            replace_caches(inner, replacement)
            cache.caches = tuple(inner)
        else:
            caches[index] = replacement(cache)


def make_rewindable(caches: list[Any], role: str) -> None:
    """Replace windows and chunks by ones that can be rewound, contents included.

    Raises `PairError` for caches that can neither be trimmed nor put back to a snapshot.
    """
    for cache in flattened(caches):
        is_ring = isinstance(cache, RotatingKVCache) and cache.keep > 0
        if is_ring or not hasattr(cache, "__dict__"):
            why = " that keeps its first tokens" if is_ring else ""
            raise PairError(
                f"speculation needs caches that can be rewound, and the {role} model has a "
                f"{type(cache).__name__}{why}: drop --draft-model to decode without one"
            )

    def rewindable(cache: Any) -> Any:
        if type(cache) is RotatingKVCache:
            return SlidingKVCache.from_rotating(cache)
        if type(cache) is ChunkedKVCache:
            return LongChunkedKVCache.from_chunked(cache)
        return cache

    replace_caches(caches, rewindable)


def make_rotating(caches: list[Any]) -> None:
    """Turn windows that can be rewound back into mlx-lm's own."""

    def rotating(cache: Any) -> Any:
        return cache.to_rotating() if type(cache) is SlidingKVCache else cache

    replace_caches(caches, rotating)


def is_trimmable(cache: Any) -> bool:
    """Whether the newest tokens can be taken off this cache and leave what was there before.

    Asked by type: mlx-lm's own answer is yes for caches that lose tokens.
    """
    return type(cache) in _TRIMMABLE


def rewind(caches: list[Any], length: int, role: str) -> None:
    """Drop what lies behind the first `length` tokens, in every cache that can be trimmed.

    Caches may differ in length after an exception inside a forward pass; all end up equal.
    Raises `GenerationError` when one cannot be brought to that length.
    """
    for layer, cache in enumerate(caches):
        if isinstance(cache, CacheList):
            rewind(list(cache.caches), length, role)
        elif is_trimmable(cache) and not cache.empty():
            _trim(cache, length, f"the {role} model's cache of layer {layer}")


def _trim(cache: Any, length: int, name: str) -> None:
    surplus = int(cache.offset) - length
    trimmed = cache.trim(surplus) if surplus > 0 else 0
    if trimmed != max(surplus, 0) or int(cache.offset) != length:
        raise GenerationError(
            f"{name} holds {cache.offset} tokens after trimming {trimmed}, not {length}: its "
            f"{type(cache).__name__} cannot be rewound"
        )
    if isinstance(cache, ChunkedKVCache) and (
        cache.start_position > length // cache.chunk_size * cache.chunk_size
    ):
        raise GenerationError(
            f"{name} has lost the beginning of the chunk that token {length} belongs to: its "
            f"ChunkedKVCache cannot be rewound so far"
        )


def quantize_if_due(caches: list[Any], config: CacheConfig) -> None:
    """Quantise caches that hold at least `quantized_kv_start` tokens, in place."""
    if config.kv_bits is None:
        return
    for layer, cache in enumerate(caches):
        if type(cache) is KVCache and cache.offset >= config.quantized_kv_start:
            caches[layer] = cache.to_quantized(group_size=config.kv_group_size, bits=config.kv_bits)


def evaluate(caches: list[Any]) -> None:
    """Compute what the caches hold, so that no long graph builds up."""
    mx.eval([cache.state for cache in caches])


def start_evaluating(caches: list[Any]) -> None:
    """As `evaluate`, without waiting."""
    mx.async_eval([cache.state for cache in caches])


def _type_names(caches: list[Any]) -> str:
    return ", ".join(sorted({type(cache).__name__ for cache in flattened(caches)}))
