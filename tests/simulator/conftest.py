"""Tests of the CUDA kernels in Numba's simulator: they need `NUMBA_ENABLE_CUDASIM=1`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from numba import config

from syncbn_core.backends import cuda

collect_ignore_glob = [] if config.ENABLE_CUDASIM else ["*"]
if config.ENABLE_CUDASIM:
    sys.path.insert(0, str(Path(__file__).parent))  # for `simulated`


@pytest.fixture
def short_groups(monkeypatch):
    """A few splits of rows are added up in groups already: simulating many takes long."""
    monkeypatch.setattr(cuda, "LONE_GROUP", 3)
