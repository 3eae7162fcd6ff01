"""The speculative loop: draft, verify, accept, commit, emit.

A round proposes k tokens, runs the target once over the newest emitted token and the proposals,
judges them on the device and synchronises with the host once. At every round boundary, and after
any exit, both caches hold prompt plus every emitted token except the newest, save for tokens owed
to the draft. Rewinding to that length after a of k proposals were accepted takes k - a tokens off
the target's cache and k - a - 1 off the draft's; after a full acceptance the draft is owed the
last proposal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxgen.cache.cached_model import CachedModel, as_ids
from mlxgen.config import AcceptRule
from mlxgen.decoding.tokens import FinishReason, LogprobRows, Token
from mlxgen.drafters.proposal import Drafter, LengthPolicy, Proposal
from mlxgen.errors import NonFiniteError
from mlxgen.sampling.chain import SamplerChain
from mlxgen.sampling.history import History
from mlxgen.sampling.randomness import Randomness
from mlxgen.sampling.target_draw import draw_by_position
from mlxgen.speculative.selection import acceptance_rule
from mlxgen.speculative.statistics import SpeculativeAcceptanceStats
from mlxgen.speculative.verification import Verifier

logger = logging.getLogger("mlxgen")
_seen_rules: set[str] = set()
_seen_outcomes: set[str] = set()


@dataclass(frozen=True)
class Round:
    """One round as it was committed, for observers: lengths in tokens, after the commit."""

    proposed: int
    accepted: int
    emitted: tuple[int, ...]
    target_cache_tokens: int
    draft_cache_tokens: int
    owed_tokens: int


class SpeculativeGenerator:
    """Generates from a target, with a drafter's proposals judged by an acceptance rule.

    The rule is `acceptance_rule(accept_rule, ...)`: it depends on the arguments alone, never on
    the environment. num_draft_tokens is k, at least 1; a round proposes fewer near the end of the
    budget. on_round is called after each commit. Raises `PairError` when the target's cache
    cannot be rewound, `ValueError` when the drafter decides on more than the rule allows.

    Call `prefill` once, then iterate over `tokens`; read `statistics` and `finish_reason` after.
    """

    def __init__(
        self,
        target: CachedModel,
        drafter: Drafter,
        chain: SamplerChain,
        randomness: Randomness,
        *,
        num_draft_tokens: int = 3,
        accept_rule: AcceptRule = AcceptRule.SAMPLER_MATCH,
        diagnostics: bool = False,
        eos_ids: frozenset[int] = frozenset(),
        logprobs: int = 0,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        if num_draft_tokens < 1:
            raise ValueError("num_draft_tokens must be at least 1; use PlainGenerator for 0")
        target.require_rewindable()
        rule = acceptance_rule(accept_rule, chain.config, drafter.reports_distribution)
        if drafter.length_policy > rule.length_policy:
            raise ValueError(
                f"a drafter with length policy {drafter.length_policy.name} is not lossless under "
                f"the rule {rule.id}, which allows {rule.length_policy.name} at most"
            )
        self._target = target
        self._drafter = drafter
        self._chain = chain
        self._randomness = randomness
        diagnostics = diagnostics and drafter.reports_distribution
        self._verifier = Verifier(rule, chain, randomness, diagnostics=diagnostics)
        self._num_draft_tokens = num_draft_tokens
        self._eos_ids = eos_ids
        self._logprobs = logprobs
        self._on_round = on_round
        self._history = History([])
        self.statistics = SpeculativeAcceptanceStats(rule, diagnostics=diagnostics)
        self.finish_reason = FinishReason.LENGTH

    def prefill(self, prompt: list[int]) -> None:
        """Take in a prompt of at least one token; its last one is the first step's input."""
        tokens = as_ids(prompt)
        self._history = self._chain.new_history(prompt)
        self._target.prefill(tokens[:-1])
        self._drafter.prefill(tokens)
        _log_once(
            _seen_rules,
            self.statistics.rule.id,
            'speculative acceptance rule active rule="%s" distribution_preserving=%s',
            self.statistics.rule.label,
            str(self.statistics.rule.is_lossless).lower(),
        )

    def tokens(self, max_tokens: int) -> Generator[Token, None, None]:
        """Emit up to max_tokens tokens. Raises `NonFiniteError` where no token can be drawn.

        Closing the iterator, or an exception, leaves both caches at the last token taken.
        """
        self.finish_reason = FinishReason.LENGTH
        left = max_tokens
        is_first = True
        try:
            while left > 0 and self.finish_reason is FinishReason.LENGTH:
                # The first token comes from the target alone, as in plain decoding.
                k = 0 if is_first else self._draft_length(left)
                is_first = False
                for token in self._round(k) if k > 0 else self._single_step():
                    self._history.extend([token.id])
                    left -= 1
                    yield token
        finally:
            self._rewind(len(self._history) - 1)
            self._log_finished(max_tokens - left)

    def _draft_length(self, left: int) -> int:
        """k of the next round: with the bonus token a round emits at most k + 1."""
        limit = self._target.block_limit()
        widest = left if limit is None else min(left, limit)
        return min(self._num_draft_tokens, widest - 1)

    def _single_step(self) -> list[Token]:
        """One target token without proposals."""
        logits = self._target.forward(mx.array(self._history.tokens[-1:]))
        drawn = draw_by_position(
            self._chain, self._randomness, logits, self._history, None, len(self._history)
        )
        logprobs = LogprobRows(logits, self._logprobs) if self._logprobs else None
        mx.eval(drawn.ids, drawn.usable, *(logprobs.arrays if logprobs else []))
        self._require_usable("target", drawn.usable)
        token = int(np.array(drawn.ids)[0])
        if token in self._eos_ids:
            self.finish_reason = FinishReason.STOP
            return []
        return [Token(token, logprobs=logprobs.read(0, token) if logprobs else None)]

    def _round(self, k: int) -> list[Token]:
        """Draft k tokens, verify them, and commit what was accepted and the token after it."""
        history, verifier = self._history, self._verifier
        proposal = self._drafter.propose(
            history,
            k,
            want_distribution=verifier.wants_distribution,
            coupled=verifier.rule.couples_draws,
        )
        k = self._checked_length(k, proposal)
        newest = mx.array(history.tokens[-1:])
        logits = self._target.forward(mx.concatenate([newest, proposal.ids]))
        checked = verifier.verify(logits, history, proposal)
        verdict = checked.verdict
        logprobs = LogprobRows(logits, self._logprobs) if self._logprobs else None
        mx.eval(
            proposal.ids,
            proposal.finite,
            checked.usable,
            *verdict,
            *(checked.forms or ()),
            *(logprobs.arrays if logprobs else []),
        )
        self._require_usable("draft", proposal.finite)
        self._require_usable("target", checked.usable)

        accepted = int(np.array(verdict.accepted))
        ids = [int(i) for i in np.array(proposal.ids)]
        emitted = [*ids[:accepted], int(np.array(verdict.next_id))]
        tested = min(accepted + 1, k)
        # An accepted end of sequence ends the chain: nothing behind it counts.
        countable = next((i + 1 for i, token in enumerate(ids) if token in self._eos_ids), k)
        tested, accepted = min(tested, countable), min(accepted, countable)
        ends = [offset for offset, token in enumerate(emitted) if token in self._eos_ids]
        if ends:
            emitted = emitted[: ends[0]]
            self.finish_reason = FinishReason.STOP
        fell_back = bool(verdict.fell_back.item())
        self.statistics.record_round(
            proposed=k,
            tested=tested,
            accepted=accepted,
            countable=countable,
            forms=None if checked.forms is None else checked.forms.read(),
            residual_fallback=fell_back,
        )
        self._log_outcomes(tested, accepted, fell_back)
        self._rewind(len(history) + len(emitted) - 1)
        if self._on_round is not None:
            self._on_round(
                Round(
                    proposed=k,
                    accepted=accepted,
                    emitted=tuple(emitted),
                    target_cache_tokens=self._target.cached_tokens,
                    draft_cache_tokens=self._drafter.cached_tokens,
                    owed_tokens=len(history) + len(emitted) - 1 - self._drafter.cached_tokens,
                )
            )
        return [
            Token(
                token,
                from_draft=offset < accepted,
                logprobs=logprobs.read(offset, token) if logprobs else None,
            )
            for offset, token in enumerate(emitted)
        ]

    def _checked_length(self, k: int, proposal: Proposal) -> int:
        """The proposal's length; a drafter that breaks its own policy is a programming error."""
        proposed = proposal.ids.shape[0]
        is_allowed = 1 <= proposed <= k
        if self._drafter.length_policy is LengthPolicy.FIXED:
            is_allowed = proposed == k
        if not is_allowed:
            raise ValueError(
                f"the drafter proposed {proposed} tokens where {k} were asked for, against its "
                f"length policy {self._drafter.length_policy.name}"
            )
        return proposed

    def _rewind(self, length: int) -> None:
        self._target.rewind(length)
        self._drafter.rewind(length)

    def _require_usable(self, role: str, usable: mx.array) -> None:
        if not usable.item():
            raise NonFiniteError(role, len(self._history))

    def _log_outcomes(self, tested: int, accepted: int, fell_back: bool) -> None:
        if not self.statistics.rule.needs_distribution:
            return
        outcomes = {
            "accept": accepted > 0,
            "reject, resampled from normalized relu(p - q)": accepted < tested and not fell_back,
            "reject, no residual mass, resampled from p": fell_back,
        }
        for outcome, happened in outcomes.items():
            if happened:
                _log_once(
                    _seen_outcomes,
                    outcome,
                    'speculative acceptance outcome first seen outcome="%s"',
                    outcome,
                )

    def _log_finished(self, generated_tokens: int) -> None:
        stats = self.statistics
        logger.info(
            "speculative decode finished rule=%s rounds=%d proposed=%d positions_tested=%d "
            "accepted=%d per_position_acceptance=%.4f acceptance_rate=%.4f "
            "mean_accepted_len=%.4f generated_tokens=%d",
            stats.rule.id,
            stats.rounds,
            stats.proposed,
            stats.positions_tested,
            stats.accepted,
            stats.per_position_acceptance,
            stats.acceptance_rate,
            stats.mean_accepted_len,
            generated_tokens,
        )


def _log_once(seen: set[str], key: str, message: str, *args: object) -> None:
    if logger.isEnabledFor(logging.INFO) and key not in seen:
        seen.add(key)
        logger.info(message, *args)
