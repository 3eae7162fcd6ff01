"""Penalties and bias: what is added to or taken from logits because of the history.

All functions take `logits: [rows, V] float32` with a `History` and the proposals of the round,
`proposals: [m] int32` on the device. The last row sees all m proposals, the row before it m - 1,
and so on: for a verification of k proposals rows = k + 1 and m = k; for the draft's i-th step
rows = 1 and m = i. Nothing here waits for the device.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from mlxgen.sampling.history import History

_LARGEST_EXPONENT = 88.7
"""exp of this is the largest power of e that float32 holds."""


def _windows(
    history: History, proposals: mx.array, rows: int, last_n: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Tokens that the rows' windows hold, as (common to all rows, rows' own tokens, their rows).

    A window is the newest `last_n` tokens before the row's position (-1: all of them).
    """
    tokens = history.tokens
    n, m = len(tokens), proposals.shape[0]
    ends = [n + m - rows + 1 + row for row in range(rows)]
    starts = [0 if last_n < 0 else max(0, end - last_n) for end in ends]
    common = tokens[min(starts[-1], n) : min(ends[0], n)]
    own = [
        (row, position)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True))
        for position in [*range(start, min(starts[-1], end)), *range(max(n, start), end)]
    ]
    # Ranges may meet twice when a window is shorter than the block: count a position once.
    own = sorted(set(own))
    recent_start = min([n, *(position for _, position in own)])
    recent = mx.concatenate([mx.array(tokens[recent_start:]), proposals])
    own_rows = mx.array([row for row, _ in own], dtype=mx.int32)
    positions = mx.array([position - recent_start for _, position in own], dtype=mx.int32)
    return mx.array(common), recent[positions], own_rows


def token_counts(
    history: History, proposals: mx.array, rows: int, width: int, last_n: int
) -> mx.array:
    """How often each token stands in each row's window: `[rows, width] float32`."""
    common, own, own_rows = _windows(history, proposals, rows, last_n)
    # Prompts may hold ids past the width; an extra column takes them.
    shared = mx.zeros((width + 1,)).at[mx.minimum(common, width)].add(1.0)
    counts = mx.broadcast_to(shared, (rows, width + 1))
    return counts.at[own_rows, mx.minimum(own, width)].add(1.0)[:, :width]


def repetition(logits: mx.array, counts: mx.array, penalty: float) -> mx.array:
    """Divide positive logits of tokens seen by the penalty, multiply negative ones by it.

    CTRL (Keskar et al. 2019), sign-aware.
    """
    penalised = mx.where(logits > 0, logits / penalty, logits * penalty)
    return mx.where(counts > 0, penalised, logits)


def frequency_and_presence(
    logits: mx.array, counts: mx.array, frequency: float, presence: float
) -> mx.array:
    """Take `frequency` off for each time a token was seen and `presence` once."""
    return logits - frequency * counts - presence * (counts > 0)


def dry(
    logits: mx.array,
    history: History,
    proposals: mx.array,
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
    last_n: int,
    breakers: mx.array,
) -> mx.array:
    """Penalise the token that would continue a repetition of earlier text.

    If the text ending at an earlier position j equals the newest text for m tokens, the token
    after j loses multiplier * base^(m - allowed_length), when m >= allowed_length; the strongest
    penalty of a token counts. Matches stay inside the newest `last_n` tokens (-1: all) and end at
    a token of `breakers: [n] int32`. The history must track matches.
    """
    rows, width = logits.shape
    n, m = len(history), proposals.shape[0]
    tokens = mx.concatenate([mx.array(history.tokens), proposals])
    lengths = mx.array(history.match_lengths)
    exponent_limit = _LARGEST_EXPONENT / math.log(base) if base > 1 else math.inf
    adjusted = []
    for seen in range(m + 1):
        end = n + seen
        if seen:
            newest = tokens[end - 1]
            previous = mx.concatenate([mx.zeros((1,), dtype=mx.int32), lengths[:-1]])
            matches = tokens[: end - 1] == newest
            if breakers.size:
                matches = matches & ~mx.any(breakers == newest)
            lengths = mx.concatenate(
                [mx.where(matches, previous + 1, 0), mx.zeros((1,), dtype=mx.int32)]
            )
        row = seen - (m + 1 - rows)
        if row < 0:
            continue
        start = 0 if last_n < 0 else max(0, end - last_n)
        if end - start < 2:
            adjusted.append(logits[row])
            continue
        room = mx.array(np.arange(1, end - start, dtype=np.int32))
        length = mx.minimum(lengths[start : end - 1], room)
        exponent = mx.minimum(length - allowed_length, exponent_limit)
        penalty = mx.where(
            length >= allowed_length, multiplier * mx.power(base, exponent.astype(mx.float32)), 0
        )
        continuation = mx.minimum(tokens[start + 1 : end], width)
        strongest = mx.zeros((width + 1,)).at[continuation].maximum(penalty)
        # Capped, so that logits stay finite whatever the multiplier.
        adjusted.append(logits[row] - mx.minimum(strongest[:width], 1e30))
    return mx.stack(adjusted)
