from __future__ import annotations

import contextlib
import copy
import gc

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import syncbn_torch  # noqa: E402
from syncbn_torch.backends import cuda  # noqa: E402
from syncbn_torch.forward import always_ours  # noqa: E402
from syncbn_torch.inplace import InPlaceABN  # noqa: E402

DTYPES = {"float32": 2e-5, "float64": 1e-12, "float16": 4e-3, "bfloat16": 3e-2}
SHAPES = [
    (8, 64, 56, 56),
    (4, 3, 113, 57),
    (32, 130, 7, 7),
    (32, 256, 14, 14),
    (2, 2048, 1, 1),
    (6, 1, 33, 5),
    (5, 8, 2, 1),
    (300, 96),
    (64, 7, 3),
    (2, 16, 8, 9, 10),
    (1, 4, 700, 900),
]


@pytest.fixture(autouse=True)
def ours():
    with always_ours():
        yield


@pytest.fixture(autouse=True)
def give_memory_back():
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def layer_for(channels, device, **settings):
    torch.manual_seed(channels)
    layer = syncbn_torch.SyncBatchNorm(channels, **settings).to(device)
    with torch.no_grad():
        layer.weight.normal_(1, 0.3)
        layer.bias.normal_()
        layer.running_mean.normal_()
    return layer


def twin_of(layer):
    """Torch's layer, in float64, with the state of ours."""
    twin = nn.BatchNorm1d(layer.num_features, layer.eps, layer.momentum).double()
    twin._check_input_dim = lambda input: None
    twin.to(layer.weight.device).load_state_dict(copy.deepcopy(layer.state_dict()))
    return twin


def batch(shape, dtype, device, channels_last=False):
    generator = torch.Generator().manual_seed(sum(shape))
    x = (torch.randn(shape, generator=generator) * 2 + 3).to(device, getattr(torch, dtype))
    if channels_last and len(shape) in (4, 5):
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        x = x.contiguous(memory_format=formats[len(shape)])
    return x


def close(actual, expected, tolerance):
    scale = 1 + expected.abs().max().item() if expected.numel() else 1
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance * scale
    )


