"""From a kernel in Python to machine code, kept on disk; needs no device.

numba-cuda compiles a kernel to PTX, nvJitLink makes that machine code, and a file in the user's
cache keeps it, so that the next process imports neither.

    SYNCBN_CACHE_DIR    where compiled kernels are kept; else `syncbn` in the user's cache folder
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from syncbn_core.errors import BackendError

__all__ = [
    "INSTALL",
    "Code",
    "Source",
    "cache_file",
    "compile_source",
    "linker",
    "store",
    "stored",
]

INSTALL = 'pip install "syncbn[cuda12]", or "syncbn[cuda13]" for CUDA 13'


@dataclass(frozen=True, slots=True)
class Source:
    """What to compile.

    `key`: unique and stable, such as "planes_moments-float32-4-256"; `build` makes the Python
    function; `codes`: a letter per argument, "q" for an integer or pointer, "d" for a float64;
    `threads` per block, of which `min_blocks` shall fit on a multiprocessor (1 leaves it to the
    compiler); `max_registers` per thread, 0 for as many as that leaves; `files`: sources whose
    change makes a kernel stale; `oldest`: compute capability that its instructions need.
    """

    key: str
    build: Callable[[], Callable[..., None]]
    codes: str
    threads: int
    min_blocks: int = 1
    max_registers: int = 0
    files: tuple[str, ...] = ()
    oldest: tuple[int, int] = (7, 0)


@dataclass(frozen=True, slots=True)
class Code:
    """A compiled kernel, by the name `entry`; the driver takes machine code or PTX.

    `cubin` is empty where nvJitLink can't make it, `ptx` where the disk cache gave the cubin.
    """

    entry: str
    ptx: str
    cubin: bytes

    @property
    def image(self) -> bytes:
        """What the driver loads."""
        return self.cubin or self.ptx.encode() + b"\0"


_compiling = threading.Lock()


def compile_source(source: Source, capability: tuple[int, int]) -> Code:
    """Machine code of `source` for a compute capability; needs no device and keeps nothing."""
    number = "{}.{}".format(*capability)
    try:
        ptx = _to_ptx(source, capability)
        # NVVM takes the nearest it knows for a device that is newer: left to the driver
        link = linker() if f".target sm_{number.replace('.', '')}\n" in ptx else None
        cubin = b"" if link is None else _to_cubin(link, ptx, capability)
    except Exception as error:
        raise BackendError(
            f"expected kernel {source.key} to compile for compute capability {number}, got "
            f"{type(error).__name__}: {error}; {INSTALL}"
        ) from error
    entry = re.search(r"\.visible \.entry (\w+)\(", ptx)
    assert entry is not None, "PTX of a kernel without an entry"
    return Code(entry[1], ptx, cubin)


def _to_ptx(source: Source, capability: tuple[int, int]) -> str:
    with _compiling, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Numba's advice is for the author of a kernel
        with suppress(ImportError):  # usually done by a .pth file, which `python -S` leaves out
            import_module("_numba_cuda_redirector")
        numba, cuda = import_module("numba"), import_module("numba.cuda")
        if getattr(cuda, "implementation", "") != "NVIDIA":
            raise ImportError("numba.cuda is not that of the package numba-cuda")
        letters = {"q": numba.types.int64, "d": numba.types.float64}
        with _capability_given(capability):
            ptx: str
            ptx, _ = cuda.compile(
                source.build(),
                numba.types.void(*(letters[letter] for letter in source.codes)),
                debug=False,  # whatever NUMBA_CUDA_DEBUGINFO says
                device=False,
                abi="numba",  # a kernel's: every argument is a parameter of 8 bytes
                cc=capability,
                # asked for 1 block, ptxas spends all registers; asked for none, it balances
                launch_bounds=(source.threads, source.min_blocks)
                if source.min_blocks > 1
                else source.threads,
            )
    if source.max_registers:  # the option -maxrregcount is ignored beside launch bounds
        limit = rf"\1\n.maxnreg {source.max_registers}"
        ptx = re.sub(r"(\.visible \.entry \w+\([^)]*\))", limit, ptx, count=1)
    return ptx


@contextmanager
def _capability_given(capability: tuple[int, int]) -> Iterator[None]:
    """Numba asks the current device, in a context of its own, when a kernel calls a function."""
    dispatcher: Any = import_module("numba.cuda.dispatcher")
    current = getattr(dispatcher, "get_current_device", None)
    thread, given = threading.get_ident(), SimpleNamespace(compute_capability=capability)

    def get_current_device() -> Any:
        return given if current is None or threading.get_ident() == thread else current()

    dispatcher.get_current_device = get_current_device
    try:
        yield
    finally:
        dispatcher.get_current_device = current


def linker() -> Any:
    """nvJitLink, or None where it isn't installed."""
    try:
        linker = import_module("cuda.bindings.nvjitlink")
        linker.version()  # loads the library
    except Exception:  # every version has an error of its own
        return None
    return linker


