"""Where two runs that should emit the same ids part, and how close the choice was there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxgen.cache.cached_model import CachedModel, as_ids
from mlxgen.config import GenerationConfig
from mlxgen.models.loading import LoadedModel
from mlxgen.sampling.chain import SamplerChain
from mlxgen.sampling.randomness import Randomness, Stream, exponential

TIE_BOUND_NATS = {mx.float32: 0.0005, mx.float16: 0.125, mx.bfloat16: 0.5}
"""Largest top-2 margin that rounding explains, by the dtype of the logits.

A logit of size 16 to 32 has a spacing of 1/64 in float16 and of 1/8 in bfloat16; four spacings and
two of the next size up are allowed for what the layers below add. In float32 the layers are all of
it: a product over several rows adds up in another order than over one. Logits of SmolLM2-135M of
sizes up to 31 moved by up to 0.00005 with MKL, and five times what two such logits make is allowed.
"""


@dataclass(frozen=True)
class Difference:
    """The first step at which two runs differ, counted in emitted tokens from 0.

    expected, found: token ids, None where a run ended. margin_nats: distance between the two best
    scores of plain decoding there, noise included under sampling. tie_bound_nats: the largest
    margin that rounding explains in the model's precision.
    """

    step: int
    expected: int | None
    found: int | None
    margin_nats: float
    tie_bound_nats: float

    @property
    def is_tie(self) -> bool:
        """Whether a near-tie and rounding explain the difference."""
        return self.margin_nats <= self.tie_bound_nats


def first_difference(
    target: LoadedModel,
    prompt_ids: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    config: GenerationConfig,
) -> Difference | None:
    """Compare emitted ids; None when they are equal. config: of the plain run."""
    if list(expected) == list(found):
        return None
    shared = min(len(expected), len(found))
    step = next((i for i in range(shared) if expected[i] != found[i]), shared)
    margin, dtype = _top_two_margin(target, [*prompt_ids, *expected[:step]], config)
    return Difference(
        step=step,
        expected=expected[step] if step < len(expected) else None,
        found=found[step] if step < len(found) else None,
        margin_nats=margin,
        tie_bound_nats=TIE_BOUND_NATS.get(dtype, 0.0),
    )


def _top_two_margin(
    target: LoadedModel, text: list[int], config: GenerationConfig
) -> tuple[float, mx.Dtype]:
    """Margin between the two best choices for the token after a text, as plain decoding sees it."""
    width = target.drawable_ids
    model = CachedModel(target.model, role="target", width=width, config=config.cache)
    model.prefill(as_ids(text)[:-1])
    logits = model.forward(mx.array(text[-1:], dtype=mx.int32))
    chain = SamplerChain(config.sampling, width)
    history = chain.new_history(text)
    if config.sampling.is_greedy:
        scores = chain.adjusted_logits(logits, history)
    else:
        keys = Randomness(config.seed).position_keys(Stream.TARGET, len(text), 1)
        weights = chain.weights(logits, history).rows
        scores = mx.log(weights / exponential(keys, width))
    best = np.sort(np.array(mx.topk(scores[0], 2)))
    return float(best[1] - best[0]), logits.dtype
