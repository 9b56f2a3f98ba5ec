"""The program for accelerate in docs/frameworks.md."""

from pathlib import Path

import pytest
from recipes import equals_one_process

accelerate = pytest.importorskip("accelerate")


@pytest.mark.timeout(240)
def test_a_model_trained_on_two_processes_is_that_of_one(tmp_path: Path) -> None:
    equals_one_process("accelerate", "accelerate", tmp_path, ("batch_size=4", "batch_size=8"))
