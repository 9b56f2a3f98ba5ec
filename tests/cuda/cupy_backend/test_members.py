"""Groups of members on streams and devices equal the undivided batch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from cupy_arrays import (
    PLACES,
    check_group,
    close,
    in_group,
    one_stream,
    places,
    streams,
    to_device,
    to_host,
    two_devices,
)
from fake_cupy import Device, log

from syncbn_core import BatchNorm, functional
from syncbn_core.errors import BatchSizeError, ShapeError


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
        log.launches.clear()
        in_group(1, place, member)
        assert len(log.launches) == 4
        in_group(3, place, member)
        assert len(log.launches) == 4 + 3 * 4


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
