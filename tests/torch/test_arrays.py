"""The tensors that the CPU kernels take, and their memory."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from syncbn_torch.arrays import (
    as_tensor,
    huge_pages_on_request,
    supports,
)


def test_an_array_and_its_tensor_share_memory() -> None:
    array = np.zeros((2, 3))
    as_tensor(array)[0, 1] = 6
    assert array[0, 1] == 6


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
from syncbn_torch.arrays import empty_like

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
