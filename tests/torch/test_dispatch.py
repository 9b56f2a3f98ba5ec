"""Which inputs a layer alone hands to torch's kernel, and which to ours."""

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import Tensor

from syncbn_core.backends.cuda import driver
from syncbn_core.moments import NormRule
from syncbn_torch import which_kernel
from syncbn_torch.backends import cuda, memory
from syncbn_torch.which_kernel import (
    CUDA_PLANE,
    CUDA_SIZE,
    HUGE_SIZE,
    KERNEL_SIZE,
    KERNEL_SIZE_16_BITS,
    always_ours,
    torch_is_better,
)

HALVES = (torch.float16, torch.bfloat16)
WEIGHT = torch.ones(1)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def goes_to_torch(x: Tensor) -> bool:
    return torch_is_better(x, WEIGHT.dtype, NormRule())


def planes(count: int, inner: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Contiguous planes of `inner` elements, of `count` elements or some more in all."""
    return torch.empty(8, -(-count // (8 * inner)), inner, dtype=dtype)


def test_contiguous_planes_from_so_many_elements(threads: int) -> None:
    for dtype in (torch.float32, torch.float64):
        assert not goes_to_torch(planes(KERNEL_SIZE, 3136, dtype))
        assert goes_to_torch(planes(KERNEL_SIZE - 3136 * 8, 3136, dtype))
    for dtype in HALVES:
        assert goes_to_torch(planes(KERNEL_SIZE_16_BITS * threads, 3136, dtype))
        assert not goes_to_torch(planes(KERNEL_SIZE_16_BITS * threads, 49, dtype))
        assert goes_to_torch(planes(KERNEL_SIZE_16_BITS * threads - 49 * 8, 49, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_other_layouts_where_results_are_mapped_anew(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    elements = HUGE_SIZE // dtype.itemsize
    large = torch.empty(elements // 64, 64, dtype=dtype)
    image = torch.empty(2, 64, 8, elements // 1024, dtype=dtype)
    image = image.to(memory_format=torch.channels_last)
    for huge in (True, False):
        monkeypatch.setattr(memory, "huge_pages_on_request", lambda huge=huge: huge)
        assert goes_to_torch(large) is not huge
        assert goes_to_torch(image) is not huge
        assert goes_to_torch(large[:-1])
        assert goes_to_torch(image[:1])


def test_clamp_and_always_ours_never_go_to_torch() -> None:
    x = torch.empty(2, 3, 4)
    assert goes_to_torch(x)
    assert not torch_is_better(x, WEIGHT.dtype, NormRule(1e-5, "clamp"))
    with always_ours():
        assert not goes_to_torch(x)


def on_device(*shape: int, dtype: torch.dtype = torch.float32, last: bool = False) -> bool:
    """Whether a tensor on a GPU goes to our kernels, by its shape; meta tensors have no memory."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    return which_kernel._is_large_on_device(x.to(memory_format=torch.channels_last) if last else x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_on_an_h100_large_planes_go_to_our_kernels(dtype: torch.dtype) -> None:
    samples = CUDA_SIZE // dtype.itemsize // (64 * CUDA_PLANE) + 1
    assert on_device(samples, 64, 28, 28, dtype=dtype)
    assert not on_device(samples - 1, 64, 28, 28, dtype=dtype)
    assert not on_device(samples, 64, 28, 28, dtype=dtype, last=True)
    assert not on_device(5 * samples, 64, 14, 14, dtype=dtype)


def test_on_an_h100_large_bfloat16_goes_to_our_kernels_in_channels_last_too() -> None:
    samples = CUDA_SIZE // 2 // (64 * CUDA_PLANE) + 1
    for last in (True, False):
        assert on_device(samples, 64, 28, 28, dtype=torch.bfloat16, last=last)
        assert not on_device(samples - 2, 64, 28, 28, dtype=torch.bfloat16, last=last)
    assert not on_device(samples, 65, 28, 28, dtype=torch.bfloat16, last=True)


def test_on_an_h100_nothing_that_was_not_timed_goes_to_our_kernels() -> None:
    assert not on_device(CUDA_SIZE, 64, dtype=torch.bfloat16)
    assert not on_device(CUDA_SIZE // (64 * CUDA_PLANE), 64, 28, 28, dtype=torch.float64)


def test_in_a_captured_graph_torch_keeps_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_is_measured", lambda device: True)
    monkeypatch.setattr(cuda, "supports", lambda tensor: True)
    for captured in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=captured: c)
        assert cuda.measured(torch.empty(1)) is not captured


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> list[str]:
        raise AssertionError("the machine needs nothing then")

    monkeypatch.setenv("SYNCBN_KERNELS", "off")
    monkeypatch.setattr(driver, "missing", asked)
    assert not cuda._is_measured.__wrapped__(0)
    assert not cuda._ready.__wrapped__(0, torch.float32)


def test_a_check_may_wait_and_the_mode_of_torch_that_forbids_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To set the mode warns, so that it is not set where it is 0."""
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    memory = cuda.TensorDeviceMemory()
    with memory.waiting_allowed():
        pass
    assert modes == [0]
    modes.append(2)
    with suppress(KeyError), memory.waiting_allowed():
        with memory.waiting_allowed():  # another thread's
            assert modes[-1] == 0
        assert modes[-1] == 0
        raise KeyError
    assert modes == [0, 2, 0, 2]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int64", "int32"])
def test_arrays_of_a_check_go_to_the_device_and_back(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_device", lambda index: torch.device("cpu"))
    values = np.array([0.0, 1.0, -7.0, 96.0])
    memory = cuda.TensorDeviceMemory()
    tensor = memory.upload(values, dtype, 0)
    assert tensor.dtype is getattr(torch, dtype)
    found = memory.download(tensor)
    assert found.dtype == np.float64
    assert found.tolist() == values.tolist()


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), None])
def test_a_gpu_that_nobody_measured_keeps_the_kernel_of_torch(
    capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`None`: the kernels can't run; then nothing warns of it, as torch's kernel is no fallback."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(driver, "missing", lambda: [] if capability else ["a package"])
    monkeypatch.setattr(driver, "compute_capability", lambda device: capability)
    monkeypatch.setattr(driver, "compile_failure", lambda capability: None)
    monkeypatch.setattr(cuda, "supports", lambda tensor: True)
    cuda._is_measured.cache_clear()
    try:
        assert cuda.measured(torch.empty(1)) is (capability == (9, 0))
    finally:
        cuda._is_measured.cache_clear()
