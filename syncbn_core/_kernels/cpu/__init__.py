"""Numba kernels for CPUs, over arrays as `syncbn_core.layout` views them."""
