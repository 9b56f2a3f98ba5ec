"""What `syncbn_core.functional` refuses: by which error and message, and that nothing changes."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from syncbn_core import backends, batch_norm_backward, batch_norm_eval, batch_norm_forward
from syncbn_core.comm import Communicator, SingleCommunicator, thread_group
from syncbn_core.errors import (
    ArgumentError,
    BackendError,
    BatchSizeError,
    DeviceError,
    DTypeError,
    ReadOnlyError,
    ShapeError,
    SyncBNError,
)

Array = np.ndarray
Function = Callable[..., Any]

F4 = np.float32


def zeros(*shape: int, dtype: Any = F4) -> Array:
    return np.zeros(shape, dtype)


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def arguments(**changed: Any) -> dict[str, Any]:
    """A call of `batch_norm_forward` that is right, but for `changed`."""
    return {
        "x": np.random.default_rng(0).normal(size=(4, 3, 5)).astype(F4),
        "weight": np.ones(3, F4),
        "bias": zeros(3),
        "running_mean": zeros(3),
        "running_var": np.ones(3, F4),
        "num_batches_tracked": np.array(7),
        "momentum": 0.1,
        "eps": 1e-5,
        "eps_mode": "plus",
        "out": zeros(4, 3, 5),
        **changed,
    }


def assert_refused(
    call: Callable[[], Any], arrays: dict[str, Any], error: type[SyncBNError], *words: str
) -> None:
    """`call` raises `error`, whose message has all `words`, and leaves `arrays` as they are."""
    before = {name: np.array(a) for name, a in arrays.items() if isinstance(a, np.ndarray)}
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)
    for name, value in before.items():
        np.testing.assert_array_equal(arrays[name], value, err_msg=name)


class Elsewhere:
    """An array of a library that no backend takes."""


# A long double is a double on some systems, and is taken there.
LONG = [np.longdouble] if np.dtype(np.longdouble).itemsize > 8 else []

FORWARD: dict[str, tuple[dict[str, Any], type[SyncBNError], tuple[str, ...]]] = {
    "x of rank 0": ({"x": np.array(1.0)}, ShapeError, ("rank 2 or more", "shape ()")),
    "x of rank 1": ({"x": zeros(4)}, ShapeError, ("rank 2 or more", "shape (4,)", "x[:, None]")),
    **{
        f"x of dtype {np.dtype(dtype)}": (
            {"x": zeros(4, 3, 5, dtype=dtype)},
            DTypeError,
            ("expected float16, bfloat16, float32 or float64", f"got {np.dtype(dtype)}", "astype"),
        )
        for dtype in (np.int64, np.uint8, np.bool_, np.complex64, object, *LONG)
    },
    "x is a list": ({"x": [[1.0, 2.0]]}, BackendError, ("numpy", "got builtins.list", "asarray")),
    "x is foreign": ({"x": Elsewhere()}, BackendError, ("expected an array of", "Elsewhere")),
    "weight too long": (
        {"weight": zeros(4)},
        ShapeError,
        ("expected weight of shape (3,)", "(4, 3, 5)", "got (4,)"),
    ),
    "weight of rank 2": (
        {"weight": zeros(1, 3)},
        ShapeError,
        ("expected weight of shape (3,)", "got (1, 3)"),
    ),
    "weight of integers": (
        {"weight": zeros(3, dtype=np.int64)},
        DTypeError,
        ("expected weight of a floating dtype", "got int64"),
    ),
    "weight is a list": ({"weight": [1.0, 1.0, 1.0]}, BackendError, ("got builtins.list",)),
    "bias too short": (
        {"bias": zeros(1)},
        ShapeError,
        ("expected bias of shape (3,)", "got (1,)"),
    ),
    "running_mean too long": (
        {"running_mean": zeros(4)},
        ShapeError,
        ("expected running_mean of shape (3,)", "got (4,)"),
    ),
    "running_var too long": (
        {"running_var": zeros(4)},
        ShapeError,
        ("expected running_var of shape (3,)", "got (4,)"),
    ),
    "running_var of integers": (
        {"running_var": zeros(3, dtype=np.int64)},
        DTypeError,
        ("expected running_var of a floating dtype", "got int64"),
    ),
    **{
        f"{name} read-only": (
            {name: read_only(value)},
            ReadOnlyError,
            (f"expected a writable {name}", "got a read-only array", "copy it"),
        )
        for name, value in (
            ("running_mean", zeros(3)),
            ("running_var", zeros(3)),
            ("num_batches_tracked", np.array(7)),
        )
    },
    "only running_mean": (
        {"running_var": None},
        ArgumentError,
        ("running_mean and running_var together", "got only running_mean"),
    ),
    "only running_var": (
        {"running_mean": None},
        ArgumentError,
        ("running_mean and running_var together", "got only running_var"),
    ),
    "momentum None without a counter": (
        {"momentum": None, "num_batches_tracked": None},
        ArgumentError,
        ("expected num_batches_tracked with momentum=None", "integer array of shape ()"),
    ),
    "counter with an axis": (
        {"num_batches_tracked": np.array([7])},
        ShapeError,
        ("expected num_batches_tracked of shape ()", "got (1,)"),
    ),
    "counter per channel": (
        {"num_batches_tracked": np.array([7, 7, 7])},
        ShapeError,
        ("expected num_batches_tracked of shape ()", "got (3,)"),
    ),
    "counter of floats": (
        {"num_batches_tracked": np.array(7.0)},
        DTypeError,
        ("expected num_batches_tracked of an integer dtype", "got float64"),
    ),
    "momentum above 1": ({"momentum": 1.5}, ArgumentError, ("from 0 to 1", "got 1.5")),
    "momentum below 0": ({"momentum": -0.1}, ArgumentError, ("from 0 to 1", "got -0.1")),
    "eps of zero": ({"eps": 0}, ArgumentError, ("expected eps", "> 0", "got 0")),
    "eps not finite": ({"eps": np.inf}, ArgumentError, ("finite", "got inf")),
    "unknown eps_mode": ({"eps_mode": "add"}, ArgumentError, ("plus", "clamp", "got 'add'")),
    "out of another shape": (
        {"out": zeros(4, 5, 3)},
        ShapeError,
        ("expected out of shape (4, 3, 5)", "got (4, 5, 3)"),
    ),
    "out of another dtype": (
        {"out": zeros(4, 3, 5, dtype=float)},
        ShapeError,
        ("dtype float32", "got (4, 3, 5) and float64"),
    ),
    "out read-only": ({"out": read_only(zeros(4, 3, 5))}, ReadOnlyError, ("writable out",)),
    "one value per channel": (
        {"x": zeros(1, 3), "out": None},
        BatchSizeError,
        ("more than 1 value per channel", "[1, 3]"),
    ),
    "one pixel of one sample": (
        {"x": zeros(1, 3, 1, 1), "out": zeros(1, 3, 1, 1)},
        BatchSizeError,
        ("more than 1 value per channel", "[1, 3, 1, 1]"),
    ),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_refuses_and_changes_nothing(name: str) -> None:
    changed, error, words = FORWARD[name]
    given = arguments(**changed)
    assert_refused(lambda: batch_norm_forward(**given), given, error, *words)


def test_arrays_of_two_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NumPy and CuPy arrays are, here with a kind that this test makes up."""

    class OnDevice(np.ndarray):
        __module__ = "ondevice.arrays"

    monkeypatch.setitem(backends._MODULES, "ondevice", "syncbn_core.backends.reference")
    given = arguments(weight=np.ones(3, F4).view(OnDevice))
    words = (
        "of the kind of x (numpy.ndarray on cpu)",
        "got ondevice.arrays.OnDevice",
        "one device",
    )
    assert_refused(lambda: batch_norm_forward(**given), given, DeviceError, *words)