def has_nvvm() -> bool:
    """Whether the compiler's library is installed, where Numba finds it."""
    try:
        import_module("cuda.bindings.nvvm").version()  # loads the library
        return True
    except Exception:  # every version has an error of its own
        pass
    try:  # it knows more places, but takes half a second to import
        with suppress(ImportError):
            import_module("_numba_cuda_redirector")
        import_module("numba.cuda.cudadrv.nvvm").NVVM()
        return True
    except Exception:
        return False


def _to_cubin(linker: Any, ptx: str, capability: tuple[int, int]) -> bytes:
    """Machine code, by the assembler that goes with the compiler: a driver may be older."""
    options = ["-arch=sm_{}{}".format(*capability), "-O3"]
    handle = linker.create(len(options), options)
    try:
        data = ptx.encode()
        linker.add_data(handle, linker.InputType.PTX, data, len(data), "kernel")
        linker.complete(handle)
        cubin = bytearray(linker.get_linked_cubin_size(handle))
        linker.get_linked_cubin(handle, cubin)
    except linker.nvJitLinkError as error:
        log = bytearray(linker.get_error_log_size(handle))
        if log:
            linker.get_error_log(handle, log)
        start = log.decode(errors="replace")[:400]
        raise RuntimeError(f"nvJitLink, {error}: {start}") from error
    finally:
        linker.destroy(handle)
    return bytes(cubin)


# Kept on disk.

_COMPILERS = (
    "numba-cuda",
    "numba",
    "llvmlite",
    "cuda-bindings",
    "nvidia-nvjitlink",
    "nvidia-nvjitlink-cu12",
    "nvidia-nvvm",
    "nvidia-cuda-nvcc-cu12",
)


@cache
def versions() -> tuple[str, ...]:
    found = [f"python {sys.version_info.major}.{sys.version_info.minor}"]
    for name in _COMPILERS:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return tuple(found)


def cache_file(source: Source, capability: tuple[int, int]) -> Path | None:
    """Where this very kernel is kept; None without a place, or without the sources."""
    try:
        sources = [Path(name).read_bytes() for name in (__file__, *source.files)]
        folder = os.environ.get("SYNCBN_CACHE_DIR")
        if not folder:
            parent = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME")
            folder = str((Path(parent) if parent else Path.home() / ".cache") / "syncbn")
    except (OSError, RuntimeError):  # a zipped package; a user without a home
        return None
    digests = [hashlib.sha256(text).hexdigest() for text in sources]
    options = (source.codes, source.threads, source.min_blocks, source.max_registers)
    name = repr((source.key, *options, capability, versions(), digests))
    return Path(folder) / f"{hashlib.sha256(name.encode()).hexdigest()}.kernel"


def stored(path: Path | None) -> Code | None:
    """None for a file that is damaged or can't be read."""
    with suppress(OSError, ValueError):
        if path is not None:
            checksum, content = path.read_bytes().split(b"\n", 1)
            if checksum == hashlib.sha256(content).hexdigest().encode():
                entry, image = content.split(b"\n", 1)
                if image.startswith(b"\x7fELF"):
                    return Code(entry.decode(), "", image)
                return Code(entry.decode(), image.rstrip(b"\0").decode(), b"")
    return None


def store(path: Path | None, code: Code) -> None:
    """All or nothing: other processes may read or write it meanwhile."""
    if path is None:
        return
    content = code.entry.encode() + b"\n" + code.image
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
