"""Decoding without a draft."""

from __future__ import annotations

from collections.abc import Generator

from mlxgen.cache.cached_model import CachedModel, as_ids
from mlxgen.decoding.steps import PlainStepper
from mlxgen.decoding.tokens import FinishReason, Token
from mlxgen.sampling.chain import SamplerChain
from mlxgen.sampling.history import History
from mlxgen.sampling.randomness import Randomness


class PlainGenerator:
    """Generates from one model.

    Call `prefill` once, then iterate over `tokens`. Afterwards the cache, if it can be rewound,
    holds prompt plus every token taken from the iterator except the newest.
    """

    def __init__(
        self,
        target: CachedModel,
        chain: SamplerChain,
        randomness: Randomness,
        *,
        eos_ids: frozenset[int] = frozenset(),
        logprobs: int = 0,
    ) -> None:
        self._target = target
        self._chain = chain
        self._stepper = PlainStepper(target, chain, randomness, eos_ids=eos_ids, logprobs=logprobs)
        self._history = History([])
        self.finish_reason = FinishReason.LENGTH

    def prefill(self, prompt: list[int]) -> None:
        """Take in a prompt of at least one token; its last one is the first step's input.

        What the cache holds already must be a prefix of it, and is not taken in again.
        """
        self._history = self._chain.new_history(prompt)
        self._target.prefill(as_ids(prompt)[self._target.cached_tokens : -1])

    def tokens(self, max_tokens: int) -> Generator[Token, None, None]:
        """Emit up to max_tokens tokens. Raises `NonFiniteError` where no token can be drawn."""
        self.finish_reason = FinishReason.LENGTH
        if max_tokens <= 0:
            return
        try:
            if (yield from self._stepper.steps(self._history, max_tokens)):
                self.finish_reason = FinishReason.STOP
        finally:
            if self._target.is_rewindable:
                self._target.rewind(len(self._history) - 1)
