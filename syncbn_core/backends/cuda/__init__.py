"""The CUDA backend: compiler, driver, choice of kernels and grids, and its use with CuPy."""
