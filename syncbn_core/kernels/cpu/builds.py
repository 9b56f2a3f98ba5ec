"""How the CPU kernels are compiled: serial and parallel builds. `cache` keeps them on disk.

A kernel is a `SerialParallelKernel`. The functions that it calls carry one of three decorators,
which say what the compiler may do with their arithmetic:

    strict        nothing: every operation is rounded as it is written
    may_contract  turn `a * b + c` into one instruction that rounds once
    may_reorder   that, and add numbers in another order, without which sums are not vectorized

Each decorated function is compiled once and linked into both builds of all its callers, so the
serial and the parallel build of a kernel give the same bits. They are not for Python: without the
code that converts its objects, which takes a tenth of all compilation, a call ends the process.
`from_python` is `strict` with that code.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
from numba.core.compiler_lock import global_compiler_lock

from syncbn_core.kernels.cpu.cache import LOGGER, KernelCache, described

__all__ = [
    "SerialParallelKernel",
    "from_python",
    "holding_lock",
    "may_contract",
    "may_reorder",
    "strict",
]

OPTIONS = {"error_model": "numpy", "no_cfunc_wrapper": True}
CONTRACT_FLAGS = {"contract"}
# Never plain `fastmath=True`: it assumes that NaN and infinity do not occur and drops them.
REORDER_FLAGS = {"reassoc", "contract", "nsz", "arcp"}


def _stamp() -> int:
    """A checksum of all kernel files.

    Numba's cache compares only the file that a function stands in, not those of the functions
    that it calls.
    """
    try:
        sources = sorted(Path(__file__).parent.glob("*.py"))
        return zlib.crc32(b"".join(source.read_bytes() for source in sources))
    except OSError:  # imported from an archive
        return 0


_STAMP = _stamp()


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with the cache on disk."""

    def decorate(function: Callable[..., Any]) -> Any:
        function = _renamed(function, f"_{_STAMP:08x}")
        decorator: Any = numba.njit
        dispatcher = decorator(**OPTIONS, **options)(function)
        dispatcher._cache = KernelCache(function)  # what `cache=True` does
        dispatcher.compile = partial(_claimed, dispatcher._cache, dispatcher.compile)
        compile_for = partial(_timed, dispatcher, dispatcher._compile_for_args)
        dispatcher._compile_for_args = partial(_uninterrupted, compile_for)
        return dispatcher

    return decorate


def _renamed(function: Callable[..., Any], suffix: str) -> Callable[..., Any]:
    """A copy under another name: Numba's disk cache tells builds apart by their names only."""
    copy = FunctionType(function.__code__, function.__globals__, function.__name__)
    copy.__qualname__ = function.__qualname__ + suffix
    copy.__module__ = function.__module__
    return copy


def _claimed(cache: KernelCache, compile_for: Callable[[Any], Any], sig: Any) -> Any:
    """`compile_for(sig)`; other processes that need this build wait until it returns or raises."""
    with global_compiler_lock:
        try:
            return compile_for(sig)
        finally:
            cache.release(sig)


def _timed(dispatcher: Any, compile_for: Callable[..., Any], *arguments: Any) -> Any:
    """`compile_for(...)`, with a line in the log if the build was compiled and not loaded."""
    before = dispatcher.stats.cache_misses.copy()
    begin = time.perf_counter()
    result = compile_for(*arguments)
    seconds = time.perf_counter() - begin
    for sig in dispatcher.stats.cache_misses.keys() - before.keys():
        what = described(dispatcher.py_func.__qualname__, sig)
        LOGGER.debug("compiled %s in %.1f s", what, seconds)
    return result


def _uninterrupted(compile_for: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """`compile_for(...)`, moved from the main thread, which Ctrl-C interrupts, to one of its own.

    An interrupted compilation leaves Numba's tables half filled, and every later one fails.
    """
    if threading.current_thread() is not threading.main_thread():
        return compile_for(*arguments, **named)
    outcome: list[Any] = []
    done = threading.Lock()
    done.acquire()

    def run() -> None:
        try:
            outcome.append(compile_for(*arguments, **named))
        except BaseException as error:
            outcome.append(_Failed(error))
        finally:
            done.release()

    threading.Thread(target=run, name="compile", daemon=True).start()
    with done:
        (result,) = outcome
    if isinstance(result, _Failed):
        raise result.error
    return result


class _Failed:
    """Holds the exception that a compilation raised."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class SerialParallelKernel:
    """The serial and the parallel build of one kernel; each compiles when it is first called."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.serial = jit(nogil=True)(function)
        self.parallel = jit(nogil=True, parallel=True)(_renamed(function, "_parallel"))


holding_lock = jit()  # for functions that call Python's C functions, which need its lock
from_python = jit(nogil=True)
strict = jit(no_cpython_wrapper=True)
may_contract = jit(no_cpython_wrapper=True, fastmath=CONTRACT_FLAGS)
may_reorder = jit(no_cpython_wrapper=True, fastmath=REORDER_FLAGS)