def run_both(layer, x, dy, function=lambda y: y):
    twin = twin_of(layer)
    wide = x.detach().double().requires_grad_()
    expected = function(twin(wide))
    expected.backward(dy.double())
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy)
    pairs = [(y, expected), (x.grad, wide.grad)]
    pairs += zip(layer.parameters(), twin.parameters(), strict=True)
    ours = [a.grad if isinstance(a, nn.Parameter) else a for a, _ in pairs]
    theirs = [b.grad if isinstance(b, nn.Parameter) else b for _, b in pairs]
    names = ["y", "dx", "dweight", "dbias", "running_mean", "running_var"]
    ours += [layer.running_mean, layer.running_var]
    theirs += [twin.running_mean, twin.running_var]
    return dict(zip(names, zip(ours, theirs, strict=True), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_equals_torch_in_float64(shape, channels_last, dtype, device):
    layer = layer_for(shape[1], device, dtype=torch.float64 if dtype == "float64" else None)
    x = batch(shape, dtype, device, channels_last)
    dy = torch.randn(shape).to(x)
    for name, (actual, expected) in run_both(layer, x, dy).items():
        activation = name in ("y", "dx")
        tolerance = DTYPES[dtype if activation or dtype == "float64" else "float32"]
        close(actual, expected, tolerance if activation else tolerance * 10)
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu", "hardswish", "relu6"])
@pytest.mark.parametrize("shape", [(4, 8, 16, 16), (6, 8, 7, 7), (3, 3, 128, 96), (64, 8)], ids=str)
def test_an_activation_equals_torch_in_float64(shape, activation, dtype, device):
    own = torch.float64 if dtype == "float64" else None
    layer = layer_for(shape[1], device, dtype=own, activation=activation)
    x = batch(shape, dtype, device)
    found = run_both(layer, x, torch.randn(shape).to(x), getattr(nn.functional, activation))
    for name, (actual, expected) in found.items():
        close(actual, expected, DTYPES[dtype] * (1 if name in ("y", "dx") else 10))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("activation", ["leaky_relu", "elu", "identity"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_in_place_equals_two_operations(channels_last, activation, dtype, device):
    layer = InPlaceABN(8, activation=activation, activation_param=0.2).to(device)
    nn.init.normal_(layer.weight, 1, 0.2)
    twin = copy.deepcopy(layer).double()
    x = batch((6, 8, 12, 12), dtype, device, channels_last)
    wide, dy = x.double().requires_grad_(), torch.randn(x.shape).to(x)
    z = F.batch_norm(wide, None, None, twin.weight.abs() + layer.eps, twin.bias, True)
    expected = twin._applied.apply_(z.clone())
    wanted = torch.autograd.grad(expected, [wide, twin.weight, twin.bias], dy.double())
    leaf = x.clone().requires_grad_()
    given = leaf.clone()
    y = layer(given)
    assert y.data_ptr() == given.data_ptr()
    found = torch.autograd.grad(y, [leaf, layer.weight, layer.bias], dy)
    for actual, value in zip((y, *found), (expected, *wanted), strict=True):
        close(actual, value, DTYPES[dtype] * 10)


# Each kernel on a few numbers, beside float64 on the CPU: compute-sanitizer runs these too.
EACH_KERNEL = [
    (4, 8, 16, 16),  # whole vectors
    (6, 8, 7, 7),  # misaligned planes
    (9, 4, 3, 1),  # planes shorter than a vector
    (3, 3, 128, 96),
    (3, 1, 97, 101),  # one channel, many blocks; with a tail
    (70, 8, 7, 7),
    (2, 130, 6, 6),
    (32, 64, 1, 1),  # one value per plane
    (11, 16, 31),
    (64, 8),
    (33, 130),
    (2100, 1),
]
UNUSUAL = {
    "momentum None": {"momentum": None},
    "no affine": {"affine": False},
    "no statistics": {"track_running_stats": False},
    "clamp": {"eps_mode": "clamp", "eps": 1.0},
    "parameters of x": {"dtype": ...},
}


def equals_the_cpu(shape, dtype, device, layout="contiguous", offset=0, settings=None):
    """Two steps. `offset`: elements by which x, and in the second step dy, are misaligned."""
    torch.manual_seed(sum(shape))
    kind = getattr(torch, dtype)
    settings = {"dtype": torch.float64 if dtype == "float64" else None, **(settings or {})}
    settings["dtype"] = kind if settings["dtype"] is ... else settings["dtype"]
    layer = syncbn_torch.SyncBatchNorm(shape[1], **settings)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 1, 0.3)
    twin = copy.deepcopy(layer).double()
    layer.to(device)

    def placed(values, offset):
        if layout == "sliced":
            return F.pad(values, (1, 1), value=float("nan")).to(device)[..., 1:-1]
        if layout == "channels last":
            values = values.contiguous(memory_format=torch.channels_last)
        memory = torch.empty(values.numel() + offset, dtype=kind, device=device)
        return memory.as_strided(values.shape, values.stride(), offset).copy_(values)

    for step in range(2):
        values, dy = (torch.randn(shape).to(kind) for _ in range(2))
        values = values * 0.5 + 3
        expanded = layout == "expanded dy"
        dy = dy[:1, :1].expand(shape) if expanded else dy
        x, wide = placed(values, offset).requires_grad_(), values.double().requires_grad_()
        layer.zero_grad(), twin.zero_grad()
        y, expected = layer(x), twin(wide)
        y.backward(dy[:1, :1].to(device).expand(shape) if expanded else placed(dy, step * offset))
        expected.backward(dy.double())
        pairs = [
            (y, expected),
            (x.grad, wide.grad),
            *zip(layer.buffers(), twin.buffers(), strict=True),
        ]
        both = zip(layer.parameters(), twin.parameters(), strict=True)
        pairs += [(own.grad, other.grad) for own, other in both]
        for actual, wanted in pairs:
            own = str(actual.dtype).removeprefix("torch.")
            close(actual.detach().cpu(), wanted.detach(), DTYPES.get(own, 0))


@pytest.mark.parametrize("settings", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sanitized_settings(dtype, layout, settings, device):
    equals_the_cpu((6, 8, 5, 5), dtype, device, layout, settings=settings)


@pytest.mark.parametrize("layout", ["sliced", "expanded dy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sanitized_layouts(dtype, layout, device):
    equals_the_cpu((6, 8, 5, 5), dtype, device, layout)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", EACH_KERNEL, ids=str)
def test_sanitized_shapes(shape, dtype, layout, offset, device):
    if layout == "channels last" and len(shape) != 4:
        pytest.skip("has four dimensions")
    equals_the_cpu(shape, dtype, device, layout, offset)


@pytest.mark.parametrize("mean", [1e3, 1e6])
@pytest.mark.parametrize("shape", [(32, 16, 28, 28), (32, 16, 7, 7), (4096, 16)], ids=str)
def test_digits_survive_a_large_mean(shape, mean, device):
    layer = layer_for(shape[1], device)
    x = (torch.randn(shape, dtype=torch.float64) + mean).float().to(device)
    dy = torch.randn(shape).to(device)
    for name, (actual, expected) in run_both(layer, x, dy).items():
        close(actual, expected, 1e-5 if name in ("y", "dx") else 1e-4)


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("shape", [(4, 6, 8, 8), (4, 6, 7, 7), (40, 8)], ids=str)
def test_misaligned_storage(shape, dtype, offset, device):
    layer = layer_for(shape[1], device, dtype=torch.float64 if dtype == "float64" else None)
    size = torch.Size(shape).numel()
    buffer = torch.randn(size + 8).to(device, getattr(torch, dtype))
    x = buffer[offset : offset + size].view(shape)
    dy = torch.randn(shape).to(x)
    for name, (actual, expected) in run_both(layer, x, dy).items():
        close(actual, expected, DTYPES[dtype] * (1 if name in ("y", "dx") else 10))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_results_are_bitwise_the_same_on_every_run(channels_last, dtype, device, only_cuda):
    x = batch((16, 24, 33, 31), dtype, device, channels_last)
    dy = torch.randn(x.shape).to(x)
    seen = set()
    for _ in range(5):
        layer = layer_for(24, device, dtype=torch.float64 if dtype == "float64" else None)
        own = x.detach().requires_grad_()
        y = layer(own)
        y.backward(dy)
        tensors = (y, own.grad, layer.weight.grad, layer.bias.grad, layer.running_var)
        parts = (t.detach().contiguous().view(torch.uint8).cpu() for t in tensors)
        seen.add(b"".join(p.numpy().tobytes() for p in parts))
    assert len(seen) == 1


def test_nothing_waits_for_the_device(device, only_cuda):
    layer = layer_for(64, device)
    x = batch((8, 64, 14, 14), "float32", device).requires_grad_()
    layer(x).sum().backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        layer(x).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_capture_in_a_graph(dtype, channels_last, momentum, device, only_cuda):
    layer = layer_for(32, device, momentum=momentum)
    start = copy.deepcopy(layer.state_dict())
    eager = copy.deepcopy(layer)
    x = batch((16, 32, 28, 28), dtype, device, channels_last).requires_grad_()
    dy = torch.randn(x.shape).to(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            layer(x).backward(dy)
    torch.cuda.current_stream().wait_stream(side)
    layer.load_state_dict(start)
    layer.zero_grad(set_to_none=True)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
        y.backward(dy)
    layer.load_state_dict(start)
    for step in range(3):
        fresh = batch((16, 32, 28, 28), dtype, device) + step
        with torch.no_grad():
            x.copy_(fresh)
        graph.replay()
        own = x.detach().clone().requires_grad_()
        eager.zero_grad(set_to_none=True)
        expected = eager(own)
        expected.backward(dy)
        for actual, wanted in [
            (y, expected),
            (x.grad, own.grad),
            (layer.weight.grad, eager.weight.grad),
            (layer.running_mean, eager.running_mean),
            (layer.running_var, eager.running_var),
            (layer.num_batches_tracked, eager.num_batches_tracked),
        ]:
            assert torch.equal(actual, wanted)


def test_block_counters_are_in_no_pool_of_the_user(device, only_cuda):
    layer, x = layer_for(8, device), batch((16, 8, 40, 40), "float32", device)
    cuda.OPERATIONS.scratch.clear()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        layer(x)
    torch.cuda.synchronize()
    (kept,) = cuda.OPERATIONS.scratch.values()
    pools = [
        segment["segment_pool_id"]
        for segment in torch.cuda.memory_snapshot()
        if 0 <= kept.counters - segment["address"] < segment["total_size"]
    ]
    assert pools == [], "not torch's memory at all"


def test_streams_do_not_disturb_each_other(device, only_cuda):
    streams = [torch.cuda.Stream() for _ in range(4)]
    layers = [layer_for(8, device) for _ in streams]
    inputs = [batch((16, 8, 40, 40), "float32", device) + i for i in range(4)]
    torch.cuda.synchronize()
    outputs = []
    for _ in range(20):
        outputs = []
        for stream, layer, x in zip(streams, layers, inputs, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(layer(x))
    torch.cuda.synchronize()
    for layer, x, y in zip(layers, inputs, outputs, strict=True):
        expected = F.batch_norm(x, None, None, layer.weight, layer.bias, True)
        close(y, expected, 2e-5)


@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
@pytest.mark.parametrize("rows", [9, 7, 2])
def test_replicas_on_one_device_equal_the_undivided_batch(rows, eps_mode, device):
    layer = layer_for(6, device, eps_mode=eps_mode).double()
    single = copy.deepcopy(layer)
    model = syncbn_torch.DataParallelWithCallback(layer, device_ids=[device] * 3)
    x = batch((rows, 6, 5, 5), "float64", device)
    dy = torch.randn(x.shape).to(x)
    one, many = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(many).backward(dy)
    single(one).backward(dy)
    close(many.grad, one.grad, 1e-11)
    for ours, theirs in zip(layer.parameters(), single.parameters(), strict=True):
        close(ours.grad, theirs.grad, 1e-11)
    for ours, theirs in zip(layer.buffers(), single.buffers(), strict=True):
        close(ours, theirs, 1e-12)


@pytest.mark.parametrize("used", ["all outputs", "the last device's output"])
@pytest.mark.parametrize("side_streams", [False, True])
def test_replicas_on_several_devices(side_streams, used, only_cuda):
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two devices")
    layer = layer_for(16, torch.device("cuda", 0)).double()
    single = copy.deepcopy(layer)
    model = syncbn_torch.DataParallelWithCallback(layer, device_ids=list(range(count)))
    x = batch((4 * count + 1, 16, 9, 9), "float64", torch.device("cuda", 0))
    dy = torch.randn(x.shape).to(x)
    first = -1 if used != "all outputs" else 0
    one, many = x.clone().requires_grad_(), x.clone().requires_grad_()
    with contextlib.ExitStack() as stack:
        for device in range(count if side_streams else 0):
            torch.cuda.synchronize(device)
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        model(many)[first:].backward(dy[first:])
    torch.cuda.synchronize()
    single(one)[first:].backward(dy[first:])
    close(many.grad, one.grad, 1e-11)
    close(layer.running_var, single.running_var, 1e-12)


@pytest.mark.parametrize("shape", [(2, 2, 1 << 30), (1 << 29, 8)], ids=["planes", "rows"])
def test_more_than_2_to_the_31_elements(shape, device, only_cuda):
    """In float16, with float64 for one slice at a time: 35 GB of activations and 4 of slices."""
    free, _ = torch.cuda.mem_get_info()
    if free < 42 << 30:
        pytest.skip("needs 42 GiB of free GPU memory")
    axes, view = ((0, 2), (1, -1, 1)) if len(shape) == 3 else ((0,), (1, -1))
    axis = max(axes)

    def slices(*tensors):
        parts = (t.detach().split(shape[axis] >> 5, axis) for t in tensors)
        for part in zip(*parts, strict=True):
            yield [p.double() for p in part]

    x = torch.empty(shape, dtype=torch.float16, device=device).normal_()
    dy = torch.empty_like(x).normal_()
    x[-1:] += 1
    dy[-1:] += 1
    layer = layer_for(shape[1], device)
    y = layer(x.requires_grad_())
    y.backward(dy)
    count = x.numel() // shape[1]
    mean = sum(part.sum(axes) for (part,) in slices(x)) / count
    deviations = (part - mean.view(view) for (part,) in slices(x))
    invstd = (sum(d.square().sum(axes) for d in deviations) / count + layer.eps).rsqrt()
    scale = (invstd * layer.weight).detach()
    mean_dy = sum(part.sum(axes) for (part,) in slices(dy)) / count
    pairs = slices(dy, x)
    products = (g * (part - mean.view(view)) * invstd.view(view) for g, part in pairs)
    mean_dy_xhat = sum(product.sum(axes) for product in products) / count
    close(layer.weight.grad / count, mean_dy_xhat, 1e-6)
    close(layer.bias.grad / count, mean_dy, 1e-6)
    for part, g, result, gradient in slices(x, dy, y, x.grad):
        xhat = (part - mean.view(view)) * invstd.view(view)
        close(result, xhat * layer.weight.view(view) + layer.bias.view(view), 4e-3)
        through = g - mean_dy.view(view) - xhat * mean_dy_xhat.view(view)
        close(gradient, through * scale.view(view), 4e-3)


def test_mixed_precision_and_gradient_scaling(device):
    layer = layer_for(8, device)
    model = nn.Sequential(nn.Conv2d(3, 8, 3).to(device), layer, nn.ReLU())
    x = torch.randn(4, 3, 16, 16, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = model(x)
    y.float().square().sum().backward()
    assert y.dtype is torch.bfloat16
    assert torch.isfinite(model[0].weight.grad).all()


def test_second_derivatives(device):
    layer = layer_for(3, device).double()
    twin = twin_of(layer)
    grads = []
    for module in (layer, twin):
        x = batch((3, 3, 2, 4), "float64", device).requires_grad_()
        (first,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        grads.append(torch.autograd.grad(first.pow(2).sum(), x)[0])
    close(grads[0], grads[1], 1e-8)


def test_the_kernels_are_ours(device, only_cuda):
    assert cuda.supports(torch.zeros(1, device=device))
    layer = layer_for(8, device)
    x = batch((4, 8, 16, 16), "float32", device).requires_grad_()
    layer(x).sum().backward()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        y = layer(x)
        y.backward(torch.ones_like(y))
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    for step in ("planes_moments", "planes_normalize", "planes_backward"):
        assert any(step in name for name in names), names
