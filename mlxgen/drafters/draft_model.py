"""The classic drafter: a small language model of the same vocabulary."""

from __future__ import annotations

import mlx.core as mx

from mlxgen.cache.cached_model import CachedModel
from mlxgen.drafters.proposal import MODEL_DRAFTER, LengthPolicy, Proposal, one_hot_log
from mlxgen.sampling.chain import SamplerChain, draw, log_probabilities, rows_are_usable
from mlxgen.sampling.history import History, IntArray
from mlxgen.sampling.randomness import Randomness, Stream, gumbel, uniform

_REPLAYED_TOKENS = 2


class DraftModel:
    """Proposes by running a model k steps ahead, through a sampler chain like the target's.

    Its cache may be behind the text: after a round in which everything was accepted the last
    proposal was never forwarded here. Whatever is owed is replayed at the head of the next round.
    """

    name = MODEL_DRAFTER
    reports_distribution = True
    length_policy = LengthPolicy.FIXED

    def __init__(
        self,
        model: CachedModel,
        chain: SamplerChain,
        randomness: Randomness,
        *,
        context_tokens: int | None = None,
    ) -> None:
        """context_tokens: the draft's context window; it stops proposing where that ends."""
        model.make_rewindable()
        self._context_tokens = context_tokens
        self._is_past_context = False
        self._model = model
        self._chain = chain
        self._randomness = randomness

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the draft's cache."""
        return self._model.cached_tokens

    @property
    def can_run_ahead(self) -> bool:
        """Whether its cache can be cut back by more than a round."""
        return self._model.can_run_ahead

    @property
    def is_past_context(self) -> bool:
        """Whether the text has outgrown the draft's context window."""
        return self._is_past_context

    def prefill(self, prompt: IntArray) -> None:
        """Take in all prompt tokens but the last, save those that the cache holds already."""
        self._model.prefill(prompt[self._model.cached_tokens : -1])

    def plan(self, history: History, k: int, limit: int) -> int:
        """k, as far as budget and context window allow."""
        if self._context_tokens is not None:
            room = self._context_tokens - len(history)
            self._is_past_context = room < 1
            limit = min(limit, room)
        return max(min(k, limit), 0)

    def propose(
        self, history: History, k: int, *, want_distribution: bool, coupled: bool
    ) -> Proposal:
        """Draw k tokens one after the other; each step is dispatched as soon as it is built."""
        chain, greedy = self._chain, self._chain.config.is_greedy
        noise = coins = None
        if not greedy:
            noise = gumbel(
                self._keys(Stream.TARGET if coupled else Stream.DRAFT, history, k), chain.width
            )
            if chain.tosses_coins:
                coins = uniform(
                    self._keys(Stream.TARGET_COIN if coupled else Stream.DRAFT_COIN, history, k)
                )

        ids = mx.zeros((0,), dtype=mx.int32)
        rows: list[mx.array] = []
        usable: list[mx.array] = []
        owed = history.tokens[self._model.cached_tokens :]
        if len(owed) > _REPLAYED_TOKENS:
            # After a stretch without drafting: catch up without computing logits.
            self._model.prefill(owed[:-1])
            owed = owed[-1:]
        inputs = mx.array(owed)
        for step in range(k):
            logits = self._model.forward(inputs)[-1:]
            if noise is None:
                scores = chain.adjusted_logits(logits, history, ids)
                token = mx.argmax(scores, axis=-1).astype(mx.int32)
            else:
                coin = None if coins is None else coins[step : step + 1]
                scores = chain.scores(logits, history, ids, coin)
                token = draw(scores, noise[step : step + 1])
            mx.async_eval(token)
            usable.append(rows_are_usable(logits, scores))
            rows.append(scores)
            ids = mx.concatenate([ids, token])
            inputs = token
        log_q = None
        if want_distribution:
            log_q = (
                one_hot_log(ids, chain.width) if greedy else log_probabilities(mx.concatenate(rows))
            )
        return Proposal(ids=ids, log_q=log_q, usable=mx.all(mx.stack(usable)))

    def _keys(self, stream: Stream, history: History, k: int) -> mx.array:
        # The target's streams are keyed by position, so both sides meet the same noise.
        start = len(history)
        if stream in (Stream.TARGET, Stream.TARGET_COIN):
            return self._randomness.position_keys(stream, start, k)
        return self._randomness.round_keys(stream, start, range(k))

    def record(self, proposed: int, accepted: int) -> None:
        """Nothing to learn: how much to draft is decided elsewhere."""

    def rewind(self, length: int) -> None:
        """Forget what lies behind the first `length` tokens of the text, if it got that far."""
        self._model.rewind(min(length, self._model.cached_tokens))
