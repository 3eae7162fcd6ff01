"""The acceptance rules as pure functions of arrays. Nothing here knows of models or keys.

Notation: p is the target's effective next-token distribution at a position, q the distribution
that the proposal t was drawn from, k the number of proposals. Rows are float32.

Why the text follows the target, whatever q is
----------------------------------------------
*Match rules.* The target draws y from p with randomness of its own and y is what is emitted: on
acceptance the proposal equals y, on rejection y is emitted itself. The proposal only decides how
many positions one forward pass settles. The probability of acceptance is sum_x p(x) q(x).

*Modified rejection sampling* (Leviathan et al. 2023, theorem 1; Chen et al. 2023). The proposal x
is emitted with probability q(x) min(1, p(x)/q(x)) = min(p(x), q(x)). A rejection happens with
probability 1 - sum_y min(p(y), q(y)) = sum_y relu(p - q)(y), and then x is drawn from relu(p - q)
divided by exactly that mass, which contributes relu(p - q)(x). The sum is
min(p, q) + relu(p - q) = p. The probability of acceptance is sum_x min(p(x), q(x)), which no rule
that judges one position at a time can exceed: it is the largest probability with which a draw
from p and a draw from q can be made to coincide.

Both arguments hold at each position given the accepted prefix, so they hold for the whole text.
After k acceptances one more token is drawn from p at the position behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

RESIDUAL_FLOOR = 1e-6
"""Residual mass below which rounding error, not p - q, would choose the token. A rejection is as
rare as this mass is small, so drawing from p instead changes nothing that could be seen."""


class Verdict(NamedTuple):
    """accepted: scalar int32, length n of the accepted prefix; next_id: scalar int32, the token
    after it; fell_back: scalar bool, the residual was empty and p was used instead."""

    accepted: mx.array
    next_id: mx.array
    fell_back: mx.array


def leading_run(hits: mx.array) -> mx.array:
    """How many leading entries are true: `[k] bool -> scalar int32`."""
    return mx.cumprod(hits.astype(mx.int32)).sum().astype(mx.int32)


def match_draft_tokens(ids: mx.array, target_ids: mx.array) -> Verdict:
    """Accept proposals while they equal the target's own tokens.

    ids: `[k] int32`; target_ids: `[k+1] int32`, drawn from p or its argmax. The next token is the
    target's own at the first difference, or the bonus behind the last proposal.
    """
    accepted = leading_run(ids == target_ids[:-1])
    return Verdict(accepted, target_ids[accepted], mx.array(False))


def stochastic_hits(p: mx.array, q: mx.array, uniforms: mx.array) -> mx.array:
    """The accept test of rejection sampling at each position: `[k] -> [k] bool`.

    p, q: probabilities of the proposed tokens, float32; uniforms in [0, 1). p > 0 is tested on its
    own: where q underflowed to 0 the product alone would read 0 <= 0 and accept a token that the
    target excludes.
    """
    return (p > 0) & (uniforms * q <= p)


def residual_weights(p: mx.array, q: mx.array) -> tuple[mx.array, mx.array]:
    """Unnormalised weights of the token after a rejection, and whether they had to be p itself.

    p, q: `[V] float32`. Weights are relu(p - q), or p where that has no mass to speak of (p and q
    equal up to rounding) or is not finite.
    """
    residual = mx.maximum(p - q, 0)
    mass = residual.sum()
    fell_back = ~((mass > RESIDUAL_FLOOR) & mx.isfinite(mass))
    return mx.where(fell_back, p, residual), fell_back


def residual_resample(p: mx.array, q: mx.array, noise: mx.array) -> tuple[mx.array, mx.array]:
    """Draw from normalised relu(p - q): `[V], [V], Gumbel noise [V] -> scalar int32, bool`.

    The noise must be finite, so that a token of weight 0 stays at -inf and can never win.
    """
    weights, fell_back = residual_weights(p, q)
    return mx.argmax(mx.log(weights) + noise).astype(mx.int32), fell_back


def verify_draft_tokens(
    log_p: mx.array,
    log_q: mx.array,
    ids: mx.array,
    uniforms: mx.array,
    noise_at: Callable[[mx.array], mx.array],
) -> Verdict:
    """Judge a block of proposals by modified rejection sampling.

    log_p: `[k+1, V] float32`, logs of rows that sum to 1; log_q: `[k, V] float32`, likewise; ids:
    `[k] int32`, drawn from log_q; uniforms: `[k]` in [0, 1). noise_at(n) gives Gumbel noise `[V]`
    for offset n, which is known on the device only. Only the probabilities of the proposals and
    one full row of p and q are computed.
    """
    k = ids.shape[0]
    index = ids[:, None]
    p_of_ids = mx.exp(mx.take_along_axis(log_p[:-1], index, axis=-1)[:, 0])
    q_of_ids = mx.exp(mx.take_along_axis(log_q, index, axis=-1)[:, 0])
    accepted = leading_run(stochastic_hits(p_of_ids, q_of_ids, uniforms))
    p_row = mx.exp(log_p[accepted])
    # Behind the last proposal q is nothing, and the residual is p: the bonus token.
    q_row = mx.where(accepted < k, mx.exp(log_q[mx.minimum(accepted, k - 1)]), 0)
    next_id, fell_back = residual_resample(p_row, q_row, noise_at(accepted))
    return Verdict(accepted, next_id, fell_back & (accepted < k))
