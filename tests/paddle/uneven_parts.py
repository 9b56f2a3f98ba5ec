"""Processes with uneven parts against the undivided batch in float64; run by test_paddle.py."""

from __future__ import annotations

import sys

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import syncbn_paddle
from syncbn_core.comm import local
from syncbn_core.errors import ProtocolError, ShapeError
from syncbn_paddle import SyncBatchNorm


def whole() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(1e4, 1, (6, 4, 5, 5)), rng.normal(size=(6, 4, 5, 5))


def formula(x: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, ...]:
    axes, count = (0, 2, 3), x.size // x.shape[1]
    invstd = 1 / np.sqrt(x.var(axes, keepdims=True) + 1e-5)
    xhat = (x - x.mean(axes, keepdims=True)) * invstd
    sums = dy.sum(axes, keepdims=True), (dy * xhat).sum(axes, keepdims=True)
    return xhat, invstd * (dy - sums[0] / count - xhat * sums[1] / count), sums[1], sums[0]


def compare(rank: int, dtype: str, empty: bool, data_format: str, constant: str = "") -> None:
    """`constant`: which of x, weight and bias needs no gradient."""
    x, dy = whole()
    first = 0 if empty else 1
    part = (slice(0, first), slice(first, 6), slice(6, 6))[rank]
    y, dx, dweight, dbias = formula(x.astype(dtype).astype("float64"), dy)
    paddle.set_default_dtype(dtype)
    model = SyncBatchNorm.convert_sync_batchnorm(paddle.nn.BatchNorm2D(4, data_format=data_format))
    move = (0, 2, 3, 1) if data_format == "NHWC" else (0, 1, 2, 3)
    own = paddle.to_tensor(x[part].astype(dtype).transpose(move), stop_gradient=False)
    operands = {"x": own, "weight": model.weight, "bias": model.bias}
    if constant:
        operands.pop(constant).stop_gradient = True
    out = model(own)
    out.backward(paddle.to_tensor(dy[part].astype(dtype).transpose(move)))
    allowed = 1e-9 if dtype == "float64" else 5e-3  # of the rounded x
    np.testing.assert_allclose(out.numpy(), y[part].transpose(move), rtol=0, atol=allowed)
    for name, operand in operands.items():
        if name == "x":
            wanted = dx[part].transpose(move)
            np.testing.assert_allclose(own.grad.numpy(), wanted, rtol=0, atol=allowed)
            continue
        total, wanted = operand.grad.clone(), dweight if name == "weight" else dbias
        dist.all_reduce(total)
        np.testing.assert_allclose(total.numpy(), wanted.ravel(), rtol=1e-3, atol=20 * allowed)
    seen = x.astype(dtype).astype("float64")
    mean, var = seen.mean((0, 2, 3)), seen.var((0, 2, 3))
    np.testing.assert_allclose(model._mean.numpy(), 0.1 * mean, rtol=1e-6)
    np.testing.assert_allclose(model._variance.numpy(), 0.9 + 0.1 * var, rtol=1e-4)


def main() -> None:
    dist.init_parallel_env()
    rank = dist.get_rank()
    for dtype in ("float64", "float32"):
        for empty in (False, True):
            for data_format in ("NCHW", "NHWC"):
                for constant in ("", "x", "weight", "bias") if dtype == "float64" else ("",):
                    compare(rank, dtype, empty, data_format, constant)
    layers = [SyncBatchNorm(4), SyncBatchNorm(4)]
    for layer in layers:
        layer(paddle.ones([2, 4, 3]))
    with pytest.raises(ProtocolError, match="sync_batch_norm"):
        layers[min(rank, 1)](paddle.ones([2, 4, 3]))
    own = paddle.to_tensor(whole()[0][rank : rank + 2] - 1e4)
    half = own.astype("bfloat16")
    paddle.set_default_dtype("float32")
    right = SyncBatchNorm(4)(half.astype("float32")).astype("bfloat16")
    assert (SyncBatchNorm(4)(half) == right).all()
    pair = SyncBatchNorm(4)
    pair.group = dist.new_group([0, 1])
    if rank < 2:  # parts of two and three of the first five samples
        x, _ = whole()
        y, *_ = formula(x[:5], x[:5])
        part = slice(0, 2) if rank == 0 else slice(2, 5)
        own = paddle.to_tensor((x[part] - 1e4).astype("float32"))
        np.testing.assert_allclose(pair(own).numpy(), y[part], rtol=0, atol=1e-5)
    frozen = layers[0]
    frozen.eval()
    if rank == 0:  # nobody waits
        frozen(paddle.ones([2, 4, 3]))
    for kind, words in (
        (ShapeError, "same number of channels"),  # by local connections
        (ProtocolError, "numbers from every process"),
    ):
        with pytest.raises(kind, match=words):
            SyncBatchNorm(4 + rank)(paddle.ones([2, 4 + rank, 3]))
        local.host_name = lambda: str(rank)  # now by gloo
        syncbn_paddle._communicator.cache_clear()
    print("right on rank", rank, flush=True)


if __name__ == "__main__":
    dist.spawn(main, nprocs=int(sys.argv[1]), backend="gloo")
