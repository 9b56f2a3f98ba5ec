"""Shared by all tests: the option `--quick`, and an interrupt at every point of a call."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

# With --quick a test runs with one value of each of these parameters.
ONE_OF = ("dtype", "size", "replicas")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="one dtype and one number of ranks or replicas for each case; no test marked slow",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    seen: set[Any] = set()
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        chosen = getattr(getattr(item, "callspec", None), "params", {})
        others = tuple((name, id(value)) for name, value in chosen.items() if name not in ONE_OF)
        case = (item.path, getattr(item, "originalname", item.name), others)
        again = case in seen or item.get_closest_marker("slow") is not None
        (dropped if again else kept).append(item)
        seen.add(case)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


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
