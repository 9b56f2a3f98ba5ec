"""Shared by the tests of the CuPy backend: arrays on the emulated device, groups of members there.

`fake_cupy` stands for CuPy. What is right is computed by the same calls with NumPy arrays in
float64.
"""

from __future__ import annotations

import contextlib
import sys

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from fake_cupy import Device, Stream, log

from syncbn_core import BatchNorm
from syncbn_core.comm import NCCLCommunicator, run_in_threads, thread_group

BACKEND = "syncbn_core.backends.cuda.cupy"  # imported anew for each file of tests, and
ARRAYS = "syncbn_core.cupy_arrays"
TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def to_device(values):
    return None if values is None else sys.modules["cupy"].asarray(values)


def to_host(value):
    return value.get() if isinstance(value, fake_cupy.ndarray) else value


def as_float64(values):
    return None if values is None else np.asarray(values, np.float64)


def close(actual, expected, dtype, what=""):
    actual, expected = as_float64(to_host(actual)), np.asarray(expected)
    bound = TOLERANCE[dtype] * (1 + np.abs(expected).max(initial=0))
    assert actual.shape == expected.shape, what
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound, err_msg=what)


# shape of what is uploaded, and the (N, C, ...) view of it
LAYOUTS = {
    "NCHW": ((2, 5, 3, 4), lambda a: a),
    "long planes": ((2, 3, 37, 40), lambda a: a),
    "channels last": ((2, 3, 4, 8), lambda a: a.transpose(0, 3, 1, 2)),
    "(N, C)": ((9, 4), lambda a: a),
    "(N, C) by columns": ((4, 9), lambda a: a.T),
    "N last": ((3, 4, 5), lambda a: a.transpose(2, 0, 1)),
    "transposed": ((2, 3, 5, 4), lambda a: a.transpose(0, 1, 3, 2)),
    "sliced": ((2, 4, 5, 6), lambda a: a[:, 1:, 1:4, ::2]),
    "flipped": ((3, 2, 6), lambda a: a[::-1, :, ::-1]),
    "planes, not at a multiple of 16 bytes": ((193,), lambda a: a[1:].reshape(2, 3, 32)),
    "rows, not at a multiple of 16 bytes": ((73,), lambda a: a[1:].reshape(9, 8)),
}
SPLIT = {  # several blocks per channel, so scratch and block counters
    "planes": ((4, 2, 2048), lambda a: a),
    "ragged planes": ((3, 2, 4099), lambda a: a),
    "rows": ((1300, 8), lambda a: a),
    "rows in groups": ((11500, 3), lambda a: a),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
OTHERS = ("float64", "float16", "bfloat16")


def numpy_dtype(dtype):
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def pair(rng, layout, dtype="float32", mean=3.0):
    """The same array on the device, and in float64 on the host."""
    named = {**LAYOUTS, **SPLIT}
    shape, view = named[layout] if isinstance(layout, str) else (layout, lambda a: a)
    values = rng.normal(mean, 2, shape).astype(numpy_dtype(dtype))
    return view(to_device(values)), as_float64(view(values))


def parameters(rng, channels, dtype="float32"):
    return rng.normal(1, 0.3, channels).astype(dtype), rng.normal(size=channels).astype(dtype)


# ------------------------------------------------------- members in threads, and where they run


@contextlib.contextmanager
def one_stream(rank):
    yield


@contextlib.contextmanager
def streams(rank):
    with Stream(non_blocking=True):
        yield


@contextlib.contextmanager
def two_devices(rank):
    with Device(rank % 2), Stream():
        yield


PLACES = [one_stream, streams, two_devices]
places = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)


def in_group(size, place, member, nccl=False, **settings):
    """Results of `member(rank, communicator)`, each in its thread, at its place."""
    group = thread_group(size, timeout=60)
    identifier = NCCLCommunicator.new_id()

    def run(rank):
        with place(rank):
            if nccl:
                own = NCCLCommunicator(rank, size, identifier, timeout=30, **settings)
                return member(rank, own)
            return member(rank, group[rank])

    return run_in_threads(
        [lambda rank=rank: run(rank) for rank in range(size)],
        abort=group[0].abort,
        leave=lambda rank: group[rank].leave(),
    )


def train(parts, grads, place, nccl=False, **settings):
    """Two steps and an eval of a layer per member: arrays by member."""

    def member(rank, own):
        layer = BatchNorm(
            parts[0].shape[1], device="cuda", dtype=np.float64, communicator=own, **settings
        )
        results = []
        for scale in (1, 2):
            x, dy = to_device(parts[rank] * scale), to_device(grads[rank])
            log.transfers.clear()
            results += [layer(x), layer.backward(dy)]
            del x, dy  # memory is free for others as early as it can be
        gradients = own.all_reduce(layer.weight_grad)
        results += [gradients, *layer.state_dict().values()]
        return [to_host(array) for array in results]

    return in_group(len(parts), place, member, nccl)


def train_alone(parts, grads, **settings):
    layer = BatchNorm(parts[0].shape[1], dtype=np.float64, **settings)
    results = []
    for scale in (1, 2):
        y = layer(np.concatenate(parts) * scale)
        results += [y, layer.backward(np.concatenate(grads))]
    return [*results, layer.weight_grad, *layer.state_dict().values()]


def check_group(rows, place, rng, nccl=False, **settings):
    parts = [rng.normal(3, 2, (n, 2, 3)) for n in rows]
    grads = [rng.normal(size=part.shape) for part in parts]
    members = train(parts, grads, place, nccl, **settings)
    expected = train_alone(parts, grads, **settings)
    for step in range(4):
        close(np.concatenate([member[step] for member in members]), expected[step], "float64")
    for member in members:
        for actual, wanted, first in zip(member[4:], expected[4:], members[0][4:], strict=True):
            np.testing.assert_array_equal(actual, first, "members differ")
            close(actual, wanted, "float64")


@contextlib.contextmanager
def captured(stream):
    fake_cupy.capturing.add(stream.ptr)
    try:
        yield
    finally:
        fake_cupy.capturing.discard(stream.ptr)
