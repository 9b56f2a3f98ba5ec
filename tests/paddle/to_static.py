"""`paddle.jit.to_static` of a converted model on two processes; run by test_paddle.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn

from syncbn_core.errors import StateError
from syncbn_paddle import SyncBatchNorm


def net() -> Any:
    paddle.seed(0)
    return nn.Sequential(nn.Conv2D(4, 4, 3), nn.BatchNorm2D(4), nn.ReLU(), nn.Conv2D(4, 1, 3))


def main() -> None:
    dist.init_parallel_env()
    x = np.random.default_rng(0).normal(2, 3, (7, 4, 7, 7)).astype("float32")
    mine = paddle.to_tensor(np.split(x, [3])[dist.get_rank()])
    twin, model = net(), SyncBatchNorm.convert_sync_batchnorm(net())
    twin(paddle.to_tensor(x)).square().sum().backward()
    paddle.jit.to_static(model, full_graph=False)(mine).square().sum().backward()
    total, wanted = model.parameters()[0].grad.clone(), twin.parameters()[0].grad
    dist.all_reduce(total)
    scale = float(wanted.abs().max())
    np.testing.assert_allclose(total.numpy() / scale, wanted.numpy() / scale, rtol=0, atol=1e-5)
    np.testing.assert_allclose(model[1]._mean.numpy(), twin[1]._mean.numpy(), rtol=1e-5)
    whole = paddle.jit.to_static(SyncBatchNorm.convert_sync_batchnorm(net()), full_graph=True)
    with pytest.raises(StateError, match=r"train without paddle\.jit\.to_static"):
        whole(mine)
    print("right on rank", dist.get_rank(), flush=True)


if __name__ == "__main__":
    dist.spawn(main, nprocs=2, backend="gloo")
