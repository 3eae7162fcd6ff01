"""Settings of MLX's CUDA backend that decoding needs. MLX reads them before its first computation.

Attention. In 16 bits MLX takes cuDNN's attention for more than one query, and builds a cuDNN graph
for every pair of query and key lengths. Key lengths grow with the text, so each verification of a
block, and each draft step over two tokens, builds one: 45 to 70 ms on an H200, whatever the model,
where the forward itself takes 5 to 14. Without cuDNN up to three queries have a kernel of their
own, and more are put together from products and a softmax, which needs no graph; blocks go through
the kernel in pieces (`mlxgen.cache.short_attention`). What it costs to do without cuDNN: a prompt
of many thousand tokens takes 16 to 24 % longer and holds its scores, heads x chunk x keys, and
single steps lose the kernel that MLX takes for them from 256 keys on. So a process that decodes
plainly keeps cuDNN.

Launch graphs. MLX launches work as CUDA graphs and keeps the newest 400. A speculative round makes
about a hundred, and others after another number of accepted tokens; once they no longer fit, every
launch builds its graph anew, and MLX may end the process with "Cache thrashing is happening".
mlxcel raises the limit to 2,000 (its issue 818), and so does this.
"""

from __future__ import annotations

import os

import mlx.core as mx

SETTINGS = {"MLX_CUDA_GRAPH_CACHE_SIZE": "2000"}
"""Environment variables of MLX, and what they are set to where they are not set."""
_CUDNN_ATTENTION = "MLX_CUDA_USE_CUDNN_SDPA"
SETTINGS_FOR_BLOCKS = {_CUDNN_ATTENTION: "0"}
"""The same, of processes that verify blocks of tokens."""


def prepare_cuda(*, verifies_blocks: bool = True) -> None:
    """Make the settings, except those that the user has made."""
    settings = SETTINGS | SETTINGS_FOR_BLOCKS if verifies_blocks else SETTINGS
    for variable, value in settings.items():
        os.environ.setdefault(variable, value)


def lacks_block_attention() -> bool:
    """Whether this process computes on CUDA and has no kernel for attention of a block.

    With cuDNN a block's pieces would each need a graph.
    """
    on_cuda = mx.cuda.is_available() and mx.default_device().type == mx.DeviceType.gpu
    return on_cuda and os.environ.get(_CUDNN_ATTENTION) == "0"
