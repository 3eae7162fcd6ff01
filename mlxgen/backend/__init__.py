"""The machine below MLX: which BLAS its CPU backend multiplies with."""
