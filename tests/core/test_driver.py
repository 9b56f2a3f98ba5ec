"""Kernels by the CUDA driver, on `stub_driver.c`, a driver that notes what it is told.

The compiler is a stand-in too, but for the last tests, which need numba-cuda and no device.
"""

import ctypes
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from syncbn_core.backends.cuda import compiler, driver, kernels
from syncbn_core.backends.cuda.compiler import Code, Source
from syncbn_core.errors import BackendError

C_FILE = Path(__file__).with_name("stub_driver.c")
OUT_OF_MEMORY, INVALID_CONTEXT, ILLEGAL_ADDRESS = 2, 201, 700


class Launch(ctypes.Structure):
    """As in stub_driver.c."""

    _fields_ = (
        ("function", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("parameters", ctypes.c_uint64 * 8),
    )


class Stub:
    """A stub of its own, with its variables `stub_*` as attributes."""

    def __init__(self, path: Path) -> None:
        self.__dict__["path"] = path
        self.__dict__["library"] = ctypes.CDLL(str(path))

    def __getattr__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, f"stub_{name}").value

    def __setattr__(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, f"stub_{name}").value = value

    def set_capabilities(self, *values: int) -> None:
        self.devices = len(values)
        (ctypes.c_int * 2).in_dll(self.library, "stub_capabilities")[: len(values)] = values

    def make_current(self, context: int) -> None:
        self.library.cuCtxSetCurrent(ctypes.c_void_p(context))

    def launches(self) -> list[Launch]:
        return list((Launch * self.launched).in_dll(self.library, "stub_launches"))

    def images(self) -> list[bytes]:
        texts = (ctypes.c_char * 32 * self.loads).in_dll(self.library, "stub_images")
        return [text.value for text in texts]


