"""The emulator notices when a barrier, a fence or a reset is removed from a kernel.

If it does not, the emulator misses a mistake, or the instruction is not needed. Here this is tried
for the kernels of float32; `python tools/gpu_emulator/mutants.py` tries it for all.
"""

from __future__ import annotations

import re

import pytest
from arithmetic_mutants import noticed
from emulator.device import program_of, ptx_of
from harness import FORMS, STEPS, source_of
from mutants import survivors


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("form", FORMS)
def test_each_removed_barrier_fence_or_reset_is_noticed(form, step):
    _, unnoticed = survivors(form, "float32", step, (9, 0))
    assert [str(mutant) for mutant in unnoticed] == []


@pytest.mark.parametrize("step", STEPS)
def test_the_check_before_the_first_use_notices_numbers_that_are_not_stored(step):
    source = source_of("planes", "float32", step)
    kernel = program_of(ptx_of(source, (9, 0))).kernel
    stores = [n for n, i in enumerate(kernel.instructions) if re.match(r"st.global\S*f", i.opcode)]
    found = [noticed(source, number) for number in stores]
    assert True in found
    assert False not in found
