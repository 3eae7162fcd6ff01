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

*Block verification* (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding",
algorithm 2 and theorem 1). The block is judged as a whole: w_i, the probability with which a
coupling of the two block laws can still keep t_1..t_i, decides on the accepted length, and the
next token is drawn from what the target still lacks there, relu(w_i p_i - q_i). The expected
accepted length is at least that of rejection sampling, since w may recover after a poor token.

*Gumbel coupling* (Daliri, Musco and Suresh 2024, drafter-invariant speculative decoding). A match
rule: y is the argmax of log p plus Gumbel noise of the position, an exact draw from p. The drafter
uses the same noise with its q, which makes agreement likely and changes nothing about y. Here the
noise is exponential, y is the argmax of p / noise, and -log(noise) is the Gumbel noise.

The match rules and rejection sampling are exact at each position given the accepted prefix, so
they are for the whole text; block verification is exact for the block. After k acceptances one
more token is drawn from p at the position behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from mlxgen.sampling.elementary import probability_of, race
from mlxgen.sampling.sums import total

RESIDUAL_FLOOR = 1e-6
"""Residual mass below which rounding error, not p - q, would choose the token. A rejection is as
rare as this mass is small, so drawing from p instead changes nothing that could be seen."""

_SMALLEST = 2.0**-126
"""The smallest normal float32 above 0."""


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


class Lacking(NamedTuple):
    """rows: relu(w p - q), what the target lacks beside what the draft brings, `[rows, V]`;
    masses: their sums, `[rows]`. Both float32."""

    rows: mx.array
    masses: mx.array


def lacking(p: mx.array, q: mx.array, weights: mx.array | None = None) -> Lacking:
    """p, q: `[rows, V]`; weights: w of block verification, `[rows]`, or None for 1."""
    rows = mx.maximum((p if weights is None else weights[:, None] * p) - q, 0)
    return Lacking(rows, total(rows).squeeze(-1))


def _lacking_at_one(p: mx.array, q: mx.array) -> Lacking:
    """The same of a single position: `[V], [V] -> [V]` and a scalar."""
    rows, masses = lacking(p[None], q[None])
    return Lacking(rows.squeeze(0), masses.squeeze(0))


def residual_weights(
    p: mx.array, residual: mx.array, mass: mx.array, was_cut: mx.array
) -> tuple[mx.array, mx.array]:
    """Unnormalised weights of the token behind the accepted prefix, and whether a rejection had to
    be answered with p itself.

    p: the target's row there, `[V]`; residual, mass: as in `Lacking`, `[V]` and a scalar; was_cut:
    scalar bool, False behind the last proposal, where there is no q. Weights are the residual
    where something was rejected, or p where the residual has no mass to speak of (p and q equal up
    to rounding) or is not finite.
    """
    # A mass that is NaN is neither.
    is_residual = (mass > RESIDUAL_FLOOR) & (mass < mx.inf) & was_cut
    return mx.where(is_residual, residual, p), was_cut != is_residual


def residual_resample(p: mx.array, q: mx.array, noise: mx.array) -> tuple[mx.array, mx.array]:
    """Draw from normalised relu(p - q): a scalar int32, and whether p was used instead.

    p, q: `[V] float32`; noise: `[V]`, as for `race`.
    """
    weights, fell_back = residual_weights(p, *_lacking_at_one(p, q), mx.array(True))
    return race(weights, noise), fell_back


def block_weights(p_of_ids: mx.array, q_of_ids: mx.array) -> mx.array:
    """w_0 .. w_k of block verification: `[k], [k] -> [k+1] float32`.

    w_0 = 1 and w_i = min(w_{i-1} p(t_i)/q(t_i), 1): the product of the ratios so far over the
    largest there was, 1 included. q is above 0, since the ids were drawn from it; of such ids the
    product has a mean of at most 1, so it exceeds what a float32 can hold with a chance of 3e-39.
    """
    products = mx.cumprod(mx.concatenate([mx.array([1.0]), p_of_ids / q_of_ids]))
    return products / mx.cummax(products)


def block_keep_probabilities(weights: mx.array, masses: mx.array) -> mx.array:
    """h_1 .. h_k: `weights: [k+1], masses: [k-1] -> [k] float32`.

    masses: s_i = sum_x relu(w_i p_i(x) - q_i(x)) for i = 1 .. k-1. h_i = s_i / (s_i + 1 - w_i) for
    0 < i < k, where 0/0 means 1 (p and q agree there), and h_k = w_k.
    """
    missing = 1 - weights[1:-1]
    both = masses + missing
    inner = mx.where(both > 0, masses / both, 1)
    return mx.concatenate([inner, weights[-1:]])


class BlockKeep(NamedTuple):
    """weights: w_0 .. w_k, `[k+1]`; keep: h_1 .. h_k, `[k]`; lacking: relu(w_i p_i - q_i) for
    i = 0 .. k-1. All float32."""

    weights: mx.array
    keep: mx.array
    lacking: Lacking


def block_keep(p: mx.array, q: mx.array, ids: mx.array) -> BlockKeep:
    """w and h of block verification for a drafted block: `p, q: [k, V], ids: [k]`."""
    weights = block_weights(probability_of(ids, p), probability_of(ids, q))
    lacks = lacking(p, q, weights[:-1])
    if len(ids) == 1:
        return BlockKeep(weights, weights[1:], lacks)
    # What the target lacks at the first position decides about no length.
    return BlockKeep(weights, block_keep_probabilities(weights, lacks.masses[1:]), lacks)


def verify_draft_block(
    p: mx.array,
    q: mx.array,
    ids: mx.array,
    uniforms: mx.array,
    noise_at: Callable[[mx.array], mx.array],
) -> Verdict:
    """Judge a block of proposals as a whole. Arguments as `verify_draft_tokens`.

    The accepted length is the largest i with u_i <= h_i, or 0. k must have been fixed before the
    block was drawn.
    """
    k = len(ids)
    _, keep, lacks = block_keep(p[:-1], q, ids)
    # A length of probability 0 is never kept, not even by a uniform of exactly 0.
    hits = mx.maximum(uniforms, _SMALLEST) <= keep
    accepted = mx.max(hits * mx.array([*range(1, k + 1)]))
    at = mx.minimum(accepted, k - 1)
    weights, fell_back = residual_weights(
        p[accepted], lacks.rows[at], lacks.masses[at], accepted < k
    )
    return Verdict(accepted, race(weights, noise_at(accepted)), fell_back)


def verify_draft_tokens(
    p: mx.array,
    q: mx.array,
    ids: mx.array,
    uniforms: mx.array,
    noise_at: Callable[[mx.array], mx.array],
) -> Verdict:
    """Judge a block of proposals by modified rejection sampling.

    p: `[k+1, V] float32`, rows sum to 1; q: `[k, V] float32`, likewise; ids: `[k] int32`, drawn
    from q; uniforms: `[k]` in [0, 1). noise_at(n) gives exponential noise `[V]` for offset n, which
    is known on the device only.
    """
    k = len(ids)
    p_of_ids, q_of_ids = probability_of(ids, p[:-1]), probability_of(ids, q)
    accepted = leading_run(stochastic_hits(p_of_ids, q_of_ids, uniforms))
    p_row = p[accepted]
    lacks = _lacking_at_one(p_row, q[mx.minimum(accepted, k - 1)])
    weights, fell_back = residual_weights(p_row, *lacks, accepted < k)
    return Verdict(accepted, race(weights, noise_at(accepted)), fell_back)
