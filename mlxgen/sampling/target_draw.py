"""Target tokens keyed by absolute position: the draw of plain decoding and of the match rules.

Both call this one function, which is why the match rules emit the ids of plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxgen.sampling.chain import SamplerChain
from mlxgen.sampling.history import History
from mlxgen.sampling.randomness import Randomness, Stream, uniform


@dataclass(frozen=True)
class TargetDraw:
    """ids: `[rows] int32`; scores: `[rows, width]`, under greedy sampling the logits that the ids
    were chosen from; tops: `[rows, 1]`, for `rows_are_usable`. All on the device."""

    ids: mx.array
    scores: mx.array
    tops: mx.array


def draw_by_position(
    chain: SamplerChain,
    randomness: Randomness,
    logits: mx.array,
    history: History,
    proposals: mx.array | None,
    first_position: int,
) -> TargetDraw:
    """Draw the tokens at positions `first_position ..`, one for each row of `logits: [rows, V]`.

    Rows, history and proposals as in `SamplerChain.scores`. Greedy sampling draws no random
    number and builds no distribution.
    """
    rows = logits.shape[0]
    if chain.config.is_greedy:
        drawn = chain.choose(logits, history, proposals)
    else:
        coins = None
        if chain.tosses_coins:
            coins = uniform(randomness.position_keys(Stream.TARGET_COIN, first_position, rows))
        noise = randomness.target_noise(first_position, rows, chain.width)
        drawn = chain.draw(logits, noise, history, proposals, coins)
    return TargetDraw(ids=drawn.ids, scores=drawn.rows, tops=drawn.tops)
