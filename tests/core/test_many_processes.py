"""Many processes that need the same kernel at first use: one compiles it, the others load it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

# `share` compiles in a tenth of a second. "ready" is said, and a line awaited, before.
USE = """
import errno, logging, os, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(message)s")
logging.getLogger("numba").setLevel(logging.WARNING)
from syncbn_core import disk_cache
from syncbn_core.kernels.cpu import cache, numerics
{setup}
print("ready", flush=True)
sys.stdin.readline()
print("share", numerics.share(10, 1, 2), flush=True)
"""

# Compiles for ever: it holds the lock, says so, and waits for a line.
HOLD = """
from numba.core.compiler import Compiler

def compile(*arguments):
    print("holds", flush=True)
    sys.stdin.readline()
    raise RuntimeError("gave up")
numerics.share._compiler.compile = compile
"""


@contextmanager
def process(folder: Path, setup: str = "") -> Iterator["subprocess.Popen[str]"]:
    """A process that waits for a line before it uses a kernel; killed at the end of the block."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    running = subprocess.Popen(
        [sys.executable, "-P", "-c", USE.format(setup=setup)],
        env={**os.environ, "PYTHONPATH": path, "NUMBA_CACHE_DIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with running:
        try:
            yield running
        finally:
            running.kill()


def line_of(running: "subprocess.Popen[str]") -> str:
    assert running.stdout is not None
    return running.stdout.readline().strip()


def go(running: "subprocess.Popen[str]") -> None:
    assert running.stdin is not None
    running.stdin.write("\n")
    running.stdin.flush()


def test_one_of_many_processes_compiles(tmp_path: Path) -> None:
    with ExitStack() as stack:
        all_of_them = [stack.enter_context(process(tmp_path)) for _ in range(6)]
        assert [line_of(each) for each in all_of_them] == ["ready"] * 6
        for each in all_of_them:
            go(each)
        printed = [each.communicate(timeout=100)[0] for each in all_of_them]
    assert all("share (5, 10)\n" in text for text in printed), printed
    assert sum(text.count("compiled share") for text in printed) == 1, printed


@pytest.fixture
def holder(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that has begun to compile and does not get on."""
    with process(tmp_path, HOLD) as running:
        assert line_of(running) == "ready"
        go(running)
        assert line_of(running).startswith("syncbn compiles CPU kernels")
        assert line_of(running) == "holds"
        yield running


def kill(holder: "subprocess.Popen[str]") -> None:
    holder.kill()


@pytest.mark.parametrize("end", [kill, go], ids=["killed", "compilation failed"])
def test_others_go_on_when_the_one_that_compiles_ends(
    end: Callable[["subprocess.Popen[str]"], None],
    holder: "subprocess.Popen[str]",
    tmp_path: Path,
) -> None:
    with process(tmp_path) as waiting, process(tmp_path) as another:
        for each in (waiting, another):
            assert line_of(each) == "ready"
            go(each)
            line = line_of(each)
            assert line == "waiting for another process, which compiles share"
        end(holder)
        printed = [each.communicate(timeout=100)[0] for each in (waiting, another)]
    assert all("share (5, 10)\n" in text for text in printed), printed
    assert sum(text.count("compiled share") for text in printed) == 1, printed


def test_process_compiles_itself_when_it_has_waited_long_enough(
    holder: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    with process(tmp_path, "disk_cache.WAIT = 0.1") as waiting:
        printed = waiting.communicate("\n", timeout=100)[0]
    assert "waiting for another process" in printed
    assert "compiled share" in printed
    assert "share (5, 10)\n" in printed
    assert holder.poll() is None, "still compiling"


WITHOUT_LOCKS = {
    "no locks in this file system": """
import fcntl
def lockf(*arguments):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.lockf = lockf
""",
    "folder that can't be written": """
def open(*arguments):
    raise PermissionError(errno.EACCES, "Permission denied")
os.open = open
""",
}


@pytest.mark.skipif(os.name == "nt", reason="Windows has other locks")
@pytest.mark.parametrize("kind", WITHOUT_LOCKS)
def test_without_locks_each_process_compiles_at_once(
    kind: str, holder: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    with process(tmp_path, WITHOUT_LOCKS[kind]) as running:
        printed = running.communicate("\n", timeout=100)[0]
    assert "waiting" not in printed
    assert "compiled share" in printed
    assert "share (5, 10)\n" in printed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_child_of_the_one_that_compiles_does_not_keep_the_lock(tmp_path: Path) -> None:
    """As a worker of a data loader, which lives on when its parent is killed."""
    forked = HOLD.replace(
        '    print("holds", flush=True)',
        """    if os.fork() == 0:
        print("child", flush=True)
        sys.stdin.readline()
        os._exit(0)""",
    )
    with process(tmp_path, forked) as parent:
        assert line_of(parent) == "ready"
        go(parent)
        assert line_of(parent).startswith("syncbn compiles CPU kernels")
        assert line_of(parent) == "child"
        parent.kill()
        parent.wait(timeout=100)
        with process(tmp_path) as other:
            printed = other.communicate("\n", timeout=100)[0]
        assert "compiled share" in printed
        assert "waiting" not in printed


# A CUDA kernel in place of `share`; the compiler waits for a line, and says when a process waits.
CUDA = """
import time, types
from syncbn_core.backends.cuda import driver
def compile_source(source, capability):
    print("holds", flush=True)
    sys.stdin.readline()
    return driver.Code("entry", "", b"\\x7fELF machine code")
def sleep(seconds):
    if not waited:
        waited.append(print("waits", flush=True))
    time.sleep(seconds)
waited = []
driver.compile_source = compile_source
disk_cache.time = types.SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
os.environ["SYNCBN_CACHE_DIR"] = os.environ["NUMBA_CACHE_DIR"]
source = driver.Source("kernel", None, "q", 256)
numerics.share = lambda *arguments: driver._code_of(source, (9, 0)).entry
"""


@pytest.mark.parametrize("end", ["compiles", "is killed"])
def test_one_process_compiles_a_cuda_kernel(end: str, tmp_path: Path) -> None:
    with process(tmp_path, CUDA) as first, process(tmp_path, CUDA) as second:
        for each, says in ((first, "holds"), (second, "waits")):
            assert line_of(each) == "ready"
            go(each)
            assert line_of(each) == says
        if end == "compiles":
            go(first)
            assert first.communicate(timeout=100)[0] == "share entry\n"
            assert second.communicate(timeout=100)[0] == "share entry\n"
        else:
            first.kill()
            assert line_of(second) == "holds"
            assert second.communicate("\n", timeout=100)[0] == "share entry\n"
