"""Plain steps: one target forward for each token, computed one step ahead of the host."""

from __future__ import annotations

from collections.abc import Callable, Generator

import mlx.core as mx
import numpy as np

from mlxgen.cache.cached_model import CachedModel
from mlxgen.decoding.tokens import LogprobRows, Token
from mlxgen.errors import NonFiniteError
from mlxgen.sampling.chain import Draws, SamplerChain, rows_are_usable
from mlxgen.sampling.history import History
from mlxgen.sampling.randomness import Randomness
from mlxgen.sampling.target_draw import draw_by_position


class PlainStepper:
    """Emits target tokens drawn by absolute position. logprobs: how many alternatives, 0 is off."""

    def __init__(
        self,
        target: CachedModel,
        chain: SamplerChain,
        randomness: Randomness,
        *,
        eos_ids: frozenset[int],
        logprobs: int,
    ) -> None:
        self._target = target
        self._chain = chain
        self._randomness = randomness
        self._eos_ids = eos_ids
        self._logprobs = logprobs

    def steps(
        self, history: History, count: int, go_on: Callable[[], bool] = lambda: True
    ) -> Generator[Token, None, bool]:
        """Emit up to `count` tokens, each appended to the history before it is handed out.

        Ends early at an end of sequence, which it returns as True, and at most one token after
        `go_on` says no. When it ends by itself the cache is at the boundary; when it is closed it
        may be two tokens ahead of it. Raises `NonFiniteError` where no token can be drawn.
        """
        step = self._dispatch(history, mx.array(history.tokens[-1:]), None)
        for emitted in range(1, count + 1):
            more = emitted < count and go_on()
            following = self._dispatch(history, step[0].ids, step[0].ids) if more else None
            drawn, logprobs = step
            mx.eval(drawn.ids, drawn.tops, *(logprobs.arrays if logprobs else []))
            if not rows_are_usable(drawn.tops):
                raise NonFiniteError("target", len(history))
            token = int(np.array(drawn.ids)[0])
            if token in self._eos_ids:
                return True
            history.extend([token])
            yield Token(token, logprobs=logprobs.read(0, token) if logprobs else None)
            if following is None:
                return False
            step = following
        return False

    def _dispatch(
        self, history: History, inputs: mx.array, newest: mx.array | None
    ) -> tuple[Draws, LogprobRows | None]:
        """Start one step. newest: the token that the host has not seen yet, if any."""
        position = len(history) + (newest is not None)
        logits = self._target.forward(inputs)
        drawn = draw_by_position(self._chain, self._randomness, logits, history, newest, position)
        mx.async_eval(drawn.ids, drawn.tops)
        return drawn, LogprobRows(logits, self._logprobs) if self._logprobs else None
