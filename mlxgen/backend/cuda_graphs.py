"""Room for MLX's CUDA graphs.

MLX launches work on a CUDA device as graphs and keeps the newest 400. A speculative round makes
about a hundred, and others after another number of accepted tokens; once they no longer fit, every
launch builds its graph anew, and MLX may end the process with "Cache thrashing is happening".
mlxcel raises the limit to 2,000 (its issue 818), and so does this.
"""

from __future__ import annotations

import os

VARIABLE = "MLX_CUDA_GRAPH_CACHE_SIZE"
_GRAPHS = "2000"


def keep_more_graphs() -> None:
    """Raise the limit, unless the variable is set. MLX reads it before its first computation."""
    os.environ.setdefault(VARIABLE, _GRAPHS)
