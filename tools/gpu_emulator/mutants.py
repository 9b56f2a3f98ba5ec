"""Kernels with one instruction removed, and whether the emulator notices.

Barriers, fences, and the stores that set a block counter back to zero are removed, one at a time.
Threads and blocks need them to work together. A test of results alone would hardly notice that one
is missing, because it gives wrong results in few runs.

    python tools/gpu_emulator/mutants.py [--arch sm_90] [--dtype float32] [--kernel rows_moments]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from emulated_device import Device, emulated, program_of, ptx_of
from harness import DTYPES, FORMS, SETTINGS, STEPS, Bench, Case, Steps, capability, source_of

from ptx_emulator.machine import Schedule
from ptx_emulator.parse import Kernel, Number
from syncbn_core._kernels.cuda.constants import lanes_of
from syncbn_core.errors import BackendError

__all__ = ["Mutant", "builds", "mutants", "noticed", "survivors"]


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


def builds(arch: tuple[int, int]) -> Iterator[tuple[str, str, str]]:
    """All kernels of an architecture that walk over activations, as (form, dtype, step)."""
    for form in FORMS:
        for dtype in DTYPES:
            for step in STEPS:
                if source_of(form, dtype, step).oldest <= arch:
                    yield form, dtype, step


def mutants(form: str, dtype: str, step: str, arch: tuple[int, int]) -> list[Mutant]:
    kernel = program_of(ptx_of(source_of(form, dtype, step), arch)).kernel
    found = []
    for number, item in enumerate(kernel.instructions):
        word = re.fullmatch(r"st\.global\.[ub]32", item.opcode)
        reset = word and _stores_zero(kernel, number)
        if item.opcode in ("bar.sync", "membar.gl") or reset:
            found.append(Mutant(form, dtype, step, number, item.text, item.line))
    return found


def _stores_zero(kernel: Kernel, number: int) -> bool:
    """Whether a store stores zero, or a register that a move before it has made zero."""
    stored = kernel.instructions[number].operands[1]
    if isinstance(stored, Number):
        return stored == Number(0)
    for item in reversed(kernel.instructions[:number]):
        if item.operands and item.operands[0] == stored:
            return item.operands[1:] == (Number(0),)
    return False


def cases(form: str, dtype: str) -> list[Case]:
    """Few blocks, many, and groups of them, each as small as possible."""
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


def noticed(form: str, dtype: str, step: str, arch: tuple[int, int], number: int | None) -> str:
    """The fault or wrong result when the instruction of that number is removed; "" if none.

    None removes nothing.
    """
    name = program_of(ptx_of(source_of(form, dtype, step), arch)).kernel.name

    def change(kernel: Kernel) -> Kernel:
        if number is None or kernel.name != name:
            return kernel
        return kernel.without(kernel.instructions[number])

    with emulated(arch) as device:
        device.before = change
        for schedule in SCHEDULES:
            device.schedule = schedule
            for case in cases(form, dtype):
                try:
                    _run(device, step, dtype, case)
                except BackendError:
                    if device.fault is None:
                        raise
                    return str(device.fault)
                except AssertionError as error:
                    return f"a wrong result: {error}"
    return ""


def survivors(form: str, dtype: str, step: str, arch: tuple[int, int]) -> tuple[int, list[Mutant]]:
    """How many mutants a kernel has, and those that go unnoticed."""
    unchanged = noticed(form, dtype, step, arch, None)
    assert not unchanged, f"{form} {dtype} {step}, nothing removed: {unchanged}"
    every = mutants(form, dtype, step, arch)
    kinds = {mutant.text.split()[0].partition(".")[0] for mutant in every}
    reduces = step in ("moments", "backward_reduce")
    assert kinds == ({"bar", "membar", "st"} if reduces else {"bar"}), kinds
    return len(every), [m for m in every if not noticed(form, dtype, step, arch, m.number)]


def _run(device: Device, step: str, dtype: str, case: Case) -> None:
    with Bench(device) as bench, case.planned():
        steps = Steps(bench, case, dtype, SETTINGS[0], np.random.default_rng(3))
        if step.startswith("backward"):
            steps.keep_statistics()
        getattr(steps, step)()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--kernel", help="a part of its name", default="")
    given = parser.parse_args()
    arch = capability(given.arch)
    total, left = 0, 0
    for form, dtype, step in builds(arch):
        if given.dtype not in (None, dtype) or given.kernel not in source_of(form, dtype, step).key:
            continue
        count, unnoticed = survivors(form, dtype, step, arch)
        total, left = total + count, left + len(unnoticed)
        for mutant in unnoticed:
            print("not noticed:", mutant, flush=True)
    print(f"{given.arch}: {total - left} of {total} noticed")
    return bool(left)


if __name__ == "__main__":
    sys.exit(main())
