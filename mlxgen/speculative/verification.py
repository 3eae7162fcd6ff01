"""From the target's logits over a block to a verdict, under the rule of the run.

Everything here stays on the device; the loop evaluates the result once.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxgen.drafters.proposal import Proposal
from mlxgen.sampling.chain import SamplerChain, log_probabilities, rows_are_usable
from mlxgen.sampling.history import History
from mlxgen.sampling.randomness import Randomness, Stream, gumbel, uniform
from mlxgen.sampling.target_draw import draw_by_position
from mlxgen.speculative import closed_forms, selection
from mlxgen.speculative.rules import Verdict, match_draft_tokens, verify_draft_tokens
from mlxgen.speculative.selection import Rule


@dataclass(frozen=True)
class Verification:
    """A verdict, whether the target's rows were usable (scalar bool), and, when asked for, the
    closed forms `[k]` of sum min(p, q) and sum p q. All on the device."""

    verdict: Verdict
    usable: mx.array
    sum_min: mx.array | None
    sum_prod: mx.array | None


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
        """Whether proposals must carry log_q."""
        return self.rule.needs_distribution or self._diagnostics

    def verify(self, logits: mx.array, history: History, proposal: Proposal) -> Verification:
        """Judge a proposal. logits: `[k+1, width]`, row i after the proposals d_1..d_i."""
        if self.rule is selection.STOCHASTIC:
            return self._reject_and_resample(logits, history, proposal)
        return self._match(logits, history, proposal)

    def _match(self, logits: mx.array, history: History, proposal: Proposal) -> Verification:
        drawn = draw_by_position(
            self._chain, self._randomness, logits, history, proposal.ids, len(history)
        )
        sum_min = sum_prod = None
        if self._diagnostics and proposal.log_q is not None:
            if self._chain.config.is_greedy:
                sum_min = closed_forms.probability_of(drawn.ids[:-1], proposal.log_q)
                sum_prod = sum_min
            else:
                log_p = log_probabilities(drawn.scores[:-1])
                sum_min = closed_forms.sum_min(log_p, proposal.log_q)
                sum_prod = closed_forms.sum_prod(log_p, proposal.log_q)
        verdict = match_draft_tokens(proposal.ids, drawn.ids)
        return Verification(verdict, drawn.usable, sum_min, sum_prod)

    def _reject_and_resample(
        self, logits: mx.array, history: History, proposal: Proposal
    ) -> Verification:
        if proposal.log_q is None:
            raise ValueError(f"the rule {self.rule.id} needs proposals with log_q")
        rows, round_start = logits.shape[0], len(history)
        offsets = range(rows)
        chain, keys = self._chain, self._randomness
        coins = None
        if chain.tosses_coins:
            coins = uniform(keys.round_keys(Stream.TARGET_COIN, round_start, offsets))
        scores = chain.scores(logits, history, proposal.ids, coins)
        log_p = log_probabilities(scores)
        residual_keys = keys.round_keys(Stream.RESIDUAL, round_start, offsets)

        def noise_at(offset: mx.array) -> mx.array:
            return gumbel(residual_keys[offset][None], chain.width)[0]

        verdict = verify_draft_tokens(
            log_p,
            proposal.log_q,
            proposal.ids,
            uniform(keys.round_keys(Stream.ACCEPT, round_start, offsets[:-1])),
            noise_at,
        )
        sum_min = sum_prod = None
        if self._diagnostics:
            sum_min = closed_forms.sum_min(log_p[:-1], proposal.log_q)
            sum_prod = closed_forms.sum_prod(log_p[:-1], proposal.log_q)
        return Verification(verdict, rows_are_usable(logits, scores), sum_min, sum_prod)
