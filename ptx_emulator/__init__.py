"""Execution of compiled CUDA kernels (PTX) on a CPU; README.md says how."""
