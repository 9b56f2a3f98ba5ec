"""Shared by all tests: the option `--quick`, and an interrupt at every point of a call."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

# With one core Numba would run no parallel build of a kernel. It reads this when it is imported.
os.environ.setdefault("NUMBA_NUM_THREADS", "2")

# Of each test, `--quick` runs one dtype, one activation and one number of members, preferably
# those of which other tests have compiled the kernels. All other cases stay.
VARIED = {"activation", "dtype", "size"}
PREFERRED = ("float32", "f4", "silu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="one dtype, one world, nothing slow")


def pytest_configure() -> None:
    # A shell lets what it starts in the background ignore Ctrl-C, which some tests send.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    cases: dict[object, list[pytest.Item]] = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        others = frozenset(
            (name, id(value)) for name, value in params.items() if name not in VARIED
        )
        cases.setdefault((item.nodeid.partition("[")[0], others), []).append(item)
    chosen = {
        max(case, key=lambda item: sum(word in item.name for word in PREFERRED))
        for case in cases.values()
        if not case[0].get_closest_marker("slow")
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


@pytest.fixture(scope="session")
def interrupt() -> Callable[..., bool]:
    """`interrupt(action, at, *within)`: whether `action()` was cut short at its `at`-th point.

    CPython raises KeyboardInterrupt in the main thread when a call has ended, or a function
    begins. Counted are those of calls made by, and of functions in, files whose path has one of
    `within` in it. What the profiling function of `sys` raises comes out just there.
    """

    def run(action: Callable[[], Any], at: int, *within: str) -> bool:
        seen = 0

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal seen
            if event == "c_call" or "weakref" in frame.f_code.co_filename:
                return  # errors in callbacks of weak references go nowhere
            where = frame.f_back if event == "return" else frame  # who gets the exception
            if where is not None and any(part in where.f_code.co_filename for part in within):
                seen += 1
                if seen > at:
                    raise KeyboardInterrupt

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            action()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(before)
        return False

    return run


@pytest.fixture
def run_program() -> Callable[..., str]:
    """`run_program(*arguments)`: what a program of Python prints; it may import this checkout."""

    def run(*arguments: str) -> str:
        root = Path(__file__).parents[1]
        paths = [str(root), str(root / "adapters"), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=110)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
