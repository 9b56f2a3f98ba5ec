"""The check of a kernel before its first use, on compiled kernels that are executed on the CPU."""

from __future__ import annotations

import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from emulator.device import Refused, emulated
from failing import computes_wrongly, forget
from harness import DTYPES, FORMS, STEPS, HostMemory, source_of

from syncbn_core.backends.cuda import driver, grid, selfcheck, usable
from syncbn_core.backends.cuda.driver import KernelFailure
from syncbn_core.errors import ArgumentError, BackendError

OTHER = source_of("planes", "float32", "moments")
MERGING = grid.source("merge_parts", "float64", 1, False, grid.THREADS)


@pytest.fixture
def memory(device, monkeypatch, tmp_path):
    monkeypatch.setattr(usable, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv("SYNCBN_KERNELS", "checked")
    device.make_current(0)
    return HostMemory(device)


def use(memory, source, stream=0):
    return usable.usable_kernel(memory, source, 0, stream)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_each_kernel_passes_its_check(form, dtype, memory, device, arch):
    for source in dict.fromkeys(source_of(form, dtype, step) for step in STEPS):
        if source.oldest > arch:
            continue
        selfcheck.check(memory, driver.kernel_for(source, 0), 0, 0)
        reduces = source.key.split("-")[0].endswith(("moments", "reduce"))
        grids = [launch.grid for launch in device.launches]
        assert all(x * y > 1 for x, y, _ in grids), "several blocks"
        assert not reduces or all(y > 2 for _, y, _ in grids), "several blocks share a channel"
        device.launches.clear()


def test_the_kernel_that_merges_passes_its_check(memory, device):
    selfcheck.check(memory, driver.kernel_for(MERGING, 0), 0, 0)
    assert device.launches[0].grid[0] > 1


def test_groups_of_blocks_are_among_what_is_checked(memory, device):
    selfcheck.check(memory, driver.kernel_for(source_of("rows", "float32", "moments"), 0), 0, 0)
    assert device.launches[0].grid[1] > grid.LONE_GROUP


ROUNDED = {"float32": 1e-6, "float16": 1e-6, "bfloat16": 1e-6, "float64": 1e-13}


@pytest.mark.parametrize("form", ["ragged planes", "rows"])
@pytest.mark.parametrize("step", ["moments", "backward_reduce"])
def test_right_kernels_are_far_within_the_tolerance(form, step, memory, monkeypatch):
    for dtype in ("float32", "float64"):
        monkeypatch.setattr(
            selfcheck, "TOLERANCES", {name: 5 * error for name, error in ROUNDED.items()}
        )
        selfcheck.check(memory, driver.kernel_for(source_of(form, dtype, step), 0), 0, 0)


# --------------------------------------------------------------------------- once per machine


def test_a_kernel_is_checked_once_per_code_device_and_driver(memory, device, monkeypatch):
    use(memory, MERGING)
    assert len(device.launches) == 1
    use(memory, MERGING)
    forget()
    use(memory, MERGING)
    assert len(device.launches) == 1, "the next process finds the note"
    forget()
    monkeypatch.setattr(usable, "description", lambda device: "another driver")
    use(memory, MERGING)
    assert len(device.launches) == 2
    forget()
    monkeypatch.setattr(selfcheck, "CASES", -1)
    monkeypatch.setattr(usable, "CASES", -1)
    use(memory, MERGING)
    assert len(device.launches) == 3


def test_the_note_can_be_read(memory, tmp_path):
    use(memory, MERGING)
    (note,) = (tmp_path / "cache").glob("*.checked")
    assert re.fullmatch(
        r"merge_parts-\S+: passed on Emulator, driver.* \(CUDA 99\.0\)\n", note.read_text()
    )


def test_a_folder_that_can_not_be_written_is_no_error(memory, device, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(usable, "cache_folder", lambda: tmp_path / "file" / "cache")
    use(memory, MERGING)
    forget()
    use(memory, MERGING)
    assert len(device.launches) == 2


def test_a_folder_that_may_not_be_searched_is_no_error(memory, device, monkeypatch):
    """As for a user whose home folder belongs to somebody else, in a container."""

    def refused(path, *arguments, **settings):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)
    monkeypatch.setattr(Path, "stat", refused)
    monkeypatch.setattr(usable, "write_atomically", refused)
    use(memory, MERGING)
    assert len(device.launches) == 1


@pytest.mark.parametrize("content", [b"", b"something else"])
def test_a_damaged_note_does_not_count(content, memory, device, tmp_path):
    use(memory, MERGING)
    (note,) = (tmp_path / "cache").glob("*.checked")
    whole = note.read_bytes()
    note.write_bytes(content)
    forget()
    use(memory, MERGING)
    assert len(device.launches) == 2
    assert note.read_bytes() == whole


@pytest.mark.parametrize("given", ["Checked", " on ", "OFF", ""])
def test_case_and_spaces_of_the_setting_do_not_matter(given, monkeypatch):
    monkeypatch.setenv("SYNCBN_KERNELS", given)
    assert usable.setting() == (given.strip().lower() or "checked")


def test_on_means_unchecked(memory, device, monkeypatch):
    monkeypatch.setenv("SYNCBN_KERNELS", "on")
    use(memory, MERGING)
    assert not device.launches


def test_a_setting_without_meaning_is_refused(memory, monkeypatch):
    monkeypatch.setenv("SYNCBN_KERNELS", "yes")
    with pytest.raises(ArgumentError, match=r"SYNCBN_KERNELS to be checked, on or off, got 'yes'"):
        use(memory, MERGING)


def test_an_unchecked_kernel_is_refused_in_a_captured_graph(memory):
    stream = 2**40
    memory.captured = True
    text = r"merge_parts.* before a CUDA graph is captured"
    with pytest.raises(BackendError, match=text) as error:
        use(memory, MERGING, stream)
    assert not isinstance(error.value, KernelFailure), "no reason for plain operations"
    memory.captured = False
    use(memory, MERGING, stream)
    forget()
    memory.captured = True
    use(memory, MERGING, stream)


# ---------------------------------------------------------------------------- kernels that fail


def fails_once(memory, source, named=True):
    """The text of the one warning."""
    expected = pytest.warns(UserWarning, match="syncbn uses plain operations instead")
    with expected as warned, pytest.raises(KernelFailure):
        use(memory, source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KernelFailure):
            use(memory, source)
    (warning,) = warned
    text = str(warning.message)
    assert "Emulator, driver" in text
    assert not named or source.key in text
    return text


@pytest.mark.parametrize(
    ("form", "step", "named"),
    [
        ("planes", "moments", "moments"),
        ("rows", "normalize", "y|running_mean|running_var|statistics"),
        ("ragged planes", "backward_reduce", "sums"),
        ("single rows", "backward_input", "dx"),
    ],
)
def test_a_kernel_that_computes_wrongly_is_noticed(form, step, named, memory, device, tmp_path):
    device.before = computes_wrongly
    text = fails_once(memory, source_of(form, "float32", step))
    assert re.search(rf"its ({named})\b.* differs from that of float64 NumPy by", text)
    assert not list((tmp_path / "cache").glob("*.checked"))


@pytest.mark.parametrize("at", [0, -1])
def test_a_kernel_that_writes_beside_its_result_is_noticed(at, memory, device):
    def beside(launch):
        for array in memory.results:
            array[at] = 0

    device.after_launch = beside
    text = fails_once(memory, source_of("rows", "float32", "backward_input"))
    assert "it writes beside the memory of its dx" in text


def test_a_kernel_that_does_not_compile_is_named(memory, monkeypatch):
    def compile_source(source, capability):
        if source.key in failing:
            raise BackendError(
                f"expected kernel {source.key} to compile, got words of the compiler"
            )
        return compiles(source, capability)

    compiles, failing = driver.compile_source, {OTHER.key}
    monkeypatch.setattr(driver, "compile_source", compile_source)
    text = fails_once(memory, OTHER)
    assert text.endswith("words of the compiler"), "which says what to do, so there is no report"
    use(memory, MERGING)


def test_a_kernel_that_does_not_load_is_named(memory, device):
    def refused(kernel):
        if "moments" in kernel.name:
            raise Refused("words of the loader")
        return kernel

    device.before = refused
    text = fails_once(memory, OTHER)
    assert "words of the loader" in text
    assert text.endswith("Please report this text to syncbn's developers")


def test_where_no_kernel_loads_one_warning_stands_for_all(memory, device, monkeypatch):
    def refused(kernel):
        raise Refused("words of the loader")

    device.before = refused
    text = fails_once(memory, OTHER, named=False)
    assert re.search(r"No kernel can be used on Emulator.*words of the loader", text)
    compiled = []
    monkeypatch.setattr(driver, "compile_source", lambda *_: compiled.append(_))
    with pytest.raises(KernelFailure):
        use(memory, source_of("planes", "float64", "normalize"))
    assert not compiled


def test_a_kernel_that_does_not_launch_is_named(memory, device, monkeypatch):
    kernel = driver.kernel_for(MERGING, 0)
    monkeypatch.setattr(kernel, "_start", lambda *arguments: 701)
    assert "to start on device 0" in fails_once(memory, MERGING)


@pytest.mark.parametrize("result", [2, 214, 700, 719])
def test_a_launch_that_fails_for_other_reasons_is_not_held_against_the_kernel(
    result, memory, monkeypatch
):
    """Memory runs out, or an earlier kernel has broken the context."""
    kernel = driver.kernel_for(MERGING, 0)
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_start", lambda *arguments: result)
        with pytest.raises(BackendError, match=rf"\({result}\)") as error:
            use(memory, MERGING)
    assert not isinstance(error.value, KernelFailure)
    assert use(memory, MERGING) is kernel


def test_where_the_memory_of_the_device_is_full_nothing_is_said_of_the_kernel(memory, monkeypatch):
    full = driver.DriverError("CUDA_ERROR_OUT_OF_MEMORY", 2)
    with monkeypatch.context() as patch:
        patch.setattr(driver._Driver, "load", lambda *_: (_ for _ in ()).throw(full))
        with pytest.raises(BackendError, match="CUDA_ERROR_OUT_OF_MEMORY") as error:
            use(memory, MERGING)
    assert not isinstance(error.value, KernelFailure)
    use(memory, MERGING)


def test_a_kernel_that_breaks_the_context_is_an_error_that_names_it(memory, device):
    def broken(launch):
        memory.fails = RuntimeError("CUDA error: an illegal memory access was encountered")

    device.after_launch = broken
    with pytest.raises(BackendError, match=r"merge_parts.*illegal memory.*SYNCBN_KERNELS=off"):
        selfcheck.check(memory, driver.kernel_for(MERGING, 0), 0, 0)


def test_threads_that_come_at_once_check_once(memory, device):
    start = threading.Barrier(4)

    def member(_):
        device.make_current(0)
        start.wait()
        return use(memory, MERGING)

    with ThreadPoolExecutor(4) as pool:
        kernels = set(pool.map(member, range(4)))
    assert len(kernels) == len(device.launches) == 1


def test_a_check_that_waits_leaves_other_devices_alone(arch, monkeypatch, tmp_path):
    """A stream may wait for another thread's, whose next kernel is unchecked too."""
    monkeypatch.setattr(usable, "cache_folder", lambda: tmp_path)
    with emulated(arch) as device:
        monkeypatch.setenv("SYNCBN_KERNELS", "checked")
        other = threading.Event()

        class Waiting(HostMemory):
            def download(self, array):
                assert other.wait(60)
                return super().download(array)

        def second():
            device.make_current(1)
            try:
                return usable.usable_kernel(HostMemory(device), MERGING, 1, 0)
            finally:
                other.set()

        device.make_current(0)
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(second)
            usable.usable_kernel(Waiting(device), MERGING, 0, 0)
            later.result()
