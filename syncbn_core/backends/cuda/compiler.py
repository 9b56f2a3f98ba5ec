"""Compiles kernels from Python to machine code and caches the result on disk; needs no device.

numba-cuda compiles a kernel to PTX, and nvJitLink turns the PTX into machine code. The result is
stored in a file, so that later processes need to import neither of them.

    NUMBA_CACHE_DIR    has a folder `syncbn` for compiled kernels; default: the user's cache folder
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
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

from syncbn_core.clock import compiling
from syncbn_core.disk_cache import read_checked, write_checked
from syncbn_core.errors import BackendError

__all__ = [
    "INSTALL",
    "Code",
    "Source",
    "cache_file",
    "cache_folder",
    "compile_source",
    "linker",
    "store",
    "stored",
]

INSTALL = 'in a checkout of syncbn, pip install ".[cuda12]", or ".[cuda13]" for CUDA 13'


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel to compile, and the compiler's settings for it.

    Attributes:
        key: a unique name that never changes, such as "planes_moments-float32-4-256".
        build: makes the Python function of the kernel.
        codes: a letter per argument: "q" for an integer or pointer, "d" for a float64; those in
            parentheses are one tuple.
        threads: threads per block.
        min_blocks: blocks that must fit on one multiprocessor; 1 leaves this to the compiler.
        max_registers: registers per thread; 0 leaves this to the compiler.
        files: source files; a change in any of them makes the cached kernel invalid.
        oldest: the oldest compute capability that has all its instructions.
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
    """A compiled kernel named `entry`, as PTX, as machine code (`cubin`), or both.

    `cubin` is empty if nvJitLink can't make it; `ptx` is empty if the cubin came from the disk.
    """

    entry: str
    ptx: str
    cubin: bytes

    @property
    def ptx_version(self) -> tuple[int, int] | None:
        """The version of PTX that a driver must take; None if it need not, as there is a cubin."""
        found = None if self.cubin else re.search(r"\.version (\d+)\.(\d+)", self.ptx)
        return (int(found[1]), int(found[2])) if found else None

    @property
    def image(self) -> bytes:
        """What the driver loads: the cubin, else the PTX."""
        return self.cubin or self.ptx.encode() + b"\0"


_compiling = threading.Lock()


@compiling()
def compile_source(source: Source, capability: tuple[int, int]) -> Code:
    """Compile `source` for a compute capability; does not use the cache on disk.

    Raises `BackendError` if that fails, for example because numba-cuda is not installed.
    """
    number = "{}.{}".format(*capability)
    try:
        ptx = _to_ptx(source, capability)
        # For a newer device NVVM targets the newest it knows; then the driver compiles the PTX.
        linked = f".target sm_{number.replace('.', '')}\n" in ptx and linker() is not None
        cubin = _to_cubin(ptx, capability) if linked else b""
    except Exception as error:
        # Numba's texts can be hundreds of lines; `__cause__` has all of it
        said = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        raise BackendError(
            f"expected kernel {source.key} to compile for compute capability {number}, got {said}; "
            f"{_remedy(said)}"
        ) from error
    entry = re.search(r"\.visible \.entry (\w+)\(", ptx)
    assert entry is not None, "PTX of a kernel without an entry"
    return Code(entry[1], ptx, cubin)


def _remedy(said: str) -> str:
    """What to do about an error of the compiler."""
    if "row_stack" in said:  # numba-cuda 0.30.4
        return 'pip install "numpy<2.5"'
    return (
        f"{INSTALL}; the versions of numba, numba-cuda, NumPy and the CUDA packages may not fit "
        "together (docs/gpu.md names some that do)"
    )


def _to_ptx(source: Source, capability: tuple[int, int]) -> str:
    with _compiling, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Numba's warnings are for authors of kernels
        with suppress(ImportError):  # a .pth file usually imports it, except with `python -S`
            import_module("_numba_cuda_redirector")
        numba, cuda = import_module("numba"), import_module("numba.cuda")
        if getattr(cuda, "implementation", "") != "NVIDIA":
            raise ImportError("numba.cuda is not that of the package numba-cuda")
        letters = {"q": numba.types.int64, "d": numba.types.float64}
        arguments = [
            letters.get(code) or numba.types.Tuple([letters[own] for own in code[1:-1]])
            for code in re.findall(r"\([qd]*\)|[qd]", source.codes)
        ]
        with _capability_given(capability):
            ptx: str
            ptx, _ = cuda.compile(
                source.build(),
                numba.types.void(*arguments),
                debug=False,  # ignore NUMBA_CUDA_DEBUGINFO
                device=False,
                abi="numba",  # as for kernels: every argument is a parameter of 8 bytes
                cc=capability,
                # a minimum of 1 block makes ptxas use all registers; without one, it balances
                launch_bounds=(source.threads, source.min_blocks)
                if source.min_blocks > 1
                else source.threads,
            )
    if source.max_registers:  # ptxas ignores -maxrregcount if launch bounds are set
        limit = rf"\1\n.maxnreg {source.max_registers}"
        ptx = re.sub(r"(\.visible \.entry \w+\([^)]*\))", limit, ptx, count=1)
    return ptx


@contextmanager
def _capability_given(capability: tuple[int, int]) -> Iterator[None]:
    """Give Numba the compute capability while it compiles.

    If a kernel calls a function, Numba would else ask the current device, in its own context.
    """
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
    """The module of nvJitLink, or None if it can't be loaded."""
    try:
        linker = import_module("cuda.bindings.nvjitlink")
        linker.version()  # loads the library
    except Exception:  # versions raise different errors
        return None
    return linker


