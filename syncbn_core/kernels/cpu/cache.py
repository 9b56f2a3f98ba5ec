"""The cache of compiled CPU kernels on disk, and what is said about it.

It is in `NUMBA_CACHE_DIR`, else in the user's cache folder. Numba's own choice is the folder of the
source: an uninstaller would leave that folder behind, and Python could still import it.

Each build is one file with a checksum; a damaged one is compiled anew. Numba's own files have an
index per function: two processes that write at once can make it point to the build of another
dtype, and once damaged it stays so. Of several processes that need a build, one compiles it.

The logger "syncbn" gets one line (INFO) when the first kernel of a process has to be compiled. A
cache that can't be used costs one warning: kernels are then compiled in every process, and no call
fails. A folder that can be read but not written, as in a container, is read.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
    ZipCacheLocator,
)
from numba.core.serialize import dumps

from syncbn_core.disk_cache import load_or_claim, on_rank, read_checked, write_checked

__all__ = ["LOGGER", "KernelCache", "described"]

LOGGER = logging.getLogger("syncbn")

_said: set[str] = set()  # what this process has said; each is said once


class _ReadableFolder:
    """Numba passes over a folder that it can't write. `save_overload` finds that out anyway."""

    def ensure_cache_path(self) -> None:
        """Do nothing: the folder is made when a kernel is saved."""


class _GivenFolder(_ReadableFolder, UserProvidedCacheLocator):
    """`NUMBA_CACHE_DIR`."""


class _UserFolder(_ReadableFolder, UserWideCacheLocator):
    """The user's cache folder."""


_LOCATORS: list[type[object]] = [_GivenFolder, _UserFolder, ZipCacheLocator]


class _CacheFiles(CompileResultCacheImpl):
    _locator_classes = _LOCATORS


class _KernelFiles:
    """One file per build, in place of Numba's `IndexDataCacheFile`."""

    def __init__(self, folder: str, name: str, stamp: Any) -> None:
        self._folder, self._name, self._stamp = Path(folder), name, stamp

    def path(self, key: Any) -> Path:
        """The file of the build for `key`: argument types, processor, code of the function."""
        text = repr((key, self._stamp, numba.__version__))
        return (
            self._folder / f"{self._name}.{hashlib.sha256(text.encode()).hexdigest()[:20]}.kernel"
        )

    def load(self, key: Any) -> Any:
        """What `save` was given; None if there is no such file, or a damaged one."""
        content = read_checked(self.path(key))
        return None if content is None else pickle.loads(content)

    def save(self, key: Any, data: Any) -> None:
        """Keep `data`. Raises `OSError`."""
        write_checked(self.path(key), dumps(data))


class KernelCache(FunctionCache):
    """The cached builds of one function; never raises because of the disk."""

    _impl_class = _CacheFiles

    def __init__(self, function: Callable[..., Any]) -> None:
        self._missing: Exception | None = None
        self._releases: dict[Any, Callable[[], None]] = {}  # of builds that are being compiled
        try:
            super().__init__(function)
            stamp = self._impl.locator.get_source_stamp()
            files: Any = _KernelFiles(self._cache_path, self._impl.filename_base, stamp)
            self._cache_file = files
        except (RuntimeError, OSError) as error:  # no source file, as in a frozen program
            settings: Any = numba.config
            self._cache_path = str(settings.CACHE_DIR or "the user's cache folder")
            self._missing = error

    @property
    def folder(self) -> Path:
        """The folder to set or to keep; Numba makes one for each package in it."""
        return Path(self._cache_path) if self._missing else Path(self._cache_path).parent

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The build for the argument types `sig`; None if it has to be compiled."""
        if self._missing is not None:
            self._announce(sig)
            return None
        found, self._releases[sig] = load_or_claim(
            Path(self._cache_path),
            repr((self._impl.filename_base, self._index_key(sig, target_context.codegen()))),
            lambda: self._load(sig, target_context),
            lambda: self._announce_wait(sig),
        )
        if found is None:
            self._announce(sig)
        return found

    def _load(self, sig: Any, target_context: Any) -> Any:
        with suppress(Exception):  # of any class: the file may be of a Numba that was changed
            return super().load_overload(sig, target_context)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a build that was just compiled."""
        try:
            if self._missing is not None:
                raise self._missing
            super().save_overload(sig, data)
        except Exception as error:
            self._warn(error)

    def release(self, sig: Any) -> None:
        """Let other processes compile the build for `sig`, if this one did not."""
        self._releases.pop(sig, lambda: None)()

    def _announce(self, sig: Any) -> None:
        """Say that the first kernel is compiled now."""
        if "compiling" not in _said:
            _said.add("compiling")
            what = described(self._py_func.__qualname__, sig)
            LOGGER.warning(
                "syncbn compiles CPU kernels, which takes some seconds each, once on this machine. "
                "The first is %s. They will be kept in %s; to compile all of them beforehand, run: "
                "python -m syncbn_core warmup %s",
                what,
                self.folder,
                what.partition(" for ")[2] or "float32",
            )

    def _announce_wait(self, sig: Any) -> None:
        """Say that another process compiles this kernel."""
        if "waiting" not in _said:
            _said.add("waiting")
            what = described(self._py_func.__qualname__, sig)
            LOGGER.info("waiting for another process, which compiles %s", what)

    def _warn(self, error: Exception) -> None:
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


def described(name: str, sig: Any) -> str:
    """Such as "planes_forward for float32", from the name of a build and its argument types."""
    kernel = name.rpartition("_")[0]  # without the stamp
    dtype = getattr(sig[0], "dtype", None) if len(sig) else None
    return kernel if dtype is None else f"{kernel} for {_FLOATS.get(str(dtype), dtype)}"


_FLOATS = {"int16": "float16", "uint16": "bfloat16"}  # whose bits these are
