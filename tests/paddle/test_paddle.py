"""The adapter for PaddlePaddle; each program starts processes of its own."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("paddle") is None, reason="needs PaddlePaddle"
)


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_equal_the_undivided_batch(ranks: int, run_program: Callable[..., str]) -> None:
    printed = run_program("tests/paddle/uneven_parts.py", str(ranks))
    assert printed.count("right on rank") == ranks


def test_to_static_runs_without_a_graph_or_is_refused(run_program: Callable[..., str]) -> None:
    assert run_program("-W", "ignore", "tests/paddle/to_static.py").count("right on rank") == 2


def test_a_process_that_is_killed_is_told(run_program: Callable[..., str]) -> None:
    printed = run_program("tests/paddle/one_dies.py")
    for rank in (0, 2):
        assert f"rank {rank} of 3 lost rank 1 in call 2 (forward of sync_batch_norm_0" in printed


def test_the_example_trains_and_fails_cleanly(run_program: Callable[..., str]) -> None:
    printed = run_program("examples/paddle_two_processes.py", "--fail")
    assert printed.count("5 steps, off by") == 2
    assert printed.count("is told: ProtocolError: rank ") == 2
    assert "of batch_norm2d_1" in printed
    assert "of batch_norm2d_0" in printed


ALONE = """
import numpy as np
import paddle
from paddle import nn
from syncbn_paddle import SyncBatchNorm

KINDS = [
    (nn.BatchNorm1D, (4, 3), {}),
    (nn.BatchNorm1D, (4, 3, 5), {}),
    (nn.BatchNorm2D, (4, 5, 5, 3), {"data_format": "NHWC"}),
    (nn.BatchNorm2D, (4, 3, 5, 5), {"use_global_stats": True}),
    (nn.BatchNorm2D, (4, 3, 5, 5), {"weight_attr": False, "bias_attr": False}),
    (nn.BatchNorm3D, (2, 3, 2, 3, 4), {}),
]
for kind, shape, settings in KINDS:
    twin, model = (nn.Sequential(kind(3, **settings)) for _ in range(2))
    before, weight = model[0], model[0].weight
    SyncBatchNorm.convert_sync_batchnorm(model)
    assert model[0] is before and isinstance(before, nn.SyncBatchNorm) and weight is before.weight
    x = paddle.randn(shape)
    for mode in ("train", "eval"):
        getattr(model, mode)(), getattr(twin, mode)()
        np.testing.assert_array_equal(model(x).numpy(), twin(x).numpy())
    twin.set_state_dict(model.state_dict())
    assert model.state_dict().keys() == twin.state_dict().keys()
print("done")
"""


def test_the_program_of_the_docs_runs(run_program: Callable[..., str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/paddle.md").read_text(), re.S)
    run_program("-W", "ignore", "-c", program)


def test_alone_it_is_paddles_layer_with_its_state(run_program: Callable[..., str]) -> None:
    assert run_program("-W", "ignore", "-c", ALONE).endswith("done\n")
