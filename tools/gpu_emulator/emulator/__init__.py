"""Execution of compiled CUDA kernels (PTX) on the CPU, behind the driver module.

`parse` reads PTX, `translate` turns its basic blocks into Python functions over NumPy arrays with
one number per thread, `machine` runs a grid of thread blocks, `memory` holds what they share and
checks every access, `device` is the driver that the library talks to.
"""
