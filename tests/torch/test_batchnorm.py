"""The layers equal `F.batch_norm` over the undivided batch, and behave as torch's layers."""

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn_core.errors import (
    ArgumentError,
    BatchSizeError,
    DTypeError,
    ShapeError,
)
from syncbn_torch import (
    BatchNorm2dReimpl,
    DataParallelWithCallback,
    SyncBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    set_sbn_eps_mode,
)

PAIRS = [
    (SynchronizedBatchNorm1d, nn.BatchNorm1d, (8, 5)),
    (SynchronizedBatchNorm1d, nn.BatchNorm1d, (8, 5, 7)),
    (SynchronizedBatchNorm2d, nn.BatchNorm2d, (8, 5, 4, 3)),
    (SynchronizedBatchNorm3d, nn.BatchNorm3d, (8, 5, 2, 3, 4)),
    (SyncBatchNorm, nn.BatchNorm2d, (8, 5, 4, 3)),
]


@pytest.fixture(autouse=True)
def plus_mode() -> Iterator[None]:
    yield
    set_sbn_eps_mode("plus")


def layer_for(rank: int) -> type[_BatchNorm]:
    kinds = {2: SynchronizedBatchNorm1d, 3: SynchronizedBatchNorm1d, 4: SynchronizedBatchNorm2d}
    return kinds.get(rank, SynchronizedBatchNorm3d)


def randomized(layer: Any) -> Any:
    """`layer` with random parameters and running statistics."""
    with torch.no_grad():
        for tensor in (layer.weight, layer.bias, layer.running_mean):
            if tensor is not None:
                tensor.normal_()
        if layer.running_var is not None:
            layer.running_var.uniform_(0.5, 2)
    return layer


def undivided(layer: Any, x: Tensor, dy: Tensor, factor: float | None) -> dict[str, Tensor | None]:
    """What `layer` should give for the whole x, by F.batch_norm in float64."""

    def wide(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().double().clone()

    x = x.detach().double().requires_grad_()
    weight, bias = wide(layer.weight), wide(layer.bias)
    for parameter in (weight, bias):
        if parameter is not None:
            parameter.requires_grad_()
    mean, var = wide(layer.running_mean), wide(layer.running_var)
    y = F.batch_norm(x, mean, var, weight, bias, True, factor or 0.0, layer.eps)
    y.backward(dy.double())
    return {
        "y": y,
        "x": x.grad,
        "weight": None if weight is None else weight.grad,
        "bias": None if bias is None else bias.grad,
        "running_mean": mean,
        "running_var": var,
    }


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], tuple[int, ...], torch.dtype, bool]:
    """Sizes of the parts, shape of a sample, dtype, channels_last."""
    parts = draw(st.lists(st.integers(0, 4), min_size=2, max_size=5))
    spatial = draw(st.lists(st.integers(1, 5), max_size=3))
    channels = draw(st.integers(1, 6))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return parts, (channels, *spatial), dtype, draw(st.booleans())


@given(
    batch=batches(),
    affine=st.booleans(),
    track=st.booleans(),
    momentum=st.sampled_from([0.1, 0.0, 1.0, None]),
)
def test_replicas_equal_the_undivided_batch(
    run_parts: Any, close: Any, batch: Any, affine: bool, track: bool, momentum: float | None
) -> None:
    sizes, sample, dtype, channels_last = batch
    count = sum(sizes) * torch.Size(sample[1:]).numel()
    kind = layer_for(1 + len(sample))
    layer = randomized(
        kind(sample[0], affine=affine, track_running_stats=track, momentum=momentum, dtype=dtype)
    )
    before = copy.deepcopy(layer.state_dict())
    parts = []
    for size in sizes:
        part = torch.randn(size, *sample, dtype=dtype) * 2 + 3
        if channels_last and part.dim() == 4:
            part = part.contiguous(memory_format=torch.channels_last)
        parts.append(part.requires_grad_())
    if count == 1:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            run_parts(layer, parts)
        for name, value in layer.state_dict().items():
            assert torch.equal(value, before[name])
        return
    x = torch.cat([part.detach() for part in parts])
    dy = torch.randn_like(x)
    if count:
        expected = undivided(layer, x, dy, 1.0 if momentum is None else momentum)
    ys = run_parts(layer, parts)
    assert [y.shape for y in ys] == [part.shape for part in parts]
    torch.autograd.backward(ys, list(dy.split(sizes)))
    if track:
        assert layer.num_batches_tracked == 1
    if not count:
        assert torch.equal(layer.state_dict().get("running_mean", x), before.get("running_mean", x))
        return
    # With two values per channel xhat is +-1 whatever x is: gradients are differences of
    # rounding, which a small variance magnifies.
    var = x.double().transpose(0, 1).flatten(1).var(1, unbiased=False)
    scale = 10 + 3 / (var.min().item() + 1e-5)
    close(torch.cat(ys), expected["y"], scale)
    close(torch.cat([part.grad for part in parts]), expected["x"], scale**1.5)
    if affine:
        close(layer.weight.grad, expected["weight"], 10 * scale)
        close(layer.bias.grad, expected["bias"], scale)
    close(layer.running_mean, expected["running_mean"])
    close(layer.running_var, expected["running_var"], 10)


