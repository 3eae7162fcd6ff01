"""Filters: rows of scores in, rows of scores out, `[rows, V] float32`, -inf outside the support.

Each filter reads the row as log-weights (softmax of the row is the distribution so far) and works
on all rows at once. One rule for ties everywhere: a cut is a value, and tokens that equal the last
one kept are kept too. So no filter depends on the order in which a sort leaves equal values, and
the most likely token always survives, except under typical_p, which may drop it.
"""

from __future__ import annotations

import math

import mlx.core as mx

from mlxgen.sampling.sums import log_sum_exp, sums_before, sums_before_and_total, total

_LARGEST_SCALE = 1e38


def _keep(scores: mx.array, kept: mx.array) -> mx.array:
    return mx.where(kept, scores, -mx.inf)


def temperature(scores: mx.array, value: float) -> mx.array:
    """Divide by a temperature above 0.

    The row's maximum is taken off first: with a tiny temperature the rest then goes to -inf, where
    dividing the raw scores would overflow to inf - inf.
    """
    shifted = scores - mx.max(scores, axis=-1, keepdims=True)
    return shifted * min(1 / value, _LARGEST_SCALE)


def top_k(scores: mx.array, k: int) -> mx.array:
    """Keep the k most likely tokens; k of 0 or of at least V is off."""
    width = scores.shape[-1]
    if k <= 0 or k >= width:
        return scores
    smallest_kept = mx.partition(scores, width - k, axis=-1)[..., width - k : width - k + 1]
    return _keep(scores, scores >= smallest_kept)


def top_p(scores: mx.array, p: float) -> mx.array:
    """Keep the smallest set of most likely tokens whose mass reaches p; 0 keeps the top token."""
    if p >= 1:
        return scores
    # Relative to the top token scores are 0 or below, and the bits of such floats, read as unsigned
    # numbers, grow as the floats fall. A CPU sorts those three times as fast as floats.
    relative = scores - mx.max(scores, axis=-1, keepdims=True)
    descending = mx.sort(relative.view(mx.uint32), axis=-1).view(mx.float32)
    before, whole = sums_before_and_total(mx.exp(descending))
    count = mx.maximum((before < p * whole).sum(axis=-1, keepdims=True), 1)
    return _keep(scores, relative >= mx.take_along_axis(descending, count - 1, axis=-1))


def min_p(scores: mx.array, p: float) -> mx.array:
    """Keep the tokens with at least p times the probability of the most likely one."""
    if p <= 0:
        return scores
    return _keep(scores, scores >= mx.max(scores, axis=-1, keepdims=True) + math.log(p))


def typical_p(scores: mx.array, p: float) -> mx.array:
    """Keep the tokens whose surprise is nearest to the entropy, until their mass reaches p.

    Locally typical sampling (Meister et al. 2023).
    """
    if p >= 1:
        return scores
    log_p = scores - log_sum_exp(scores)
    probability = mx.exp(log_p)
    surprise = mx.where(probability > 0, -log_p, 0)
    entropy = total(probability * surprise)
    deviation = mx.where(probability > 0, mx.abs(surprise - entropy), mx.inf)
    order = mx.argsort(deviation, axis=-1)
    mass = mx.take_along_axis(probability, order, axis=-1)
    count = mx.maximum((sums_before(mass) < p).sum(axis=-1, keepdims=True), 1)
    last = mx.take_along_axis(order, count - 1, axis=-1)
    return _keep(scores, deviation <= mx.take_along_axis(deviation, last, axis=-1))


def top_n_sigma(scores: mx.array, n: float) -> mx.array:
    """Keep the tokens within n standard deviations of the maximum.

    The population standard deviation is taken over the finite scores.
    """
    if n <= 0:
        return scores
    finite = mx.isfinite(scores)
    count = finite.sum(axis=-1, keepdims=True)
    mean = total(mx.where(finite, scores, 0)) / count
    variance = total(mx.where(finite, mx.square(scores - mean), 0)) / count
    cut = mx.max(scores, axis=-1, keepdims=True) - n * mx.sqrt(variance)
    return _keep(scores, scores >= cut)


def xtc(scores: mx.array, coins: mx.array, threshold: float, protected: mx.array) -> mx.array:
    """Where a row's coin is true, exclude the top choices: all tokens above the threshold but the
    least likely of them.

    coins: `[rows] bool`, one independent toss a row. protected: `[n]` ids (newlines, end of
    sequence) that are never removed. Rows with fewer than two tokens above stay as they are.
    """
    probability = mx.exp(scores - log_sum_exp(scores))
    above = probability > threshold
    least = mx.where(above, probability, mx.inf).min(axis=-1, keepdims=True)
    removed = above & (probability > least)
    if protected.size:
        removed[..., protected] = False
    return _keep(scores, ~(removed & coins[:, None]))
