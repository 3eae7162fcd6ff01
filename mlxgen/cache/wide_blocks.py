"""Short blocks that are run with more tokens than they have, because that takes less time.

MLX's CUDA backend multiplies up to seven rows by a quantised matrix row by row, and reads the
matrix anew for each of them; more rows it multiplies together. On an H200 a 4-bit llama in the
shape of 8 billion weights takes 17 ms for three tokens, 22 for four, 27 for five, and 19 for eight
(docs/benchmark_results). A block in between is filled up behind its own tokens, and what was added
is cut off the logits and trimmed off the caches.

Attention looks back only, so no row that is kept depends on what was added, save where positions
depend on the block's end (`mlxgen.cache.blocks`), where nothing is filled up; it is rounded as in a
longer block. Whether a block is filled up depends on the model and the block's length, never on
timing.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

WIDE_TOKENS = 8
"""The shortest block whose rows are multiplied together."""
_LEAST_TOKENS = 4
_LEAST_BYTES = 2**30
"""Of quantised weights. A forward over less is a matter of launches, whatever the block."""


def lengths_to_fill_up(model: Any) -> range:
    """Lengths of blocks that this model runs with `WIDE_TOKENS` tokens, on this device."""
    on_cuda = mx.cuda.is_available() and mx.default_device().type == mx.DeviceType.gpu
    return _lengths(model) if on_cuda else range(0)


def _lengths(model: Any) -> range:
    quantised = [module for module in model.modules() if "scales" in module]
    # More tokens wake more of a mixture's experts, whose matrices mostly are of another kind.
    is_plain = all(isinstance(module, QuantizedLinear | QuantizedEmbedding) for module in quantised)
    weights_bytes = sum(module["weight"].nbytes for module in quantised)
    if not is_plain or weights_bytes < _LEAST_BYTES:
        return range(0)
    return range(_LEAST_TOKENS, WIDE_TOKENS)
