"""The machine below: which BLAS MLX's CPU backend multiplies with, CUDA graphs, calls within limits."""
