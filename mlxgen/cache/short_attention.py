"""Attention of a short block, three queries at a time.

MLX's CUDA backend has a kernel for up to three queries. Without cuDNN it puts the attention of more
together from products, a mask and a softmax: a dozen operations a layer, and there a forward is
bound by the launching of operations. In pieces of three an H200 takes 10 ms instead of 12.4 for
five tokens of an 8B shape behind a short text, and 22 instead of 36 behind 16,384 tokens. Behind a
text as long as that it is quicker in one piece where the number of queries is even
(docs/benchmark_results).

A piece sees the keys up to that of its own last query, and within it attention is causal. So every
query sees what it saw in one piece, and the result is the same up to rounding, that of the kernel
for single tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx

Attention = Callable[..., mx.array]
"""`mx.fast.scaled_dot_product_attention`, or something with its arguments."""

PIECE_TOKENS = 3
"""The most queries that the kernel takes."""
_MOST_TOKENS = 12
"""Longer blocks were not measured."""
_MOST_KEYS_OF_EVEN = 4096
"""The most keys that an even number of queries goes through in pieces: somewhere between 1,000 and
16,384 that begins to take longer. Five and nine queries are quicker in pieces behind both."""
_HEAD_SIZES = {64, 96, 128}
"""Those that the kernel is built for."""


@contextmanager
def short_attention() -> Iterator[None]:
    """Within it MLX's attention goes through `attention_in_pieces`, for models of any family.

    It goes so for all of the process; two threads within it at once may each lose the other's
    pieces, and nothing else.
    """
    whole: Any = mx.fast.scaled_dot_product_attention
    mx.fast.scaled_dot_product_attention = partial(attention_in_pieces, whole)
    try:
        yield
    finally:
        mx.fast.scaled_dot_product_attention = whole


def attention_in_pieces(
    whole: Attention, q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, **options: Any
) -> mx.array:
    """`whole` of any number of queries; the other arguments are MLX's.

    q: `[batch, heads, L, size]`; k and v: `[batch, kv heads, keys, size]`, the last L keys the
    block's own; the result is shaped like the queries. In pieces where that is quicker, the mask is
    "causal" and the kernel takes heads of that size.
    """
    count, size = q.shape[2:]
    pays = PIECE_TOKENS < count <= _MOST_TOKENS and (
        count % 2 == 1 or k.shape[2] <= _MOST_KEYS_OF_EVEN
    )
    fits = size == v.shape[3] and size in _HEAD_SIZES
    if not (pays and fits and isinstance(mask, str) and mask == "causal"):
        return whole(q, k, v, mask=mask, **options)
    pieces = []
    for first in range(0, count, PIECE_TOKENS):
        last = min(first + PIECE_TOKENS, count)
        seen = k.shape[2] - count + last
        piece = whole(
            q[:, :, first:last],
            k[:, :, :seen],
            v[:, :, :seen],
            mask="causal" if last - first > 1 else None,
            **options,
        )
        # The kernel writes token by token, and models go on with rows of tokens.
        pieces.append(piece.transpose(0, 2, 1, 3))
    return mx.concatenate(pieces, axis=1).transpose(0, 2, 1, 3)
