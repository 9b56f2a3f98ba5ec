"""What the ranks of an MPI test do: `mpirun -n 4 python mpi_ranks.py NAME FOLDER`.

`NAME`: a function of `FAULTS`, or "promises" for all of `PROMISES`; each rank calls it with
a communicator of its own. For each promise that a rank has kept it prints "KEPT", and which.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from syncbn_core import BatchNorm, doctor, exchange
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

Case = Callable[[MPICommunicator], None]
PROMISES: dict[str, Case] = {}
FAULTS: dict[str, Case] = {}


def promise(function: Case) -> Case:
    PROMISES[function.__name__] = function
    return function


def fault(function: Case) -> Case:
    FAULTS[function.__name__] = function
    return function


# -------------------------------------------------------------------------------- promises


@promise
def the_doctor_finds_what_is_wrong_on_one_rank_on_all(own: MPICommunicator) -> None:
    case = doctor.Case("float64")
    check = doctor.Check("ranks of MPI", lambda: doctor.over_mpi(case, own))
    assert doctor.examine(check).verdict == "ok"
    if own.rank == 2:
        case.right["dx"] = case.right["dx"] * (1 + 1e-9)
    finding = doctor.examine(check)
    assert finding.verdict == "WRONG"
    assert "of dx" in finding.detail


@promise
def large_groups_equal_the_undivided_batch(own: MPICommunicator) -> None:
    exchange.MANY = 1
    try:
        ranks_of_different_dtypes_are_told_the_dtype_of_each_and_the_layer(own)
        uneven_and_empty_ranks_equal_the_undivided_batch(own)
    finally:
        exchange.MANY = 64


@promise
def uneven_and_empty_ranks_equal_the_undivided_batch(own: MPICommunicator) -> None:
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


@promise
def an_empty_batch_on_all_ranks_changes_only_the_counter(own: MPICommunicator) -> None:
    layer = BatchNorm(5, communicator=own)
    layer.backward(layer(np.ones((0, 5), np.float32)))
    assert layer.num_batches_tracked == 1
    assert (layer.running_var == 1).all()


@promise
def ranks_of_different_dtypes_are_told_the_dtype_of_each_and_the_layer(
    own: MPICommunicator,
) -> None:
    layer = BatchNorm(3, communicator=own, name="first")
    with pytest.raises(DTypeError, match=r"1: 'float64'.*of first, layer 1: 8 numbers"):
        layer(np.ones((2, 3), np.float64 if own.rank == 1 else np.float32))
    assert layer.num_batches_tracked == 0
    layer(np.ones((2, 3), np.float32))  # the next call succeeds


@promise
def one_value_per_channel_in_all_is_refused_by_every_rank(own: MPICommunicator) -> None:
    layer = BatchNorm(3, communicator=own)
    with pytest.raises(BatchSizeError):
        layer(np.ones((int(own.rank == 1), 3), np.float32))
    assert layer.num_batches_tracked == 0
    layer(np.ones((2, 3), np.float32))  # the next call succeeds


@promise
def collectives_keep_shape_dtype_and_the_order_of_ranks(own: MPICommunicator) -> None:
    float16 = own.all_reduce(np.array([0.5, own.rank], np.float16))
    assert float16.dtype == np.float16
    assert float16.tolist() == [2, 6]
    for shape in ((), (2, 3), (0,)):
        for dtype in ("f2", "f8", "i4"):
            rows = own.all_gather(np.full(shape, own.rank, dtype))
            assert rows.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(rows, [np.full(shape, rank) for rank in range(4)])
        assert own.all_reduce(np.full(shape, 0.5)).tolist() == np.full(shape, 2.0).tolist()
    total = own.all_reduce(np.array([[0.5], [own.rank]]))
    assert total.tolist() == [[2], [6]]


@promise
def arrays_that_mpi_cannot_add_are_refused(own: MPICommunicator) -> None:
    with pytest.raises(DTypeError, match="complex128"):
        own.all_reduce(np.array([1j]))
    with pytest.raises(DeviceError, match="NumPy"):
        own.all_reduce([1.0])


@promise
def copies_of_a_layer_share_its_communicator_which_pickle_refuses(own: MPICommunicator) -> None:
    layer = BatchNorm(3, communicator=own)
    assert copy.deepcopy(layer).communicator is own
    with pytest.raises(StateError, match="state_dict"):
        pickle.dumps(layer)


@promise
def backward_of_different_layers_is_told_to_every_rank_and_the_next_step_succeeds(
    own: MPICommunicator,
) -> None:
    one = int(own.rank == 1)
    branches = [BatchNorm(3, communicator=own) for _ in range(2)]
    ys = [branch(np.ones((2, 3), np.float32)) for branch in branches]
    told = r"rank 0: backward of BatchNorm, layer \d+, .*; rank 1: backward of BatchNorm, layer"
    with pytest.raises(ProtocolError, match=told):
        branches[one].backward(ys[one])
    layer = BatchNorm(3, communicator=own)
    layer.backward(layer(np.ones((2, 3), np.float32)))


@promise
def forward_beside_backward_is_told_to_every_rank(own: MPICommunicator) -> None:
    layer = BatchNorm(3, communicator=own)
    y = layer(np.ones((2, 3), np.float32))
    with pytest.raises(ProtocolError, match=r"rank 0: forward of .*; rank 1: backward of "):
        layer.backward(y) if own.rank == 1 else layer(y)
    assert own.all_reduce(np.array([[0.5], [own.rank]])).tolist() == [[2], [6]]


@promise
def a_split_communicator_spans_its_own_ranks_and_refuses_others(own: MPICommunicator) -> None:
    from mpi4py import MPI

    inside = own.rank in (0, 2)
    split = MPI.COMM_WORLD.Split(0 if inside else MPI.UNDEFINED)
    if inside:
        pair = MPICommunicator(split)
        y, saved = batch_norm_forward(np.arange(3.0)[:, None] + own.rank, communicator=pair)
        batch_norm_backward(y, saved, communicator=pair)
        assert saved.count == 6
    else:
        with pytest.raises(CommError, match="belongs to"):
            MPICommunicator(split)


# ---------------------------------------------------------------------- faults of rank 2


@fault
def fails_before_it_makes_its_communicator(own: MPICommunicator) -> None:
    load_kernels(own)
    if own.rank == 2:
        raise ZeroDivisionError("a fault of this rank's own")
    with pytest.raises(CommTimeout, match="waited 2 s for all ranks to make"):
        MPICommunicator(timeout=2)
    wait_for_others(own)


@fault
def raises(own: MPICommunicator) -> None:
    def wrong() -> None:
        raise ZeroDivisionError("a fault of this rank's own")

    second_call_goes_wrong(own, wrong)


@fault
def is_killed(own: MPICommunicator) -> None:
    second_call_goes_wrong(own, lambda: os.kill(os.getpid(), signal.SIGKILL))


@fault
def skips_a_call(own: MPICommunicator) -> None:
    second_call_goes_wrong(own, lambda: None)


@fault
def never_returns(own: MPICommunicator) -> None:
    def wrong() -> None:
        while True:
            time.sleep(1)

    second_call_goes_wrong(own, wrong)


def second_call_goes_wrong(own: MPICommunicator, wrong: Callable[[], None]) -> None:
    """Rank 2 runs `wrong` in the place of its second call; the others say who is missing."""
    load_kernels(own)
    short = MPICommunicator(timeout=2)
    layer = BatchNorm(3, communicator=short, name="second")
    x = np.ones((2, 3), np.float32)
    layer(x)
    if own.rank == 2:
        return wrong()
    told = r"waited 2 s in call 2 .forward of second, layer 1: .* no sign in this call of rank .*2"
    with pytest.raises(CommTimeout, match=told):
        layer(x)
    assert layer.num_batches_tracked == 1
    with pytest.raises(CommError, match="failed before: rank"):
        layer(x)
    return wait_for_others(own)


def load_kernels(own: MPICommunicator) -> None:
    """And wait until all ranks have: after that the deadlines are short."""
    BatchNorm(3)(np.ones((2, 3), np.float32))
    own.all_reduce(np.zeros(1))


def wait_for_others(own: MPICommunicator) -> None:
    """Wait until the three other ranks have been told: mpirun ends all ranks with the first."""
    folder = Path(sys.argv[2])
    (folder / f"told.{own.rank}").touch()
    deadline = time.monotonic() + 20
    while len(list(folder.glob("told.*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)


if __name__ == "__main__":
    if sys.argv[1] == "promises":
        for name, keep in PROMISES.items():
            keep(MPICommunicator(timeout=60))
            print(f"KEPT {name}.", flush=True)
    else:
        own = MPICommunicator(timeout=60)
        (Path(sys.argv[2]) / f"pid.{own.rank}").write_text(str(os.getpid()))
        FAULTS[sys.argv[1]](own)
