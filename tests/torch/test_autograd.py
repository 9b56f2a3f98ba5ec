"""The graph: no barrier in backward, any loss, no stale or lingering state, second derivatives."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from syncbn_core.errors import CheckpointError, StateError
from syncbn_torch import (
    DataParallelWithCallback,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
)
from syncbn_torch.backends import plain
from syncbn_torch.forward import always_ours

DOUBLE: Any = {"dtype": torch.float64}


def whole(x: Tensor, layer: Any) -> Tensor:
    """The layer's output over the undivided batch, in plain differentiable operations."""
    var, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    shape = (1, -1, *[1] * (x.dim() - 2))
    scale = var.clamp(min=layer.eps) if layer.eps_mode == "clamp" else var + layer.eps
    y = (x - mean.view(shape)) / scale.sqrt().view(shape)
    if layer.weight is not None:
        y = y * layer.weight.view(shape) + layer.bias.view(shape)
    return y


def make_layer(channels: int = 3, **settings: Any) -> Any:
    layer = SynchronizedBatchNorm2d(channels, **DOUBLE, **settings)
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def leaves(sizes: tuple[int, ...] = (2, 1, 3)) -> list[Tensor]:
    return [torch.randn(n, 3, 2, 2, **DOUBLE, requires_grad=True) for n in sizes]


def gradients(loss: Tensor, inputs: list[Tensor], **options: Any) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, inputs, allow_unused=True, **options))


def same(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.zeros(()) if a is None else a, e, check_dtype=False)


@pytest.mark.parametrize("subset", [[0], [1], [2], [0, 2], [1, 2], [0, 1, 2]])
def test_a_loss_on_any_subset_of_replicas(subset: list[int], run_parts: Any) -> None:
    """Every replica's x shaped the statistics, so every x has a gradient."""
    layer, parts = make_layer(), leaves()
    cotangents = [torch.randn_like(p) for p in parts]
    ys = run_parts(layer, parts)
    loss = sum((ys[i] * cotangents[i]).sum() for i in subset)
    expected_ys = whole(torch.cat(parts), layer).split([len(p) for p in parts])
    expected = sum((expected_ys[i] * cotangents[i]).sum() for i in subset)
    inputs = [*parts, layer.weight, layer.bias]
    same(gradients(loss, inputs), gradients(expected, inputs))


@pytest.mark.parametrize("needs", [[True, False, True], [False, False, True], [False] * 3])
def test_some_inputs_without_gradient(needs: list[bool], run_parts: Any) -> None:
    layer, parts = make_layer(), leaves()
    for part, need in zip(parts, needs, strict=True):
        part.requires_grad_(need)
    inputs = [*(p for p in parts if p.requires_grad), layer.weight, layer.bias]
    loss = torch.cat(run_parts(layer, parts)).pow(3).sum()
    same(gradients(loss, inputs), gradients(whole(torch.cat(parts), layer).pow(3).sum(), inputs))


def test_frozen_parameters(run_parts: Any) -> None:
    layer, parts = make_layer(), leaves()
    layer.weight.requires_grad_(False)
    loss = torch.cat(run_parts(layer, parts)).pow(3).sum()
    expected = whole(torch.cat(parts), layer).pow(3).sum()
    inputs = [*parts, layer.bias]
    same(gradients(loss, inputs), gradients(expected, inputs))


