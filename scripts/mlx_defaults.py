"""What mlxgen's settings of a process are where mlxgen is not used, for comparisons with mlx-lm."""

from __future__ import annotations

from mlxgen.backend import blas

MLX_DEFAULTS = {
    blas.VARIABLE: "off",
    "MLX_CUDA_USE_CUDNN_SDPA": "1",
    "MLX_CUDA_GRAPH_CACHE_SIZE": "400",
}
"""Environment variables of MLX's own BLAS on a CPU and of its defaults on CUDA."""
