"""The acceptance rules once more, in float64 and slowly, so that their laws can be enumerated.

Target and draft are Markov chains: `p[s]` and `q[s]` are the laws of the token after s. A round
that starts behind token s has finitely many outcomes (drafted block, accepted length, next token),
so its law is a sum, and so is the law of the first n tokens of the text: no sampling, no error but
rounding at 1e-16. Each rule is written as its definition reads, one block at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxgen.config import AcceptRule
from tests.fixtures.statistics import FloatArray

BY_BLOCK = (AcceptRule.SAMPLER_MATCH, AcceptRule.STOCHASTIC, AcceptRule.BLOCK)
"""Rules whose proposals are drawn without regard to the target's draws."""


def residual(p: FloatArray, q: FloatArray, weight: float = 1.0) -> FloatArray:
    """relu(weight p - q) normalised; p where nothing is left."""
    rest = np.maximum(weight * p - q, 0)
    return p if rest.sum() == 0 else np.asarray(rest / rest.sum())


# One block: `[k+1, V]`, the chance of (accepted length, next token) given the drafted ids.
# p_rows: `[k+1, V]`, q_rows: `[k, V]`, row i after i proposals.


def match_outcomes(p_rows: FloatArray, ids: Sequence[int]) -> FloatArray:
    """The target draws y_i from p_i until one differs from the proposal, or all k agree."""
    outcomes = np.zeros_like(p_rows)
    agreed = 1.0
    for i, t in enumerate(ids):
        outcomes[i] = agreed * p_rows[i]
        outcomes[i, t] = 0
        agreed *= p_rows[i, t]
    outcomes[len(ids)] = agreed * p_rows[len(ids)]
    return outcomes


def stochastic_outcomes(p_rows: FloatArray, q_rows: FloatArray, ids: Sequence[int]) -> FloatArray:
    """t_i is accepted with probability min(1, p/q); the first rejection draws from the residual."""
    outcomes = np.zeros_like(p_rows)
    kept = 1.0
    for i, t in enumerate(ids):
        accept = min(1.0, p_rows[i, t] / q_rows[i, t])
        outcomes[i] = kept * (1 - accept) * residual(p_rows[i], q_rows[i])
        kept *= accept
    outcomes[len(ids)] = kept * p_rows[len(ids)]
    return outcomes


@dataclass(frozen=True)
class BlockJudgement:
    """weights: w_0 .. w_k; keep: h_1 .. h_k of block verification."""

    weights: list[float]
    keep: list[float]

    @property
    def length_law(self) -> list[float]:
        """P(accepted length = i), i = 0 .. k: the largest i whose uniform is at most h_i."""
        k = len(self.keep)
        missed = [float(np.prod([1 - h for h in self.keep[i:]])) for i in range(k + 1)]
        return [missed[0]] + [self.keep[i - 1] * missed[i] for i in range(1, k + 1)]


def judge_block(p_rows: FloatArray, q_rows: FloatArray, ids: Sequence[int]) -> BlockJudgement:
    """w and h for a drafted block."""
    k = len(ids)
    weights = [1.0]
    for i, t in enumerate(ids):
        weights.append(min(weights[-1] * p_rows[i, t] / q_rows[i, t], 1.0))
    keep = []
    for i in range(1, k):
        mass = float(np.maximum(weights[i] * p_rows[i] - q_rows[i], 0).sum())
        below = mass + 1 - weights[i]
        keep.append(mass / below if below > 0 else 1.0)
    return BlockJudgement(weights, [*keep, weights[k]])


def block_outcomes(p_rows: FloatArray, q_rows: FloatArray, ids: Sequence[int]) -> FloatArray:
    """Block verification: a length, then a draw from relu(w p - q) there."""
    judged = judge_block(p_rows, q_rows, ids)
    outcomes = np.zeros_like(p_rows)
    for i, chance in enumerate(judged.length_law[:-1]):
        outcomes[i] = chance * residual(p_rows[i], q_rows[i], judged.weights[i])
    outcomes[len(ids)] = judged.length_law[-1] * p_rows[len(ids)]
    return outcomes


# Coupled draws