class Twice(nn.Module):
    """One layer used three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = make_layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x) * self.bn(x.sin()) + self.bn(self.bn(x).exp())


def test_one_layer_used_several_times(run_parts: Any) -> None:
    model, parts = Twice(), leaves()
    loss = torch.cat(run_parts(model, parts)).pow(2).sum()
    x, bn = torch.cat(parts), model.bn
    y = whole(x, bn) * whole(x.sin(), bn) + whole(whole(x, bn).exp(), bn)
    inputs = [*parts, bn.weight, bn.bias]
    same(gradients(loss, inputs), gradients(y.pow(2).sum(), inputs))
    assert bn.num_batches_tracked == 4


@pytest.mark.parametrize("replicas", [1, 3])
def test_no_grad_and_inference_mode_have_no_graph(replicas: int) -> None:
    model = DataParallelWithCallback(make_layer(eps_mode="clamp"), replicas=replicas)
    x = torch.randn(6, 3, 2, 2, **DOUBLE, requires_grad=True)
    with torch.no_grad():
        assert not model(x).requires_grad
    with torch.inference_mode():
        assert model(x).is_inference()
    assert model(x).requires_grad
    assert model.module.num_batches_tracked == 3


@pytest.mark.parametrize("replicas", [1, 3])
def test_activations_are_freed_with_the_graph(replicas: int) -> None:
    """Nothing of activation size lives on in layers, contexts or records; without gc's help."""
    model = DataParallelWithCallback(make_layer(eps_mode="clamp"), replicas=replicas)
    gc.collect()
    gc.disable()
    try:
        leaf = torch.randn(6, 3, 2, 2, **DOUBLE, requires_grad=True)
        x = leaf * 2
        y = model(x)
        dy = torch.randn_like(y)
        y.backward(dy)
        references = [weakref.ref(t) for t in (x, y, dy)]
        del x, y, dy
        assert [reference() for reference in references] == [None] * 3
        assert leaf.grad is not None
    finally:
        gc.enable()


