"""The machine below: the BLAS of MLX's CPU backend, its CUDA graphs, calls within limits."""