def gumbel_joint(p: FloatArray, q: FloatArray) -> FloatArray:
    """P(target draws x, draft draws y) with shared Gumbel noise: `[V, V]`.

    An argmax of log p + Gumbel noise is an argmin of E/p with exponential E. For x != y, with
    E_x = a and E_y = r a, r between p_y/p_x and q_y/q_x, every other E_i must be at least
    a max(p_i/p_x, r q_i/q_y). So the density in r is 1/S(r)^2 with
    S(r) = sum_i max(p_i/p_x, r q_i/q_y), which is linear between the kinks: there the integral of
    1/S^2 is the distance over the product of S at both ends.
    """
    size = len(p)
    joint = np.zeros((size, size))
    for x, y in itertools.product(range(size), repeat=2):
        if p[x] == 0 or q[y] == 0:
            continue
        if x == y:
            joint[x, x] = 1 / np.maximum(p / p[x], q / q[x]).sum()
            continue
        lowest = p[y] / p[x]
        if q[x] * p[y] >= p[x] * q[y]:
            continue
        highest = q[y] / q[x] if q[x] > 0 else np.inf
        kinks = [(p[i] / p[x]) / (q[i] / q[y]) for i in range(size) if q[i] > 0]
        ends = [lowest, *sorted(r for r in kinks if lowest < r < highest), highest]

        def total(r: float, x: int = x, y: int = y) -> float:
            return float(np.maximum(p / p[x], r * (q / q[y])).sum())

        for start, end in itertools.pairwise(ends):
            if end < np.inf:
                joint[x, y] += (end - start) / (total(start) * total(end))
            else:  # behind the last kink S(r) = constant + slope r
                slope = float((q[q > 0] / q[y]).sum())
                joint[x, y] += 1 / (slope * total(start))
    return joint


# Rounds and texts


RoundLaw = list[FloatArray]
"""Entry a has shape `(V,) * (a + 1)`: the chance to accept t_1..t_a and to go on with y."""


def rows_along(chain: FloatArray, last: int, ids: Sequence[int]) -> FloatArray:
    """The rows of a chain behind `last`, and behind each of the ids."""
    return np.asarray(chain[[last, *ids]])


def round_law(rule: AcceptRule, p: FloatArray, q: FloatArray, last: int, k: int) -> RoundLaw:
    """Law of what one round of k proposals emits behind the token `last`."""
    if rule is AcceptRule.GUMBEL_MATCH:
        return _coupled_round_law(p, q, last, k)
    size = len(p)
    law = [np.zeros((size,) * (a + 1)) for a in range(k + 1)]
    for ids in itertools.product(range(size), repeat=k):
        p_rows, q_rows = rows_along(p, last, ids), rows_along(q, last, ids)[:k]
        chance = float(np.prod([q_rows[i, t] for i, t in enumerate(ids)]))
        if chance == 0:
            continue
        if rule is AcceptRule.SAMPLER_MATCH:
            outcomes = match_outcomes(p_rows, ids)
        elif rule is AcceptRule.STOCHASTIC:
            outcomes = stochastic_outcomes(p_rows, q_rows, ids)
        else:
            outcomes = block_outcomes(p_rows, q_rows, ids)
        add_outcomes(law, ids, chance * outcomes)
    return law


def add_outcomes(law: RoundLaw, ids: Sequence[int], outcomes: FloatArray) -> None:
    """Add what a block contributes: `[k+1, V]`, weighted with the chance of the block."""
    for accepted in range(len(ids) + 1):
        law[accepted][tuple(ids[:accepted])] += outcomes[accepted]


def _coupled_round_law(p: FloatArray, q: FloatArray, last: int, k: int) -> RoundLaw:
    size = len(p)
    law = [np.zeros((size,) * (a + 1)) for a in range(k + 1)]
    joints = [gumbel_joint(p[s], q[s]) for s in range(size)]
    for accepted in range(k + 1):
        for ids in itertools.product(range(size), repeat=accepted):
            states = [last, *ids]
            agreed = float(np.prod([joints[s][t, t] for s, t in itertools.pairwise(states)]))
            joint = joints[states[-1]]
            after = p[states[-1]] if accepted == k else joint.sum(axis=1) - np.diag(joint)
            law[accepted][ids] = agreed * after
    return law


def expected_length(law: RoundLaw) -> float:
    """Mean accepted length of a round."""
    return float(sum(accepted * part.sum() for accepted, part in enumerate(law)))


def text_law(laws: Sequence[RoundLaw], last: int, count: int) -> FloatArray:
    """Law of the first `count` tokens behind `last`, round after round: shape `(V,) * count`.

    laws: of the round behind each token.
    """
    size = len(laws)
    total = np.zeros((size,) * count)
    for accepted, part in enumerate(laws[last]):
        emitted = accepted + 1
        if emitted >= count:
            total += part.sum(axis=tuple(range(count, emitted)))
            continue
        for newest in range(size):
            rest = text_law(laws, newest, count - emitted)
            index: Any = (Ellipsis, newest, *[slice(None)] * (count - emitted))
            total[index] += np.multiply.outer(part[..., newest], rest)
    return total


def chain_law(p: FloatArray, last: int, count: int) -> FloatArray:
    """Law of the first `count` tokens of the chain itself."""
    law = np.asarray(p[last])
    for _ in range(count - 1):
        law = np.asarray(law[..., None] * p)
    return law
