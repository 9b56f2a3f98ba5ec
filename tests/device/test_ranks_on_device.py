"""Groups of one and two ranks on a device, in processes of their own.

Two share a GPU over NCCL from 2.30 on, else over gloo. `SYNCBN_TEST_DEVICE=cpu`: gloo on the CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))  # ranks import it too

import rank_programs  # noqa: E402
from gpu_ranks import backend_for, run_ranks  # noqa: E402

pytestmark = pytest.mark.timeout(250)
PARTS = {"even": (8, 8), "uneven": (11, 5), "empty": (16, 0)}


@pytest.mark.parametrize("without_kernels", [False, True], ids=["", "no kernels on rank 1"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_ranks_train_as_one_process_on_the_whole_batch(parts, without_kernels, device):
    run_ranks(rank_programs.train, 2, device.type, 90, parts, without_kernels)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_ranks_that_are_one_graph_do_so_too(mode, device):
    if mode and device.type == "cuda" and backend_for(2) == "gloo":
        pytest.skip("gloo's messages can't be part of a CUDA graph")
    options = {"mode": mode} if device.type == "cuda" else {"backend": "aot_eager"}
    run_ranks(rank_programs.train, 2, device.type, 240, PARTS["uneven"], False, options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_captured_step_equals_an_eager_one(size, dtype, device):
    if device.type == "cuda" and size > 1 and backend_for(size) == "gloo":
        pytest.skip("gloo's messages can't be part of a CUDA graph")
    run_ranks(rank_programs.replay, size, device.type, 120, dtype)
