"""The program for the Trainer of transformers in docs/frameworks.md."""

from pathlib import Path

import pytest
from recipes import equals_one_process

pytest.importorskip("transformers")


@pytest.mark.timeout(240)
def test_a_model_trained_on_two_processes_is_that_of_one(tmp_path: Path) -> None:
    # AdamW divides gradients by their own size: those that are nearly 0 show rounding errors
    heading, change = "Trainer of transformers", ("batch_size=4", "batch_size=8")
    equals_one_process("transformers", heading, tmp_path, change, limit=1e-6)
