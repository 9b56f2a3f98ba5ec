"""How the CPU kernels are compiled: serial and parallel builds, kept in Numba's cache on disk.

A kernel is a `SerialParallelKernel`. The functions that it calls carry one of three decorators,
which say what the compiler may do with their arithmetic:

    strict        nothing: every operation is rounded as it is written
    may_contract  turn `a * b + c` into one instruction that rounds once
    may_reorder   that, and add numbers in another order, without which sums are not vectorized

Each decorated function is compiled once and linked into both builds of all its callers, so the
serial and the parallel build of a kernel give the same bits. They are not for Python, are not kept
on disk, and have no machine code of their own (`linking`). `loop` is `strict` for a function with a
loop worth vectorizing; like the last two it is optimized before it is linked. Kernels are only glue
around those, so they are not vectorized again. `from_python` is for what Python calls.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numba.extending
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
    ZipCacheLocator,
)

from syncbn_core._kernels.cpu.linking import kernel, linked
from syncbn_core.clock import compiling
from syncbn_core.disk_cache import on_rank

OPTIONS = {"error_model": "numpy", "no_cfunc_wrapper": True}
CONTRACT_FLAGS = {"contract"}
# Never plain `fastmath=True`: it assumes that NaN and infinity do not occur and drops them.
REORDER_FLAGS = {"reassoc", "contract", "nsz", "arcp"}

LOGGER = logging.getLogger("syncbn")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_said: set[str] = set()  # what this process has said; each is said once


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


class _ReadableFolder:
    """Numba passes over a folder that it can't write. `save_overload` finds that out anyway."""

    def ensure_cache_path(self) -> None:
        """Do nothing: the folder is made when a build is saved."""


class _GivenFolder(_ReadableFolder, UserProvidedCacheLocator):
    """`NUMBA_CACHE_DIR`."""


class _UserFolder(_ReadableFolder, UserWideCacheLocator):
    """The user's cache folder. Numba's first choice is a folder beside the source."""


class _CacheFiles(CompileResultCacheImpl):
    _locator_classes = [_GivenFolder, _UserFolder, ZipCacheLocator]  # noqa: RUF012


class _Cache(FunctionCache):
    """What `cache=True` makes, but no call fails because of the disk."""

    _impl_class = _CacheFiles

    def __init__(self, function: Callable[..., Any]) -> None:
        self.folder = Path(str(numba.config.CACHE_DIR or "the user's cache folder"))  # type: ignore[attr-defined]
        self._missing: Exception | None = None
        try:
            super().__init__(function)
            self.folder = Path(self._cache_path).parent  # which has one for each package
        except (RuntimeError, OSError) as error:  # no source file, as in a frozen program
            self._missing = error

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), _STAMP)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The build for the argument types `sig`; None if it has to be compiled."""
        if self._missing is None:
            try:
                found = super().load_overload(sig, target_context)
                # processes that save at once can give two dtypes one file
                if found is not None and found.signature.args == tuple(sig):
                    return found
            except Exception:  # of any class: the file is damaged, or of another Numba
                with suppress(OSError):
                    self.flush()
        if "compiling" not in _said:
            _said.add("compiling")
            if all(os.environ.get(name, "0") == "0" for name in _LOCAL_RANKS):
                LOGGER.warning("syncbn compiles CPU kernels: some seconds, at their first use")
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a build that was just compiled."""
        try:
            if self._missing is not None:
                raise self._missing
            Path(self._cache_path).mkdir(parents=True, exist_ok=True)
            super().save_overload(sig, data)
        except Exception as error:
            if "cache" in _said:
                return
            _said.add("cache")
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            text = (
                "syncbn compiles its CPU kernels in every process, which takes some seconds each, "
                f"because they can't be kept{on_rank()} in {self.folder} ({reason}); set "
                "NUMBA_CACHE_DIR to a folder that can be written"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def helper(vectorized: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` of a function that only compiled functions call."""
    decorator: Any = numba.njit
    return decorator(**OPTIONS, **linked(vectorized), **options)  # type: ignore[no-any-return]


def overload(function: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.extending.overload` whose functions are helpers too."""
    options: Any = OPTIONS | linked()
    return numba.extending.overload(function, jit_options=options)


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with the cache on disk."""

    def decorate(function: Callable[..., Any]) -> Any:
        decorator: Any = numba.njit
        dispatcher = decorator(**OPTIONS, **options)(function)
        dispatcher._cache = _Cache(function)
        compile_for = compiling()(dispatcher._compile_for_args)
        dispatcher._compile_for_args = partial(_uninterrupted, compile_for)
        return dispatcher

    return decorate


def _parallel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy under another name: Numba's cache tells the builds of a function apart by it."""
    copy = FunctionType(function.__code__, function.__globals__, function.__name__)
    copy.__qualname__ = function.__qualname__ + "_parallel"
    copy.__module__ = function.__module__
    return copy


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
        self.serial: Any = jit(nogil=True, **kernel())(function)
        self.parallel: Any = jit(parallel=True, nogil=True, **kernel())(_parallel(function))


from_python: Any = jit(nogil=True)
strict: Any = helper()
loop: Any = helper(vectorized=True)
may_contract: Any = helper(vectorized=True, fastmath=CONTRACT_FLAGS)
may_reorder: Any = helper(vectorized=True, fastmath=REORDER_FLAGS)
