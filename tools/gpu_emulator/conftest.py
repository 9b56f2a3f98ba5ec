"""Without numba-cuda there is nothing to emulate."""

import os
from importlib.util import find_spec

ON_THIS_MACHINE = find_spec("numba_cuda") is not None and not os.environ.get("NUMBA_ENABLE_CUDASIM")
collect_ignore_glob = [] if ON_THIS_MACHINE else ["*"]
