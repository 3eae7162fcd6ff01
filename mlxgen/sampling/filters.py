"""Filters: rows of scores in, rows of scores out, `[rows, V] float32`, -inf outside the support.

Each filter reads the row as log-weights (softmax of the row is the distribution so far) and works
on all rows at once. It takes rows whose largest score is 0, as `shifted` makes them, and leaves
them so; then no filter has to look for the largest score, and nothing overflows.

One rule for ties everywhere: a cut is a value, and tokens that equal the last one kept are kept
too. So no filter depends on the order in which a sort leaves equal values, and the most likely
token always survives, except under typical_p and XTC, which may drop it.
"""

from __future__ import annotations

import math

import mlx.core as mx

from mlxgen.sampling.elementary import computes_one_by_one, exp
from mlxgen.sampling.sums import log_weight, smallest_needed, sums_before, total, weights

_LARGEST_SCALE, _SMALLEST_SCALE = 1e38, 1e-30
"""Beyond them a float32 would be infinite or 0, and 0 times -inf is NaN."""


def _keep(scores: mx.array, kept: mx.array) -> mx.array:
    return mx.where(kept, scores, -mx.inf)


def shifted(rows: mx.array) -> tuple[mx.array, mx.array]:
    """`[rows, V]` of any precision, moved so that the largest entry is 0 (float32), and where it
    was: `[rows, 1]`. A row that holds a NaN or +inf, or nothing finite, becomes NaN."""
    rows = rows.astype(mx.float32)
    tops = mx.max(rows, axis=-1, keepdims=True)
    return rows - tops, tops


def temperature(scores: mx.array, value: float) -> mx.array:
    """Divide by a temperature above 0; with a tiny one all but the top tokens go to -inf."""
    return scores * max(min(1 / value, _LARGEST_SCALE), _SMALLEST_SCALE)


def top_k(scores: mx.array, k: int) -> mx.array:
    """Keep the k most likely tokens; k of 0 or of at least V is off."""
    if k <= 0 or k >= scores.shape[-1]:
        return scores
    return _keep(scores, scores >= _largest(scores, k)[:, :1])


def _largest(scores: mx.array, k: int) -> mx.array:
    """The k largest of each row, the smallest of them first: `[rows, k]`."""
    width = scores.shape[-1]
    return mx.partition(scores, width - k, axis=-1)[:, width - k :]


def top_k_and_p(scores: mx.array, k: int, p: float) -> mx.array:
    """What `top_p` keeps of what `top_k` keeps, found among k values instead of a vocabulary."""
    if not (0 < k < scores.shape[-1] and p < 1):
        return top_p(top_k(scores, k), p)
    largest = _largest(scores, k)
    # Tokens that tie with the k-th are kept and count, though they are none of the k.
    ties = (scores >= largest[:, :1]).sum(axis=-1, keepdims=True) - k
    mass, whole = weights(largest)
    enough = p * (whole + ties * mass[:, :1])
    least = smallest_needed(mx.sort(mass, axis=-1), enough)
    cut = mx.where(mass >= least, largest, mx.inf).min(axis=-1, keepdims=True)
    return _keep(scores, scores >= cut)


def top_p(scores: mx.array, p: float, among: int | None = None) -> mx.array:
    """Keep the smallest set of most likely tokens whose mass reaches p; 0 keeps the top token.

    Ties are those of probabilities in float32. among: it need not keep more than so many of the
    most likely tokens and those tied with them, and does not where MLX computes one by one.
    """
    if p >= 1:
        return scores
    mass, least = _nucleus(scores, p, among)
    return _keep(scores, mass >= least)


def top_p_weights(scores: mx.array, p: float, among: int | None = None) -> mx.array:
    """Weights of what `top_p` keeps, 0 elsewhere: it looks at them anyway."""
    if p >= 1:
        return exp(scores)
    mass, least = _nucleus(scores, p, among)
    return mx.where(mass >= least, mass, 0)


def _nucleus(scores: mx.array, p: float, among: int | None) -> tuple[mx.array, mx.array]:
    """The weight of each token, `[rows, V]`, and of the least likely one that top_p needs,
    `[rows, 1]`. p: below 1."""
    mass, whole = weights(scores)
    if p <= 0:
        return mass, mx.max(mass, axis=-1, keepdims=True)
    # All tokens at or below this together weigh no more than 1 - p, so the nucleus needs none of
    # them.
    ascending = _sorted(mass, (1 - p) / mass.shape[-1] * whole, among)
    return mass, smallest_needed(ascending, p * whole)


def _sorted(mass: mx.array, negligible: mx.array | float, among: int | None) -> mx.array:
    """From small to large; entries below `negligible` may be raised to it, and all but the `among`
    largest be left out."""
    if not computes_one_by_one():
        return mx.sort(mass, axis=-1)
    # The sort is most of a filter's time here. Equal entries cost it little, and positive floats
    # are ordered like their bits, which sort faster.
    likely = mx.maximum(mass, negligible).view(mx.uint32)
    if among is not None and among < likely.shape[-1]:
        likely = _largest(likely, among)
    return mx.sort(likely, axis=-1).view(mx.float32)


def min_p(scores: mx.array, p: float) -> mx.array:
    """Keep the tokens with at least p times the probability of the most likely one."""
    if p <= 0:
        return scores
    return _keep(scores, scores >= math.log(p))


def typical_p(scores: mx.array, p: float) -> mx.array:
    """Keep the tokens whose surprise is nearest to the entropy, until their mass reaches p.

    Locally typical sampling (Meister et al. 2023).
    """
    if p >= 1:
        return scores
    log_p = scores - log_weight(scores)
    probability = exp(log_p)
    surprise = mx.where(probability > 0, -log_p, 0)
    entropy = total(probability * surprise)
    deviation = mx.where(probability > 0, mx.abs(surprise - entropy), mx.inf)
    order = mx.argsort(deviation, axis=-1)
    mass = mx.take_along_axis(probability, order, axis=-1)
    count = mx.maximum((sums_before(mass) < p).sum(axis=-1, keepdims=True), 1)
    last = mx.take_along_axis(order, count - 1, axis=-1)
    kept = deviation <= mx.take_along_axis(deviation, last, axis=-1)
    return shifted(_keep(scores, kept))[0]


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
    return _keep(scores, scores >= -n * mx.sqrt(variance))


def xtc(scores: mx.array, coins: mx.array, threshold: float, protected: mx.array) -> mx.array:
    """Where a row's coin is true, exclude the top choices: all tokens above the threshold but the
    least likely of them.

    coins: `[rows] bool`, one independent toss a row. protected: `[n]` ids (newlines, end of
    sequence) that are never removed. Rows with fewer than two tokens above stay as they are.
    """
    probability = exp(scores - log_weight(scores))
    above = probability > threshold
    least = mx.where(above, probability, mx.inf).min(axis=-1, keepdims=True)
    removed = above & (probability > least)
    if protected.size:
        removed[..., protected] = False
    return shifted(_keep(scores, ~(removed & coins[:, None])))[0]