def has_nvvm() -> bool:
    """Whether NVVM, the compiler's library, is installed where Numba finds it."""
    try:
        import_module("cuda.bindings.nvvm").version()  # loads the library
        return True
    except Exception:  # versions raise different errors
        pass
    try:  # Numba searches more places, but its import takes half a second
        with suppress(ImportError):
            import_module("_numba_cuda_redirector")
        import_module("numba.cuda.cudadrv.nvvm").NVVM()
        return True
    except Exception:
        return False


def _to_cubin(ptx: str, capability: tuple[int, int]) -> bytes:
    """Machine code from PTX, by nvJitLink; empty if that is too old for this PTX.

    Not left to the driver, which may be older than the compiler.
    """
    core = import_module("cuda.core")
    options = core.ProgramOptions(arch="sm_{}{}".format(*capability))
    try:
        return bytes(core.Program(ptx, "ptx", options).compile("cubin").code)
    except Exception as error:  # versions raise different errors
        if "Unsupported .version" in str(error):  # NVVM is newer; the driver may be new enough
            return b""
        raise


# The cache on disk.

_COMPILERS = (
    "numba-cuda",
    "numba",
    "llvmlite",
    "cuda-bindings",
    "cuda-core",
    "nvidia-nvjitlink",
    "nvidia-nvjitlink-cu12",
    "nvidia-nvvm",
    "nvidia-cuda-nvcc-cu12",
)


@cache
def versions() -> tuple[str, ...]:
    """What the compiled code depends on besides its source: of Python and of each compiler."""
    found = [f"python {sys.version_info.major}.{sys.version_info.minor}"]
    for name in _COMPILERS:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    if not any("nvvm" in each or "nvcc" in each for each in found):  # then a toolkit's NVVM is used
        toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
        found.append(f"toolkit {os.path.realpath(toolkit)}")  # such as /usr/local/cuda-13.0
    return tuple(found)


def cache_folder() -> Path | None:
    """The folder of compiled kernels, which may not exist yet; None for a user without a home."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        return Path(given) / "syncbn"
    parent = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME")
    with suppress(RuntimeError):
        return (Path(parent) if parent else Path.home() / ".cache") / "syncbn"
    return None


def cache_file(source: Source, capability: tuple[int, int]) -> Path | None:
    """The cache file of a kernel; None if there is no cache folder or no source files."""
    folder = cache_folder()
    try:
        sources = [Path(name).read_bytes() for name in (__file__, *source.files)]
    except OSError:  # a zipped package
        return None
    if folder is None:
        return None
    digests = [hashlib.sha256(text).hexdigest() for text in sources]
    options = (source.codes, source.threads, source.min_blocks, source.max_registers)
    name = repr((source.key, *options, capability, versions(), digests))
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()}.kernel"


def stored(path: Path | None) -> Code | None:
    """The kernel stored in `path`; None if the file is missing, damaged or unreadable."""
    content = None if path is None else read_checked(path)
    if content is None:
        return None
    entry, image = content.split(b"\n", 1)
    if image.startswith(b"\x7fELF"):
        return Code(entry.decode(), "", image)
    return Code(entry.decode(), image.rstrip(b"\0").decode(), b"")


def store(path: Path | None, code: Code) -> None:
    """Write `code` to `path`. Does nothing if `path` is None or can't be written."""
    if path is not None:
        with suppress(OSError):
            write_checked(path, code.entry.encode() + b"\n" + code.image)