@pytest.mark.parametrize("replicas", [1, 4])
def test_backward_keeps_x_and_nothing_else_of_its_size(replicas: int) -> None:
    model = DataParallelWithCallback(make_layer(eps_mode="clamp"), replicas=replicas)
    x = torch.randn(8, 3, 32, 32, **DOUBLE, requires_grad=True)
    saved: dict[int, int] = {}

    class Watch(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                saved[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                return self.inner(x)

    watched = DataParallelWithCallback(Watch(model.module), replicas=replicas)
    watched(x).square().sum().backward()
    assert sum(saved.values()) <= x.numel() * 8 + 8 * 3 * 8
    if replicas == 1:
        assert x.untyped_storage().data_ptr() in saved


def test_input_changed_in_place_after_forward(run_parts: Any) -> None:
    """Parts that are joined are copied, so their x may change; others are noticed, as in torch."""
    layer, parts = make_layer(), leaves()
    cotangent = torch.randn(6, 3, 2, 2, **DOUBLE)
    for apart in (False, True):
        xs = [part * 1 for part in parts]
        if apart:  # a size that no other part has
            xs[0] = torch.cat([xs[0], xs[0]], 3)
        y = torch.cat([y[..., :2] for y in run_parts(layer, xs)])
        xs[0].add_(1)
        if apart:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward(cotangent)
        else:
            inputs = [*parts, layer.weight]
            expected = gradients((whole(torch.cat(parts), layer) * cotangent).sum(), inputs)
            same(gradients((y * cotangent).sum(), inputs), expected)


@pytest.mark.parametrize("other", [(2, 3, 4, 4), (2, 3, 2, 2)])
def test_input_replaced_after_forward_is_noticed(other: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, 2, 2, **DOUBLE, requires_grad=True)
    with always_ours():
        loss = make_layer()(x).square().sum()
    x.data = torch.randn(other, dtype=torch.float32 if other[2] == 2 else torch.float64)
    with pytest.raises(StateError, match="the input that the layer had in forward"):
        loss.backward()


@pytest.mark.parametrize("sizes", [(5,), (2, 3), (3, 0, 1, 1)])
@pytest.mark.parametrize("mode", ["plus", "clamp"])
@pytest.mark.parametrize("affine", [True, False])
def test_first_and_second_derivatives(
    sizes: tuple[int, ...], mode: str, affine: bool, run_parts: Any
) -> None:
    """gradcheck and gradgradcheck, one channel of "clamp" being clamped."""
    layer = make_layer(2, eps=0.3, eps_mode=mode, affine=affine, track_running_stats=False)
    x = torch.randn(sum(sizes), 2, 1, 2, **DOUBLE)
    x[:, 1] *= 0.1
    x.requires_grad_()

    def forward(x: Tensor, *parameters: Tensor) -> Tensor:
        own = copy.copy(layer)
        own._parameters = dict(zip(["weight", "bias"], parameters or [None, None], strict=True))
        if len(sizes) == 1:  # our graph, whatever is faster at this size
            with always_ours():
                return own(x)
        return torch.cat(run_parts(own, x.split(sizes)))

    inputs = (x, layer.weight, layer.bias) if affine else (x,)
    assert torch.autograd.gradcheck(forward, inputs)
    assert torch.autograd.gradgradcheck(forward, inputs)


def test_gradient_penalty_equals_the_one_of_the_whole_batch(run_parts: Any) -> None:
    layer, parts = make_layer(), leaves()

    def penalty(y: Tensor) -> list[Tensor | None]:
        grads = gradients(y.pow(3).sum(), parts, create_graph=True)
        return gradients(sum(g.square().sum() for g in grads), [*parts, layer.weight])

    same(penalty(torch.cat(run_parts(layer, parts))), penalty(whole(torch.cat(parts), layer)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.conv = nn.Conv2d(3, 4, 1, **DOUBLE)
        self.bn = SynchronizedBatchNorm2d(4, **DOUBLE)
        self.again = SynchronizedBatchNorm2d(4, **DOUBLE)

    def block(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x)).relu()
        return self.again(self.bn(x).sin())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if self.reentrant is None:
                y = self.block(x)
            else:
                y = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return y.pow(3)


def run_checkpointed(reentrant: bool | None, replicas: int) -> list[Tensor]:
    torch.manual_seed(1)
    model = Checkpointed(reentrant)
    x = torch.randn(7, 3, 3, 3, **DOUBLE, requires_grad=True)
    DataParallelWithCallback(model, replicas=replicas)(x).sum().backward()
    return [x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("replicas", [1, 3])
def test_checkpointing_without_reentry_gives_the_same_gradients(replicas: int) -> None:
    """Recomputation takes the statistics of the first time, and counts no batch twice."""
    plain, recomputed = run_checkpointed(None, replicas), run_checkpointed(False, replicas)
    for a, b in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(a, b)


def test_reentrant_checkpointing_among_replicas_is_refused_clearly() -> None:
    with pytest.raises(CheckpointError, match="use_reentrant=False"):
        run_checkpointed(True, 3)


def test_a_replica_called_after_its_forward_is_refused_clearly() -> None:
    kept = []

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = SynchronizedBatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            kept.append(self)
            return self.bn(x)

    DataParallelWithCallback(Keeps(), replicas=2)(torch.randn(4, 3))
    with pytest.raises(
        CheckpointError, match="layer 'bn' of a replica was called after the forward"
    ):
        kept[0](torch.randn(2, 3))


def test_checkpoint_around_the_replicated_model() -> None:
    model = DataParallelWithCallback(Twice(), replicas=3)
    x = torch.randn(6, 3, 2, 2, **DOUBLE, requires_grad=True)
    expected = gradients(model(x).pow(2).sum(), [x])
    for reentrant in (False, True):
        y = checkpoint(model, x, use_reentrant=reentrant)
        y.pow(2).sum().backward()
        same([x.grad], expected)
        x.grad = None


@pytest.mark.parametrize("sizes", [(5,), (2, 0, 3)])
@pytest.mark.parametrize("mode", ["plus", "clamp"])
def test_plain_operations_stand_in_where_there_are_no_kernels(
    sizes: tuple[int, ...], mode: str, run_parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device that the core has no backend for."""
    monkeypatch.setattr("syncbn_torch.forward.operations_for", lambda x: plain.OPERATIONS)
    layer = make_layer(eps=0.5, eps_mode=mode)
    parts = leaves(sizes)
    if len(sizes) == 1:
        with always_ours():
            y = layer(parts[0])
    else:
        y = torch.cat(run_parts(layer, parts))
    expected = whole(torch.cat(parts), layer)
    torch.testing.assert_close(y, expected)
    inputs = [*parts, layer.weight, layer.bias]
    same(gradients(y.pow(3).sum(), inputs), gradients(expected.pow(3).sum(), inputs))
