"""A language model together with its caches: what both decoding loops and the drafter drive."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from mlxgen.cache import caches as cache_ops
from mlxgen.cache.blocks import equal_block_tokens, require_equal_blocks
from mlxgen.cache.short_attention import PIECE_TOKENS, short_attention
from mlxgen.cache.snapshots import SnapshotLog
from mlxgen.cache.wide_blocks import WIDE_TOKENS
from mlxgen.config import CacheConfig
from mlxgen.errors import GenerationError, OptionError
from mlxgen.sampling.history import IntArray


class CachedModel:
    """A model and the state of one sequence in it.

    model: an mlx-lm model, called as `model(ids: [1, L], cache=caches) -> logits: [1, L, rows]`.
    width: number of token ids that can be drawn; further logits are padding and cut off, missing
    ones count as -inf. embedding_rows: ids from there on cannot be embedded; the last row stands
    in for them, which costs a draft some acceptance and never changes the text.
    filled_up: lengths of blocks to run with more tokens (`mlxgen.cache.wide_blocks`), where the
    caches allow it. attends_in_pieces: whether a block's attention is computed in pieces
    (`mlxgen.cache.short_attention`).
    role: "target" or "draft", for messages. Raises `OptionError` for cache options that the model
    cannot run with.

    `make_rewindable` prepares for `rewind`, in one of two ways for each cache: it is trimmed where
    its type allows that, or put back to a snapshot. Where one needs a snapshot, the tokens since
    then are forwarded again.
    """

    def __init__(
        self,
        model: Any,
        *,
        role: str,
        width: int,
        embedding_rows: int | None = None,
        filled_up: range = range(0),
        attends_in_pieces: bool = False,
        config: CacheConfig | None = None,
    ) -> None:
        self._model = model
        self._config = config or CacheConfig()
        self.role = role
        self.width = width
        self.equal_block_tokens = equal_block_tokens(model)
        """As `mlxgen.cache.blocks` says of the model."""
        self._embedding_rows = embedding_rows
        self._filled_up = filled_up
        self._attends_in_pieces = attends_in_pieces
        self.caches = cache_ops.make_caches(model, self._config)
        self._snapshots: SnapshotLog | None = None
        self._may_rewind = False
        self._fed_tokens = 0
        self._is_torn = False
        self._check_options()

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the cache, between a block and the rewind behind it with what the
        block was filled up with."""
        return self._fed_tokens

    @property
    def is_rewindable(self) -> bool:
        """Whether `rewind` can go back at all."""
        return self._snapshots is not None or not self._untrimmable()

    def make_rewindable(self) -> None:
        """Switch to caches that can be rewound. Raises `PairError` where there are none.

        Layers with a sliding window get a cache that keeps some tokens behind the window. A target
        must in addition be able to verify a block.
        """
        if self.role == "target":
            require_equal_blocks(self._model)
        cache_ops.make_rewindable(self.caches, self.role)
        self._may_rewind = True
        if self._snapshots is None and self._untrimmable():
            self._snapshots = SnapshotLog()

    def rewind(self, length: int) -> None:
        """Forget everything behind the first `length` tokens.

        That many are in the cache afterwards, also when a forward was interrupted. With snapshots
        it reaches back to the beginning of the last round but one, where a round begins with the
        first forward after a rewind. Raises `GenerationError` when that is not far enough.
        """
        base, missing = length, None
        if self._snapshots is not None:
            if self._is_torn or length != self._fed_tokens:
                base, missing = self._restore(self._snapshots, length)
            self._snapshots.end_round()
        cache_ops.rewind(self.caches, base, self.role)
        self._fed_tokens, self._is_torn = base, False
        if missing is not None and base < length:
            self._forward_again(missing)

    def _forward_again(self, ids: mx.array) -> None:
        if ids.shape[0] > self._config.prefill_step_tokens:
            self._feed(np.array(ids))
        else:
            self._call(ids)
            cache_ops.start_evaluating(self.caches)

    def adopt(self, length: int) -> None:
        """The caches were empty and have been filled from outside with this many tokens."""
        self._fed_tokens = length

    def _untrimmable(self) -> list[Any]:
        caches = cache_ops.flattened(self.caches)
        return [cache for cache in caches if not cache_ops.is_trimmable(cache)]

    def _restore(self, snapshots: SnapshotLog, length: int) -> tuple[int, mx.array]:
        if not snapshots.covers(length):
            reach = snapshots.reach_tokens
            known = "nowhere else" if reach is None else f"from {reach} tokens on"
            raise GenerationError(
                f"the {self.role} model's cache holds {self._fed_tokens} tokens and cannot be "
                f"rewound to {length}: the state of its recurrent layers is known {known}"
            )
        # What is put back piece by piece is not to be trusted until all of it is back.
        self._is_torn = True
        return snapshots.restore(self._untrimmable(), length)

    def block_limit(self) -> int | None:
        """Most tokens the next forward may take, or None for any number.

        Quantisation starts at a token count. A block across it would quantise earlier than plain
        decoding does, so it has to end there. And a block may only go as far as its rows are those
        of single tokens.
        """
        config, limits = self._config, []
        if config.kv_bits is not None and self._fed_tokens < config.quantized_kv_start:
            limits.append(config.quantized_kv_start - self._fed_tokens)
        if self.equal_block_tokens is not None:
            limits.append(max(self.equal_block_tokens - self._fed_tokens, 1))
        return min(limits, default=None)

    def prefill(self, tokens: IntArray) -> None:
        """Put prompt tokens into the cache, in chunks, without computing their logits.

        With or without a draft a cold prompt goes through mlx-lm's own caches, and so to the same
        state.
        """
        if len(tokens) == 0:
            return
        if self._fed_tokens == 0:
            cache_ops.make_rotating(self.caches)
            if self._snapshots is not None:
                self._snapshots.clear()
        elif self._snapshots is not None:
            self._snapshots.record(self._untrimmable(), self._fed_tokens, mx.array(tokens))
        try:
            self._feed(tokens)
        finally:
            if self._may_rewind:
                cache_ops.make_rewindable(self.caches, self.role)

    def _feed(self, tokens: IntArray) -> None:
        # Chunks end where those of a cold run do, since quantisation starts between two of them.
        step = self._config.prefill_step_tokens
        start = 0
        while start < len(tokens):
            end = start + step - self._fed_tokens % step
            self._call(mx.array(tokens[start:end]))
            cache_ops.evaluate(self.caches)
            mx.clear_cache()
            start = end

    def forward(self, ids: mx.array) -> mx.array:
        """Logits after each of the tokens: `ids: [L] int32 -> [L, width]`, not yet evaluated.

        A block may leave more in the caches than its tokens, so a rewind has to follow.
        """
        count = ids.shape[0]
        if self._snapshots is not None:
            self._snapshots.record(self._untrimmable(), self._fed_tokens, ids)
        elif count in self._filled_up and self._may_fill_up():
            # With the block's own last token: another's embedding might be no number.
            ids = mx.concatenate([ids, mx.broadcast_to(ids[-1:], (WIDE_TOKENS - count,))])
        in_pieces = self._attends_in_pieces and ids.shape[0] > PIECE_TOKENS
        with short_attention() if in_pieces else nullcontext():
            logits = self._call(ids)[0, :count]
        rows, heads = logits.shape
        if heads > self.width:
            return logits[:, : self.width]
        if heads < self.width:
            padding = mx.full((rows, self.width - heads), -mx.inf, dtype=logits.dtype)
            return mx.concatenate([logits, padding], axis=-1)
        return logits

    def _may_fill_up(self) -> bool:
        """Whether tokens too many can be taken off again and leave nothing behind."""
        limit = self.block_limit()
        if not self._may_rewind or self._config.kv_bits is not None:
            return False
        if limit is not None and limit < WIDE_TOKENS:
            return False
        return all(type(cache) is KVCache for cache in self.caches)

    def _call(self, ids: mx.array) -> mx.array:
        self._is_torn = True
        cache_ops.quantize_if_due(self.caches, self._config)
        if self._embedding_rows is not None:
            ids = mx.minimum(ids, self._embedding_rows - 1)
        logits: mx.array = self._model(ids[None], cache=self.caches)
        self._fed_tokens += ids.shape[0]
        self._is_torn = False
        return logits

    def _check_options(self) -> None:
        """Build, on caches of its own, what the options lead to.

        Models differ in what they do with a cache; those that cannot work with a quantised one or
        a ring fail on a shape or a type. Whether MLX can multiply by a quantised cache on this
        device is seen only when it is evaluated.
        """
        config = self._config
        if config.kv_bits is not None:
            option = f"--kv-bits {config.kv_bits} with --kv-group-size {config.kv_group_size}"
            sizes, probe = [1, 1], replace(config, quantized_kv_start=0)
        elif config.max_kv_size is not None:
            option = f"--max-kv-size {config.max_kv_size}"
            # A small ring is full after the first forward and turns in the others.
            sizes, probe = [9, 2, 1], replace(config, max_kv_size=8)
        else:
            return
        caches = cache_ops.make_caches(self._model, probe)
        try:
            for size in sizes:
                cache_ops.quantize_if_due(caches, probe)
                logits = self._model(mx.zeros((1, size), dtype=mx.int32), cache=caches)
        except ValueError as error:
            raise OptionError(f"{option} does not fit the {self.role} model: {error}") from error
        except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
            raise OptionError(
                f"{option}: mlx-lm's code for the {self.role} model cannot work with it; drop it"
            ) from error
        if config.kv_bits is None:
            return
        try:
            mx.eval(logits)
        except RuntimeError as error:
            if "No implementation" not in str(error):
                raise
            raise OptionError(
                f"{option}: MLX cannot multiply by such a cache on this device; drop it"
            ) from error


def as_ids(tokens: list[int]) -> IntArray:
    """Token ids as `[n] int32`."""
    return np.array(tokens, dtype=np.int32)
