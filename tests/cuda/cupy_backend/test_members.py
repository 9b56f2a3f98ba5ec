"""Groups of members on streams and devices equal the undivided batch."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from cupy_arrays import (
    PLACES,
    check_group,
    close,
    in_group,
    one_stream,
    pair,
    places,
    streams,
    to_device,
    to_host,
    two_devices,
)
from fake_cupy import Device, races

from syncbn_core import BatchNorm, functional
from syncbn_core.errors import BatchSizeError, ShapeError, SyncBNError


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        *(((2, 0, 1), place) for place in PLACES),
        *((rows, place) for rows in ((3, 2, 4), (0, 3)) for place in (streams, two_devices)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_members_equal_the_undivided_batch_in_every_place(rows, place, rng):
    check_group(rows, place, rng)


def test_members_that_clamp_equal_the_undivided_batch(rng):
    check_group((3, 1), two_devices, rng, eps=3.0, eps_mode="clamp", momentum=None)


@places
def test_one_row_in_all_is_refused_by_every_member(place):
    def member(rank, own):
        layer = BatchNorm(3, device="cuda", communicator=own)
        with pytest.raises(BatchSizeError):
            layer(to_device(np.ones((int(rank == 1), 3), "float32")))
        assert int(layer.num_batches_tracked) == 0

    in_group(2, place, member)


@places
def test_an_empty_batch_of_all_members(place):
    def member(rank, own):
        layer = BatchNorm(3, device="cuda", communicator=own)
        x = to_device(np.ones((0, 3), "float32"))
        assert layer(x).shape == layer.backward(x).shape == (0, 3)
        return int(layer.num_batches_tracked), to_host(layer.running_var)

    for count, var in in_group(2, place, member):
        assert count == 1
        np.testing.assert_array_equal(var, np.ones(3))


def test_members_with_the_current_device_elsewhere(rng):
    parts = [rng.normal(size=(2, 3)) for _ in range(2)]

    def member(rank, own):
        layer = BatchNorm(3, device=f"cuda:{rank}", dtype=np.float64, communicator=own)
        with Device(rank):
            x = to_device(parts[rank])
        with Device(1 - rank):
            y, dx = layer(x), layer.backward(x)
        assert y.device == dx.device == Device(rank)
        return to_host(y), to_host(dx)

    results = in_group(2, one_stream, member)
    twin = BatchNorm(3, dtype=np.float64)
    close(np.concatenate([y for y, _ in results]), twin(np.concatenate(parts)), "float64")
    close(
        np.concatenate([dx for _, dx in results]),
        twin.backward(np.concatenate(parts)),
        "float64",
    )


def test_a_step_of_members_launches_two_kernels_per_direction():
    def member(rank, own):
        layer = BatchNorm(3, device="cuda", communicator=own)
        x = to_device(np.ones((2, 3), "float32"))
        layer(x)
        layer.backward(x)

    for place in (one_stream, two_devices):
        races.launches.clear()
        in_group(1, place, member)
        assert len(races.launches) == 4
        in_group(3, place, member)
        assert len(races.launches) == 4 + 3 * 4


@places
@pytest.mark.parametrize("kind", ["(3,)", "(2, 3)", "()", "every second", "by columns"])
def test_sums_of_any_shape_and_layout(kind, place, rng):
    values = rng.normal(size=(3, 2, 3))
    every = threading.Barrier(3, timeout=30)

    def member(rank, own):
        mine = values[rank]
        array, here = {
            "(3,)": lambda: (to_device(mine[0]), mine[0]),
            "(2, 3)": lambda: (to_device(mine), mine),
            "()": lambda: (to_device(mine[0, 0]), mine[0, 0]),
            "every second": lambda: (to_device(mine)[0, ::2], mine[0, ::2]),
            "by columns": lambda: (to_device(mine.T.copy()).T, mine),
        }[kind]()
        total = own.all_reduce(array)
        assert total.device == array.device
        with total.device:
            total += float(rank)  # it is the member's own
        every.wait()
        return here, to_host(total), to_host(array)

    results = in_group(3, place, member)
    expected = sum(here for here, _, _ in results)
    for rank, (here, total, kept) in enumerate(results):
        close(total, expected + rank, "float64")
        np.testing.assert_array_equal(kept, here)


@places
def test_sums_of_two_dtypes_do_not_write_beyond_anybodys_memory(place):
    def member(rank, own):
        values = np.full(3, 1.5, "float64" if rank == 0 else "float32")
        return to_host(own.all_reduce(to_device(values)))

    try:
        results = in_group(2, place, member)
    except SyncBNError:
        return
    for total in results:
        np.testing.assert_array_equal(total, np.full(3, 3.0))


def test_members_may_be_on_host_and_device(rng):
    def member(rank, own):
        x = np.full((2, 3), float(rank))
        y, _ = functional.batch_norm_forward(x if rank else to_device(x), communicator=own)
        return (y if rank else to_host(y)).tolist()

    for rank, y in enumerate(in_group(2, one_stream, member)):
        close(np.array(y), np.full((2, 3), (rank - 0.5) / np.sqrt(0.25 + 1e-5)), "float64")


def test_members_of_other_channels_are_an_error():
    def member(rank, own):
        functional.batch_norm_forward(
            to_device(np.ones((2, 3 + rank), "float32")), communicator=own
        )

    with pytest.raises(ShapeError, match="same number of channels"):
        in_group(2, streams, member)


class Own:
    """A communicator of a user's own: members that all have the same part."""

    rank = 0

    def __init__(self, size):
        self.size = size

    def all_gather(self, values, call=None):
        xp = np if isinstance(values, np.ndarray) else sys.modules["cupy"]
        return xp.concatenate([values[None]] * self.size)

    def all_reduce(self, values, call=None):
        xp = np if isinstance(values, np.ndarray) else sys.modules["cupy"]
        gaps = xp.empty((2, 2 * values.shape[1]))
        gaps[:, ::2] = values * float(self.size)
        return gaps[:, ::2]  # an array of any layout will do


@pytest.mark.parametrize("size", [1, 17])
def test_any_communicator_will_do(size, rng):
    x, host = pair(rng, "NCHW", "float64")
    dy, grad = pair(rng, "NCHW", "float64")
    y, saved = functional.batch_norm_forward(x, communicator=Own(size))
    assert races.launches == ["planes_moments", "planes_normalize"]
    dx = functional.batch_norm_backward(dy, saved, communicator=Own(size)).x
    expected, kept = functional.batch_norm_forward(host, communicator=Own(size))
    close(y, expected, "float64")
    close(dx, functional.batch_norm_backward(grad, kept, communicator=Own(size)).x, "float64")


def test_the_example_trains_on_streams_as_it_does_on_numpy():
    for package in ("sklearn", "rich", "tqdm"):
        pytest.importorskip(package)
    path = Path(__file__).parents[3] / "examples" / "cupy_pipeline.py"
    spec = importlib.util.spec_from_file_location("cupy_pipeline", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.TRAINED = 1780  # the others are taken at once, through all of the network
    xp, which = example.array_library()
    assert xp is sys.modules["cupy"]
    assert which.startswith("On CuPy")
    on_the_host, _ = example.train(np, 1, steps=2)[0]
    for state, _ in example.train(xp, 3, steps=2):
        for name, values in on_the_host.items():
            close(state[name], values, "float64", name)
