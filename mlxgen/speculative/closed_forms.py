"""Closed forms: what theory says a rule accepts at a position, given p and q there.

Unless they say otherwise they take rows that sum to 1, `p, q: [k, V] float32`, and return
`[k] float32`.
"""

from __future__ import annotations

import mlx.core as mx

from mlxgen.sampling.sums import sums_before, total


def sum_min(p: mx.array, q: mx.array) -> mx.array:
    """sum_x min(p(x), q(x)): acceptance of rejection sampling, one minus the total variation."""
    return total(mx.minimum(p, q))[:, 0]


def sum_prod(p: mx.array, q: mx.array) -> mx.array:
    """sum_x p(x) q(x): acceptance when target and draft draw independently and must agree.

    At most `sum_min`, since a b <= min(a, b) on [0, 1]; rounding is kept from breaking that.
    """
    return total(mx.minimum(p * q, mx.minimum(p, q)))[:, 0]


def gumbel_overlap(p: mx.array, q: mx.array) -> mx.array:
    """sum_x 1 / sum_y max(p_y/p_x, q_y/q_x): acceptance when both sides share Gumbel noise.

    Daliri, Musco and Suresh 2024. The larger of the two ratios is the one with q where
    q_y/p_y >= q_x/p_x, so with the tokens sorted by q/p the inner sum is a suffix sum of q and a
    prefix sum of p: O(V log V).
    """
    # Where p is 0 the ratio is infinite, or 0/0, which would not sort: such a token adds nothing.
    order = mx.argsort(mx.where(p > 0, q / p, mx.inf), axis=-1)
    p = mx.take_along_axis(p, order, axis=-1)
    q = mx.take_along_axis(q, order, axis=-1)
    p_before = sums_before(p)
    q_from = total(q) - sums_before(q)
    # p q / (p q_from + q p_before), which is 1 / (q_from / q + p_before / p) without infinities.
    inner = p * q_from + q * p_before
    shared = (p > 0) & (q > 0) & (inner > 0)
    return total(mx.where(shared, p * q / mx.where(shared, inner, 1), 0))[:, 0]


def block_survival(keep: mx.array) -> mx.array:
    """P(accepted length >= i) for i = 1 .. k, given the drafted block: `[k] -> [k] float32`.

    keep: h_1 .. h_k of block verification. The length is the largest i with u_i <= h_i, so it is
    at least i unless all of u_i .. u_k miss: 1 - prod_{j >= i} (1 - h_j).
    """
    return 1 - mx.cumprod(1 - keep, reverse=True)
