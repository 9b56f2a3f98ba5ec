"""These tests need other libraries: `python3 dev.py works_with` installs them, runs the tests and
writes docs/works-with.md. The usual sessions leave this folder out."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "torch"):
    sys.path.insert(0, str(folder))  # for `harness` and `world`

import world  # noqa: E402

# importing these takes longer than most tests; forked ranks need not do it again
world.PRELOADED += ["timm", "segmentation_models_pytorch"]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the replicas are threads already
    yield
    torch.set_num_threads(before)
