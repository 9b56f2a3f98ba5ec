"""A barrier, fence or reset less is noticed: else the emulator is blind, or it isn't needed.

`python tests/ptx/mutants.py` does so for all kernels; here for those of float32.
"""

from __future__ import annotations

import pytest
from harness import FORMS, STEPS
from mutants import survivors


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("form", FORMS)
def test_what_makes_blocks_and_threads_work_together_is_needed(form, step, arch):
    _, unnoticed = survivors(form, "float32", step, arch)
    assert [str(mutant) for mutant in unnoticed] == []
