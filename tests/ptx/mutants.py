"""Kernels with one instruction less, and whether the emulator notices.

Taken away are, one at a time, the barriers, the fences, and the stores that set a counter back to
zero: what makes blocks and threads work together, and what a test of results alone would hardly
miss, as a mistake there shows in one run of many.

    python tests/ptx/mutants.py [--arch sm_90] [--dtype float32] [--kernel rows_moments]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from emulator.device import Device, emulated, program_of, ptx_of
from emulator.machine import Schedule
from emulator.parse import Kernel, Number
from harness import DTYPES, FORMS, SETTINGS, STEPS, Bench, Case, Step

from syncbn_core.backends import cuda
from syncbn_core.errors import BackendError
from syncbn_core.kernels.cuda_constants import lanes_of

__all__ = ["Mutant", "builds", "mutants", "noticed"]


@dataclass(frozen=True)
class Mutant:
    """`step` of activations of a form and dtype, without the instruction of that number."""

    form: str
    dtype: str
    step: str
    number: int
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.form} {self.dtype} {self.step}: line {self.line}, {self.text}"


def builds() -> Iterator[tuple[str, str, str]]:
    """All kernels that have anything to take away, as (form, dtype, step)."""
    for form in FORMS:
        for dtype in DTYPES:
            for step in STEPS:
                yield form, dtype, step


def source_of(form: str, dtype: str, step: str) -> cuda.Source:
    """The kernel of a step for activations of a form."""
    lanes = 1 if form.startswith("single") else lanes_of(dtype)
    kind = "rows" if form.endswith("rows") else "planes"
    ragged = form == "ragged planes"
    return cuda.source(f"{kind}_{step}", dtype, lanes, ragged, cuda.THREADS)


def mutants(form: str, dtype: str, step: str, arch: tuple[int, int]) -> list[Mutant]:
    kernel = program_of(ptx_of(source_of(form, dtype, step), arch)).kernel
    found = []
    for number, item in enumerate(kernel.instructions):
        reset = item.opcode == "st.global.u32" and item.operands[1:] == (_zero_of(kernel, number),)
        if item.opcode in ("bar.sync", "membar.gl") or reset:
            found.append(Mutant(form, dtype, step, number, item.text, item.line))
    return found


def _zero_of(kernel: Kernel, number: int) -> object:
    """The register that a store stores, if a move has just made it zero."""
    stored = kernel.instructions[number].operands[1]
    for item in reversed(kernel.instructions[:number]):
        if item.operands and item.operands[0] == stored:
            return stored if item.operands[1:] == (Number(0),) else None
    return Number(0)


def cases(form: str, dtype: str) -> list[Case]:
    """Few blocks, many, and groups of them; as small as shows all."""
    lanes = lanes_of(dtype)
    if form == "rows":
        return [
            Case(form, 200, 16 * lanes, splits=(9, 3)),
            Case(form, 40, 5 * lanes, splits=(2, 2)),
        ]
    if form == "single rows":
        return [Case(form, 300, 32, offset=1, splits=(9, 3)), Case(form, 50, 3, splits=(2, 2))]
    inner = {"planes": 300 * lanes, "ragged planes": 299 * lanes + 1, "single planes": 2}[form]
    outer = 400 if form == "single planes" else 2
    return [Case(form, outer, 2, inner, splits=(5, 1)), Case(form, 3, 3, inner, splits=(1, 1))]


SCHEDULES = [Schedule("first"), Schedule("random", 5), Schedule("last", 1)]


def noticed(mutant: Mutant, arch: tuple[int, int]) -> str:
    """What noticed it, "" if nothing did."""
    name = program_of(ptx_of(source_of(mutant.form, mutant.dtype, mutant.step), arch)).kernel.name

    def change(kernel: Kernel) -> Kernel:
        return kernel.without(kernel.instructions[mutant.number]) if kernel.name == name else kernel

    with emulated(arch) as device:
        device.before = change
        for schedule in SCHEDULES:
            device.schedule = schedule
            for case in cases(mutant.form, mutant.dtype):
                try:
                    _run(device, mutant, case)
                except BackendError as error:
                    return f"{device.fault or error}"
                except AssertionError as error:
                    return f"a wrong result: {error}"
    return ""


def _run(device: Device, mutant: Mutant, case: Case) -> None:
    with Bench(device) as bench, case.planned():
        step = Step(bench, case, mutant.dtype, SETTINGS[0], np.random.default_rng(3))
        if mutant.step.startswith("backward"):
            step.keep_statistics()
        getattr(step, mutant.step)()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--kernel", help="a part of its name", default="")
    given = parser.parse_args()
    arch = divmod(int(given.arch.removeprefix("sm_")), 10)
    total, survivors = 0, []
    for form, dtype, step in builds():
        if given.dtype not in (None, dtype) or given.kernel not in source_of(form, dtype, step).key:
            continue
        for mutant in mutants(form, dtype, step, arch):
            total += 1
            if not noticed(mutant, arch):
                survivors.append(mutant)
                print("not noticed:", mutant, flush=True)
    print(f"{total - len(survivors)} of {total} noticed")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
