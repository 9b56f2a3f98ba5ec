"""CUDA devices: compiler, driver, grids, and CuPy arrays on them."""
