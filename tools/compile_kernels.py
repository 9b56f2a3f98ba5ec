"""Compile the CPU kernels that the tests use, in two processes, and say how far it is.

    python tools/compile_kernels.py           # those of `pytest --quick`
    python tools/compile_kernels.py --all     # and more, of all tests

Into Numba's cache, where tests find them: else two workers compile the same kernel at once, and a
test that happens to be the first one takes minutes on a slow machine.
"""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

import numpy as np
from ml_dtypes import bfloat16

from syncbn_core import BatchNorm

# A plane is long, and a row short. From 32768 elements on kernels are parallel.
SHAPES = {
    ("planes", False): (2, 3, 70),
    ("planes", True): (2, 3, 6000),
    ("rows", False): (9, 3),
    ("rows", True): (12000, 3),
}


class Kernels(NamedTuple):
    """Those of forward and backward for one kind of x."""

    dtype: type
    activation: str | None = None
    masked: bool = False
    parallel: bool = False


DTYPES = (np.float32, np.float64, np.float16)
MANY = (False, True)
QUICK = [
    Kernels(bfloat16),
    *(Kernels(dtype, parallel=many) for dtype in DTYPES for many in MANY),
    *(Kernels(np.float64, "silu", parallel=many) for many in MANY),
    *(Kernels(np.float64, masked=True, parallel=many) for many in MANY),
]
ALL = [  # what one test alone would compile for longer than it may take
    *QUICK,
    *(Kernels(dtype, "silu") for dtype in (np.float32, np.float16)),
    *(Kernels(dtype, "silu", masked=True) for dtype in DTYPES),
    *(Kernels(dtype, masked=True) for dtype in (np.float32, np.float16)),
]


def compile_for(layout: str, kernels: Kernels) -> None:
    """Run a step, whose kernels are compiled and kept."""
    dtype, activation, masked, parallel = kernels
    x = np.ones(SHAPES[layout, parallel], dtype)
    mask = np.arange(len(x)) > 0 if masked else None
    layer = BatchNorm(3, activation=activation)
    layer.backward(layer(x, mask))


def main(arguments: list[str]) -> None:
    wanted = ALL if "--all" in arguments else QUICK
    # A process for each layout: processes that save the same kernel's index at once lose entries.
    with ProcessPoolExecutor(1) as planes, ProcessPoolExecutor(1) as rows:
        pools = {"planes": planes, "rows": rows}
        tasks = [
            pool.submit(compile_for, layout, kernels)
            for kernels in wanted
            for layout, pool in pools.items()
        ]
        for done, task in enumerate(as_completed(tasks), 1):
            task.result()
            print(f"compiled kernels that the tests use: {done} of {len(tasks)} kinds", flush=True)


if __name__ == "__main__":
    logging.getLogger("syncbn").setLevel(logging.ERROR)  # that kernels are compiled
    main(sys.argv[1:])
