"""CUDA tensors by the contract of backends, as far as it can be tested without a device."""

from typing import Any

import numpy as np
import pytest
import torch

from syncbn_core.backends.cuda import kernels
from syncbn_torch.backends import cuda
from syncbn_torch.backends.tensors import ARRAYS


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> list[str]:
        raise AssertionError("the machine needs nothing then")

    monkeypatch.setenv("SYNCBN_KERNELS", "off")
    monkeypatch.setattr(kernels, "missing", asked)
    assert not cuda._ready.__wrapped__(0, torch.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int64", "int32"])
def test_arrays_of_a_check_go_to_the_device_and_back(dtype: str) -> None:
    values = np.array([0.0, 1.0, -7.0, 96.0])
    tensor = ARRAYS.from_host(values, ARRAYS.empty((1,), dtype, -1))
    assert tensor.dtype is getattr(torch, dtype)
    assert ARRAYS.dtype_name(tensor.dtype) == dtype
    found = ARRAYS.to_host(ARRAYS.cast(tensor, ARRAYS.widest(tensor)))
    assert found.dtype == np.float64
    assert found.tolist() == values.tolist()


@pytest.mark.parametrize(
    "mode", [torch.device("meta"), torch.inference_mode()], ids=["meta", "inference"]
)
def test_the_number_that_a_device_writes_is_on_the_host_in_every_mode(mode: Any) -> None:
    like = torch.ones(1, dtype=torch.bool)
    with mode:
        word = ARRAYS.page_locked(like)
    for number, found in ((0.0, 0), (5.0, 5), (6.0, 5)):
        ARRAYS.write_where(like if number else ~like, number or 7.0, word)
        assert np.asarray(word).tolist() == [found]
