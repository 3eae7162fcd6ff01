"""Keys and noise: one seed, one stream of keys for each purpose, no global state.

An MLX key is a pair of uint32, so the key of a position is built directly. A stream's first word
and a base for its second come from hashing the seed with the stream's name; the position is added
to the second. Two rules decide what is keyed by what (docs/speculative-acceptance.md says why):

* plain decoding and the match rules key the target's draws and coins by *absolute position* in
  the sequence, prompt included, so the text does not depend on the draft;
* every other draw is keyed by *(position where the round starts, offset in the round)*. A rule may
  reject a position after looking at its draw; meeting the same draw again at the same position
  in the next round would bias the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxgen.sampling.elementary import computes_one_by_one, negative_log1m

KeyArray = npt.NDArray[np.uint32]

_WORD = 2**32
_STARTS = 64
"""For how many starts of a round uniforms are computed together."""
_STEPS = 8
"""For how many plain steps noise is computed together."""
_BELOW_ONE = 2.0**-32 * (1 - 2.0**-24)
"""Takes 2^32, to which the largest of 32 bits are rounded, to the largest float32 below 1."""


class Stream(str, Enum):
    """The purposes that draw random numbers, each with keys of its own."""

    TARGET = "target draw"
    TARGET_COIN = "target xtc coin"
    DRAFT = "draft draw"
    DRAFT_COIN = "draft xtc coin"
    ACCEPT = "accept uniform"
    RESIDUAL = "residual or bonus draw"


class _Uniforms(NamedTuple):
    """Of rounds that start at `first` and behind it: `rows: [starts, count]`."""

    first: int
    rows: mx.array


class Randomness:
    """The keys of one run.

    `seed` is any integer in 0 .. 2^64-1. Keys are `[n, 2] uint32`.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._words: dict[str, tuple[int, int]] = {}
        self._first_noisy, self._noise = 0, mx.zeros((0, 0))
        self._residual: tuple[int, mx.array] = (-1, mx.zeros((0, 0)))
        self._uniforms: dict[int, _Uniforms] = {}

    def _stream_words(self, name: str) -> tuple[int, int]:
        words = self._words.get(name)
        if words is None:
            digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
            words = (int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little"))
            self._words[name] = words
        return words

    def position_keys(self, stream: Stream, first: int, count: int) -> mx.array:
        """Keys `[count, 2]` of the absolute positions `first .. first + count - 1`."""
        return mx.array(self._position_words(stream, first, count))

    def _position_words(self, stream: Stream, first: int, count: int) -> KeyArray:
        word, base = self._stream_words(stream.value)
        keys = np.empty((count, 2), dtype=np.uint32)
        keys[:, 0] = word
        keys[:, 1] = (np.arange(first, first + count, dtype=np.uint64) + base) % _WORD
        return keys

    def round_keys(self, stream: Stream, round_start: int, offsets: range) -> mx.array:
        """Keys `[len(offsets), 2]` of the given offsets in the round that starts there."""
        return mx.array(self._round_words(stream, round_start, offsets))

    def _round_words(self, stream: Stream, round_start: int, offsets: range) -> KeyArray:
        keys = np.empty((len(offsets), 2), dtype=np.uint32)
        for row, offset in enumerate(offsets):
            word, base = self._stream_words(f"{stream.value}/{offset}")
            keys[row] = word, (base + round_start) % _WORD
        return keys

    def accept_uniforms(self, round_start: int, count: int) -> mx.array:
        """A number in [0, 1) for each of the first offsets of the round that starts there.

        `[count] float32`, those of the keys of `Stream.ACCEPT`. They are computed for many starts
        together, since half a dozen operations are much for a few numbers.
        """
        known = self._uniforms.get(count)
        if known is None or not known.first <= round_start < known.first + _STARTS:
            starts = range(round_start, round_start + _STARTS)
            keys = [self._round_words(Stream.ACCEPT, start, range(count)) for start in starts]
            rows = uniform(mx.array(np.concatenate(keys))).reshape(_STARTS, count)
            known = self._uniforms[count] = _Uniforms(round_start, rows)
        return known.rows[round_start - known.first]

    def draft_noise(self, round_start: int, k: int, width: int, *, beside: Stream) -> mx.array:
        """Noise `[k, width]` of the draft's own draws in the round that starts there.

        beside: what the round will draw from besides, TARGET or RESIDUAL. Where it is operations
        that cost, and not rows, that noise is made along with the draft's and kept. A guess that
        was wrong costs time alone.
        """
        drafted = self._round_words(Stream.DRAFT, round_start, range(k))
        if computes_one_by_one():
            return exponential(mx.array(drafted), width)
        kept = mx.zeros((0, width))
        if beside is Stream.TARGET:
            kept = self._kept_noise(round_start, k + 1, width)
            known = len(kept)
            along = self._position_words(Stream.TARGET, round_start + known, k + 1 - known)
        else:
            along = self._round_words(Stream.RESIDUAL, round_start, range(k + 1))
        rows = exponential(mx.array(np.concatenate([drafted, along])), width)
        if beside is Stream.TARGET:
            self._keep_noise(round_start, kept, rows[k:])
        else:
            self._residual = round_start, rows[k:]
        return rows[:k]

    def residual_noise(
        self, round_start: int, count: int, width: int
    ) -> Callable[[mx.array], mx.array]:
        """Noise `[width]` of the draw behind a rejection or a whole block, by its offset.

        offset: scalar int32 below count, on the device.
        """
        start, rows = self._residual
        if start == round_start and rows.shape == (count, width):
            return lambda offset: rows[offset]
        keys = self.round_keys(Stream.RESIDUAL, round_start, range(count))
        return lambda offset: exponential(keys[offset][None], width)[0]

    def target_noise(self, first: int, count: int, width: int) -> mx.array:
        """Noise `[count, width]` of the target's draws at the positions from `first` on.

        Rounds overlap where proposals were rejected, and a coupled draft meets the same noise as
        the target, so the newest rows are kept and not computed again. Where it is operations that
        cost, a plain step's one row comes along with those of the steps behind it.
        """
        kept = self._kept_noise(first, count, width)
        known = len(kept)
        if known == count:
            return kept
        missing = _STEPS if count == 1 and not computes_one_by_one() else count - known
        keys = self.position_keys(Stream.TARGET, first + known, missing)
        self._keep_noise(first, kept, exponential(keys, width))
        return self._noise[:count]

    def _kept_noise(self, first: int, count: int, width: int) -> mx.array:
        skipped = first - self._first_noisy
        if width != self._noise.shape[1] or skipped < 0:
            return mx.zeros((0, width))
        return self._noise[skipped : skipped + count]

    def _keep_noise(self, first: int, kept: mx.array, rows: mx.array) -> None:
        self._first_noisy = first
        parts = [part for part in (kept, rows) if len(part)]
        self._noise = mx.concatenate(parts) if len(parts) > 1 else parts[0]


def uniform(keys: mx.array) -> mx.array:
    """One number in [0, 1) for each key: `[n, 2] uint32 -> [n] float32`."""
    return mx.vmap(lambda key: mx.random.uniform(key=key))(keys)


def exponential(keys: mx.array, width: int) -> mx.array:
    """Standard exponential noise for each key: `[n, 2] uint32 -> [n, width] float32`.

    The noise of a row depends on its width. Built as -log(1 - u): it is the small values that
    decide about unlikely tokens, and u is fine-grained near 0, down to 2^-32, and coarse near 1.
    All of it is positive and finite, so that a token of weight 0 stays at 0 and never wins.
    """
    # Bits as they come: MLX makes a uniform number of them in five operations more.
    bits = mx.vmap(lambda key: mx.random.split(key, (width + 1) // 2))(keys)
    bits = bits.reshape(len(keys), -1)[:, :width]
    return negative_log1m((bits | 1).astype(mx.float32) * _BELOW_ONE)
