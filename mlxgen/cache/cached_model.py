"""A language model together with its caches: what both decoding loops and the drafter drive."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlxgen.cache import caches as cache_ops
from mlxgen.config import CacheConfig
from mlxgen.errors import OptionError
from mlxgen.sampling.history import IntArray


class CachedModel:
    """A model and the state of one sequence in it.

    model: an mlx-lm model, called as `model(ids: [1, L], cache=caches) -> logits: [1, L, rows]`.
    width: number of token ids that can be drawn; further logits are padding and cut off, missing
    ones count as -inf. embedding_rows: ids from there on cannot be embedded; the last row stands
    in for them, which costs a draft some acceptance and never changes the text.
    role: "target" or "draft", for messages.
    """

    def __init__(
        self,
        model: Any,
        *,
        role: str,
        width: int,
        embedding_rows: int | None = None,
        config: CacheConfig | None = None,
    ) -> None:
        self._model = model
        self._config = config or CacheConfig()
        self.role = role
        self.width = width
        self._embedding_rows = embedding_rows
        self.caches = cache_ops.make_caches(model, self._config)
        self._fed_tokens = 0

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the cache."""
        return self._fed_tokens

    @property
    def is_rewindable(self) -> bool:
        """Whether `rewind` is exact for this model's caches."""
        return cache_ops.are_rewindable(self.caches)

    def require_rewindable(self) -> None:
        """Raise `PairError` unless this model's caches can be rewound exactly."""
        cache_ops.require_rewindable(self.caches, self.role)

    def rewind(self, length: int) -> None:
        """Forget everything behind the first `length` tokens."""
        cache_ops.rewind(self.caches, length, self.role)
        self._fed_tokens = length

    def block_limit(self) -> int | None:
        """Most tokens the next forward may take, or None for any number.

        Quantisation starts at a token count. A block across it would quantise earlier than plain
        decoding does, so it has to end there.
        """
        config = self._config
        if config.kv_bits is None or self._fed_tokens >= config.quantized_kv_start:
            return None
        return config.quantized_kv_start - self._fed_tokens

    def prefill(self, tokens: IntArray) -> None:
        """Put prompt tokens into the cache, in chunks, without computing their logits."""
        step = self._config.prefill_step_tokens
        for start in range(0, len(tokens), step):
            self._call(mx.array(tokens[start : start + step]))
            cache_ops.evaluate(self.caches)
            mx.clear_cache()

    def forward(self, ids: mx.array) -> mx.array:
        """Logits after each of the tokens: `ids: [L] int32 -> [L, width]`, not yet evaluated."""
        logits = self._call(ids)[0]
        rows, heads = logits.shape
        if heads > self.width:
            return logits[:, : self.width]
        if heads < self.width:
            padding = mx.full((rows, self.width - heads), -mx.inf, dtype=logits.dtype)
            return mx.concatenate([logits, padding], axis=-1)
        return logits

    def _call(self, ids: mx.array) -> mx.array:
        try:
            cache_ops.quantize_if_due(self.caches, self._config)
            if self._embedding_rows is not None:
                ids = mx.minimum(ids, self._embedding_rows - 1)
            logits: mx.array = self._model(ids[None], cache=self.caches)
        except ValueError as error:
            if self._config.kv_bits is None or "quantize" not in str(error):
                raise
            raise OptionError(
                f"--kv-bits {self._config.kv_bits} with --kv-group-size "
                f"{self._config.kv_group_size} does not fit this model's head size: {error}"
            ) from error
        self._fed_tokens += ids.shape[0]
        return logits


def as_ids(tokens: list[int]) -> IntArray:
    """Token ids as `[n] int32`."""
    return np.array(tokens, dtype=np.int32)
