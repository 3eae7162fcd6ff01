"""Making, measuring and rewinding mlx-lm's key/value caches.

The boundary invariant of this project: between rounds and after any exit a cache holds prompt plus
every emitted token except the newest. Rewinding is therefore by target length, never by a count of
rejected tokens that several places would have to agree on.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlxgen.config import CacheConfig
from mlxgen.errors import GenerationError, OptionError, PairError

_REWINDABLE = (KVCache, QuantizedKVCache)
_KEPT_AT_RING_START_TOKENS = 4


def make_caches(model: Any, config: CacheConfig) -> list[Any]:
    """The model's own caches, one for each layer, under the given options."""
    caches: list[Any] = make_prompt_cache(model)
    if config.max_kv_size is not None:
        # mlx-lm drops the size for models that make their own caches, llama among them.
        caches = [
            RotatingKVCache(max_size=config.max_kv_size, keep=_KEPT_AT_RING_START_TOKENS)
            if type(cache) is KVCache
            else cache
            for cache in caches
        ]
    if config.kv_bits is not None:
        for cache in caches:
            if type(cache) is not KVCache:
                raise OptionError(
                    f"--kv-bits: mlx-lm cannot quantise this model's {type(cache).__name__}; "
                    f"drop --kv-bits"
                )
    return caches


def are_rewindable(caches: list[Any]) -> bool:
    """Whether every layer's cache can be rewound exactly."""
    return all(type(cache) in _REWINDABLE for cache in caches)


def require_rewindable(caches: list[Any], role: str) -> None:
    """Raise `PairError`, naming the cache type, unless every layer can be rewound exactly."""
    for cache in caches:
        if type(cache) not in _REWINDABLE:
            raise PairError(
                f"speculation needs caches that can be rewound, and the {role} model has a "
                f"{type(cache).__name__} (sliding-window or recurrent layers), which is not "
                f"supported with a draft yet: drop --draft-model to decode without one"
            )


def rewind(caches: list[Any], length: int, role: str) -> None:
    """Drop what lies behind the first `length` tokens, in every layer.

    Layers may differ in length after an exception inside a forward pass; all end up equal.
    Raises `GenerationError` when a layer cannot be brought to that length.
    """
    for layer, cache in enumerate(caches):
        surplus = int(cache.offset) - length
        trimmed = cache.trim(surplus) if surplus > 0 else 0
        if int(cache.offset) != length:
            raise GenerationError(
                f"the {role} model's cache of layer {layer} holds {cache.offset} tokens after "
                f"trimming {trimmed}, not {length}: its {type(cache).__name__} cannot be rewound"
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
