"""Parts of replicas that are joined: the same bits as one device, and no more memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncbn_core.comm import run_in_threads
from syncbn_torch import (
    DataParallelWithCallback,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    execute_replication_callbacks,
    update_bn_stats,
)

KINDS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "(N, C)": ({}, (9, 5)),
    "(N, C, L)": ({"momentum": None}, (9, 5, 6)),
    "images": ({}, (9, 5, 6, 7)),
    "volumes": ({"affine": False}, (9, 5, 2, 3, 4)),
    "an axis of 1": ({}, (9, 5, 7, 1)),
    "silu": ({"activation": "silu"}, (9, 5, 6, 7)),
    "large, relu": ({"activation": "relu"}, (9, 16, 64, 64)),
    "clamp": ({"eps_mode": "clamp", "eps": 0.5}, (9, 5, 6, 7)),
    "untracked": ({"track_running_stats": False}, (9, 5, 6, 7)),
    "mask": ({}, (9, 5, 6, 7)),
}


def layer_for(kind: str) -> Any:
    settings, shape = KINDS[kind]
    kinds = {4: SynchronizedBatchNorm2d, 5: SynchronizedBatchNorm3d}
    layer = kinds.get(len(shape), SynchronizedBatchNorm1d)(shape[1], **settings)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def results(model: Any, layer: Any, x: Tensor, dy: Tensor, *more: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    y = model(x, *more)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_and_one_device_give_the_same_bits(
    kind: str, dtype: torch.dtype, last: bool
) -> None:
    shape = KINDS[kind][1]
    if last and len(shape) < 4:
        pytest.skip("no such layout")
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = formats[len(shape)] if last else torch.contiguous_format
    x, dy = ((torch.randn(shape) + 1).to(dtype, memory_format=layout) for _ in range(2))
    more = [torch.rand(shape[0], *shape[2:]) > 0.3] if kind == "mask" else []
    layer = layer_for(kind)
    twin = copy.deepcopy(layer)
    wrapper = DataParallelWithCallback(layer, replicas=4)
    for _ in range(2):
        found, expected = results(wrapper, layer, x, dy, *more), results(twin, twin, x, dy, *more)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_mean_far_from_0_loses_no_digits(layout: torch.memory_format) -> None:
    x = torch.randn(18, 3, 20, 20) + torch.tensor([0.0, 1e3, 1e6]).view(1, 3, 1, 1)
    x = x.contiguous(memory_format=layout)
    layer, wide = (
        SynchronizedBatchNorm2d(3, momentum=None),
        nn.BatchNorm2d(3, momentum=None).double(),
    )
    for _ in range(2):
        y = DataParallelWithCallback(layer, replicas=3)(x)
        assert (y - wide(x.double())).abs().max() < 2e-6
    assert layer.num_batches_tracked == 2
    torch.testing.assert_close(layer.running_var.double(), wide.running_var, rtol=1e-6, atol=0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 1), SynchronizedBatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = F.relu(self.bn(self.conv(x)), inplace=True)[:, :3]
        return x


def bytes_kept(y: Tensor) -> int:
    """By the graph of y: what its nodes have saved, each storage once."""
    stack: list[Any] = [y.grad_fn]
    seen, storages = set(), {}
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [one for one, _ in node.next_functions]
        values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        values += getattr(node, "saved_tensors", ())
        for value in values:
            for tensor in value if isinstance(value, Sequence) else [value]:
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_the_graph_keeps_as_much_as_that_of_the_undivided_batch() -> None:
    model, x = Net(), torch.randn(8, 3, 32, 32)
    replicas = bytes_kept(DataParallelWithCallback(model, replicas=4)(x))
    assert replicas <= bytes_kept(model(x)) + 10_000


def test_a_replica_may_overwrite_its_result_and_its_input() -> None:
    class Overwrites(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            y: Tensor = self.layer(x)
            if isinstance(self.layer, SynchronizedBatchNorm2d):
                x.zero_()
                return y.mul_(2).add_(x + 1)
            return y * 2 + 1

    ours, theirs = SynchronizedBatchNorm2d(4).double(), nn.BatchNorm2d(4).double()
    x, dy = torch.randn(2, 6, 4, 3, 3, dtype=torch.float64)
    found = results(DataParallelWithCallback(Overwrites(ours), replicas=3), ours, x, dy)
    for one, other in zip(found, results(Overwrites(theirs), theirs, x, dy), strict=True):
        torch.testing.assert_close(one, other)


def test_an_activation_that_has_saved_its_result_notices_that_it_is_overwritten() -> None:
    """Never a wrong gradient: torch's own error."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = SynchronizedBatchNorm2d(4, activation="relu")

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.bn(x)
            return y.add_(1)

    y = DataParallelWithCallback(Adds(), replicas=2)(torch.randn(4, 4, 3, 3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_unlike_parts_are_joined_with_those_of_their_kind() -> None:
    """In other sizes, dtypes and layouts, or with an input that has no part in the gradient."""

    class Unlike(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            kind = int(number[0])
            x = x[..., : 3 + kind % 2]
            if kind >= 4:
                x = x.contiguous(memory_format=torch.channels_last)
            y: Tensor = self.layer(x)
            assert y.is_contiguous(memory_format=torch.channels_last) or kind < 4
            return F.pad(y, (0, 1 - kind % 2))

    layer = SynchronizedBatchNorm2d(3, dtype=torch.float64)
    x = torch.randn(12, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    numbers = torch.arange(6).repeat_interleave(2)
    y = DataParallelWithCallback(Unlike(layer), replicas=6)(x, numbers)
    z = x.detach().clone().requires_grad_()
    valid = (torch.arange(4) < 3 + numbers[:, None] % 2)[:, None].expand(12, 5, 4)
    expected = SynchronizedBatchNorm2d(3, dtype=torch.float64)(z, valid)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(x.grad, z.grad)
    assert layer.num_batches_tracked == 1


def test_an_empty_part_takes_the_layout_of_the_others(run_parts: Any) -> None:
    x = torch.randn(5, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    for sizes in ([2, 0, 3], [0, 2, 3]):
        ys = run_parts(SynchronizedBatchNorm2d(3), [part + 0 for part in x.split(sizes)])
        assert all(y.is_contiguous(memory_format=torch.channels_last) for y in ys)


def test_a_part_without_gradients_is_a_constant() -> None:
    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = SynchronizedBatchNorm2d(3, dtype=torch.float64)

        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            x = x * 2
            with torch.set_grad_enabled(bool(number[0])):
                return self.bn(x)  # type: ignore[no-any-return]

    x, dy = torch.randn(2, 6, 3, 4, 4, dtype=torch.float64)
    x.requires_grad_()
    numbers = torch.arange(3).repeat_interleave(2)
    DataParallelWithCallback(Stops(), replicas=3)(x, numbers).backward(dy)
    z = x.detach().clone().requires_grad_()
    joined = torch.cat([z[:2].detach(), z[2:]]) * 2
    F.batch_norm(joined, None, None, training=True)[2:].backward(dy[2:])
    torch.testing.assert_close(x.grad, z.grad)


def test_a_part_of_its_own_kind_in_inference_mode() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = SynchronizedBatchNorm2d(3, dtype=torch.float64)

        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            with torch.inference_mode(bool(number[0])):
                x = x[..., : 3 if number[0] else 4] * 2
                y: Tensor = self.bn(x)
            return y.sum((1, 2, 3)).clone()

    x = torch.randn(4, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    y = DataParallelWithCallback(Apart(), replicas=2)(x, torch.tensor([0, 0, 1, 1]))
    y.square().sum().backward()
    assert x.grad is not None
    assert x.grad[:2].abs().sum() > 0
    assert not x.grad[2:].any()


def test_copies_with_parameters_and_buffers_of_their_own() -> None:
    """By hand: each copy gets its own gradients and updates its own running statistics."""
    copies: list[Any] = [SynchronizedBatchNorm2d(3, dtype=torch.float64) for _ in range(2)]
    twin = nn.BatchNorm2d(3, dtype=torch.float64)
    x, dy = torch.randn(2, 5, 3, 4, 4, dtype=torch.float64)
    execute_replication_callbacks(copies)
    parts = zip(copies, x.split([2, 3]), strict=True)
    ys = run_in_threads([partial(copy, part) for copy, part in parts])
    torch.autograd.backward(ys, dy.split([2, 3]))
    twin(x).backward(dy)
    assert twin.weight.grad is not None
    torch.testing.assert_close(sum(one.weight.grad for one in copies), twin.weight.grad)
    xhat_dy = torch.cat(ys).detach() * dy
    torch.testing.assert_close(copies[0].weight.grad, xhat_dy[:2].sum((0, 2, 3)))
    for one in copies:
        torch.testing.assert_close(dict(one.named_buffers()), dict(twin.named_buffers()))


@pytest.mark.parametrize("which", [[0], [0, 2]])
def test_masks_in_some_replicas_only(which: list[int]) -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = SynchronizedBatchNorm2d(3)

        def forward(self, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
            at = int(number[0])
            own = mask[:, :, :1] if at == 2 else mask
            return self.bn(x, own if at in which else None)  # type: ignore[no-any-return]

    x, dy = torch.randn(2, 6, 3, 4, 5)
    mask = torch.rand(6, 4, 5) > 0.4
    mask[4:] = mask[4:, :, :1]
    whole = torch.stack([m if n // 2 in which else m | True for n, m in enumerate(mask)])
    model, twin = Masks(), SynchronizedBatchNorm2d(3)
    numbers = torch.arange(3).repeat_interleave(2)
    found = results(DataParallelWithCallback(model, replicas=3), model.bn, x, dy, mask, numbers)
    for one, other in zip(found, results(twin, twin, x, dy, whole), strict=True):
        torch.testing.assert_close(one, other)


def test_the_error_of_a_part_is_that_of_its_replica() -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = SynchronizedBatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(x.double() if (x == 7).any() else x)  # type: ignore[no-any-return]

    model, x = Doubles(), torch.randn(6, 3, 4, 4)
    x[5] = 7
    with pytest.raises(TypeError, match=r"bn .*expected input of dtype torch.float32") as caught:
        DataParallelWithCallback(model, replicas=3)(x)
    assert caught.value.__notes__ == ["raised in replica 2 of 3"]
    assert model.bn.num_batches_tracked == 0


def test_gradients_within_a_replica_are_refused() -> None:
    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = SynchronizedBatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(self.bn(x).square().sum(), x)
            return dx

    with pytest.raises(RuntimeError, match=r"backward of layer 'bn' after the forward of all"):
        DataParallelWithCallback(Penalty(), replicas=2)(torch.randn(4, 3, 2, 2))


def test_precise_statistics_are_those_of_the_whole_data() -> None:
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    data = [torch.randn(6, 3, 8, 8) for _ in range(3)]
    update_bn_stats(DataParallelWithCallback(model, replicas=3), data)
    update_bn_stats(twin, data)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_all_replicas_see_the_running_statistics_of_the_module() -> None:
    """A layer that is called in training and then in eval, within one forward."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = SynchronizedBatchNorm2d(3, momentum=1.0)

        def forward(self, x: Tensor) -> Tensor:
            self.bn.train()
            self.bn(x)
            return self.bn.eval()(x)  # type: ignore[no-any-return]

    model, x = Both(), torch.randn(6, 3, 4, 4)
    y = DataParallelWithCallback(model, replicas=3)(x)
    twin = nn.BatchNorm2d(3, momentum=1.0)
    twin(x)
    torch.testing.assert_close(y, twin.eval()(x))


@pytest.mark.parametrize("longer", [0, 1])
def test_the_node_of_a_layer_comes_after_all_before_it_in_each_replica(longer: int) -> None:
    """Autograd runs nodes with higher numbers first; each thread counts by itself."""
    numbers: dict[int, list[Any]] = {}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = SynchronizedBatchNorm2d(2)

        def forward(self, x: Tensor) -> Tensor:
            replica = int(x.detach().amin())
            h = x * 1
            for _ in range(100 if replica == longer else 1):
                h = h * 1
            y = self.layer(h)
            z = y * 1
            nodes = h.grad_fn, y.grad_fn.next_functions[0][0], z.grad_fn
            numbers[replica] = [node._sequence_nr() for node in nodes]
            assert "BatchNorm" in nodes[1].name()
            return z

    x = torch.tensor([0.0, 1.0])[:, None, None, None] + torch.arange(18.0).view(2, 3, 3)
    DataParallelWithCallback(Model(), replicas=2)(x.requires_grad_())
    of_layers = {of_layer for _, of_layer, _ in numbers.values()}
    assert len(of_layers) == 1
    for before, of_layer, after in numbers.values():
        assert before < of_layer < after, numbers
