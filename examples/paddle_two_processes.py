"""Train a small network with PaddlePaddle on the CPU, in two processes with uneven parts.

    python examples/paddle_two_processes.py          # compares with the whole batch in one
    python examples/paddle_two_processes.py --fail   # one calls another layer: both are told

On a CPU `paddle.nn.SyncBatchNorm` raises an error; `syncbn_paddle.SyncBatchNorm` takes its place.
"""

from __future__ import annotations

import argparse

import numpy as np
import paddle
import paddle.distributed as dist

from syncbn_core.errors import ProtocolError
from syncbn_paddle import SyncBatchNorm

STEPS = 5


def network() -> paddle.nn.Layer:
    paddle.seed(0)
    nn = paddle.nn
    layers = nn.Conv2D(3, 8, 3), nn.BatchNorm2D(8), nn.ReLU(), nn.Conv2D(8, 4, 3), nn.BatchNorm2D(4)
    return nn.Sequential(*layers)


def batch(step: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng(step).normal(3, 2, (6, 3, 9, 9)))


def train(model: paddle.nn.Layer, part: slice, together: bool) -> dict[str, np.ndarray]:
    for step in range(STEPS):
        loss = (model(batch(step)[part]) - 1).abs().sum() / 6
        loss.backward()
        for parameter in model.parameters():
            if not parameter.stop_gradient:
                gradient = parameter.grad
                if together:
                    dist.all_reduce(gradient)
                parameter.set_value(parameter - 0.01 * gradient)
        model.clear_gradients()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def main(fail: bool) -> None:
    dist.init_parallel_env()
    rank = dist.get_rank()
    paddle.set_default_dtype("float64")
    model = SyncBatchNorm.convert_sync_batchnorm(network())
    state = train(model, slice(0, 1) if rank == 0 else slice(1, 6), together=True)
    alone = train(network(), slice(0, 6), together=False)
    off = max(float(np.abs(state[name] - alone[name]).max()) for name in alone)
    print(f"rank {rank}: {STEPS} steps, off by {off:.1e} from one process", flush=True)
    assert off < 1e-5  # Paddle's own running statistics have a momentum of float32
    if fail:
        try:
            model[1 if rank == 0 else 4](paddle.ones([2, 8 if rank == 0 else 4, 3, 3]))
        except ProtocolError as error:
            print(f"rank {rank} is told: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fail", action="store_true")
    dist.spawn(main, args=(parser.parse_args().fail,), nprocs=2, backend="gloo")