@pytest.mark.parametrize(("ours", "theirs", "shape"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 5000])
def test_alone_a_layer_is_its_torch_namesake(
    ours: Any, theirs: Any, shape: Any, dtype: torch.dtype, size: int, close: Any
) -> None:
    """Also for sizes that take our kernels rather than torch's."""
    shape = (shape[0] * size, *shape[1:])
    layer = randomized(ours(shape[1], dtype=dtype))
    twin = theirs(shape[1], dtype=torch.float64)
    twin.load_state_dict(layer.state_dict())
    for _ in range(3):
        x = (torch.randn(shape, dtype=dtype) + 1).requires_grad_()
        x_twin = x.detach().double().requires_grad_()
        dy = torch.randn(shape, dtype=dtype)
        y, y_twin = layer(x), twin(x_twin)
        y.backward(dy)
        y_twin.backward(dy.double())
        close(y, y_twin, 4)  # the own kernel of torch for (40000, C) is off by 2e-5
        close(x.grad, x_twin.grad, 4)
    close(layer.weight.grad, twin.weight.grad, size)
    close(layer.bias.grad, twin.bias.grad, size)
    for name, value in layer.state_dict().items():
        if value.is_floating_point():
            close(value, twin.state_dict()[name])
        else:
            assert torch.equal(value, twin.state_dict()[name])
    layer.eval(), twin.eval()
    close(layer(x), twin(x_twin))


