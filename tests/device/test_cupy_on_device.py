from __future__ import annotations

import numpy as np
import pytest

from syncbn_core import BatchNorm
from syncbn_core.comm import run_in_threads, thread_group
from syncbn_core.functional import batch_norm_backward, batch_norm_eval, batch_norm_forward


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture(autouse=True)
def cuda_only(only_cuda):
    pass


def compared(actual, expected, tolerance):
    np.testing.assert_allclose(actual.get(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize("shape", [(8, 16, 28, 28), (8, 5, 7, 7), (30, 24, 1, 1)], ids=str)
def test_cupy_equals_numpy(shape, axes, dtype, cupy):
    rng = np.random.default_rng(0)
    order = np.argsort(axes)
    x = rng.normal(3, 2, [shape[a] for a in axes]).astype(dtype).transpose(order)
    dy = rng.normal(size=shape).astype(dtype)
    weight, bias = rng.normal(size=(2, shape[1])).astype(np.float32)
    stats = [rng.normal(size=shape[1]), rng.uniform(1, 2, shape[1]), np.zeros((), np.int64)]
    names = ("running_mean", "running_var", "num_batches_tracked")
    wide = [a.copy() for a in stats]
    y, saved = batch_norm_forward(
        x.astype(float), weight, bias, **dict(zip(names, wide, strict=True))
    )
    expected = batch_norm_backward(dy.astype(float), saved)
    device = [cupy.asarray(a) for a in stats]
    on = [cupy.asarray(a) for a in (x, weight, bias)]
    z, kept = batch_norm_forward(*on, **dict(zip(names, device, strict=True)))
    gradients = batch_norm_backward(cupy.asarray(dy), kept)
    tolerance = {2: 5e-3, 4: 2e-5, 8: 1e-11}[np.dtype(dtype).itemsize]
    assert z.dtype == dtype
    compared(z, y, tolerance)
    compared(gradients.x, expected.x, tolerance)
    scale = max(np.abs(expected.weight).max(), np.abs(expected.bias).max())
    compared(gradients.weight / scale, expected.weight / scale, 1e-4)
    compared(gradients.bias / scale, expected.bias / scale, 1e-4)
    for actual, wanted in zip(device, wide, strict=True):
        compared(actual, wanted, 1e-4 if dtype == np.float16 else 1e-5)


def test_eval_and_layer(cupy):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(6, 4, 5, 5)).astype(np.float32)
    ours, host = BatchNorm(4, device="cuda"), BatchNorm(4)
    for _ in range(3):
        compared(ours(cupy.asarray(x)), host(x), 2e-5)
        compared(ours.backward(cupy.asarray(x)), host.backward(x), 2e-5)
    state = {name: array.get() for name, array in ours.state_dict().items()}
    host.load_state_dict(state)
    ours.load_state_dict(host.state_dict())
    compared(ours.eval()(cupy.asarray(x)), host.eval()(x), 2e-5)
    y, saved = batch_norm_eval(cupy.asarray(x), ours.running_mean, ours.running_var)
    assert saved.count is None
    assert y.shape == x.shape


@pytest.mark.parametrize("own_streams", [False, True])
def test_members_on_streams_of_their_own(own_streams, cupy):
    count = cupy.cuda.runtime.getDeviceCount()
    rng = np.random.default_rng(2)
    parts = [rng.normal(1, 2, (n, 8, 6, 6)) for n in (3, 1, 4)]
    grads = [rng.normal(size=part.shape) for part in parts]
    group = thread_group(3)

    def member(rank):
        def work():
            with cupy.cuda.Device(rank % count):
                new = cupy.cuda.Stream(non_blocking=True) if own_streams else None
                stream = new or cupy.cuda.Stream.null
                with stream:
                    x, dy = cupy.asarray(parts[rank]), cupy.asarray(grads[rank])
                    for _ in range(20):
                        y, saved = batch_norm_forward(x, communicator=group[rank])
                        gradient = batch_norm_backward(dy, saved, communicator=group[rank])
                    stream.synchronize()
                    return y.get(), gradient.x.get()

        return work

    results = run_in_threads([member(rank) for rank in range(3)], abort=group[0].abort)
    y, saved = batch_norm_forward(np.concatenate(parts))
    expected = batch_norm_backward(np.concatenate(grads), saved)
    np.testing.assert_allclose(np.concatenate([r[0] for r in results]), y, rtol=1e-11, atol=1e-11)
    joined = np.concatenate([r[1] for r in results])
    np.testing.assert_allclose(joined, expected.x, rtol=1e-11, atol=1e-11)


def test_capture_in_a_graph(cupy):
    rng = np.random.default_rng(3)
    x = cupy.asarray(rng.normal(size=(16, 8, 28, 28)).astype(np.float32))
    dy = cupy.asarray(rng.normal(size=x.shape).astype(np.float32))
    layer = BatchNorm(8, device="cuda")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        y, dx = cupy.empty_like(x), cupy.empty_like(x)

        def step():
            _, saved = batch_norm_forward(
                x,
                layer.weight,
                layer.bias,
                running_mean=layer.running_mean,
                running_var=layer.running_var,
                num_batches_tracked=layer.num_batches_tracked,
                out=y,
            )
            batch_norm_backward(dy, saved, out=dx)

        for _ in range(2):
            step()
        stream.synchronize()
        pool = cupy.cuda.MemoryPool()  # what the graph writes must belong to nobody else
        with cupy.cuda.using_allocator(pool.malloc):
            stream.begin_capture()
            step()
            graph = stream.end_capture()
        others = [cupy.ones(size, cupy.float64) for size in (17, 25, 64, 4096)]
        x[...] = cupy.asarray(rng.normal(5, 3, x.shape).astype(np.float32))
        graph.launch(stream)
        stream.synchronize()
        expected, saved = batch_norm_forward(x.get())
        np.testing.assert_allclose(y.get(), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(dx.get(), batch_norm_backward(dy.get(), saved).x, atol=1e-4)
        assert int(layer.num_batches_tracked) == 3
        assert all(bool((other == 1).all()) for other in others)
