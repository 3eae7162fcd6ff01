"""The machine below: the BLAS of the CPU backend, settings of the CUDA backend, limits of calls."""
