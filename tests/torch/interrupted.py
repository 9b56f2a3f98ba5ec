"""Storms of interrupts over a model in replicas: `interrupted.py COUNT`, run by tests.

After each: the call has ended, running statistics are of whole batches, the next forward is right,
and no thread is left. The storm is that of tests/core/interrupted.py.
"""

import sys
import threading
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from syncbn_torch import DataParallelWithCallback, SynchronizedBatchNorm1d

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from interrupted import Storm, check_statistics, join_members

REPLICAS, LAYERS = 2, 6


def make() -> DataParallelWithCallback:
    layers = nn.Sequential(*[SynchronizedBatchNorm1d(4) for _ in range(LAYERS)]).double()
    return DataParallelWithCallback(_with_means(layers), replicas=REPLICAS)


def _with_means(layers: nn.Sequential) -> nn.Sequential:
    """The same with biases, so that the next layer has running means to be torn."""
    for number, layer in enumerate(layers, 1):
        nn.init.constant_(layer.bias, float(number))
    return layers


def train(model: nn.Module, x: Tensor, dy: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    model(x).backward(dy)
    assert x.grad is not None
    return x.grad


def main(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    x, dy = (torch.randn(7, 4, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    twin = _with_means(nn.Sequential(*[nn.BatchNorm1d(4) for _ in range(LAYERS)]).double())
    expected, y = train(twin, x, dy), twin(x).detach()
    inputs = [x, *[layer_in.detach() for layer_in in _inputs(twin, x)]][:LAYERS]
    moments = [(t.mean(0).numpy(), t.var(0).numpy()) for t in inputs]
    storm = Storm(count)
    threads = threading.active_count()
    model = make()
    for _ in range(3):
        train(model, x, dy)
    while storm.interrupts < count:
        if storm.run(partial(train, model, x, dy)):
            join_members()
            for layer, (mean, var) in zip(model.module, moments, strict=True):
                check_statistics(layer, mean, var)
        for parameter in model.parameters():
            parameter.grad = None
        torch.testing.assert_close(train(model, x, dy), expected)
        torch.testing.assert_close(model(x), y)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        if int(model.module[0].num_batches_tracked) > 50:
            model = make()
    left = threading.active_count() - threads
    print(f"{storm.interrupts} interrupts, slowest {storm.slowest:.3f} s, {left} threads left")
    assert left <= count // 100


def _inputs(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """The outputs of all layers."""
    outputs = []
    for layer in model:
        x = layer(x)
        outputs.append(x)
    return outputs


if __name__ == "__main__":
    main(int(sys.argv[1]))
