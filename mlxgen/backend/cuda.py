"""Settings of MLX's CUDA backend that decoding needs. MLX reads them before its first computation.

Attention. For more than one query MLX takes cuDNN's attention, and builds a cuDNN graph for every
pair of query and key lengths. Key lengths grow with the text, so each verification of a block, and
each draft step over two tokens, builds one: 45 to 70 ms on an H200, whatever the model, where the
forward itself takes 5 to 12. MLX's own kernels need none. They are slower at prompts of many
thousand tokens, where cuDNN reads a chunk about twice as fast.

Launch graphs. MLX launches work as CUDA graphs and keeps the newest 400. A speculative round makes
about a hundred, and others after another number of accepted tokens; once they no longer fit, every
launch builds its graph anew, and MLX may end the process with "Cache thrashing is happening".
mlxcel raises the limit to 2,000 (its issue 818), and so does this.
"""

from __future__ import annotations

import os

SETTINGS = {"MLX_CUDA_USE_CUDNN_SDPA": "0", "MLX_CUDA_GRAPH_CACHE_SIZE": "2000"}
"""Environment variables of MLX, and what they are set to where they are not set."""


def prepare_cuda() -> None:
    """Make the settings, except those that the user has made."""
    for variable, value in SETTINGS.items():
        os.environ.setdefault(variable, value)
