"""Kernels: arrays in and out, nothing else. They allocate no results and know no ranks."""
