"""CUDA tensors by the contract of backends, as far as it can be tested without a device."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from syncbn_core.backends.cuda import kernels
from syncbn_torch.backends import cuda
from syncbn_torch.process_group import TensorArrays


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> list[str]:
        raise AssertionError("the machine needs nothing then")

    monkeypatch.setenv("SYNCBN_KERNELS", "off")
    monkeypatch.setattr(kernels, "missing", asked)
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


@pytest.mark.parametrize(
    "mode", [torch.device("meta"), torch.inference_mode()], ids=["meta", "inference"]
)
def test_the_number_that_a_device_writes_is_on_the_host_in_every_mode(mode: Any) -> None:
    like = torch.ones(1, dtype=torch.bool)
    with mode:
        word = TensorArrays.page_locked(like)
    for number, found in ((0.0, 0), (5.0, 5), (6.0, 5)):
        TensorArrays.write_where(like if number else ~like, number or 7.0, word)
        assert np.asarray(word).tolist() == [found]
