"""A sliding-window cache that can be rewound.

mlx-lm's `RotatingKVCache` overwrites the oldest entry with the newest, so once the window has
wrapped a rejected draft has destroyed entries that are needed again. This one keeps a stretch of
older entries behind the window. Its model is handed the same entries as by the rotating cache,
token by token, but oldest first: attention sums over them in another order.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

RESERVE_TOKENS = 2304
"""How far back `trim` reaches, at least: two rounds of k + 2 tokens each, k <= 1024."""
_STEP_TOKENS = 256


class SlidingKVCache(RotatingKVCache):
    """Keys and values of a sliding-window layer: `[B, heads, tokens, head_dim]`.

    max_size: the window in tokens, the newest included. The buffer's first `_idx` slots hold the
    newest tokens in order; slot i is the token at position `offset - _idx + i`.
    """

    keys: Any
    values: Any

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)  # type: ignore[no-untyped-call]
        self._newest_tokens = 1

    @classmethod
    def from_rotating(cls, cache: RotatingKVCache) -> SlidingKVCache:
        """The same contents. Only what the rotating cache still holds can be rewound to."""
        if cache.keep:
            raise ValueError("a ring that keeps its first tokens is no sliding window")
        sliding = cls(cache.max_size)
        if cache.keys is not None:
            sliding.keys = cache._temporal_order(cache.keys)
            sliding.values = cache._temporal_order(cache.values)
            sliding.offset, sliding._idx = cache.offset, sliding.keys.shape[2]
        return sliding

    def to_rotating(self) -> RotatingKVCache:
        """The same contents without the stretch behind the window."""
        rotating = RotatingKVCache(self.max_size)
        if self.keys is not None:
            start = max(0, self._idx - self.max_size)
            rotating.keys = self.keys[..., start : self._idx, :]
            rotating.values = self.values[..., start : self._idx, :]
            rotating.offset, rotating._idx = self.offset, self._idx - start
        return rotating

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `[B, heads, n, head_dim]`; returns the n newest tokens and the window before."""
        n = keys.shape[2]
        if self.keys is None or self._idx + n > self.keys.shape[2]:
            self._make_room(keys, values)
        end = self._idx + n
        self.keys[..., self._idx : end, :] = keys
        self.values[..., self._idx : end, :] = values
        self.offset, self._idx, self._newest_tokens = self.offset + n, end, n
        return self.keys_and_values()

    def _make_room(self, keys: mx.array, values: mx.array) -> None:
        """Move what may be needed again to the front of a new buffer."""
        n = keys.shape[2]
        kept = min(self._idx, self.max_size - 1 + RESERVE_TOKENS)

        def moved(old: mx.array | None, new: mx.array) -> mx.array:
            room = -(-n // _STEP_TOKENS) * _STEP_TOKENS
            shape = (*new.shape[:2], room, new.shape[3])
            empty = mx.zeros(shape, new.dtype)
            if old is None or kept == 0:
                return empty
            return mx.concatenate([old[..., self._idx - kept : self._idx, :], empty], axis=2)

        self.keys, self.values, self._idx = (
            moved(self.keys, keys),
            moved(self.values, values),
            kept,
        )

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the newest tokens may attend to: themselves and the window before them."""
        start = max(0, self._idx - (self.max_size - 1 + self._newest_tokens))
        if start == 0 and self._idx == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[..., start : self._idx, :], self.values[..., start : self._idx, :]

    def make_mask(
        self, n: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """The mask for n new tokens: `[n, keys] bool`, "causal", or None for all keys.

        Each token sees what it would see alone. A model may ask for a wider window than the cache
        holds; the rotating cache then gives a block more than it gives single tokens.
        """
        mask: mx.array | str | None = None
        window = min(window_size or self.max_size, self.max_size)
        if n > 1:
            mask = super().make_mask(n, window, return_array)
        elif window < self.max_size and window <= self.offset:
            held = min(self.offset + 1, self.max_size)
            mask = mx.arange(held) >= held - window
        return mask

    def is_trimmable(self) -> bool:
        """Whether anything can be trimmed."""
        return True

    def trim(self, n: int) -> int:
        """Drop the n newest tokens, or as many as leave a full window behind; returns how many."""
        older = self.offset - self._idx
        spare = self._idx if older == 0 else self._idx - (self.max_size - 1)
        dropped = max(0, min(n, spare))
        self.offset -= dropped
        self._idx -= dropped
        return dropped
