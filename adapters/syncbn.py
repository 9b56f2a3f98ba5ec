"""No module to import: it says which one to take."""

raise ImportError(
    "expected one of the packages of syncbn: import syncbn_torch for PyTorch, syncbn_jax, "
    "syncbn_paddle, or syncbn_core for arrays of NumPy and CuPy",
    name="syncbn",
)
