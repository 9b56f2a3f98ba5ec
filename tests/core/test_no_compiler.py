"""`NUMBA_DISABLE_JIT=1`: no kernel can be compiled; plain operations compute the same, slowly."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

COMPUTE = """
import warnings
import numpy as np
from syncbn_core import BatchNorm, batch_norm_eval, batch_norm_forward
from syncbn_core.comm import run_in_threads, thread_group

rng = np.random.default_rng(0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    results = []
    for dtype in ("f8", "f4", "f2"):
        x, dy = rng.normal(1, 2, (2, 6, 3, 4, 5)).astype(dtype)
        layer = BatchNorm(3)
        y = layer(x)
        results += [y, layer.backward(dy), *layer.gradients(), layer.running_var]
        group, parts = thread_group(2), np.split(x, 2)
        results += run_in_threads(
            [lambda r=r: batch_norm_forward(parts[r], communicator=group[r])[0] for r in (0, 1)]
        )
        out = np.zeros((6, 3, 4, 10), dtype)[..., ::2]
        assert batch_norm_forward(x, out=out)[0] is out
        results += [out, batch_norm_eval(x, layer.running_mean, layer.running_var)[0]]
        x[0, 1, 0, 0] = np.inf
        results.append(batch_norm_forward(x)[0])
    assert layer.num_batches_tracked == 1
np.savez(PATH, *results)
print(*(warning.message for warning in caught), sep="\\n")
"""


def test_arrays_are_computed_by_plain_operations_and_one_warning_says_so(
    fresh_python: Callable[..., str], tmp_path: Path, close: Callable[..., None]
) -> None:
    found = []
    for forbidden in ("0", "1"):
        path = tmp_path / f"{forbidden}.npz"
        printed = fresh_python(f"PATH = {str(path)!r}\n{COMPUTE}", NUMBA_DISABLE_JIT=forbidden)
        assert printed.count("NUMBA_DISABLE_JIT is set") == int(forbidden), printed
        assert len(printed.split("\n")) == 2, "no other warning"
        with np.load(path) as results:
            found.append(list(results.values()))
    for kernels, plain in zip(*found, strict=True):
        assert kernels.dtype == plain.dtype
        close(plain, kernels, scale=3)
