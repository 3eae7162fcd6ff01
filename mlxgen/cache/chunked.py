"""The cache of chunked attention, kept long enough to be rewound."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import ChunkedKVCache

from mlxgen.cache.sliding import RESERVE_TOKENS

_STEP_TOKENS = 256


class LongChunkedKVCache(ChunkedKVCache):
    """A chunked cache that keeps `RESERVE_TOKENS` more than a chunk.

    Attention reaches back to the beginning of the chunk that a token belongs to. mlx-lm keeps no
    more than one chunk before the newest tokens, so going back over the beginning of a chunk finds
    the chunk before it cut off. The model's mask goes by `start_position` and hides what is kept
    in addition.
    """

    keys: Any
    values: Any

    @classmethod
    def from_chunked(cls, cache: ChunkedKVCache) -> LongChunkedKVCache:
        """The same contents."""
        kept = cls(cache.chunk_size)
        vars(kept).update(vars(cache))
        return kept

    def maybe_trim_front(self) -> None:
        """Drop what is out of reach, a good many tokens at a time."""
        held = self.offset - self.start_position
        surplus = held - (self.chunk_size + RESERVE_TOKENS)
        if surplus < _STEP_TOKENS:
            return
        self.keys = self.keys[..., surplus:held, :]
        self.values = self.values[..., surplus:held, :]
        self.start_position += surplus
