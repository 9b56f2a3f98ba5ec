"""CuPy on the emulated device, for the tests of this folder."""

from cupy_fixtures import *  # noqa: F403
