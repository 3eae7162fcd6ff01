"""A model's cache that outlives a run: a later run takes up what its prompt shares with it.

Between runs it holds a known text. A run on another text gets it rewound to the longest common
prefix, so that only the rest has to be taken in. What cannot be rewound so far, or would not hold
what a cold run would put there, is given up and the run starts cold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mlx_lm.models.cache import QuantizedKVCache

from mlxgen.cache import caches as cache_ops
from mlxgen.cache.cached_model import CachedModel
from mlxgen.config import CacheConfig
from mlxgen.errors import GenerationError, PairError
from mlxgen.sampling.history import IntArray

NO_IDS: IntArray = np.zeros(0, dtype=np.int32)


def common_prefix_length(first: IntArray, second: IntArray) -> int:
    """Number of leading ids on which two texts agree."""
    n = min(len(first), len(second))
    differing = np.flatnonzero(first[:n] != second[:n])
    return int(differing[0]) if len(differing) else n


class KeptCache:
    """Lends a `CachedModel` to one run after another.

    fresh: makes one with nothing in it; config: the options it makes them with. What cannot be
    rewound is never kept: a rotating cache (`max_kv_size`), which forgets, and a model whose state
    depends on how many tokens were taken in at once.
    """

    def __init__(self, fresh: Callable[[], CachedModel], config: CacheConfig) -> None:
        self._fresh = fresh
        self._config = config
        self._held: CachedModel | None = None
        self._ids: IntArray = NO_IDS
        self._lent: CachedModel | None = None
        self._is_keepable = config.max_kv_size is None
        self.reused_tokens = 0
        """How many tokens of its prompt the newest run found here."""

    @property
    def held(self) -> CachedModel | None:
        """What is kept between runs; None during a run, and when nothing is."""
        return self._held

    @property
    def ids(self) -> IntArray:
        """The token ids that `held` holds: `[n] int32`."""
        return self._ids

    @property
    def is_keepable(self) -> bool:
        """Whether anything can be kept, as far as is known; `empty` finds out."""
        return self._is_keepable

    def empty(self) -> CachedModel:
        """A cached model with nothing in it, made rewindable where that is possible."""
        cached = self._fresh()
        if self._is_keepable:
            try:
                cached.make_rewindable()
            except PairError:  # plain decoding works with it all the same
                self._is_keepable = False
        return cached

    def put(self, cached: CachedModel, ids: IntArray) -> None:
        """Keep a model whose caches hold exactly these ids."""
        self._held, self._ids = cached, ids

    def forget(self) -> None:
        """The next run starts cold."""
        self._held, self._ids = None, NO_IDS

    def lend(self, prompt: IntArray) -> CachedModel:
        """A model that holds a prefix of the prompt, never all of it: the last token is always
        the run's first input. What is kept is unknown until `take_back`."""
        cached, ids = self._held, self._ids
        self.forget()
        shared = common_prefix_length(ids, prompt[:-1])
        if cached is not None and shared > 0 and not self._depends_on_chunks(cached, len(prompt)):
            try:
                cached.rewind(shared)
            except GenerationError:  # a state that cannot be taken back so far
                cached = None
        else:
            cached = None
        lent = cached or self.empty()
        self._lent, self.reused_tokens = lent, lent.cached_tokens
        return lent

    def take_back(self, text: IntArray) -> None:
        """After a run, however it ended. text: its prompt and the tokens taken from it, `[n]`."""
        cached, self._lent = self._lent, None
        if cached is None or not self._is_keepable:
            return
        length = min(cached.cached_tokens, len(text) - 1)
        try:
            # The run has done this already, unless it was interrupted at that very moment.
            cached.rewind(length)
        except GenerationError:
            return
        if _are_whole(cached):
            self.put(cached, text[:length])

    def _depends_on_chunks(self, cached: CachedModel, prompt_tokens: int) -> bool:
        """Whether a cold run might have quantised at another token than this cache did, or put
        other keys there, since a block's depend on where it ends."""
        longest = max(cached.cached_tokens, prompt_tokens)
        limit = cached.equal_block_tokens
        if limit is not None and longest > limit:
            return True
        return self._config.quantized_kv_start > 0 and any(
            type(cache) is QuantizedKVCache for cache in cache_ops.flattened(cached.caches)
        )


def _are_whole(cached: CachedModel) -> bool:
    """Whether keys and values have room for the same tokens in every layer.

    An interrupt between the growth of the one and of the other leaves a cache that rewinding does
    not mend.
    """

    def room(entries: Any) -> int | None:
        if isinstance(entries, list | tuple):
            entries = entries[0]
        return None if entries is None else int(entries.shape[2])

    return all(
        room(cache.keys) == room(cache.values)
        for cache in cache_ops.flattened(cached.caches)
        if hasattr(cache, "keys") and hasattr(cache, "values")
    )
