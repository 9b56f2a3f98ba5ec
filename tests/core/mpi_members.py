"""What the ranks of an MPI test do: `mpirun -n 4 python mpi_members.py CASE`."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from syncbn_core import BatchNorm
from syncbn_core.comm import MPICommunicator
from syncbn_core.errors import (
    BatchSizeError,
    CommError,
    CommTimeout,
    DeviceError,
    DTypeError,
    ProtocolError,
    StateError,
)
from syncbn_core.functional import batch_norm_backward, batch_norm_forward

CASE = sys.argv[1]


def parts(own: MPICommunicator) -> None:
    """Uneven ranks and empty ones, each layout: the undivided batch."""
    rng = np.random.default_rng(0)
    for bounds in ([0, 3, 3, 7, 12], [0, 0, 0, 0, 12], [0, 1, 2, 3, 4]):
        mine = slice(*bounds[own.rank : own.rank + 2])
        for shape in ((12, 5), (12, 5, 3, 2)):
            x, dy = rng.normal(5, 2, shape), rng.normal(size=shape)
            x, dy = x[: bounds[-1]], dy[: bounds[-1]]
            for settings in ({}, {"momentum": None}, {"affine": False}, {"eps_mode": "clamp"}):
                layer = BatchNorm(5, dtype=np.float64, communicator=own, **settings)
                twin = BatchNorm(5, dtype=np.float64, **settings)
                for scale in (1.0, 2.0):
                    y, y_twin = layer(x[mine] * scale), twin(x * scale)
                    dx, dx_twin = layer.backward(dy[mine]), twin.backward(dy)
                    np.testing.assert_allclose(y, y_twin[mine], atol=1e-11)
                    np.testing.assert_allclose(dx, dx_twin[mine], atol=1e-11)
                for name, value in layer.state_dict().items():
                    np.testing.assert_allclose(value, twin.state_dict()[name], atol=1e-12)
                if layer.weight_grad is not None:
                    total = own.all_reduce(layer.weight_grad)
                    np.testing.assert_allclose(total, twin.weight_grad, atol=1e-11)
                running = np.zeros((own.size, 5))
                running[own.rank] = layer.running_var
                running = own.all_reduce(running)
                assert (running == running[0]).all(), "ranks differ"
    layer = BatchNorm(5, communicator=own)
    layer.backward(layer(np.ones((0, 5), np.float32)))
    assert layer.num_batches_tracked == 1
    assert (layer.running_var == 1).all()


def errors(own: MPICommunicator) -> None:
    """What all ranks are told, and can go on after."""
    layer = BatchNorm(3, communicator=own, name="first")
    with pytest.raises(DTypeError, match=r"1: 'float64'.*of first, layer 1: 7 numbers"):
        layer(np.ones((2, 3), np.float64 if own.rank == 1 else np.float32))
    with pytest.raises(BatchSizeError):
        layer(np.ones((int(own.rank == 1), 3), np.float32))
    assert layer.num_batches_tracked == 0
    halves = own.all_reduce(np.array([0.5, own.rank], np.float16))
    assert halves.dtype == np.float16
    assert halves.tolist() == [2, 6]
    for shape in ((), (2, 3), (0,)):
        for dtype in ("f2", "f8", "i4"):
            rows = own.all_gather(np.full(shape, own.rank, dtype))
            assert rows.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(rows, [np.full(shape, rank) for rank in range(4)])
        assert own.all_reduce(np.full(shape, 0.5)).tolist() == np.full(shape, 2.0).tolist()
    assert copy.deepcopy(layer).communicator is own
    with pytest.raises(StateError, match="state_dict"):
        pickle.dumps(layer)
    with pytest.raises(DTypeError, match="complex128"):
        own.all_reduce(np.array([1j]))
    with pytest.raises(DeviceError, match="NumPy"):
        own.all_reduce([1.0])
    checked = MPICommunicator(check_order=True, timeout=20)
    layers = [BatchNorm(c, communicator=checked, name=f"bn{c}") for c in (3, 4)]
    layers[0](np.ones((2, 3), np.float32))
    one = int(own.rank == 1)
    told = r"rank 0: call 2 .forward of bn3, layer 1: 7 numbers, float32.; rank 1: .* of bn4"
    with pytest.raises(ProtocolError, match=told):
        layers[one](np.ones((2, 3 + one), np.float32))
    layers[1](np.ones((2, 4), np.float32))
    for group in (own, checked):  # a loss of other branches
        branches = [BatchNorm(3, communicator=group) for _ in range(2)]
        ys = [branch(np.ones((2, 3), np.float32)) for branch in branches]
        with pytest.raises(
            ProtocolError, match=r"backward of BatchNorm, layer \d, forward in call"
        ):
            branches[one].backward(ys[one])
        with pytest.raises(ProtocolError, match=r"call"):  # and sums of something else
            branches[0].backward(ys[0]) if one else group.all_reduce(np.zeros(6))
        total = group.all_reduce_sums(np.array([[0.5], [own.rank]]))  # the earlier name
        assert total.tolist() == [[2], [6]]
        again = BatchNorm(3, communicator=group)
        again.backward(again(np.ones((2, 3), np.float32)))
    pair = own_pair()
    if own.rank in (0, 2):
        y, saved = batch_norm_forward(np.arange(3.0)[:, None] + own.rank, communicator=pair)
        batch_norm_backward(y, saved, communicator=pair)
        assert saved.count == 6
    else:
        assert pair is None


def own_pair() -> MPICommunicator | None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    color = 0 if world.rank in (0, 2) else MPI.UNDEFINED
    split = world.Split(color)
    if color == 0:
        return MPICommunicator(split)
    with pytest.raises(CommError, match="belongs to"):
        MPICommunicator(split)
    return None


def faulty(own: MPICommunicator) -> None:
    """Rank 2 goes wrong in its second call; the others say so."""
    BatchNorm(3)(np.ones((2, 3), np.float32))  # loads the kernels
    own.all_reduce(np.zeros(1))
    if CASE == "absent":  # it fails before it makes its communicator
        if own.rank == 2:
            raise ZeroDivisionError("a fault of this rank's own")
        with pytest.raises(CommTimeout, match="waited 2 s for all ranks to make"):
            MPICommunicator(timeout=2)
        wait_for_others(own)
        return
    own = MPICommunicator(timeout=2)
    layer = BatchNorm(3, communicator=own, name="second")
    x = np.ones((2, 3), np.float32)
    layer(x)
    if own.rank == 2:
        if CASE == "raise":
            raise ZeroDivisionError("a fault of this rank's own")
        if CASE == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if CASE == "skip":
            return
        while True:  # "stuck"
            time.sleep(1)
    told = r"waited 2 s in call 2 .forward of second, layer 1: .* no sign of rank .*2"
    with pytest.raises(CommTimeout, match=told):
        layer(x)
    assert layer.num_batches_tracked == 1
    with pytest.raises(CommError, match="failed before: rank"):
        layer(x)
    wait_for_others(own)


def wait_for_others(own: MPICommunicator) -> None:
    """Who ends first ends the job: wait until all three have been told."""
    folder = Path(sys.argv[2])
    (folder / f"told.{own.rank}").touch()
    deadline = time.monotonic() + 20
    while len(list(folder.glob("told.*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)


if __name__ == "__main__":
    {"parts": parts, "errors": errors}.get(CASE, faulty)(MPICommunicator(timeout=60))
    if CASE in ("parts", "errors"):
        print("DONE", flush=True)
