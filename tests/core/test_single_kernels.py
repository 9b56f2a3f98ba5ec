"""Both steps of a direction in one kernel: bitwise what the two kernels give."""

from typing import Any

import numpy as np
import pytest
from steps import Steps

from syncbn_core import functional
from syncbn_core.backends.base import Affine
from syncbn_core.backends.cpu import numpy, operations
from syncbn_core.comm import SingleCommunicator
from syncbn_core.kernels.cpu.operands import FUSED, ROWS
from syncbn_core.moments import NormRule

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
backend = Steps(numpy.OPERATIONS)
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
    look = operations.CpuOperations._look

    def fitting(self: Any, *parts: Any) -> operations.Seen:
        seen = look(self, *parts)
        return seen._replace(code=seen.code | FUSED)

    monkeypatch.setattr(operations.CpuOperations, "_look", fitting)
    monkeypatch.setattr(operations, "most_threads", lambda: 1 if not parallel else 2)
    x, dy, weight, bias = case(shape, dtype)
    given = (weight, bias) if affine else (None, None)
    rule = NormRule(4.0, eps_mode)  # "clamp" makes the deviation of some channels a constant
    ours = backend.chosen(parallel)
    moments = backend.moments(x, parallel=parallel)
    invstd = rule.invstd(moments.var)
    expected = backend.normalize(x, moments.mean, invstd, *given, parallel=parallel)
    for out in (None, np.empty_like(x)):
        y, statistics, _ = ours.forward_single(x, Affine(*given), rule, None, out)
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(statistics.moments.mean, moments.mean)
        np.testing.assert_array_equal(statistics.moments.m2, moments.m2)
        np.testing.assert_array_equal(statistics.invstd, invstd)
        assert out is None or y is out
    clamped = rule.clamped(moments.var)
    first, second = backend.backward_reduce(x, dy, moments.mean, invstd, parallel=parallel)
    scale = weight if affine else 1.0
    means = first * scale / moments.count, second * scale / moments.count
    if clamped is not None:
        means = means[0], np.where(clamped, 0.0, means[1])
    operands = (x, dy, moments.mean, invstd, given[0])
    dx = backend.backward_input(*operands, *means, parallel=parallel)
    done = ours.backward_single(x, dy, statistics, Affine(given[0]), rule)
    dtype = x.dtype if given[0] is None else given[0].dtype
    np.testing.assert_array_equal(done.x, dx)
    with np.errstate(over="ignore"):  # sums of a float16 activation may exceed float16
        expected_gradients = second.astype(dtype), first.astype(dtype)
    np.testing.assert_array_equal(done[1:], expected_gradients)


def test_layers_alone_take_it_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    original = operations.launch

    def launch(step: str, code: int, *arguments: Any) -> None:
        ran.append(("rows_" if code & ROWS else "planes_") + step)
        original(step, code, *arguments)

    monkeypatch.setattr(operations, "launch", launch)
    x, dy, weight, bias = case((6, 16, 7, 7), "f4")
    y, saved = functional.batch_norm_forward(x, weight, bias)
    functional.batch_norm_backward(dy, saved)
    assert ran == ["planes_forward", "planes_backward"]
    ran.clear()
    alone = SingleCommunicator()
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
