"""Tests that need a CUDA device: `pytest tests/device`; without one they are skipped.

`SYNCBN_TEST_DEVICE=cpu` runs what can run there, to see that the tests themselves are sound.
"""

from __future__ import annotations

import os

import pytest

from syncbn_core.backends.cuda import kernels

WANTED = os.environ.get("SYNCBN_TEST_DEVICE", "cuda")


def pytest_collection_modifyitems(items):
    lacks = kernels.missing() if WANTED == "cuda" else []
    for item in items:
        if item.path.parent.name == "device":
            item.add_marker(pytest.mark.cuda)
            if lacks:
                item.add_marker(pytest.mark.skip(reason="; ".join(lacks)))


@pytest.fixture(scope="session")
def device():
    return pytest.importorskip("torch").device(WANTED, 0 if WANTED == "cuda" else None)


@pytest.fixture
def only_cuda():
    if WANTED != "cuda":
        pytest.skip("needs a CUDA device")
