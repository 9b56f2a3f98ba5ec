"""Block counters of streams that run side by side, and of captured CUDA graphs."""

from __future__ import annotations

import sys

from cupy_arrays import (
    BACKEND,
    captured,
    close,
    pair,
    streams,
    to_device,
    to_host,
)
from fake_cupy import Stream

from syncbn_core import functional
from syncbn_core.comm import run_in_threads


def test_channels_over_several_blocks_on_streams_side_by_side(rng):
    """Each alone: what a launch counts in, and its partial sums, are no other's."""
    values = rng.normal(3, 2, (4, 2, 2048))

    def member(rank):
        with streams(rank):
            x = to_device(values * (rank + 1))
            y, saved = functional.batch_norm_forward(x)
            return to_host(y), to_host(functional.batch_norm_backward(x, saved).x)

    results = run_in_threads([lambda rank=rank: member(rank) for rank in range(2)])
    for rank, result in enumerate(results):
        y, saved = functional.batch_norm_forward(values * (rank + 1))
        close(result[0], y, "float64")
        close(result[1], functional.batch_norm_backward(values * (rank + 1), saved).x, "float64")


def test_the_counters_of_the_default_stream_are_kept(rng, gpu):
    x, _ = pair(rng, "planes")
    functional.batch_norm_forward(x)
    (scratch,) = sys.modules[BACKEND].OPERATIONS.scratch.values()
    gpu.launches.clear()
    _, saved = functional.batch_norm_forward(x)
    functional.batch_norm_backward(x, saved)
    assert sum(scratch.partials in launch.stored_bytes for launch in gpu.launches) == 2


def test_nothing_is_kept_of_streams_that_may_end_nor_of_graphs(rng):
    with Stream() as current:
        x, _ = pair(rng, "planes")
        _, saved = functional.batch_norm_forward(x)
        functional.batch_norm_backward(x, saved)
        with captured(current):
            _, saved = functional.batch_norm_forward(x)
            functional.batch_norm_backward(x, saved)
    assert not sys.modules[BACKEND].OPERATIONS.scratch
