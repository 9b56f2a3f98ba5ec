"""Kernels on a driver that notes what it is told: compiled once, kept on disk, what is missing.

The compiler is a stand-in too, but for the last tests, which need numba-cuda and no device. See
`tests/cuda/test_driver.py` for the driver itself.
"""

import os
import re
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import pytest

from syncbn_core.backends.cuda import compiler, driver, kernels
from syncbn_core.backends.cuda.compiler import Code, Source
from syncbn_core.backends.cuda.driver import DriverError
from syncbn_core.errors import BackendError


class Stub:
    """Stands in for `Driver`: notes what it was to load and to launch."""

    def __init__(self) -> None:
        self.takes = 13, 0
        self.capabilities = [(9, 0)]
        self.images: list[bytes] = []
        self.launches: list[tuple[Any, ...]] = []
        self.launch_fails = False

    def version(self) -> tuple[int, int]:
        return self.takes

    def device_count(self) -> int:
        return len(self.capabilities)

    def compute_capability(self, device: int) -> tuple[int, int]:
        return self.capabilities[device]

    def load(self, image: bytes, entry: str, device: int) -> str:
        self.images.append(image)
        return entry

    def launcher(self, kernel: str, device: int, threads: int) -> driver.Launch:
        def launch(*launched: Any) -> None:
            if self.launch_fails:
                raise DriverError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access", 700)
            self.launches.append((device, threads, *launched))

        return launch


class Compiler:
    """Stands in for `compile_source`: notes what it was to compile."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, int]]] = []

    def __call__(self, source: Source, capability: tuple[int, int]) -> Code:
        self.calls.append((source.key, capability))
        return Code("entry", "", b"\x7fELF %s %d.%d" % (source.key.encode(), *capability))


class Machine(NamedTuple):
    stub: Stub
    compiler: Compiler
    cache: Path  # directory of the disk cache
    restart: Callable[[], None]  # forget what a process remembers


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: Callable[[], None]
) -> Machine:
    stub, compiler = Stub(), Compiler()
    monkeypatch.setattr(kernels, "Driver", lambda: stub)
    monkeypatch.setattr(kernels, "compile_source", compiler)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    return Machine(stub, compiler, tmp_path / "cache" / "syncbn", forgetful)


def no_driver() -> NoReturn:
    raise BackendError("the NVIDIA driver can't be loaded (libcuda.so.1: not found): install it")


def no_function() -> Callable[..., None]:
    raise AssertionError("compiled")


def source_of(codes: str = "q", key: str = "kernel", **options: Any) -> Source:
    return Source(key, no_function, codes, options.pop("threads", 256), **options)


# ------------------------------------------------------------------------------ launch


def test_arguments_arrive_as_declared(machine: Machine) -> None:
    """Where a float64 is due, a kernel would take the bits of an int for one."""
    launch = kernels.launch_of(source_of("qdq(d)"), 0)
    launch((34, 5), 7, 2**62, 3, True, 1)
    (found,) = machine.stub.launches
    assert found == (0, 256, (34, 5), 7, 2**62, 3.0, 1, 1.0)
    assert [type(each) for each in found[4:]] == [int, float, int, float]


@pytest.mark.parametrize("arguments", [(), (1,), (1, 2, 3), (1, "a")])
def test_other_arguments_than_declared_are_refused(
    machine: Machine, arguments: tuple[Any, ...]
) -> None:
    kernel = kernels.launch_of(source_of("qq"), 0)
    with pytest.raises(ValueError, match=r"zip\(\) argument|invalid literal"):
        kernel((1, 1), 0, *arguments)
    assert not machine.stub.launches


def test_failing_launch_names_kernel_device_grid_block_and_error(machine: Machine) -> None:
    kernel = kernels.launch_of(source_of("q", "planes_moments-float32"), 0)
    machine.stub.launch_fails = True
    with pytest.raises(BackendError) as caught:
        kernel((34, 5), 0, 1)
    for part in (
        "planes_moments-float32",
        "device 0",
        "(34, 5)",
        "256 threads",
        "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access",
    ):
        assert part in str(caught.value)
    machine.stub.launch_fails = False
    kernel((1, 1), 0, 1)
    assert len(machine.stub.launches) == 1


# ----------------------------------------------------------------------------- loading


def test_threads_that_come_at_once_get_the_one_kernel(machine: Machine) -> None:
    start = threading.Barrier(8)

    def member(_: int) -> driver.Launch:
        start.wait()
        return kernels.launch_of(source_of(), 0)

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(member, range(8)))
    assert len(found) == len(machine.stub.images) == len(machine.compiler.calls) == 1


def test_device_too_old_is_refused(machine: Machine) -> None:
    machine.stub.capabilities = [(9, 0), (6, 1)]
    with pytest.raises(BackendError, match=r"device 1: expected .* 7\.0 .* got 6\.1; use"):
        kernels.launch_of(source_of(), 1)
    assert machine.compiler.calls == []


def test_without_a_driver_there_are_no_devices(
    monkeypatch: pytest.MonkeyPatch, forgetful: Callable[[], None]
) -> None:
    monkeypatch.setattr(kernels, "Driver", no_driver)
    assert kernels.device_count() == 0
    with pytest.raises(BackendError, match="driver can't be loaded"):
        kernels.launch_of(source_of(), 0)


# -------------------------------------------------------------------------- disk cache


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_next_process_does_not_compile(machine: Machine) -> None:
    kernels.launch_of(source_of(), 0)
    machine.restart()
    kernels.launch_of(source_of(), 0)((1, 1), 0, 1)
    assert len(machine.compiler.calls) == 1
    assert machine.stub.images == [b"\x7fELF kernel 9.0"] * 2


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
    assert set(machine.stub.images) == {b"\x7fELF kernel 9.0"}
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
    equipped.stub.takes = version // 1000, version % 1000 // 10
    if fits:
        assert kernels.missing() == []
        kernels.launch_of(source_of(), 0)
        return
    assert f"does not take its PTX {ptx}" in only_missing()
    with pytest.raises(kernels.KernelFailure, match="update the driver"):
        kernels.launch_of(source_of(), 0)
    assert not equipped.stub.images


def test_missing_driver(equipped: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "Driver", no_driver)
    sentence = only_missing()
    assert "NVIDIA driver can't be loaded (libcuda.so.1" in sentence
    assert "install it" in sentence


def test_old_device(equipped: Machine) -> None:
    equipped.stub.capabilities = [(6, 1), (5, 2)]
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
    monkeypatch.setattr(kernels, "Driver", no_driver)
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
