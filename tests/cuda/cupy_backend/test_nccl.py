"""`NCCLCommunicator` over the NCCL of `fake_cupy`."""

from __future__ import annotations

import fake_cupy
import numpy as np
import pytest
from cupy_arrays import (
    captured,
    check_group,
    in_group,
    one_stream,
    streams,
    to_device,
    to_host,
    two_devices,
)
from fake_cupy import log

from syncbn_core import BatchNorm, functional
from syncbn_core.errors import (
    CommError,
    CommTimeout,
    ProtocolError,
)


@pytest.mark.parametrize("place", [one_stream, streams, two_devices], ids=lambda p: p.__name__)
@pytest.mark.parametrize("rows", [(2, 0, 1), (3, 2), (4,)], ids=str)
@pytest.mark.parametrize("many", [64, 1])
def test_ranks_of_nccl_equal_the_undivided_batch(many, rows, place, rng, monkeypatch):
    monkeypatch.setattr("syncbn_core.exchange.MANY", many)
    check_group(rows, place, rng, nccl=True)


@pytest.mark.parametrize("many", [64, 1])
def test_the_host_takes_no_part_in_nccl(many, rng, monkeypatch):
    monkeypatch.setattr("syncbn_core.exchange.MANY", many)
    x = rng.normal(size=(4, 3, 5))

    def member(rank, own):
        layer, part = BatchNorm(3, device="cuda", communicator=own), to_device(x)
        layer.backward(layer(part))  # in the first call the host waits for labels
        log.transfers.clear()
        layer.backward(layer(part))
        assert not log.transfers
        own.synchronize()

    in_group(2, two_devices, member, nccl=True)


@pytest.mark.parametrize("many", [64, 1])
def test_nccl_ranks_of_other_dtypes_are_told_in_the_next_call(many, monkeypatch):
    """In a large group the layers are compared in first calls only, kind and dtype in all."""
    monkeypatch.setattr("syncbn_core.exchange.MANY", many)

    def member(rank, own):
        layer, x = BatchNorm(3, device="cuda", communicator=own), np.arange(6.0).reshape(2, 3)
        layer(to_device(x.astype("float32")))

        def step():
            layer(to_device(x.astype("float16" if rank == 1 else "float32")))
            own.synchronize()

        with pytest.raises(ProtocolError, match="forward of"):
            step()

    in_group(2, streams, member, nccl=True)


def test_nccl_ranks_in_different_layers_are_told_so():
    def member(rank, own):
        layers = [BatchNorm(3, device="cuda", communicator=own, name=name) for name in "ab"]
        x = to_device(np.ones((2, 3), "float32"))
        for layer in (*layers, layers[rank]):
            layer(x)
        told = TOLD.format("forward", "ab"[rank], 1 + rank)
        with pytest.raises(ProtocolError, match=told):
            own.synchronize()

    in_group(2, streams, member, nccl=True)


def unlike_branches(own, rank, rows=2):
    """A backward of another layer on each rank: its dx. `rows`: of x, on rank 1."""
    layers = [BatchNorm(3, device="cuda", communicator=own, name=name) for name in "ab"]
    x = to_device(np.ones((rows if rank else 2, 3), "float32") + rank)
    ys = [layer(x) for layer in layers]
    return layers[rank].backward(ys[rank]), ys


TOLD = r"different ones in call 3 \({} of {}, layer {}\)"


@pytest.mark.parametrize("rows", [2, 0])
@pytest.mark.parametrize("looks", ["the next call", "synchronize"])
def test_nccl_ranks_in_backward_of_other_layers_get_nan_and_are_told_later(looks, rows):
    def member(rank, own):
        dx, ys = unlike_branches(own, rank, rows)
        told = TOLD.format("backward", "ab"[rank], 1 + rank)
        with pytest.raises(ProtocolError, match=told):
            own.synchronize() if looks == "synchronize" else own.all_reduce(ys[0])
        assert np.isnan(to_host(dx)).all()
        with pytest.raises(CommError, match="failed before: expected all ranks"):
            own.all_reduce(ys[0])

    in_group(2, streams, member, nccl=True)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_captured_call_of_other_layers_is_told_too(direction, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr("syncbn_core.backends.cuda.operations.usable", lambda *_: False)

    def member(rank, own):
        with captured(fake_cupy.get_current_stream()):
            if direction == "backward":
                dx, _ = unlike_branches(own, rank)
                assert np.isnan(to_host(dx)).all()
            else:
                layers = [BatchNorm(3, device="cuda", communicator=own, name=n) for n in "ab"]
                for layer in (*layers, layers[rank]):
                    layer(to_device(np.ones((2, 3), "float32")))
        with pytest.raises(ProtocolError, match=TOLD.format(direction, "ab"[rank], 1 + rank)):
            own.synchronize()

    in_group(2, streams, member, nccl=True)


def test_waiting_for_nccl_has_a_deadline():
    def member(rank, own):
        x = to_device(np.ones((2, 3), "float32"))
        functional.batch_norm_forward(x, communicator=own)
        fake_cupy.stuck.append(True)
        with pytest.raises(CommTimeout, match=r"rank 0 of 1 waited 0.05 s for call 1 .forward"):
            own.synchronize(0.05)
        assert own._nccl._comm.aborted
        with pytest.raises(CommError, match=r"failed before.*waited 0.05 s"):
            functional.batch_norm_forward(x, communicator=own)

    try:
        in_group(1, streams, member, nccl=True)
    finally:
        fake_cupy.stuck.clear()
