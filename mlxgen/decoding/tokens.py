"""Emitted tokens, and what the consumer of a decoding loop is told of each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import mlx.core as mx
import numpy as np

from mlxgen.sampling.sums import log_sum_exp


class FinishReason(str, Enum):
    """Why a run ended. `STOP` is an end-of-sequence token or a stop string."""

    STOP = "stop"
    LENGTH = "length"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities under the model's own softmax, before bias, penalties, filters
    and temperature: of the token, and of the most likely ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Token:
    """An emitted token. from_draft: it was proposed by the drafter and accepted."""

    id: int
    from_draft: bool = False
    logprobs: TokenLogprobs | None = None


class LogprobRows:
    """Log-probabilities of a block of rows, computed on the device, read after evaluation.

    logits: `[rows, V]`, as the model gave them; top: number of alternatives.
    """

    def __init__(self, logits: mx.array, top: int) -> None:
        logits = logits.astype(mx.float32)
        self._all = logits - log_sum_exp(logits)
        count = min(top, logits.shape[-1])
        self._top_ids = mx.argsort(-self._all, axis=-1)[:, :count]
        self._top = mx.take_along_axis(self._all, self._top_ids, axis=-1)

    @property
    def arrays(self) -> list[mx.array]:
        """What to evaluate together with the round."""
        return [self._all, self._top_ids, self._top]

    def read(self, row: int, token: int) -> TokenLogprobs:
        """The log-probabilities at a row, for the token emitted there."""
        ids, values = np.array(self._top_ids[row]), np.array(self._top[row])
        top = tuple((int(i), float(v)) for i, v in zip(ids, values, strict=True))
        return TokenLogprobs(float(np.array(self._all[row, token])), top)
