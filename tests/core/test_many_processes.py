"""Processes that need the same CUDA kernel at first use: one compiles it, the others load it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# "ready" is said, and a line awaited, before. The compiler waits for another line; a process says
# when it waits.
USE = """
import os, sys, time, types
from syncbn_core import disk_cache
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
source = driver.Source("kernel", None, "q", 256)
print("ready", flush=True)
sys.stdin.readline()
print("kernel", driver._code_of(source, (9, 0)).entry, flush=True)
"""


@contextmanager
def process(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that waits for a line before it needs the kernel; killed at the end."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    running = subprocess.Popen(
        [sys.executable, "-P", "-c", USE],
        env={**os.environ, "PYTHONPATH": path, "SYNCBN_CACHE_DIR": str(folder)},
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


@pytest.mark.parametrize("end", ["compiles", "is killed"])
def test_one_process_compiles_a_cuda_kernel(end: str, tmp_path: Path) -> None:
    with process(tmp_path) as first, process(tmp_path) as second:
        for each, says in ((first, "holds"), (second, "waits")):
            assert line_of(each) == "ready"
            go(each)
            assert line_of(each) == says
        if end == "compiles":
            go(first)
            assert first.communicate(timeout=100)[0] == "kernel entry\n"
            assert second.communicate(timeout=100)[0] == "kernel entry\n"
        else:
            first.kill()
            assert line_of(second) == "holds"
            assert second.communicate("\n", timeout=100)[0] == "kernel entry\n"
