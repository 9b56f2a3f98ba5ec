"""Functions that only compiled code calls have no machine code and no file of their own."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from syncbn_core._kernels.cpu import linking

STEP = """
from syncbn_core._kernels.cpu import linking
linking._KNOWN = {known}
import numpy as np
from numba.core import event
from syncbn_core import BatchNorm

x, dy = np.random.default_rng(0).normal(3, 1, (2, 4, 6, 9, 9)).astype("f4")
layer = BatchNorm(6)
with event.install_recorder("numba:compile") as compiled:
    y = layer(x)
    dx = layer.backward(dy)
print("functions", sum(event.is_start for _, event in compiled.buffer))
print("bits", (y.tobytes() + dx.tobytes() + layer.weight_grad.tobytes()).hex())
"""


@pytest.mark.slow
def test_without_private_parts_of_numba_all_works_and_compiles_longer(
    fresh_python: Callable[..., str], tmp_path: Path
) -> None:
    assert linking._KNOWN, "this Numba has other private parts: kernels compile longer"
    functions, bits, files = [], [], []
    for known in (True, False):
        folder = tmp_path / str(known)
        printed = fresh_python(STEP.format(known=known), NUMBA_CACHE_DIR=str(folder))
        functions += map(int, re.findall(r"functions (\d+)", printed))
        bits += re.findall("bits (.*)", printed)
        files.append(len(list(folder.rglob("*.nbi"))))
    assert functions[0] <= 37
    assert files[0] <= 6
    assert len(functions) == 2
    assert bits[0] == bits[1]
