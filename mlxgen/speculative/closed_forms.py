"""Closed forms: what theory says a rule accepts at a position, given p and q there.

All take logs of rows, `log_p, log_q: [k, V] float32`, and return `[k] float32`.
"""

from __future__ import annotations

import mlx.core as mx


def sum_min(log_p: mx.array, log_q: mx.array) -> mx.array:
    """sum_x min(p(x), q(x)): acceptance of rejection sampling, one minus the total variation."""
    return mx.exp(mx.minimum(log_p, log_q)).sum(axis=-1)


def sum_prod(log_p: mx.array, log_q: mx.array) -> mx.array:
    """sum_x p(x) q(x): acceptance when target and draft draw independently and must agree.

    At most `sum_min`, since a b <= min(a, b) on [0, 1]; rounding is kept from breaking that.
    """
    return mx.exp(mx.minimum(log_p + log_q, mx.minimum(log_p, log_q))).sum(axis=-1)


def probability_of(ids: mx.array, log_q: mx.array) -> mx.array:
    """q(id) in each row: both closed forms when p is one-hot at the id. ids: `[k] int32`."""
    return mx.exp(mx.take_along_axis(log_q, ids[:, None], axis=-1)[:, 0])
