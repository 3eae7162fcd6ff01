"""From the target's logits over a block to a verdict, under the rule of the run.

Everything here stays on the device; the loop evaluates the result once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxgen.drafters.proposal import Proposal
from mlxgen.sampling.chain import SamplerChain, probabilities
from mlxgen.sampling.elementary import probability_of
from mlxgen.sampling.history import History
from mlxgen.sampling.randomness import Randomness, Stream, uniform
from mlxgen.sampling.target_draw import draw_by_position
from mlxgen.speculative import closed_forms, selection
from mlxgen.speculative.rules import (
    Verdict,
    block_keep,
    leading_run,
    match_draft_tokens,
    verify_draft_block,
    verify_draft_tokens,
)
from mlxgen.speculative.selection import Rule
from mlxgen.speculative.statistics import RoundForms


class FormArrays(NamedTuple):
    """The arrays behind `RoundForms`, each `[k] float32`, on the device."""

    sum_min: mx.array
    sum_prod: mx.array
    gumbel: mx.array
    block_survival: mx.array

    def read(self) -> RoundForms:
        """The numbers, after evaluation."""
        return RoundForms(*(np.array(form).tolist() for form in self))


@dataclass(frozen=True)
class Verification:
    """A verdict, the target's largest logits (`[k+1, 1]`, for `rows_are_usable`), and, when asked
    for, the closed forms. All on the device."""

    verdict: Verdict
    tops: mx.array
    forms: FormArrays | None


class Verifier:
    """Judges blocks by one rule, with one chain and one set of keys."""

    def __init__(
        self, rule: Rule, chain: SamplerChain, randomness: Randomness, *, diagnostics: bool
    ) -> None:
        self.rule = rule
        self._chain = chain
        self._randomness = randomness
        self._diagnostics = diagnostics

    @property
    def wants_distribution(self) -> bool:
        """Whether proposals must carry q."""
        return self.rule.needs_distribution or self._diagnostics

    def verify(self, logits: mx.array, history: History, proposal: Proposal) -> Verification:
        """Judge a proposal. logits: `[k+1, width]`, row i after the proposals d_1..d_i."""
        if self.rule.needs_distribution:
            return self._judge_by_distribution(logits, history, proposal)
        return self._match(logits, history, proposal)

    def _match(self, logits: mx.array, history: History, proposal: Proposal) -> Verification:
        drawn = draw_by_position(
            self._chain, self._randomness, logits, history, proposal.ids, len(history)
        )
        forms = None
        if self._diagnostics and proposal.q is not None:
            if self._chain.config.is_greedy:
                forms = _one_hot_forms(drawn.ids[:-1], proposal.q)
            else:
                forms = _forms(probabilities(drawn.rows[:-1]), proposal.q, proposal.ids)
        verdict = match_draft_tokens(proposal.ids, drawn.ids)
        return Verification(verdict, drawn.tops, forms)

    def _judge_by_distribution(
        self, logits: mx.array, history: History, proposal: Proposal
    ) -> Verification:
        if proposal.q is None:
            raise ValueError(f"the rule {self.rule.id} needs proposals with q")
        rows, round_start = logits.shape[0], len(history)
        chain, keys = self._chain, self._randomness
        coins = None
        if chain.tosses_coins:
            coins = uniform(keys.round_keys(Stream.TARGET_COIN, round_start, range(rows)))
        weights = chain.weights(logits, history, proposal.ids, coins)
        p = probabilities(weights.rows)
        uniforms = keys.accept_uniforms(round_start, rows - 1)
        noise_at = keys.residual_noise(round_start, rows, chain.width)
        verify = verify_draft_block if self.rule is selection.BLOCK else verify_draft_tokens
        verdict = verify(p, proposal.q, proposal.ids, uniforms, noise_at)
        forms = None
        if self._diagnostics:
            forms = _forms(p[:-1], proposal.q, proposal.ids)
        return Verification(verdict, weights.tops, forms)


def _forms(p: mx.array, q: mx.array, ids: mx.array) -> FormArrays:
    return FormArrays(
        sum_min=closed_forms.sum_min(p, q),
        sum_prod=closed_forms.sum_prod(p, q),
        gumbel=closed_forms.gumbel_overlap(p, q),
        block_survival=closed_forms.block_survival(block_keep(p, q, ids).keep),
    )


def _one_hot_forms(target_ids: mx.array, q: mx.array) -> FormArrays:
    """Under greedy sampling both rows are one-hot and every form is their overlap."""
    overlap = probability_of(target_ids, q)
    kept = mx.arange(overlap.shape[0]) < leading_run(overlap > 0)
    return FormArrays(overlap, overlap, overlap, kept.astype(mx.float32))
