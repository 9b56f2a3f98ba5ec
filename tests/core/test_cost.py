"""What the CPU kernels cost, in units that don't depend on the machine: bytes, passes, vectors."""

import platform
import re
import tracemalloc
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numba
import numpy as np
import pytest
from numba import types

from syncbn_core import batch_norm_backward, batch_norm_forward, numpy_steps
from syncbn_core._kernels.cpu import elements
from syncbn_core._kernels.cpu import rows as cpu_rows
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

    def run(steps: Any, step: str, x: Any, dy: Any, norm: Any, *last: Any) -> None:
        read = [x.flat] if dy is None else [x.flat, dy.flat]
        found.append(sum(a.nbytes for a in (*read, *last[1:])))  # the last of two is written
        original(steps, step, x, dy, norm, *last)

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

NONE, WHOLE = types.none, types.int64
MASKS = (NONE, types.Array(types.uint8, 1, "C"))


def loops(element: Any) -> Iterator[tuple[Any, tuple[Any, ...], int]]:
    """Functions with loops over elements, the types of their arguments, how many loops are due."""
    number = element if isinstance(element, types.Float) else types.float32
    run, whole = types.Array(element, 1, "C"), types.Array(element, 2, "C")
    line = types.Array(number, 1, "C")
    # in float64 a library computes exp, number by number
    activations = ACTIVATIONS if element is types.float32 else (None,)
    for valid in MASKS:
        block = whole, NONE, valid, WHOLE, WHOLE, WHOLE, WHOLE
        due = 2 if valid is NONE else 1  # four rows at once, and those left over
        yield elements.sums_of_run, (run, NONE, valid, *[NONE] * 5), 1
        yield elements.sums_of_run, (run, NONE, valid, NONE, number, *[NONE] * 3), 1
        yield elements.add_rows, (*block, *[NONE] * 5, line, NONE), due
        yield elements.add_rows, (*block, NONE, line, *[NONE] * 3, line, line), due
        for activation in activations:
            act = numba.typeof(activation_of(activation, 0.1))
            for one in (number, line):  # of planes, of rows; one scale for all columns
                known = act, one, number, one, one
                last = one, one, one, run
                yield elements.write_run, (run, NONE, valid, *known, *last), 1
                yield elements.write_run, (run, run, valid, *known, *last), 1
            yield elements.sums_of_run, (run, run, valid, act, *[number] * 4), 1
            given = whole, whole, *block[2:], act, line, number, line, line, line, line
            yield elements.add_rows, given, 1


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
    for function, given, due in loops(element):
        found = vector_loops(assembler_of(function, given))
        assert len(found) >= due, f"{function.py_func.__name__} of {given}: {len(found)}"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads x86's assembler")
def test_channels_of_rows_are_merged_with_vectors() -> None:
    """Of rows with many channels this was a third of the statistics' time."""
    if "+avx2" not in numba.core.codegen.get_host_cpu_features():
        pytest.skip("a processor without the instructions")
    number, line = types.float64, types.Array(types.float64, 1, "C")
    given = NONE, number, line, line, number, line, line
    assert vector_loops(assembler_of(cpu_rows._add_chunk, given))


def assembler_of(function: Any, given: tuple[Any, ...]) -> str:
    """That of a function of the kernels, compiled by itself."""
    options = {k: v for k, v in function.targetoptions.items() if k in ("error_model", "fastmath")}
    fresh = numba.njit(**options)(function.py_func)
    fresh.compile(given)
    return str(fresh.inspect_asm(given))


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