def strided(strides: tuple[int, int, int]) -> Array:
    """`(4, 3, 5)` float32 with these strides in elements."""
    memory = np.zeros(200, F4)
    return np.lib.stride_tricks.as_strided(memory, (4, 3, 5), tuple(4 * s for s in strides))


@pytest.mark.parametrize("strides", [(15, 5, 1), (1, 4, 12), (30, 10, 2), (12, 4, 13)], ids=str)
def test_out_of_any_strides_that_keep_values_apart_is_written(
    strides: tuple[int, int, int],
) -> None:
    x, out = arguments()["x"], strided(strides)
    y, _ = batch_norm_forward(x, out=out)
    assert y is out
    np.testing.assert_array_equal(out, batch_norm_forward(x)[0])


EVAL: dict[str, tuple[dict[str, Any], type[SyncBNError], tuple[str, ...]]] = {
    "x of rank 1": ({"x": zeros(4)}, ShapeError, ("rank 2 or more", "shape (4,)")),
    "x of integers": ({"x": zeros(4, 3, 5, dtype=np.int64)}, DTypeError, ("got int64",)),
    "running_mean too long": (
        {"running_mean": zeros(4)},
        ShapeError,
        ("expected running_mean of shape (3,)", "got (4,)"),
    ),
    "running_var of integers": (
        {"running_var": zeros(3, dtype=np.int64)},
        DTypeError,
        ("expected running_var of a floating dtype", "got int64"),
    ),
    "bias too long": ({"bias": zeros(4)}, ShapeError, ("expected bias of shape (3,)",)),
    "eps negative": ({"eps": -1.0}, ArgumentError, ("expected eps", "got -1.0")),
    "unknown eps_mode": ({"eps_mode": ""}, ArgumentError, ("plus", "clamp", "got ''")),
    "out of another dtype": ({"out": zeros(4, 3, 5, dtype=float)}, ShapeError, ("float64",)),
    "out read-only": ({"out": read_only(zeros(4, 3, 5))}, ReadOnlyError, ("writable out",)),
}


