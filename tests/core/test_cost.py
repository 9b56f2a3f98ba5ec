"""What the CPU kernels cost, in units that don't depend on the machine: bytes, passes, vectors."""

import platform
import re
import tracemalloc
from itertools import product
from typing import Any

import ml_dtypes
import numba
import numpy as np
import pytest
from numba import types

from syncbn_core import batch_norm_backward, batch_norm_forward, numpy_steps
from syncbn_core._kernels.cpu import planes as cpu_planes
from syncbn_core._kernels.cpu import row_parts
from syncbn_core._kernels.cpu.activations import activation_of
from syncbn_core._kernels.cpu.numerics import has_half
from syncbn_core.comm import SingleCommunicator
from syncbn_core.moments import ACTIVATIONS

Array = np.ndarray[Any, Any]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the activations that each kernel was given."""
    found: list[int] = []
    original: Any = numpy_steps.NumpySteps._run

    def run(steps: Any, step: str, x: Any, arrays: Any, norm: Any, *numbers: Any) -> None:
        found.append(sum(a.nbytes for a in (*arrays, *numbers) if np.ndim(a) > 1))
        original(steps, step, x, arrays, norm, *numbers)

    monkeypatch.setattr(numpy_steps.NumpySteps, "_run", run)
    return found


@pytest.mark.parametrize("dtype", ["f2", "bf2", "f4", "f8"])
@pytest.mark.parametrize("kind_of", ["NCHW", "channels last", "short planes", "rows"])
def test_three_passes_forward_and_five_backward_in_the_dtype_of_x(
    kind_of: str, dtype: str, moved: list[int]
) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bf2" else dtype)
    if dtype == "f2" and not has_half():
        pytest.skip("this processor does not convert float16")
    shapes = {"short planes": (16, 400, 7, 7), "rows": (500, 600)}
    shape = shapes.get(kind_of, (4, 3, 180, 150))
    x, dy = (np.ones(shape, kind) for _ in range(2))
    if kind_of == "channels last":
        x, dy = (a.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2) for a in (x, dy))
    # with a communicator: somebody else may have a part of the batch
    settings: dict[str, Any] = {"communicator": SingleCommunicator(), "parallel": False}
    batch_norm_backward(dy, batch_norm_forward(x, **settings)[1], **settings)  # compile, load
    moved.clear()
    tracemalloc.start()
    try:
        _, saved = batch_norm_forward(x, **settings)
        # y, and numbers per channel
        assert tracemalloc.get_traced_memory()[1] < 1.05 * x.nbytes + 16 * 8 * shape[1]
        assert sum(moved) == 3 * x.nbytes
        moved.clear()
        batch_norm_backward(dy, saved, **settings)
        assert sum(moved) == 5 * x.nbytes
        # y is gone, dx has come
        assert tracemalloc.get_traced_memory()[1] < 2.2 * x.nbytes
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------- vectors

LOOPS = {
    cpu_planes: "_sum _deviations _products _affine _gradient",
    row_parts: "_add _add_deviations _add_products _affine _gradient",
}


MASKS = (types.none, types.Array(types.uint8, 1, "C"))


def signature(function: Any, element: Any, number: Any, act: Any, valid: Any) -> tuple[Any, ...]:
    """Types of the arguments, told by their names."""
    rows = function.py_func.__module__ == row_parts.__name__
    run, line = types.Array(element, 1, "C"), types.Array(number, 1, "C")
    known = {
        "x": types.Array(element, 2 if rows else 3, "C"),
        "run": run, "source": run, "grad": run, "target": run,
        "total": line, "first": line, "second": line,
    }  # fmt: skip
    known |= {"dy": known["x"], "y": known["x"], "dx": known["x"]}
    if function.py_func.__name__ == "_products":
        known |= {"x": run, "dy": run}
    known |= {
        "valid": valid,
        "act": act,
        "power": number,
    }  # one for all columns: the case that is fast
    known |= dict.fromkeys(("left", "right", "begin", "end", "c"), types.int64)
    channelwise = line if rows else number
    code = function.py_func.__code__
    return tuple(known.get(n, channelwise) for n in code.co_varnames[: code.co_argcount])


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads x86's assembler")
@pytest.mark.parametrize(
    "element", [types.float32, types.float64, types.int16, types.uint16], ids=str
)
def test_every_inner_loop_is_vectorized(element: Any) -> None:
    """A change that costs this costs a factor of four to fifteen, and no result."""
    features = numba.core.codegen.get_host_cpu_features()
    if "+avx2" not in features or (element is types.int16 and not has_half()):
        pytest.skip("a processor without the instructions")
    number = element if isinstance(element, types.Float) else types.float32
    for module, names in LOOPS.items():
        for name in names.split():
            function = getattr(module, name)
            options = {k: v for k, v in function.targetoptions.items() if k != "nopython"}
            fresh = numba.njit(**options)(function.py_func)  # cached ones show no code
            takes = "act" in function.py_func.__code__.co_varnames
            # in float64 a library computes exp, number by number
            activations = ACTIVATIONS if takes and element is types.float32 else (None,)
            masks = MASKS if "valid" in function.py_func.__code__.co_varnames else MASKS[:1]
            for activation, valid in product(activations, masks):
                act = numba.typeof(activation_of(activation, 0.1))
                given = signature(function, element, number, act, valid)
                fresh.compile(given)
                loops = vector_loops(fresh.inspect_asm(given))
                # four rows at once, and those left over
                due = 2 if name in ("_add", "_add_deviations") and valid is types.none else 1
                assert len(loops) >= due, (
                    f"{module.__name__}.{name} of {element}, {activation}, {valid}: {len(loops)}"
                )


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads x86's assembler")
def test_channels_of_rows_are_merged_with_vectors() -> None:
    """Of rows with many channels this was a third of the statistics' time."""
    if "+avx2" not in numba.core.codegen.get_host_cpu_features():
        pytest.skip("a processor without the instructions")
    rows = types.Array(types.float64, 2, "C")
    number, whole = types.float64, types.int64

    def chunks(count, mean, m2, other_count, means, m2s, k, low, high):  # type: ignore[no-untyped-def]
        """As `merge_chunks` calls it."""
        return row_parts._merge_in(
            count, mean, m2, other_count, means[k, low:high], m2s[k, low:high]
        )

    line = types.Array(number, 1, "C")
    given = (number, line, line, number, rows, rows, whole, whole, whole)
    fresh = numba.njit(error_model="numpy")(chunks)
    fresh.compile(given)
    assert vector_loops(fresh.inspect_asm(given))


def vector_loops(assembler: str) -> list[str]:
    """Blocks that jump back to their own beginning and compute with whole vectors."""
    blocks = re.split(r"\n(?=\.L\w+:)", assembler)
    found = []
    for block in blocks:
        label = block.partition(":")[0]
        again = re.search(rf"\tj\w+\t{re.escape(label)}\b", block)
        if again and re.search(r"v(f\w+|add|sub|mul)p[sd]\s.*[yz]mm", block):
            found.append(block)
    return found
