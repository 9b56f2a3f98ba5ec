"""`update_bn_stats`: running statistics of a whole data set, over all processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from world import close, on_ranks

from syncbn_core.errors import BatchSizeError
from syncbn_torch import (
    DataParallelWithCallback,
    convert_model,
    freeze,
    revert_model,
    set_sbn_eps_mode,
    update_bn_stats,
)
from syncbn_torch.inplace import ABN, InPlaceABN, InPlaceABNSync


def net() -> Any:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2)
    return convert_model(nn.Sequential(*layers)).double()


def batches(*sizes: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 3, 4, 5, generator=generator).double() * n for n in sizes]


def expected(model: Any, loader: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Mean and unbiased variance of all that each layer sees, with statistics of each batch."""
    seen: dict[Any, list[Tensor]] = {model[1]: [], model[3]: []}
    with torch.no_grad():
        for x in loader:
            for layer in model:
                if layer in seen:
                    seen[layer].append(x)
                    settings = layer.weight, layer.bias, True, 0.0, layer.eps
                    x = nn.functional.batch_norm(x, None, None, *settings)
                else:
                    x = layer(x)
    rows = [torch.cat([x.movedim(1, -1).flatten(0, -2) for x in xs]) for xs in seen.values()]
    return [(all_rows.mean(0), all_rows.var(0)) for all_rows in rows]


def check(model: Any, wanted: list[tuple[Tensor, Tensor]]) -> None:
    for layer, (mean, var) in zip((model[1], model[3]), wanted, strict=True):
        close(layer.running_mean, mean)
        close(layer.running_var, var)


@pytest.mark.parametrize("training", [True, False])
def test_one_process_and_replicas(training: bool) -> None:
    model = net().train(training)
    loader = batches(5, 2, 1)
    wanted = expected(model, loader)
    update_bn_stats(model, loader)
    check(model, wanted)
    assert model[1].training == training
    assert model[1].num_batches_tracked == 0
    pairs = [(x, "label") for x in loader]
    other = net()
    update_bn_stats(DataParallelWithCallback(other, replicas=2), pairs, device="cpu")
    check(other, wanted)
    freeze(model[1])
    update_bn_stats(model, batches(3, seed=1), forward=lambda model, x: model(x))
    close(model[1].running_mean, wanted[0][0])
    assert not torch.equal(model[3].running_mean, wanted[1][0])


class WithLengths(nn.Sequential):
    def forward(self, x: Tensor, lengths: Tensor) -> Any:  # type: ignore[override]
        assert lengths.shape == (len(x),)
        return super().forward(x)


def test_layers_of_torch_and_models_that_take_more_than_x() -> None:
    """As after Lightning's fit, which undoes the conversion."""
    model = revert_model(WithLengths(*net()))
    kinds, attributes = [type(m) for m in model], [vars(m).keys() for m in model]
    loader = [{"x": x, "lengths": torch.ones(len(x))} for x in batches(5, 2)]
    wanted = expected(model, [batch["x"] for batch in loader])
    set_sbn_eps_mode("clamp")
    try:
        update_bn_stats(model, loader, forward=lambda m, batch: m(batch["x"], batch["lengths"]))
    finally:
        set_sbn_eps_mode("plus")
    check(model, wanted)
    assert [type(m) for m in model] == kinds
    assert [vars(m).keys() for m in model] == attributes


@pytest.mark.parametrize("kind", [ABN, InPlaceABN, InPlaceABNSync])
def test_layers_in_place(kind: Any) -> None:
    conv, loader = net()[0], batches(5, 1, 2)
    model = nn.Sequential(conv, kind(4).double())
    group = model[1].process_group
    update_bn_stats(model, loader)
    with torch.no_grad():
        rows = torch.cat([conv(x) for x in loader]).movedim(1, -1).flatten(0, -2)
    close(model[1].running_mean, rows.mean(0))
    close(model[1].running_var, rows.var(0))
    assert model[1].process_group is group


def test_a_batch_of_one_value_counts_as_one() -> None:
    model = convert_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)))
    x = torch.randn(5, 3)
    update_bn_stats(model.double(), [x[:4].double(), x[4:].double()])
    with torch.no_grad():
        rows = model[0](x.double())
    close(model[1].running_mean, rows.mean(0))
    close(model[1].running_var, rows.var(0))
    # what the second layer sees of it is the bias of the first, 0
    assert model[2].running_mean.abs().max() < 1e-12


def test_a_loader_without_batches_is_told() -> None:
    used_up = iter(batches(3))
    update_bn_stats(net(), used_up)
    with pytest.raises(BatchSizeError, match="got none in any process; is the loader an iterator"):
        update_bn_stats(net(), used_up)


@on_ranks(2, 3)
def test_ranks_with_loaders_of_unlike_lengths(rank: int, size: int) -> None:
    loaders = [batches(*sizes, seed=rank) for rank, sizes in enumerate([(5, 2), (1,), ()][:size])]
    model = net()
    wanted = expected(model, [x for loader in loaders for x in loader])
    update_bn_stats(DistributedDataParallel(model), loaders[rank])
    check(model, wanted)
    model.eval()
    update_bn_stats(model, loaders[rank])
    check(model, wanted)


def test_after_an_error_the_model_is_as_before() -> None:
    model = net().eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError):
        update_bn_stats(model, [torch.ones(2, 3, 4, 5).double(), torch.ones(2, 7, 4, 5).double()])
    with pytest.raises(BatchSizeError):
        update_bn_stats(model, [torch.ones(1, 3, 1, 1).double()])
    close(model.state_dict(), before)
    assert model[1].process_group is None
    assert model[1].track_running_stats
    assert not model[1].training


def test_a_model_whose_graph_may_not_break() -> None:
    model = net()
    wanted = expected(model, batches(5, 2))
    update_bn_stats(torch.compile(model, backend="aot_eager", fullgraph=True), batches(5, 2))
    check(model, wanted)


def test_between_a_checkpointed_forward_and_its_backward() -> None:
    model = net()
    wanted = expected(model, batches(5, 2))
    (x,) = batches(4, seed=3)
    y = checkpoint(model, x.requires_grad_(), use_reentrant=False)
    update_bn_stats(model, batches(5, 2))
    y.sum().backward()
    check(model, wanted)
