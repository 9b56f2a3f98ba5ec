"""The emulator notices when a barrier, a fence or a reset is removed from a kernel.

If it does not, the emulator misses a mistake, or the instruction is not needed. Here this is tried
for the kernels of float32; `python tools/gpu_emulator/mutants.py` tries it for all.
"""

from __future__ import annotations

import pytest
from harness import FORMS, STEPS
from mutants import survivors


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("form", FORMS)
def test_each_removed_barrier_fence_or_reset_is_noticed(form, step):
    _, unnoticed = survivors(form, "float32", step, (9, 0))
    assert [str(mutant) for mutant in unnoticed] == []
