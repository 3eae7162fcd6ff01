"""Target tokens keyed by absolute position: the draw of plain decoding and of the match rules.

Both call this one function, which is why the match rules emit the ids of plain decoding.
"""

from __future__ import annotations

import mlx.core as mx

from mlxgen.sampling.chain import Draws, SamplerChain
from mlxgen.sampling.history import History
from mlxgen.sampling.randomness import Randomness, Stream, uniform


def draw_by_position(
    chain: SamplerChain,
    randomness: Randomness,
    logits: mx.array,
    history: History,
    proposals: mx.array | None,
    first_position: int,
) -> Draws:
    """Draw the tokens at positions `first_position ..`, one for each row of `logits: [rows, V]`.

    Rows, history and proposals as in `SamplerChain.weights`. Greedy sampling draws no random
    number and builds no distribution.
    """
    if chain.config.is_greedy:
        return chain.choose(logits, history, proposals)
    rows, coins = logits.shape[0], None
    if chain.tosses_coins:
        coins = uniform(randomness.position_keys(Stream.TARGET_COIN, first_position, rows))
    noise = randomness.target_noise(first_position, rows, chain.width)
    return chain.draw(logits, noise, history, proposals, coins)