def test_a_lone_layer_compiles_in_one_graph() -> None:
    layer = SynchronizedBatchNorm2d(3)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(16, 3, 256, 256)  # large enough for our kernels, were they traceable
    torch.testing.assert_close(compiled(x), twin(x))
    torch.testing.assert_close(layer.running_var, twin.running_var)
    assert layer.num_batches_tracked == 1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_clamping_layer_compiles_in_one_graph() -> None:
    layer = SynchronizedBatchNorm2d(3, eps=0.5, eps_mode="clamp")
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, dy = torch.randn(2, 4, 3, 5, 5)
    for module in (compiled, twin):
        module(x).backward(dy)
    torch.testing.assert_close(compiled(x), twin(x))
    torch.testing.assert_close(layer.running_var, twin.running_var)
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad)
    with pytest.raises(BatchSizeError, match="more than 1 value"):
        torch.compile(layer, backend="aot_eager")(torch.randn(1, 3, 1, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", ["float32", "half"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_half_precision_keeps_float32_statistics(
    dtype: torch.dtype, parameters: str, replicas: int, run_parts: Any, close: Any
) -> None:
    layer = SynchronizedBatchNorm2d(4, dtype=dtype if parameters == "half" else None)
    x = (torch.randn(9, 4, 6, 6) + 20).to(dtype).requires_grad_()  # half sums would be far off
    dy = torch.randn(9, 4, 6, 6).to(dtype)
    expected = undivided(layer, x, dy, 0.1)
    y = torch.cat(run_parts(layer, x.chunk(replicas))) if replicas > 1 else layer(x)
    y.backward(dy)
    assert y.dtype == x.grad.dtype == dtype
    scale = 2 if parameters == "float32" else 3
    close(y, expected["y"], scale)
    close(x.grad, expected["x"], scale)
    if parameters == "float32":
        assert layer.running_mean.dtype == torch.float32
        close(layer.running_mean, expected["running_mean"], 10)
        close(layer.running_var, expected["running_var"], 10)


@pytest.mark.parametrize(("replicas", "size"), [(2, 256), (3, 40)])
def test_large_means_do_not_cancel(replicas: int, size: int, run_parts: Any) -> None:
    x = torch.randn(18, 3, size, size) + torch.tensor([1e3, -1e5, 1e6]).view(1, 3, 1, 1)
    layer = SynchronizedBatchNorm2d(3, momentum=1.0)
    y = torch.cat(run_parts(layer, x.chunk(replicas)))
    wide = x.double()
    expected = F.batch_norm(wide, None, None, training=True)
    assert (y - expected).abs().max() < 2e-6
    torch.testing.assert_close(
        layer.running_var.double(), wide.transpose(0, 1).flatten(1).var(1), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("mode", ["plus", "clamp"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_eps_mode_holds_in_training_and_eval(mode: Any, replicas: int, run_parts: Any) -> None:
    def formula(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
        scale = var.clamp(min=eps) if mode == "clamp" else var + eps
        shape = (1, -1, 1, 1)
        return (x - mean.view(shape)) / scale.view(shape).sqrt()

    layer = SynchronizedBatchNorm2d(2, eps=0.1, momentum=1.0, eps_mode=mode, dtype=torch.float64)
    x = torch.randn(6, 2, 3, 3, dtype=torch.float64) * torch.tensor([2.0, 0.1]).view(1, 2, 1, 1)
    x.requires_grad_()
    x_twin = x.detach().clone().requires_grad_()
    flat = x_twin.transpose(0, 1).flatten(1)
    expected = formula(x_twin, flat.mean(1), flat.var(1, unbiased=False), 0.1)
    y = torch.cat(run_parts(layer, x.chunk(replicas))) if replicas > 1 else layer(x)
    dy = torch.randn_like(x)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, x_twin.grad)
    layer.eval()
    torch.testing.assert_close(layer(x), formula(x, layer.running_mean, layer.running_var, 0.1))


def test_default_eps_mode_is_plus_and_can_be_set_for_all() -> None:
    x = torch.randn(6, 2) * 1e-3
    one, own = SynchronizedBatchNorm1d(2), SynchronizedBatchNorm1d(2, eps_mode="plus")
    plus = one(x)
    set_sbn_eps_mode("clamp")
    assert not torch.allclose(one(x), plus)
    torch.testing.assert_close(own(x), plus)
    with pytest.raises(ArgumentError, match=r"plus.*clamp.*got 'add'"):
        set_sbn_eps_mode("add")
    with pytest.raises(ArgumentError):
        SynchronizedBatchNorm1d(2, eps_mode="add")


@pytest.mark.parametrize("view", ["transposed", "gaps", "expanded", "flipped", "channels_last"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_any_memory_layout(view: str, replicas: int, run_parts: Any, close: Any) -> None:
    base = torch.randn(10, 12, 8, 6)
    x = {
        "transposed": base.transpose(2, 3),
        "gaps": base[:, ::2, 1:],
        "expanded": base[:, :1].expand(10, 6, 8, 6) + 0,
        "flipped": base.flip(0),
        "channels_last": base.to(memory_format=torch.channels_last),
    }[view]
    if view == "expanded":
        x = base[:, :1].expand(10, 6, 8, 6)
    layer = randomized(SynchronizedBatchNorm2d(x.shape[1], eps_mode="plus"))
    x = x.detach().requires_grad_()
    dy = torch.randn(x.shape)
    expected = undivided(layer, x, dy, 0.1)
    y = torch.cat(run_parts(layer, x.chunk(replicas))) if replicas > 1 else layer(x)
    if view == "channels_last" and replicas == 1:
        assert y.is_contiguous(memory_format=torch.channels_last)
    y.backward(dy)
    close(y, expected["y"])
    close(x.grad, expected["x"])


@pytest.mark.parametrize(("ours", "theirs", "shape"), PAIRS)
def test_class_relations_and_state_as_torch_users_expect(
    ours: Any, theirs: Any, shape: Any
) -> None:
    layer, twin = randomized(ours(5)), theirs(5)
    assert isinstance(layer, _BatchNorm)
    twin.load_state_dict(layer.state_dict())
    layer.load_state_dict(twin.state_dict())
    assert list(layer.state_dict()) == list(twin.state_dict())
    assert layer.extra_repr() == twin.extra_repr()
    assert [n for n, _ in layer.named_parameters()] == ["weight", "bias"]
    layer(torch.randn(shape))
    layer.reset_running_stats()
    assert layer.num_batches_tracked == 0
    assert layer.running_var.eq(1).all()
    layer.reset_parameters()
    assert layer.weight.eq(1).all()


def by_torch_save(layer: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), by_torch_save]
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_copies_work_like_the_original(clone: Any, wrapped: bool) -> None:
    layer: Any = randomized(SynchronizedBatchNorm2d(3, eps_mode="clamp"))
    model = DataParallelWithCallback(layer, replicas=2) if wrapped else layer
    x = torch.randn(4, 3, 2, 2)
    model(x)
    twin = clone(model)
    torch.testing.assert_close(twin(x), copy.deepcopy(model)(x))


@pytest.mark.parametrize("replicas", [1, 3])
def test_eval_uses_running_statistics_and_leaves_them(replicas: int, close: Any) -> None:
    layer = randomized(SynchronizedBatchNorm2d(3)).eval()
    before = copy.deepcopy(layer.state_dict())
    twin = nn.BatchNorm2d(3).eval()
    twin.load_state_dict(before)
    x = torch.randn(6, 3, 4, 4, requires_grad=True)
    x_twin = x.detach().clone().requires_grad_()
    y = DataParallelWithCallback(layer, replicas=replicas)(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    twin(x_twin).backward(dy)
    close(y, twin(x_twin).detach())
    close(x.grad, x_twin.grad)
    close(layer.weight.grad, twin.weight.grad, 10)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])


def test_one_value_in_all_is_torchs_value_error(run_parts: Any) -> None:
    text = r"Expected more than 1 value per channel when training, got input size .*\[1, 3"
    x = torch.randn(1, 3)
    with pytest.raises(ValueError, match=text):
        DataParallelWithCallback(SynchronizedBatchNorm1d(3), replicas=3)(x)
    layer, clamping = SynchronizedBatchNorm1d(3), SynchronizedBatchNorm1d(3, eps_mode="clamp")
    for fails in (lambda: run_parts(layer, [x, x[:0]]), lambda: clamping(x)):
        with pytest.raises(BatchSizeError, match=text):
            fails()
    assert layer.num_batches_tracked == clamping.num_batches_tracked == 0


@pytest.mark.parametrize(
    ("layer", "x", "error", "text"),
    [
        (
            nn.Sequential(nn.Identity(), SynchronizedBatchNorm2d(4)),
            torch.randn(6, 3, 2, 2),
            ShapeError,
            r"^1 \(SynchronizedBatchNorm2d\): expected 4 channels",
        ),
        (SynchronizedBatchNorm2d(3), torch.randn(6, 3, 2), ShapeError, "expected 4D input"),
        (SynchronizedBatchNorm1d(3), torch.randn(6, 3, 2, 2), ShapeError, "expected 2D or 3D"),
        (SynchronizedBatchNorm3d(3), torch.randn(6, 3), ShapeError, "expected 5D input"),
        (SyncBatchNorm(3), torch.randn(6), ShapeError, "at least 2D"),
        (SynchronizedBatchNorm1d(3), torch.ones(6, 3).int(), DTypeError, "got torch.int32"),
        (SynchronizedBatchNorm1d(3), torch.randn(6, 3).double(), DTypeError, "torch.float32"),
        (SynchronizedBatchNorm1d(3).double(), torch.randn(6, 3), DTypeError, "torch.float64"),
    ],
)
def test_bad_input_of_replicas_gets_one_clear_error(
    layer: Any, x: Tensor, error: Any, text: str
) -> None:
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(error, match=text) as caught:
        DataParallelWithCallback(layer, replicas=3)(x)
    assert "got" in str(caught.value)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("argument", [{"eps": 0}, {"eps": -1.0}, {"momentum": 2}, {"momentum": -1}])
def test_bad_settings_are_named(argument: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(argument))):
        SynchronizedBatchNorm2d(3, **argument)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_plain_reimplementation_is_the_same_layer(momentum: float | None, close: Any) -> None:
    plain = BatchNorm2dReimpl(3, eps=1e-3, momentum=momentum).double()
    twin = nn.BatchNorm2d(3, eps=1e-3, momentum=momentum).double()
    for _ in range(2):
        x = torch.randn(4, 3, 5, 5, dtype=torch.float64, requires_grad=True)
        x_twin = x.detach().clone().requires_grad_()
        dy = torch.randn_like(x)
        y, y_twin = plain(x), twin(x_twin)
        y.backward(dy)
        y_twin.backward(dy)
        close(y, y_twin, 4)  # the own kernel of torch for (40000, C) is off by 2e-5
        close(x.grad, x_twin.grad, 4)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name])
    plain.eval(), twin.eval()
    close(plain(x), twin(x_twin))
    with pytest.raises(ValueError, match="more than 1 value"):
        plain.train()(torch.randn(1, 3, 1, 1, dtype=torch.float64))
    assert plain.num_batches_tracked == 2
    before = plain.running_var.clone()
    assert plain(torch.randn(0, 3, 2, 2, dtype=torch.float64)).shape == (0, 3, 2, 2)
    assert torch.equal(plain.running_var, before)