class Compiler:
    """Stands in for `compile_source`: notes what it was to compile."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, int]]] = []
        self.error: Exception | None = None

    def __call__(self, source: Source, capability: tuple[int, int]) -> Code:
        self.calls.append((source.key, capability))
        if self.error is not None:
            raise self.error
        return Code("entry", "", b"\x7fELF %s %d.%d" % (source.key.encode(), *capability))


class Machine(NamedTuple):
    stub: Stub
    compiler: Compiler
    cache: Path  # directory of the disk cache
    restart: Callable[[], None]  # forget what a process remembers


@pytest.fixture(scope="session")
def stub_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stub as a shared library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler, on Linux")
    path = tmp_path_factory.mktemp("driver") / "stub.so"
    command = [compiler, "-Wall", "-shared", "-fPIC", "-o", str(path), str(C_FILE)]
    subprocess.run(command, check=True, timeout=60)
    return path


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """`forget()`, and nothing of other tests is remembered in this one, or of it in others."""

    def forget() -> None:
        monkeypatch.setattr(kernels, "_machine", kernels.Machine())

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    forget()
    return forget


@pytest.fixture
def machine(
    stub_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forgetful: Callable[[], None],
) -> Machine:
    copy = tmp_path / "libstub.so"  # a library of its own has variables of its own
    shutil.copy(stub_path, copy)
    stub, compiler = Stub(copy), Compiler()
    monkeypatch.setattr(driver, "_open", lambda: stub.library)
    monkeypatch.setattr(kernels, "compile_source", compiler)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    return Machine(stub, compiler, tmp_path / "cache" / "syncbn", forgetful)


def no_function() -> Callable[..., None]:
    raise AssertionError("compiled")


def source_of(codes: str = "q", key: str = "kernel", **options: Any) -> Source:
    return Source(key, no_function, codes, options.pop("threads", 256), **options)


# ------------------------------------------------------------------------------ launch


@pytest.mark.parametrize(
    ("codes", "values"),
    [
        ("q", [0]),
        ("qqqq", [1, -1, 2**63 - 1, -(2**63)]),
        ("qqq", [2**32 + 5, 0x7F00_1234_5678, True]),
        ("dddd", [0.1, -0.0, math.inf, 5e-324]),
        ("d", [math.nan]),
        ("qdqdqdqd", [7, 7.0, -7, -7.0, 2**53 + 1, 2.0**53, 3, 1e308]),
        ("d", [3]),
        ("", []),
    ],
)
def test_arguments_arrive_bit_for_bit(machine: Machine, codes: str, values: list[float]) -> None:
    machine.stub.parameters = len(codes)
    kernels.launch_of(source_of(codes), 0)((1, 1), 0, *values)
    (launch,) = machine.stub.launches()
    assert bytes(launch.parameters)[: 8 * len(codes)] == struct.pack("<" + codes, *values)


@pytest.mark.parametrize("arguments", [(), (1,), (1, 2, 3), (1, "2")])
def test_other_arguments_than_declared_are_refused(
    machine: Machine, arguments: tuple[Any, ...]
) -> None:
    kernel = kernels.launch_of(source_of("qq"), 0)
    with pytest.raises(struct.error):
        kernel((1, 1), 0, *arguments)
    assert machine.stub.launched == 0


def test_threads_do_not_mix_their_arguments(machine: Machine) -> None:
    threads, times, size = 6, 3000, 8
    machine.stub.parameters = size
    launches_of = [kernels.launch_of(source_of("q" * size, f"kernel {k}"), 0) for k in range(2)]
    start = threading.Barrier(threads)

    def member(rank: int) -> None:
        start.wait()
        for i in range(times):
            first = (rank * times + i) << 8
            launches_of[i % 2]((1, 1), 0, *range(first, first + size))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(member, range(threads)))
    launches = machine.stub.launches()
    firsts = [launch.parameters[0] for launch in launches]
    assert sorted(firsts) == [n << 8 for n in range(threads * times)]
    for launch, first in zip(launches, firsts, strict=True):
        assert list(launch.parameters) == list(range(first, first + size))


def test_failing_launch_names_kernel_device_grid_block_and_error(machine: Machine) -> None:
    kernel = kernels.launch_of(source_of("q", "planes_moments-float32"), 0)
    machine.stub.launch_fails = ILLEGAL_ADDRESS
    with pytest.raises(BackendError) as caught:
        kernel((34, 5), 0, 1)
    for part in (
        "planes_moments-float32",
        "device 0",
        "(34, 5)",
        "256 threads",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "an illegal memory access was encountered",
    ):
        assert part in str(caught.value)
    machine.stub.launch_fails = 0
    kernel((1, 1), 0, 1)
    assert machine.stub.launched == 1


# ---------------------------------------------------------------------------- contexts


def test_without_a_context_the_primary_one_of_the_device_is_made_current(
    machine: Machine,
) -> None:
    machine.stub.set_capabilities(90, 90)
    kernels.launch_of(source_of(), 1)((1, 1), 0, 1)
    assert machine.stub.retained == 1
    (launch,) = machine.stub.launches()
    primary = ctypes.c_void_p()
    machine.stub.library.cuDevicePrimaryCtxRetain(ctypes.byref(primary), 1)
    assert launch.context == primary.value


def test_context_of_the_caller_stays(machine: Machine) -> None:
    machine.stub.make_current(2**40)
    kernels.launch_of(source_of(), 0)((1, 1), 0, 1)
    assert machine.stub.retained == 0
    assert machine.stub.launches()[0].context == 2**40


# ----------------------------------------------------------------------------- loading


def test_threads_that_come_at_once_get_the_one_kernel(machine: Machine) -> None:
    start = threading.Barrier(8)

    def member(_: int) -> driver.Launch:
        start.wait()
        return kernels.launch_of(source_of(), 0)

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(member, range(8)))
    assert len(found) == machine.stub.loads == len(machine.compiler.calls) == 1


def test_device_too_old_is_refused(machine: Machine) -> None:
    machine.stub.set_capabilities(90, 61)
    with pytest.raises(BackendError, match=r"device 1: expected .* 7\.0 .* got 6\.1; use"):
        kernels.launch_of(source_of(), 1)
    assert machine.compiler.calls == []


def test_without_a_driver_there_are_no_devices(
    monkeypatch: pytest.MonkeyPatch, forgetful: Callable[[], None]
) -> None:
    monkeypatch.setattr(driver, "_open", cannot_open)
    assert kernels.device_count() == 0
    with pytest.raises(BackendError, match="driver can't be loaded"):
        kernels.launch_of(source_of(), 0)


def test_zeros_are_of_no_pool_and_written_on_the_stream(machine: Machine) -> None:
    address = kernels.lasting_zeros(0, 5000, 7)
    assert address is not None
    assert not any((ctypes.c_int32 * 5000).from_address(address))
    assert machine.stub.memory_stream == 7
    mode = ctypes.c_int(0)
    machine.stub.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == 0, "the thread captures as before"


# -------------------------------------------------------------------------- disk cache


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_next_process_does_not_compile(machine: Machine) -> None:
    kernels.launch_of(source_of(), 0)
    machine.restart()
    kernels.launch_of(source_of(), 0)((1, 1), 0, 1)
    assert len(machine.compiler.calls) == 1
    assert machine.stub.images() == [b"\x7fELF kernel 9.0"] * 2


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut short": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
    "one bit of the code": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "one bit of the checksum": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "another entry": lambda content: content.replace(b"entry", b"other"),
    "something else": lambda content: b"\xff" * 100,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_compiled_anew(machine: Machine, damage: str) -> None:
    kernels.launch_of(source_of(), 0)
    (path,) = files_in(machine.cache)
    intact = path.read_bytes()
    path.write_bytes(DAMAGES[damage](intact))
    machine.restart()
    kernels.launch_of(source_of(), 0)
    assert len(machine.compiler.calls) == 2
    assert set(machine.stub.images()) == {b"\x7fELF kernel 9.0"}
    assert path.read_bytes() == intact


def test_changed_source_file_is_compiled_anew(machine: Machine, tmp_path: Path) -> None:
    file = tmp_path / "kernels.py"
    source = source_of(files=(str(file),))
    for text, expected in (("a = 1", 1), ("a = 1", 1), ("a = 2", 2), ("a = 1", 2)):
        file.write_text(text)
        machine.restart()
        kernels.launch_of(source, 0)
        assert len(machine.compiler.calls) == expected


def test_other_compiler_compiles_anew(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.launch_of(source_of(), 0)
    machine.restart()
    monkeypatch.setattr(compiler, "versions", lambda: ("numba-cuda 99",))
    kernels.launch_of(source_of(), 0)
    assert len(machine.compiler.calls) == 2


def test_place_that_can_not_be_written_is_no_error(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    kernels.launch_of(source_of(), 0)((1, 1), 0, 1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(os.name == "nt", reason="Windows has another folder")
def test_cache_is_in_the_folder_of_the_user(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    kernels.launch_of(source_of(), 0)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    machine.restart()
    kernels.launch_of(source_of(), 0)
    (first,) = files_in(tmp_path / "xdg" / "syncbn")
    (second,) = files_in(tmp_path / "home" / ".cache" / "syncbn")
    assert first.read_bytes() == second.read_bytes()


# --------------------------------------------------------------------- what is missing


def cannot_open() -> ctypes.CDLL:
    raise OSError("libcuda.so.1: cannot open shared object file")


def linker_of(*version: int) -> Callable[[], Any]:
    return lambda: SimpleNamespace(version=lambda: version)


@pytest.fixture
def equipped(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """With everything: the test takes one thing away."""
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    monkeypatch.setattr(kernels, "linker", linker_of(13, 0))
    return machine


def only_missing() -> str:
    (sentence,) = kernels.missing()
    with pytest.raises(BackendError, match=re.escape(sentence)):
        kernels.require()
    return sentence


@pytest.mark.parametrize(
    ("version", "ptx", "fits"),
    [
        (12000, "8.0", True),
        (12060, "8.5", True),
        (12060, "8.6", False),
        (12090, "8.8", True),
        (12090, "9.0", False),
        (13000, "9.0", True),
        (13000, "9.5", False),
        (13050, "9.5", True),
        (14000, "10.1", True),
    ],
)
def test_ptx_is_left_to_a_driver_that_takes_it(
    version: int, ptx: str, fits: bool, equipped: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nvJitLink is older than NVVM; the minor version counts too."""
    code = Code("entry", f".version {ptx}\n", b"")
    monkeypatch.setattr(kernels, "linker", linker_of(version // 1000, 0))
    monkeypatch.setattr(kernels, "compile_source", lambda *_: code)
    equipped.stub.version = version
    if fits:
        assert kernels.missing() == []
        kernels.launch_of(source_of(), 0)
        return
    assert f"does not take its PTX {ptx}" in only_missing()
    with pytest.raises(kernels.KernelFailure, match="update the driver"):
        kernels.launch_of(source_of(), 0)
    assert equipped.stub.loads == 0


def test_missing_driver(equipped: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_open", cannot_open)
    sentence = only_missing()
    assert "NVIDIA driver can't be loaded (libcuda.so.1" in sentence
    assert "install it" in sentence


def test_old_device(equipped: Machine) -> None:
    equipped.stub.set_capabilities(61, 52)
    assert "expected compute capability 7.0 (Volta) or newer, got 6.1" in only_missing()


def test_missing_numba_cuda(equipped: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    sentence = only_missing()
    assert "numba-cuda is not installed" in sentence
    assert '".[cuda12]"' in sentence
    assert '".[cuda13]"' in sentence


def test_simulator_is_no_device(equipped: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert "unset it" in only_missing()


def test_everything_that_is_missing_is_in_one_sentence(
    equipped: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_open", cannot_open)
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert len(kernels.missing()) == 2
    with pytest.raises(BackendError, match=r"^expected a machine .*libcuda.*; numba-cuda is not"):
        kernels.require()


# ------------------------------------------------------------------------- compilation


needs_numba_cuda = pytest.mark.skipif(find_spec("numba_cuda") is None, reason="needs numba-cuda")


def scale_kernel() -> Callable[..., None]:
    """`y = x * factor` for n numbers; a function is called, as in the kernels of the package."""
    import numba
    from numba import cuda
    from numba.cuda.extending import register_jitable

    @register_jitable
    def scaled(value, factor):
        return value * factor

    def scale(x, y, n, factor):
        shared = cuda.shared.array(256, numba.float64)
        i = cuda.threadIdx.x
        if i < n:
            shared[i] = scaled(x + i, factor)
            cuda.syncthreads()
            shared[i] += y

    warnings.warn("this must not reach the user", stacklevel=1)
    return scale


SCALE = Source("scale", scale_kernel, "qqqd", 256)


@needs_numba_cuda
def test_compiles_without_a_device_for_any_capability() -> None:
    codes = [compiler.compile_source(SCALE, capability) for capability in ((9, 0), (8, 0))]
    for code, number in zip(codes, (90, 80), strict=True):
        assert f".target sm_{number}\n" in code.ptx
        assert f".visible .entry {code.entry}(" in code.ptx
        assert code.ptx.count(".param .") == 4
        assert code.image == code.cubin
        assert code.cubin.startswith(b"\x7fELF")
        assert code.entry.encode() in code.cubin
    assert codes[0].cubin != codes[1].cubin


@needs_numba_cuda
def test_kernel_that_does_not_compile_is_named() -> None:
    source = replace(SCALE, key="wrong kernel", codes="q")
    with pytest.raises(BackendError, match=r"wrong kernel to compile .* 9\.0, got \w+Error"):
        compiler.compile_source(source, (9, 0))


@needs_numba_cuda
def test_versions_that_do_not_fit_are_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(text: str) -> None:
        def to_ptx(*_: Any) -> str:
            raise AttributeError(text)

        monkeypatch.setattr(compiler, "_to_ptx", to_ptx)

    failing("module 'numpy' has no attribute 'row_stack'")
    with pytest.raises(BackendError, match=r'row_stack.*; pip install "numpy<2.5"$'):
        compiler.compile_source(SCALE, (9, 0))
    failing("a long text\n" * 1000)
    with pytest.raises(BackendError, match="may not fit together") as caught:
        compiler.compile_source(source_of(), (9, 0))
    assert len(str(caught.value)) < 900


@needs_numba_cuda
def test_compiled_kernel_passes_through_the_disk_cache(tmp_path: Path) -> None:
    code = compiler.compile_source(SCALE, (9, 0))
    compiler.store(tmp_path / "kernel", code)
    assert compiler.stored(tmp_path / "kernel") == replace(code, ptx="")
