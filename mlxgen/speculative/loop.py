"""The speculative loop: draft, verify, accept, commit, emit.

A round proposes k tokens, runs the target once over the newest emitted token and the proposals,
judges them on the device and synchronises with the host once. At every round boundary, and after
any exit, both caches hold prompt plus every emitted token except the newest, save for tokens owed
to the draft. Rewinding to that length after a of k proposals were accepted takes k - a tokens off
the target's cache, and what the block was filled up with, and k - a - 1 off the draft's; after a
full acceptance the draft is owed the last proposal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import mlx.core as mx
import numpy as np

from mlxgen.cache.cached_model import CachedModel, as_ids
from mlxgen.config import AcceptRule
from mlxgen.decoding.steps import PlainStepper
from mlxgen.decoding.tokens import FinishReason, LogprobRows, Token
from mlxgen.drafters.proposal import MODEL_DRAFTER, Drafter, LengthPolicy, Proposal
from mlxgen.errors import NonFiniteError
from mlxgen.sampling.chain import SamplerChain, rows_are_usable
from mlxgen.sampling.history import History
from mlxgen.sampling.randomness import Randomness
from mlxgen.speculative.depth import DepthSummary, DraftDepth, FixedDepth, TimedRound
from mlxgen.speculative.selection import acceptance_rule
from mlxgen.speculative.statistics import SpeculativeAcceptanceStats
from mlxgen.speculative.verification import Verification, Verifier

logger = logging.getLogger("mlxgen")
_seen_rules: set[str] = set()
_seen_outcomes: set[str] = set()


@dataclass(frozen=True)
class Round:
    """One round as it was committed, for observers: lengths in tokens, after the commit.

    draft_cache_tokens: None when the drafter keeps no cache.
    """

    proposed: int
    accepted: int
    emitted: tuple[int, ...]
    target_cache_tokens: int
    draft_cache_tokens: int | None
    owed_tokens: int


@dataclass(frozen=True)
class _Flight:
    """A round that has been dispatched and not been looked at yet. source: who proposed; since_s:
    when the round before it was over, so that what the host does between them counts too; follows:
    who proposed that one, None behind a plain step."""

    source: str
    proposal: Proposal
    checked: Verification
    logprobs: LogprobRows | None
    since_s: float
    follows: str | None
    draft_ms: float | None

    @property
    def arrays(self) -> list[mx.array]:
        """All that the host reads of the round."""
        forms, logprobs = self.checked.forms, self.logprobs
        return [
            self.proposal.ids,
            *self.proposal.tops,
            self.checked.tops,
            *self.checked.verdict,
            *(forms or ()),
            *(logprobs.arrays if logprobs else ()),
        ]


class SpeculativeGenerator:
    """Generates from a target, with a drafter's proposals judged by an acceptance rule.

    The rule is `acceptance_rule(accept_rule, ...)`: it depends on the arguments alone, never on
    the environment. depth chooses k for each round; without one it is num_draft_tokens, which
    only a drafter with a width of its own can do with 0. A round
    proposes fewer near the end of the budget. on_round is called after each commit; clock gives
    seconds. Raises `PairError` when a cache cannot be rewound, `ValueError` when the drafter
    decides on more than the rule allows.

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
        depth: DraftDepth | None = None,
        accept_rule: AcceptRule = AcceptRule.SAMPLER_MATCH,
        diagnostics: bool = False,
        eos_ids: frozenset[int] = frozenset(),
        logprobs: int = 0,
        on_round: Callable[[Round], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        target.make_rewindable()
        rule = acceptance_rule(accept_rule, chain.config, drafter.reports_distribution)
        if drafter.length_policy > rule.length_policy:
            raise ValueError(
                f"a drafter with length policy {drafter.length_policy.name} is not lossless under "
                f"the rule {rule.id}, which allows {rule.length_policy.name} at most"
            )
        self._target = target
        self._drafter = drafter
        self._chain = chain
        diagnostics = diagnostics and drafter.reports_distribution
        self._verifier = Verifier(rule, chain, randomness, diagnostics=diagnostics)
        self._stepper = PlainStepper(target, chain, randomness, eos_ids=eos_ids, logprobs=logprobs)
        self._depth = depth or FixedDepth(num_draft_tokens)
        self._eos_ids = eos_ids
        self._logprobs = logprobs
        self._on_round = on_round
        self._clock = clock
        self._history = History([])
        self._last_round: tuple[str, float] | None = None
        self.statistics = SpeculativeAcceptanceStats(rule, diagnostics=diagnostics)
        self.finish_reason = FinishReason.LENGTH

    @property
    def depth_summary(self) -> DepthSummary | None:
        """What an adaptive draft length chose and why."""
        return self._depth.summary()

    def prefill(self, prompt: list[int]) -> None:
        """Take in a prompt of at least one token; its last one is the first step's input.

        What the caches hold already must be a prefix of it, and is not taken in again.
        """
        tokens = as_ids(prompt)
        self._history = self._chain.new_history(prompt)
        self._target.prefill(tokens[self._target.cached_tokens : -1])
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

        The tokens of a round are handed out when the next round is under way. Closing the
        iterator, or an exception, leaves both caches at the last token taken.
        """
        self.finish_reason = FinishReason.LENGTH
        if max_tokens <= 0:
            return
        start = len(self._history)
        taken = 0
        flight: _Flight | None = None
        try:
            while taken < max_tokens and self._is_running:
                # The first token comes from the target alone, as in plain decoding.
                if flight is None and taken > 0:
                    flight = self._dispatch(max_tokens - taken)
                if flight is None:
                    for token in self._plain(max_tokens - taken):
                        taken += 1
                        yield token
                    continue
                emitted = self._settle(flight)
                left = max_tokens - taken - len(emitted)
                flight = self._dispatch(left) if self._is_running else None
                for token in emitted:
                    taken += 1
                    yield token
        finally:
            if len(self._history) > start + taken:
                self._history.truncate(start + taken)
            self._rewind(len(self._history) - 1)
            self._log_finished(taken)

    @property
    def _is_running(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH

    def _plan(self, left: int) -> int:
        """How many tokens to propose; with the token behind them a round emits one more."""
        limit = self._target.block_limit()
        most = (left if limit is None else min(left, limit)) - 1
        return self._drafter.plan(self._history, self._depth.choose(), most) if most > 0 else 0

    def _plain(self, left: int) -> Generator[Token, None, None]:
        """Target tokens without proposals, until there is something to propose again."""
        length_before = len(self._history)
        started_s = self._clock()
        self._last_round = None
        stamps_s: list[float] = []

        def nothing_to_propose() -> bool:
            stamps_s.append(self._clock())
            return self._plan(left - (len(self._history) - length_before)) == 0

        count = min(left, self._depth.plain_tokens)
        if (yield from self._stepper.steps(self._history, count, nothing_to_propose)):
            self.finish_reason = FinishReason.STOP
        tokens = len(self._history) - length_before
        # The first step waits for its graph and the last one for nothing. Between two tokens within
        # a stretch there is one step, as throughout plain decoding.
        steps_s = [later - earlier for earlier, later in pairwise(stamps_s[1:])]
        mean_s = (self._clock() - started_s) / max(tokens, 1)
        step_s = median(steps_s) if steps_s else mean_s
        self._depth.record_plain(tokens, 1e3 * step_s, is_steady=bool(steps_s))

    def _dispatch(self, left: int) -> _Flight | None:
        """Start a round, if there is something to propose: draft and verification as one graph."""
        k = self._plan(left)
        if k == 0:
            return None
        history, verifier = self._history, self._verifier
        started_s = self._clock()
        follows, since_s = self._last_round or (None, started_s)
        proposal = self._drafter.propose(
            history,
            k,
            want_distribution=verifier.wants_distribution,
            coupled=verifier.rule.couples_draws,
        )
        self._check_length(k, proposal)
        draft_ms = None
        if self._depth.wants_split_costs and self._drafter.name == MODEL_DRAFTER:
            mx.eval(proposal.ids)
            draft_ms = 1e3 * (self._clock() - started_s)
        newest = mx.array(history.tokens[-1:])
        logits = self._target.forward(mx.concatenate([newest, proposal.ids]))
        flight = _Flight(
            source=self._drafter.name,
            proposal=proposal,
            checked=verifier.verify(logits, history, proposal),
            logprobs=LogprobRows(logits, self._logprobs) if self._logprobs else None,
            since_s=since_s,
            follows=follows,
            draft_ms=draft_ms,
        )
        mx.async_eval(*flight.arrays)
        return flight

    def _settle(self, flight: _Flight) -> list[Token]:
        """Wait for a round, count it, and commit what was accepted and the token after it."""
        mx.eval(*flight.arrays)
        over_s = self._clock()
        cost_ms = 1e3 * (over_s - flight.since_s)
        self._last_round = flight.source, over_s
        checked, verdict, logprobs = flight.checked, flight.checked.verdict, flight.logprobs
        self._require_usable("draft", *flight.proposal.tops)
        self._require_usable("target", checked.tops)

        accepted = int(np.array(verdict.accepted))
        ids = [int(i) for i in np.array(flight.proposal.ids)]
        emitted = [*ids[:accepted], int(np.array(verdict.next_id))]
        # A drafted end of sequence ends the round's draft: nothing behind it counts.
        proposed = next((i + 1 for i, token in enumerate(ids) if token in self._eos_ids), len(ids))
        tested, accepted = min(accepted + 1, proposed), min(accepted, proposed)
        ends = [offset for offset, token in enumerate(emitted) if token in self._eos_ids]
        if ends:
            emitted = emitted[: ends[0]]
            self.finish_reason = FinishReason.STOP
        fell_back = bool(verdict.fell_back.item()) and accepted < tested
        self.statistics.record_round(
            source=flight.source,
            proposed=proposed,
            tested=tested,
            accepted=accepted,
            forms=None if checked.forms is None else checked.forms.read(),
            residual_fallback=fell_back,
        )
        self._drafter.record(proposed, accepted)
        if flight.source == MODEL_DRAFTER:
            is_steady = flight.follows in (None, flight.source)
            self._depth.record_round(
                TimedRound(len(ids), tested, accepted, cost_ms, flight.draft_ms, is_steady)
            )
        self._log_outcomes(tested, accepted, fell_back)
        self._commit(proposed, accepted, emitted)
        return [
            Token(
                token,
                from_draft=offset < accepted,
                logprobs=logprobs.read(offset, token) if logprobs else None,
            )
            for offset, token in enumerate(emitted)
        ]

    def _commit(self, proposed: int, accepted: int, emitted: list[int]) -> None:
        """The emitted tokens are part of the text now, and both caches hold all but the newest."""
        self._history.extend(emitted)
        length = len(self._history) - 1
        self._rewind(length)
        if self._on_round is not None:
            drafted = self._drafter.cached_tokens
            self._on_round(
                Round(
                    proposed=proposed,
                    accepted=accepted,
                    emitted=tuple(emitted),
                    target_cache_tokens=self._target.cached_tokens,
                    draft_cache_tokens=drafted,
                    owed_tokens=0 if drafted is None else length - drafted,
                )
            )

    def _check_length(self, k: int, proposal: Proposal) -> None:
        """A drafter that breaks its own plan or policy is a programming error."""
        proposed = proposal.ids.shape[0]
        is_allowed = 1 <= proposed <= k
        if self._drafter.length_policy is LengthPolicy.FIXED:
            is_allowed = proposed == k
        if not is_allowed:
            raise ValueError(
                f"the drafter proposed {proposed} tokens where {k} were asked for, against its "
                f"length policy {self._drafter.length_policy.name}"
            )

    def _rewind(self, length: int) -> None:
        self._target.rewind(length)
        self._drafter.rewind(length)

    def _require_usable(self, role: str, *tops: mx.array) -> None:
        if not all(rows_are_usable(rows) for rows in tops):
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
