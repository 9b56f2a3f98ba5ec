"""In-place layers equal batch norm and an activation, and refuse what they can't overwrite."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import close, on_ranks, raises, rows_of, whole_batch

from syncbn_core.errors import ArgumentError, StateError
from syncbn_torch import DataParallelWithCallback, convert_model, set_sbn_eps_mode
from syncbn_torch.inplace import ABN, InPlaceABN, InPlaceABNSync

ACTIVATIONS = [
    ("leaky_relu", 0.01),
    ("leaky_relu", 0.3),
    ("elu", 1.0),
    ("elu", 0.4),
    ("identity", 0),
]
LAYOUTS = [(9, 3), (5, 3, 4), (4, 3, 5, 6), (2, 3, 40, 50), (3, 3, 2, 3, 4)]


class Own(Tensor):
    """A tensor that no kernel takes, so plain operations compute, as on GPUs."""


def randomized(layer: Any) -> Any:
    torch.manual_seed(0)
    if layer.affine:
        nn.init.uniform_(layer.weight, 0.5, 1.5)
        layer.weight.data[0] *= -1
        nn.init.normal_(layer.bias)
    return layer


def clamped(layer: Any, x: Tensor, weight: Any, training: bool) -> Tensor:
    """1 / sqrt(max(var, eps)), by definition."""
    mean, var = layer.running_mean, layer.running_var
    if training:
        rows = x.movedim(1, -1).flatten(0, -2)
        mean, var = rows.mean(0), rows.var(0, correction=0)
        with torch.no_grad():
            layer.running_mean.lerp_(mean, layer.momentum)
            layer.running_var.lerp_(rows.var(0), layer.momentum)
    z = (x.movedim(1, -1) - mean) / var.clamp(min=layer.eps).sqrt()
    z = z if weight is None else z * weight + layer.bias
    return z.movedim(-1, 1)


def two_operations(layer: Any, x: Tensor) -> Tensor:
    """What `layer` stands for, by torch alone; updates its running statistics."""
    weight = None if layer.weight is None else layer.weight.abs() + layer.eps
    training = layer.training or layer.running_mean is None
    running = layer.running_mean, layer.running_var
    if training and layer.num_batches_tracked is not None:
        layer.num_batches_tracked += 1
    if layer.effective_eps_mode == "clamp":
        y = clamped(layer, x, weight, training)
    else:
        y = F.batch_norm(x, *running, weight, layer.bias, training, layer.momentum, layer.eps)
    if layer.activation == "identity":
        return y
    return getattr(F, layer.activation)(y, layer.activation_param)  # type: ignore[no-any-return]


def compare(layer: Any, twin: Any, x: Tensor, **tolerance: float) -> None:
    """y, gradients and running statistics of `layer` in place and of `twin` by torch alone."""
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    hidden = leaf * 1
    y, expected = layer(hidden), two_operations(twin, other)
    if layer.training:
        assert y.data_ptr() == hidden.data_ptr()
    dy = torch.randn_like(expected)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(y, expected, **tolerance)
    torch.testing.assert_close(leaf.grad, other.grad, **tolerance)
    torch.testing.assert_close(dict(layer.named_buffers()), dict(twin.named_buffers()))
    for one, same in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, same.grad, **tolerance)


@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
def test_training_equals_two_operations(activation: str, param: float, shape: Any) -> None:
    for affine in (True, False):
        layer = InPlaceABN(3, affine=affine, activation=activation, activation_param=param)
        layer = randomized(layer.double())
        twin = copy.deepcopy(layer)
        for mode in (True, True, False):
            x = torch.randn(shape, dtype=torch.float64) * 3 + 1
            compare(layer.train(mode), twin.train(mode), x)
        if len(shape) == 4:
            x = torch.randn(shape).double().to(memory_format=torch.channels_last)
            compare(layer.train(), twin.train(), x)


@pytest.mark.parametrize("kind", [Tensor, Own])
def test_mode_clamp_in_training_and_eval(kind: Any) -> None:
    """The variance of the first channel is less than eps."""
    set_sbn_eps_mode("clamp")
    try:
        for activation, param in ACTIVATIONS:
            layer = InPlaceABN(3, eps=0.5, activation=activation, activation_param=param)
            twin = copy.deepcopy(randomized(layer.double()))
            x = torch.randn(6, 3, 4).double() * torch.tensor([[0.1], [2], [3]])
            for mode in (True, True, False):
                compare(layer.train(mode), twin.train(mode), x.as_subclass(kind))
        abn = randomized(ABN(3, eps=0.5).double())
        y = abn(x)
        torch.testing.assert_close(y, F.leaky_relu(clamped(abn, x, abn.weight, True), 0.01))
        torch.testing.assert_close(
            abn.eval()(x), F.leaky_relu(clamped(abn, x, abn.weight, False), 0.01)
        )
    finally:
        set_sbn_eps_mode("plus")


def test_a_weight_of_0_gets_a_gradient_and_trains() -> None:
    """As in inplace_abn, whose derivative of `|weight|` at 0 is 1."""
    layer = InPlaceABN(3, activation="identity").double()
    nn.init.zeros_(layer.weight)
    x, dy = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    layer(x * 1).backward(dy)
    xhat = F.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(layer.weight.grad, (dy * xhat).sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    allowed = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 0.15}[dtype]
    for activation, param in ACTIVATIONS:
        layer = randomized(InPlaceABN(3, activation=activation, activation_param=param))
        twin = copy.deepcopy(layer)
        x = torch.randn(6, 3, 8, 9).to(dtype)
        leaf, other = x.clone().requires_grad_(), x.float().requires_grad_()
        y, expected = layer(leaf * 1), two_operations(twin, other)
        assert y.dtype is dtype
        dy = torch.randn_like(expected).to(dtype)
        y.backward(dy)
        expected.backward(dy.float())
        torch.testing.assert_close(y.float(), expected, rtol=allowed, atol=allowed)
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.float(), other.grad, rtol=allowed, atol=allowed)


@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
def test_plain_operations(activation: str, param: float) -> None:
    layer = InPlaceABN(3, activation=activation, activation_param=param)
    twin = copy.deepcopy(randomized(layer.double()))
    for _ in range(2):
        compare(layer, twin, torch.randn(4, 3, 5, 6, dtype=torch.float64).as_subclass(Own))


@on_ranks(2)
def test_steps_in_distributed_data_parallel_equal_those_of_one_device(rank: int, size: int) -> None:
    torch.manual_seed(0)
    convs = nn.Conv2d(3, 4, 3).double(), nn.Conv2d(4, 2, 1).double()
    model = nn.Sequential(convs[0], randomized(InPlaceABNSync(4).double()), convs[1])
    alone = copy.deepcopy(model)
    alone[1].set_group(dist.new_subgroups(1)[0])  # a group of one
    parallel = DistributedDataParallel(model)
    for step in range(3):
        x, _ = whole_batch((7, 3, 6, 6), step)
        for net, rows in ((alone, slice(0, 7)), (parallel, rows_of(rank, (0, 5, 7)))):
            net.zero_grad()
            loss = net(x[rows]).square().sum() / 7
            (loss if net is alone else loss * size).backward()  # whose gradients are averaged
            with torch.no_grad():
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
    close(dict(model.state_dict()), dict(alone.state_dict()))


@on_ranks(2, 3)
def test_ranks_equal_the_undivided_batch(rank: int, size: int) -> None:
    whole, dy = whole_batch((7, 3, 4, 5))
    mine = rows_of(rank, (0, 5, 7) if size == 2 else (0, 5, 5, 7))
    for (activation, param), kind in product(ACTIVATIONS, (Tensor, Own)):
        x = whole.as_subclass(kind)
        layer = InPlaceABNSync(3, activation=activation, activation_param=param).double()
        twin = copy.deepcopy(randomized(layer))
        for _ in range(2):
            leaf, other = x[mine].clone().requires_grad_(), x.clone().requires_grad_()
            y, expected = layer(leaf * 1), two_operations(twin, other)
            close(y, expected[mine])
            y.backward(dy[mine])
            expected.backward(dy)
            assert leaf.grad is not None
            assert other.grad is not None
            close(leaf.grad, other.grad[mine])
        for name, buffer in layer.named_buffers():
            close(buffer, twin.get_buffer(name))
        for one, same in zip(layer.parameters(), twin.parameters(), strict=True):
            assert one.grad is not None
            torch.distributed.all_reduce(one.grad)
            close(one.grad, same.grad)
    lonely = InPlaceABN(3).double()  # of this rank alone
    raises(ValueError, "more than 1 value", call=lambda: lonely(whole[:1, :, 0, 0] * 1))


def test_backward_keeps_one_tensor_of_the_size_of_x() -> None:
    x, kept = torch.randn(4, 3, 50, requires_grad=True), []
    hidden = x * 1

    def pack(tensor: Tensor) -> Tensor:
        kept.append((tensor.data_ptr(), tensor.numel()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        InPlaceABN(3)(hidden)
    assert [address for address, size in kept if size == x.numel()] == [hidden.data_ptr()]


def test_the_state_is_that_of_inplace_abn() -> None:
    names = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    for kind in (ABN, InPlaceABN, InPlaceABNSync):
        layer = kind(3, activation="elu", activation_param=0.5)
        assert list(layer.state_dict()) == names
        again = pickle.loads(pickle.dumps(layer))
        again.load_state_dict(nn.BatchNorm2d(3).state_dict())
        assert (again.activation, again.activation_param) == ("elu", 0.5)
        assert "activation='elu', activation_param=0.5" in repr(again)


def test_what_must_not_be_overwritten_is_refused_before_it_is() -> None:
    layer = InPlaceABN(3)
    leaf = torch.randn(4, 3, 5, requires_grad=True)
    for x, why in (
        (leaf, "a leaf"),
        ((leaf * 1).chunk(2)[0], "returns multiple views"),
        ((leaf * 1).unbind()[0].mT, "returns multiple views"),
        ((leaf * 1)[:, :, ::2], "gaps"),
        ((leaf * 1)[:1].expand(4, 3, 5), "expanded"),
    ):
        before, running = x.detach().clone(), layer.running_mean.clone()
        with pytest.raises(StateError, match=why):
            layer(x)
        assert torch.equal(x, before)
        assert torch.equal(layer.running_mean, running)
    with torch.no_grad():
        assert layer(leaf).data_ptr() == leaf.data_ptr()  # nobody needs it


def test_a_result_that_was_changed_before_backward_is_an_error_with_the_name_of_the_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), InPlaceABN(4))
    y = model(torch.randn(2, 3, 5, 5))
    y += 1
    with pytest.raises(StateError, match=r"y of 1 \(InPlaceABN\).* changed in place"):
        y.sum().backward()
    y = model(torch.randn(2, 3, 5, 5))
    (y + 1).sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        (y + 1).sum().backward()


def test_an_input_that_autograd_needs_is_an_error() -> None:
    leaf = torch.randn(4, 3, 5, requires_grad=True)
    x = leaf.exp()  # its backward needs x
    y = InPlaceABN(3)(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (ABN, {"activation": "gelu"}),
        (InPlaceABN, {"activation": "relu"}),
        (InPlaceABN, {"activation_param": 0.0}),
        (InPlaceABN, {"activation": "elu", "activation_param": -1.0}),
        (ABN, {"activation_param": -2}),
        (InPlaceABNSync, {"group": 3}),
    ],
)
def test_settings_that_it_cannot_have_are_named(kind: Any, arguments: Any) -> None:
    with pytest.raises(ArgumentError):
        kind(3, **arguments)


def test_a_conversion_leaves_it_and_names_the_layers_that_do_not_synchronize() -> None:
    model = convert_model(nn.Sequential(InPlaceABNSync(3), nn.BatchNorm2d(3)))
    assert type(model[0]) is InPlaceABNSync
    with pytest.warns(UserWarning, match=r"kept 1 of 2 layers .*InPlaceABN \(0\)"):
        convert_model(nn.Sequential(InPlaceABN(3), InPlaceABNSync(3)))
    for kind in (ABN, InPlaceABN, InPlaceABNSync):  # by torch they would lose the activation
        assert type(nn.SyncBatchNorm.convert_sync_batchnorm(kind(3))) is kind
    model = convert_model(nn.Sequential(InPlaceABN(3)), extra={InPlaceABN: InPlaceABNSync})
    assert type(model[0]) is InPlaceABNSync


def test_replicas_that_it_would_not_synchronize_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), InPlaceABNSync(3))
    x = torch.randn(4, 3, 5, 5)
    with pytest.raises(StateError, match="model without replicas"):
        DataParallelWithCallback(model, replicas=2)(x)
    DataParallelWithCallback(model.eval(), replicas=2)(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_equals_an_eager_one() -> None:
    model = nn.Sequential(nn.Conv1d(3, 3, 1), randomized(InPlaceABN(3)))
    x = torch.randn(4, 3, 5)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [InPlaceABN, InPlaceABNSync])
def test_torch_export_takes_a_layer_in_eval(kind: Any) -> None:
    layer, x = randomized(kind(3)).eval(), torch.randn(4, 3, 5)
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x))
    whole = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(x), layer(x))
    with pytest.raises(Exception, match=r"in eval for torch.export.*model\.eval\(\)"):
        torch.export.export(layer.train(), (x,))
