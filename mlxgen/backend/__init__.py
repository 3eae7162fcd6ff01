"""The machine below: BLAS, rotations and memory allocator of the CPU backend, settings of the CUDA
backend, limits of calls."""