@pytest.mark.parametrize("name", EVAL)
def test_eval_refuses_and_changes_nothing(name: str) -> None:
    changed, error, words = EVAL[name]
    given = arguments(**changed)
    del given["momentum"], given["num_batches_tracked"]
    assert_refused(lambda: batch_norm_eval(**given), given, error, *words)


BACKWARD: dict[str, tuple[dict[str, Any], type[SyncBNError], tuple[str, ...]]] = {
    "dy of another shape": (
        {"dy": zeros(4, 3, 6)},
        ShapeError,
        ("expected dy of the shape of x, (4, 3, 5)", "got (4, 3, 6)"),
    ),
    "dy of integers": (
        {"dy": zeros(4, 3, 5, dtype=np.int64)},
        DTypeError,
        ("expected dy of a floating dtype", "got int64"),
    ),
    "out of another shape": ({"out": zeros(4, 15)}, ShapeError, ("(4, 3, 5)", "got (4, 15)")),
    "out read-only": ({"out": read_only(zeros(4, 3, 5))}, ReadOnlyError, ("writable out",)),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_refuses_and_changes_nothing(name: str) -> None:
    changed, error, words = BACKWARD[name]
    _, saved = batch_norm_forward(**arguments(out=None))
    given = {"dy": np.ones((4, 3, 5), F4), "out": zeros(4, 3, 5), **changed}
    assert_refused(lambda: batch_norm_backward(saved=saved, **given), given, error, *words)


# ------------------------------------------------------------------------------ in a group


def test_one_value_in_the_whole_group_is_refused_by_every_member(in_group: Function) -> None:
    members = [arguments(x=zeros(int(rank == 1), 3), out=None) for rank in range(3)]

    def member(rank: int, communicator: Communicator) -> str:
        given = members[rank]
        words = ("more than 1 value per channel", f"[{len(given['x'])}, 3]")
        call = lambda: batch_norm_forward(**given, communicator=communicator)  # noqa: E731
        assert_refused(call, given, BatchSizeError, *words)
        return "refused"

    assert in_group(3, member) == ["refused"] * 3


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"x": zeros(4)}, ShapeError, "rank 2 or more"),
        ({"x": zeros(4, 3, 5, dtype=np.int64)}, DTypeError, "got int64"),
        ({"running_var": zeros(4)}, ShapeError, "running_var"),
        ({"x": zeros(4, 2, 5), "weight": None, "bias": None, "out": None}, ShapeError, "channels"),
    ],
)
@pytest.mark.parametrize("failing", [0, 2])
def test_error_of_one_member_is_raised_and_no_member_has_changed(
    failing: int, changed: dict[str, Any], error: type[SyncBNError], words: str, in_group: Function
) -> None:
    if "weight" in changed:  # another number of channels, which only the group can notice
        changed = {**changed, "running_mean": zeros(2), "running_var": zeros(2)}
    members = [arguments(**(changed if rank == failing else {})) for rank in range(3)]
    before = [{n: np.array(a) for n, a in given.items()} for given in members]
    with pytest.raises(error, match=re.escape(words)):
        in_group(3, lambda rank, group: batch_norm_forward(**members[rank], communicator=group))
    for given, old in zip(members, before, strict=True):
        for name in ("running_mean", "running_var", "num_batches_tracked", "out"):
            np.testing.assert_array_equal(np.array(given[name]), old[name], err_msg=name)


def test_backward_with_another_group_than_forward_is_refused() -> None:
    """It would take the sums of one part, or of other members."""
    x, (two, _), (three, *_) = arguments()["x"], thread_group(2), thread_group(3)
    _, saved = batch_norm_forward(x)
    batch_norm_backward(x, saved, communicator=SingleCommunicator())
    for members, wrong in ((1, two), (2, None), (2, three)):
        with pytest.raises(ArgumentError, match=f"of {members} members.* pass the same one to"):
            batch_norm_backward(x, replace(saved, members=members), communicator=wrong)
