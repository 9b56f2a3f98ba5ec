"""The tools of CUDA, where numba-cuda is there to compile for them."""

import os
from importlib.util import find_spec

ON_THIS_MACHINE = find_spec("numba_cuda") is not None and not os.environ.get("NUMBA_ENABLE_CUDASIM")
collect_ignore_glob = [] if ON_THIS_MACHINE else ["*"]
if ON_THIS_MACHINE:
    from emulator_fixtures import *  # noqa: F403
