"""Numba kernels for CUDA devices: pointers in, nothing returned."""
