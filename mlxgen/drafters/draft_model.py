"""The classic drafter: a small language model of the same vocabulary."""

from __future__ import annotations

import mlx.core as mx

from mlxgen.cache.cached_model import CachedModel
from mlxgen.drafters.proposal import LengthPolicy, Proposal
from mlxgen.sampling.chain import SamplerChain, draw, log_probabilities, rows_are_usable
from mlxgen.sampling.history import History, IntArray
from mlxgen.sampling.randomness import Randomness, Stream, gumbel, uniform


class DraftModel:
    """Proposes by running a model k steps ahead, through a sampler chain like the target's.

    Its cache may be behind the text: after a round in which everything was accepted the last
    proposal was never forwarded here. Whatever is owed is replayed at the head of the next round.
    """

    reports_distribution = True
    length_policy = LengthPolicy.FIXED

    def __init__(self, model: CachedModel, chain: SamplerChain, randomness: Randomness) -> None:
        model.require_rewindable()
        self._model = model
        self._chain = chain
        self._randomness = randomness

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the draft's cache."""
        return self._model.cached_tokens

    def prefill(self, prompt: IntArray) -> None:
        """Take in all prompt tokens but the last."""
        self._model.prefill(prompt[:-1])

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
        finite: list[mx.array] = []
        inputs = mx.array(history.tokens[self._model.cached_tokens :])
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
            finite.append(rows_are_usable(logits, scores))
            rows.append(scores)
            ids = mx.concatenate([ids, token])
            inputs = token
        log_q = None
        if want_distribution:
            log_q = (
                one_hot_log(ids, chain.width) if greedy else log_probabilities(mx.concatenate(rows))
            )
        return Proposal(ids=ids, log_q=log_q, finite=mx.all(mx.stack(finite)))

    def _keys(self, stream: Stream, history: History, k: int) -> mx.array:
        # The target's streams are keyed by position, so both sides meet the same noise.
        start = len(history)
        if stream in (Stream.TARGET, Stream.TARGET_COIN):
            return self._randomness.position_keys(stream, start, k)
        return self._randomness.round_keys(stream, start, range(k))

    def rewind(self, length: int) -> None:
        """Forget what lies behind the first `length` tokens of the text, if it got that far."""
        self._model.rewind(min(length, self._model.cached_tokens))


def one_hot_log(ids: mx.array, width: int) -> mx.array:
    """Log of one-hot rows: `[k] int32 -> [k, width] float32`, 0 at the id and -inf elsewhere."""
    return mx.where(mx.arange(width)[None, :] == ids[:, None], 0.0, -mx.inf)
