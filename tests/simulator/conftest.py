"""Tests of the CUDA kernels in Numba's simulator: they need `NUMBA_ENABLE_CUDASIM=1`."""

from __future__ import annotations

import sys
from pathlib import Path

from numba import config

collect_ignore_glob = [] if config.ENABLE_CUDASIM else ["*"]
if config.ENABLE_CUDASIM:
    sys.path.insert(0, str(Path(__file__).parent))  # for `simulated`
