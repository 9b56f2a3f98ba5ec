"""Tensors and arrays share memory both ways."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from syncbn_torch.backends.memory import (
    as_array,
    as_tensor,
    huge_pages_on_request,
    supports,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grad", [False, True])
def test_tensor_and_array_share_memory_both_ways(dtype: torch.dtype, grad: bool) -> None:
    tensor = torch.randn(2, 3, dtype=dtype, requires_grad=grad)
    array = as_array(tensor)
    array[0, 0] = 5
    assert tensor[0, 0] == 5
    back = as_tensor(array)
    back[0, 1] = 6
    assert tensor[0, 1] == 6


def test_bfloat16_crosses_as_bits() -> None:
    tensor = torch.tensor([1.0, -2.5], dtype=torch.bfloat16, requires_grad=True)
    bits = as_array(tensor)
    assert bits.dtype == np.uint16
    bits[0] = 0x4000
    assert tensor[0] == 2


def test_strides_cross_unchanged() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)[:, :, ::2]
    array = as_array(tensor)
    assert [s // 4 for s in array.strides] == list(tensor.stride())
    np.testing.assert_array_equal(array, np.array(tensor.tolist(), np.float32))


def test_lazily_negated_tensor_has_its_own_sign() -> None:
    tensor = torch.randn(4, dtype=torch.complex64).conj().imag
    assert tensor.is_neg()
    assert torch.equal(as_tensor(as_array(tensor).copy()), tensor.resolve_neg())


def test_what_takes() -> None:
    assert supports(torch.ones(1))
    assert supports(torch.ones(1).double())
    assert supports(torch.ones(1).half())
    assert supports(torch.ones(1).bfloat16())
    assert not supports(torch.ones(1, dtype=torch.float8_e5m2))
    assert not supports(torch.ones(1, device="meta"))
    assert not supports(torch.ones(2, 2).to_sparse())


def test_import_compiles_nothing() -> None:
    heavy = {"numba", "torch._dynamo"}
    code = f"import syncbn_torch, sys; assert not {heavy} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


HUGE = """
from pathlib import Path
import torch
from syncbn_torch.backends.memory import empty_like

def advised(tensor):
    "Whether the middle of its memory lies in a mapping that asks for huge pages."
    middle = tensor.data_ptr() + tensor.numel() // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        words = line.split()
        if "-" in words[0] and ":" not in words[0]:
            low, high = (int(end, 16) for end in words[0].split("-"))
            inside = low <= middle < high
        elif inside and words[0] == "VmFlags:":
            return "hg" in words

x = torch.empty(40 << 20, dtype=torch.uint8)  # large enough to be mapped by itself
print(advised(torch.empty_like(x)), advised(empty_like(x)))
"""


@pytest.mark.skipif(not huge_pages_on_request(), reason="no huge pages on request here")
def test_large_results_ask_for_huge_pages() -> None:
    """In a new process, where no memory has been asked for before."""
    done = subprocess.run(
        [sys.executable, "-c", HUGE], check=True, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.split() == ["False", "True"]
