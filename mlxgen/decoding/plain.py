"""Decoding without a draft: one forward for each token, one step ahead of the host."""

from __future__ import annotations

from collections.abc import Generator

import mlx.core as mx
import numpy as np

from mlxgen.cache.cached_model import CachedModel, as_ids
from mlxgen.decoding.tokens import FinishReason, LogprobRows, Token
from mlxgen.errors import NonFiniteError
from mlxgen.sampling.chain import SamplerChain
from mlxgen.sampling.history import History
from mlxgen.sampling.randomness import Randomness
from mlxgen.sampling.target_draw import TargetDraw, draw_by_position


class PlainGenerator:
    """Generates from one model.

    Call `prefill` once, then iterate over `tokens`. While the host handles a token the next one is
    already being computed. Afterwards the cache, if it can be rewound, holds prompt plus every
    token taken from the iterator except the newest.
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
        self._randomness = randomness
        self._eos_ids = eos_ids
        self._logprobs = logprobs
        self._history = History([])
        self.finish_reason = FinishReason.LENGTH

    def prefill(self, prompt: list[int]) -> None:
        """Take in a prompt of at least one token; its last one is the first step's input."""
        self._history = self._chain.new_history(prompt)
        self._target.prefill(as_ids(prompt)[:-1])

    def tokens(self, max_tokens: int) -> Generator[Token, None, None]:
        """Emit up to max_tokens tokens. Raises `NonFiniteError` where no token can be drawn."""
        self.finish_reason = FinishReason.LENGTH
        if max_tokens <= 0:
            return
        try:
            step = self._step(mx.array(self._history.tokens[-1:]), None)
            for emitted in range(1, max_tokens + 1):
                following = self._step(step[0].ids, step[0].ids) if emitted < max_tokens else None
                drawn, logprobs = step
                mx.eval(drawn.ids, drawn.usable, *(logprobs.arrays if logprobs else []))
                if not drawn.usable.item():
                    raise NonFiniteError("target", len(self._history))
                token = int(np.array(drawn.ids)[0])
                if token in self._eos_ids:
                    self.finish_reason = FinishReason.STOP
                    return
                self._history.extend([token])
                yield Token(token, logprobs=logprobs.read(0, token) if logprobs else None)
                if following is not None:
                    step = following
        finally:
            if self._target.is_rewindable:
                self._target.rewind(len(self._history) - 1)

    def _step(
        self, inputs: mx.array, newest: mx.array | None
    ) -> tuple[TargetDraw, LogprobRows | None]:
        """Dispatch one step. newest: the token that the host has not seen yet, if any."""
        position = len(self._history) + (newest is not None)
        logits = self._target.forward(inputs)
        drawn = draw_by_position(
            self._chain, self._randomness, logits, self._history, newest, position
        )
        mx.async_eval(drawn.ids)
        return drawn, LogprobRows(logits, self._logprobs) if self._logprobs else None
