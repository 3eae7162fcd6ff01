"""The classic drafter: a small language model of the same vocabulary."""

from __future__ import annotations

import mlx.core as mx

from mlxgen.cache.cached_model import CachedModel
from mlxgen.drafters.proposal import MODEL_DRAFTER, LengthPolicy, Proposal
from mlxgen.sampling.chain import Draws, SamplerChain, probabilities
from mlxgen.sampling.elementary import one_hot
from mlxgen.sampling.history import History, IntArray
from mlxgen.sampling.randomness import Randomness, Stream, uniform

_REPLAYED_TOKENS = 2
_NUCLEUS_TOKENS = 4096
"""A proposal from further down is hardly ever accepted, and finding it costs a sort of them all."""


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
        self._chain = chain.narrowed(_NUCLEUS_TOKENS)
        self._randomness = randomness

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the draft's cache."""
        return self._model.cached_tokens

    @property
    def is_past_context(self) -> bool:
        """Whether the text has outgrown the draft's context window."""
        return self._is_past_context

    def prefill(self, prompt: IntArray) -> None:
        """Take in all prompt tokens but the last, save those that the cache holds already.

        A prompt that fills the context window is left alone: nothing will be proposed behind it,
        and a table of positions may end there.
        """
        if self._context_tokens is not None and len(prompt) >= self._context_tokens:
            return
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
        noises: list[mx.array] = []
        coins: list[mx.array | None] = [None] * k
        if not greedy:
            if coupled:
                # With that of the target's last row, which takes no operation more.
                noise = self._randomness.target_noise(len(history), k + 1, chain.width)[:k]
            else:
                # For diagnostics a match rule wants it too; then the target makes its own noise.
                beside = Stream.RESIDUAL if want_distribution else Stream.TARGET
                noise = self._randomness.draft_noise(len(history), k, chain.width, beside=beside)
            noises = [*mx.split(noise, k)]
            if chain.tosses_coins:
                stream = Stream.TARGET_COIN if coupled else Stream.DRAFT_COIN
                coins = [*mx.split(uniform(self._keys(stream, history, k)), k)]

        owed = history.tokens[self._model.cached_tokens :]
        if len(owed) > _REPLAYED_TOKENS:
            # After a stretch without drafting: catch up without computing logits.
            self._model.prefill(owed[:-1])
            owed = owed[-1:]
        inputs = mx.array(owed)
        drawn: list[Draws] = []
        for step in range(k):
            logits = self._model.forward(inputs)
            if len(logits) > 1:
                logits = logits[-1:]
            before = None
            if drawn and chain.reads_history:
                before = mx.concatenate([earlier.ids for earlier in drawn])
            if greedy:
                newest = chain.choose(logits, history, before)
            else:
                newest = chain.draw(logits, noises[step], history, before, coins[step])
            # With the top, which would otherwise keep the logits until the round is judged.
            mx.async_eval(newest.ids, newest.tops)
            drawn.append(newest)
            inputs = newest.ids
        ids = mx.concatenate([step.ids for step in drawn])
        q = None
        if want_distribution and greedy:
            q = one_hot(ids, chain.width)
        elif want_distribution:
            q = probabilities(mx.concatenate([step.rows for step in drawn]))
        return Proposal(ids=ids, q=q, tops=tuple(step.tops for step in drawn))

    def _keys(self, stream: Stream, history: History, k: int) -> mx.array:
        # The target's streams are keyed by position, so both sides meet the same coins.
        start = len(history)
        if stream is Stream.TARGET_COIN:
            return self._randomness.position_keys(stream, start, k)
        return self._randomness.round_keys(stream, start, range(k))

    def record(self, proposed: int, accepted: int) -> None:
        """Nothing to learn: how much to draft is decided elsewhere."""

    def rewind(self, length: int) -> None:
        """Forget what lies behind the first `length` tokens of the text, if it got that far."""
        self._model.rewind(min(length, self._model.cached_tokens))
