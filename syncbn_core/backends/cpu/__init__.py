"""The CPU: how dense memory is taken by the kernels, and NumPy arrays on it."""
