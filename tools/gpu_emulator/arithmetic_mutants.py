"""Kernels with one instruction of arithmetic exchanged, and whether their check notices.

Sums become differences and the reverse, products become sums, and numbers are not stored. Not every
mutant computes wrongly: the value from which deviations are taken may be any, for example.

    python tools/gpu_emulator/arithmetic_mutants.py [--dtype float32] [--each 12]
"""

from __future__ import annotations

import argparse
import random
import re
import warnings
from dataclasses import replace

from emulator.device import emulated, program_of, ptx_of
from failing import forget
from harness import DTYPES, FORMS, STEPS, HostMemory, source_of

from syncbn_core.backends.cuda import driver, selfcheck
from syncbn_core.errors import BackendError

ARCH = (9, 0)
OTHER = {"add": "sub", "sub": "add", "mul": "add"}
ARITHMETIC = re.compile(r"(add|sub|mul)\S*\.f(32|64)|(st)\.global\S*")


def exchanged(kernel, number):
    item = kernel.instructions[number]
    word = item.opcode.partition(".")[0]
    if word == "st":
        return kernel.without(item)
    other = replace(item, opcode=item.opcode.replace(word, OTHER[word]))
    return replace(kernel, body=tuple(other if each is item else each for each in kernel.body))


def block_of(kernel, number):
    """In which basic block the instruction of that number is."""
    for block, items in enumerate(kernel.blocks()[0]):
        if number < len(items):
            return block
        number -= len(items)
    raise ValueError(number)


def noticed(source, number):
    """Whether the check notices that the instruction is another; None if it never runs."""
    with emulated(ARCH) as device:
        device.make_current(0)
        device.before = lambda kernel: exchanged(kernel, number)
        forget()
        try:
            selfcheck.check(HostMemory(device), driver.kernel_for(source, 0), 0, 0)
        except BackendError:
            return True
        block = block_of(program_of(ptx_of(source, ARCH)).kernel, number)
        ran = any(launch.counts.warps[block] for launch in device.launches)
        return False if ran else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--each", type=int, default=12, help="mutants of each kernel")
    given = parser.parse_args()
    chosen = random.Random(0)
    total = caught = idle = 0
    sources = [source_of(form, given.dtype, step) for form in FORMS for step in STEPS]
    for source in dict.fromkeys(sources):
        kernel = program_of(ptx_of(source, ARCH)).kernel
        every = [n for n, i in enumerate(kernel.instructions) if ARITHMETIC.fullmatch(i.opcode)]
        for number in chosen.sample(every, min(given.each, len(every))):
            found = noticed(source, number)
            idle += found is None
            total += found is not None
            caught += bool(found)
            if not found:
                why = "not executed" if found is None else "not noticed"
                print(f"{why}: {source.key}: {kernel.instructions[number].text}", flush=True)
    print(f"{caught} of {total} noticed; {idle} are never executed by the check")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
