"""Both steps of a direction in one kernel: bitwise what the two kernels give."""

from typing import Any

import numpy as np
import pytest

from syncbn_core import functional
from syncbn_core.backends.cpu import launch as cpu
from syncbn_core.backends.cpu import numpy as backend
from syncbn_core.kernels.cpu.numerics import SerialParallelKernel

SHAPES = [
    (6, 5, 7, 7),  # several short planes to a tile
    (3, 70, 65, 66),  # planes of more than a tile
    (40, 3, 33, 31),  # few channels: several chunks to each
    (1, 9, 3),
    (2, 8, 2, 3, 4),
    (300, 4, 2, 1),  # rows: short planes, joined
    (32, 70, 7, 7),  # rows in several blocks, a narrow last one
    (40, 1100),
    (301, 10),
]
Array = np.ndarray[Any, Any]


def case(shape: tuple[int, ...], dtype: str) -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(sum(shape))
    x, dy = (rng.normal(3, 2, shape).astype(dtype) for _ in range(2))
    weight, bias = rng.normal(size=(2, shape[1]))
    weight[0] = 0
    return x, dy, weight, bias


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bitwise_the_same(
    shape: tuple[int, ...],
    dtype: str,
    affine: bool,
    eps_mode: Any,
    parallel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu.Plan, "stays_near", lambda plan, arrays, parallel: True)
    monkeypatch.setattr(cpu.numba, "get_num_threads", lambda: 1 if not parallel else 2)
    x, dy, weight, bias = case(shape, dtype)
    given = (weight, bias) if affine else (None, None)
    eps = 4.0  # "clamp" freezes some channels
    moments = backend.moments(x, parallel=parallel)
    invstd = moments.invstd(eps, eps_mode)
    expected = backend.normalize(x, moments.mean, invstd, *given, parallel=parallel)
    settings: dict[str, Any] = {"eps": eps, "eps_mode": eps_mode, "parallel": parallel}
    for out in (None, np.empty_like(x)):
        done = backend.forward_alone(x, *given, out=out, **settings)
        assert done is not None
        np.testing.assert_array_equal(done[0], expected)
        np.testing.assert_array_equal(done[1].mean, moments.mean)
        np.testing.assert_array_equal(done[1].m2, moments.m2)
        np.testing.assert_array_equal(done[2], invstd)
        assert out is None or done[0] is out
    frozen = moments.var < eps if eps_mode == "clamp" else None
    first, second = backend.backward_reduce(x, dy, moments.mean, invstd, parallel=parallel)
    scale = weight if affine else 1.0
    means = first * scale / moments.count, second * scale / moments.count
    if frozen is not None:
        means = means[0], np.where(frozen, 0.0, means[1])
    operands = (x, dy, moments.mean, invstd, given[0])
    dx = backend.backward_input(*operands, *means, parallel=parallel)
    done_backward = backend.backward_alone(*operands, frozen, parallel=parallel)
    assert done_backward is not None
    for actual, wanted in zip(done_backward, (first, second, dx), strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_layers_alone_take_it_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    original = cpu._run

    def run(kernel: SerialParallelKernel, *arguments: Any) -> None:
        ran.append(kernel.serial.__name__)
        original(kernel, *arguments)

    monkeypatch.setattr(cpu, "_run", run)
    x, dy, weight, bias = case((6, 16, 7, 7), "f4")
    y, saved = functional.batch_norm_forward(x, weight, bias)
    functional.batch_norm_backward(dy, saved)
    assert ran == ["planes_forward", "planes_backward"]
    ran.clear()
    alone = functional.SingleCommunicator()
    y2, saved = functional.batch_norm_forward(x, weight, bias, communicator=alone)
    functional.batch_norm_backward(dy, saved, communicator=alone)
    assert len(ran) == 4
    np.testing.assert_array_equal(y, y2)
    ran.clear()
    big = np.ones((2, 4, 600, 600), np.float32)  # a channel is in no near cache
    functional.batch_norm_forward(big)
    assert ran == ["planes_moments", "planes_normalize"]


def test_it_may_write_over_its_input_and_keeps_nan_to_its_channel() -> None:
    x, dy, weight, bias = case((6, 16, 7, 7), "f4")
    x[2, 3, 1, 1] = np.nan
    expected, saved = functional.batch_norm_forward(x.copy(), weight, bias)
    assert np.isnan(expected[:, 3]).all()
    assert np.isfinite(np.delete(expected, 3, 1)).all()
    wanted = functional.batch_norm_backward(dy, saved).x
    assert np.isfinite(np.delete(wanted, 3, 1)).all()
    grad = dy.copy()
    np.testing.assert_array_equal(functional.batch_norm_backward(grad, saved, out=grad).x, wanted)
    y, _ = functional.batch_norm_forward(x, weight, bias, out=x)
    assert y is x
    np.testing.assert_array_equal(y, expected)
