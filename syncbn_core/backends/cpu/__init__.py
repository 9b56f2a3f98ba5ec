"""The CPU backend: how kernels see memory, how they are run, and its use with NumPy arrays."""
