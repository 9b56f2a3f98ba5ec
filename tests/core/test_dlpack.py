"""`syncbn_core.functional` and `BatchNorm` take arrays of any library that speaks DLPack."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from foreign import Foreign

from syncbn_core import (
    BatchNorm,
    batch_norm_backward,
    batch_norm_forward,
    dlpack,
)
from syncbn_core.errors import (
    BackendError,
    BatchSizeError,
    DeviceError,
    DTypeError,
    ReadOnlyError,
    ShapeError,
    SyncBNError,
)

Array = np.ndarray
SHAPE = (4, 3, 5)


def numbers(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).normal(1, 2, size=shape).astype(dtype)


def arguments() -> dict[str, Array]:
    return {
        "x": numbers(*SHAPE),
        "weight": numbers(3, seed=1),
        "bias": numbers(3, seed=2),
        "running_mean": np.zeros(3, np.float32),
        "running_var": np.ones(3, np.float32),
        "num_batches_tracked": np.array(7),
    }


def foreign(arrays: dict[str, Array], **options: Any) -> dict[str, Any]:
    return {name: Foreign(array, **options) for name, array in arrays.items()}


def same(actual: Any, expected: Array) -> bool:
    assert type(actual) is Foreign
    assert actual.values.dtype == expected.dtype
    return actual.values.tobytes() == np.ascontiguousarray(expected).tobytes()


def forward(x: Any, *args: Any, **options: Any) -> Any:
    return batch_norm_forward(x, *args, parallel=False, **options)


# ------------------------------------------------------------------------- the same numbers


def test_results_are_of_the_library_of_x_and_the_bits_of_numpy() -> None:
    own, theirs = arguments(), foreign(arguments())
    dy = numbers(*SHAPE, seed=3)
    y, saved = forward(**own)
    their_y, their_saved = forward(**theirs)
    assert same(their_y, y)
    assert same(their_saved.mean, saved.mean)
    assert same(their_saved.invstd, saved.invstd)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        np.testing.assert_array_equal(theirs[name].values, own[name])
    assert own["num_batches_tracked"] == 8
    expected = batch_norm_backward(dy, saved, parallel=False)
    gradients = batch_norm_backward(Foreign(dy), their_saved, parallel=False)
    for gradient, right in zip(gradients, expected, strict=True):
        assert same(gradient, right)


def test_kinds_may_be_mixed_and_x_decides() -> None:
    own = arguments()
    y, _ = forward(own["x"], own["weight"])
    theirs, their_saved = forward(Foreign(own["x"]), own["weight"])
    assert same(theirs, y)
    mixed, mixed_saved = forward(own["x"], Foreign(own["weight"]))
    assert type(mixed) is np.ndarray
    np.testing.assert_array_equal(mixed, y)
    dy = numbers(*SHAPE, seed=3)
    assert type(batch_norm_backward(dy, their_saved, parallel=False).weight) is Foreign
    assert type(batch_norm_backward(Foreign(dy), mixed_saved, parallel=False).x) is np.ndarray


def test_out_is_written_and_comes_back() -> None:
    own = arguments()
    y, saved = forward(own["x"])
    out = Foreign(np.zeros_like(own["x"]))
    result, their_saved = forward(Foreign(own["x"]), out=out)
    assert result is out
    np.testing.assert_array_equal(out.values, y)
    assert forward(own["x"], out=out)[0] is out
    dy = numbers(*SHAPE, seed=3)
    expected = batch_norm_backward(dy, saved, parallel=False).x
    assert batch_norm_backward(Foreign(dy), their_saved, out=out, parallel=False).x is out
    np.testing.assert_array_equal(out.values, expected)
    assert batch_norm_backward(dy, saved, out=out, parallel=False).x is out


def test_layer_takes_them_and_keeps_its_own(in_group: Callable[..., Any]) -> None:
    x, dy = numbers(6, 3, 5), numbers(6, 3, 5, seed=3)

    def steps(kind: Callable[[Array], Any]) -> list[Any]:
        def member(rank: int, communicator: Any) -> Any:
            layer = BatchNorm(3, communicator=communicator)
            part = slice(2 * rank, 2 * rank + 2 + 2 * rank)
            y = layer(kind(x[part]))
            dx = layer.backward(kind(dy[part]))
            layer.eval()
            return y, dx, layer(kind(x[part])), layer.weight_grad, layer.running_var

        return [result for results in in_group(2, member) for result in results]

    for number, (theirs, own) in enumerate(zip(steps(Foreign), steps(np.array), strict=True)):
        if number % 5 < 3:
            assert same(theirs, own)
        else:
            assert type(theirs) is np.ndarray
            np.testing.assert_array_equal(theirs, own)


# ------------------------------------------------------------------------------ ownership


@pytest.mark.parametrize("version", [0, 1])
def test_memory_is_released_once_when_the_last_user_is_gone(version: int) -> None:
    x, weight = Foreign(numbers(*SHAPE), version=version), Foreign(numbers(3), version=version)
    y, saved = forward(x, weight)
    gc.collect()
    assert x.made == 1
    assert x.deleted == 0  # backward needs it
    batch_norm_backward(Foreign(numbers(*SHAPE, seed=3)), saved, parallel=False)
    del saved
    gc.collect()
    assert (x.deleted, weight.deleted) == (1, 1)
    assert np.isfinite(y.values).all()


# ------------------------------------------------------------------- what must not be written

WRITTEN = ["running_mean", "running_var", "num_batches_tracked", "out"]


def refused(
    call: Callable[[], Any], arrays: dict[str, Any], error: type[SyncBNError], match: str
) -> None:
    """`call` raises, leaves all values as they are, and releases all capsules."""
    before = {name: a.values.copy() for name, a in arrays.items() if isinstance(a, Foreign)}
    with pytest.raises(error, match=match) as caught:
        call()
    assert type(caught.value) is error
    caught.value.__traceback__ = None
    del caught
    gc.collect()
    for name, values in before.items():
        np.testing.assert_array_equal(arrays[name].values, values)
        assert arrays[name].made == arrays[name].deleted, name


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("options", [{"read_only": True}, {"version": 0}], ids=str)
def test_what_may_not_be_written_is_refused(name: str, options: Any) -> None:
    arrays = foreign({**arguments(), "out": np.zeros(SHAPE, np.float32)})
    arrays[name] = Foreign(arrays[name].values, **options)
    sentence = rf"writable {name}, .* got .*Foreign, which .*; give a NumPy array"
    refused(lambda: forward(**arrays), arrays, ReadOnlyError, sentence)


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("weight", numbers(4), ShapeError, r"weight of shape \(3,\)"),
        ("x", numbers(1, 3), BatchSizeError, "more than 1 value"),
        ("bias", np.zeros(3, np.int32), DTypeError, "bias of a floating dtype"),
    ],
)
def test_a_failed_call_changes_nothing(
    name: str, value: Array, error: type[SyncBNError], match: str
) -> None:
    arrays = foreign({**arguments(), name: value})
    refused(lambda: forward(**arrays), arrays, error, match)


# ----------------------------------------------------------------- devices and libraries


@pytest.mark.parametrize(("kind", "word"), [(8, "Metal"), (10, "ROCm"), (77, "another device")])
def test_other_devices_are_refused(kind: int, word: str) -> None:
    arrays = {**foreign(arguments()), "weight": Foreign(numbers(3), device=(kind, 0))}
    sentence = rf"weight on the CPU or a CUDA device, got .*Foreign on {word} .* {kind}\); move"
    refused(lambda: forward(**arrays), arrays, DeviceError, sentence)


class Broken(Foreign):
    requires_grad = False

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("no export today")


@pytest.mark.parametrize(
    ("requires_grad", "remedy"), [(False, r"numpy\.asarray"), (True, r"detach\(\).*syncbn_torch")]
)
def test_a_failing_export_says_whose_and_what_to_do(requires_grad: bool, remedy: str) -> None:
    bias = Broken(numbers(3))
    bias.requires_grad = requires_grad
    arrays = {**foreign(arguments()), "bias": bias}
    sentence = rf"bias .*Broken and BufferError: no export today; .*{remedy}"
    refused(lambda: forward(**arrays), arrays, BackendError, sentence)


def test_a_library_that_refuses_the_result_leaves_running_statistics_as_they_are(
    monkeypatch: Any,
) -> None:
    arrays = foreign(arguments())

    def refuse(_: Any) -> Any:
        raise BufferError("not today")

    monkeypatch.setattr(Foreign, "read", refuse)
    refused(lambda: forward(**arrays), arrays, BufferError, "not today")


# -------------------------------------------------------------------------------- CUDA


class CudaArray(Foreign):
    """Memory of the host that calls itself a device's."""

    def __init__(self, values: Array, **options: Any) -> None:
        super().__init__(values, device=(2, 1), **options)


@pytest.fixture
def devices(monkeypatch: Any) -> list[str]:
    """A CuPy that reads capsules on "stream 5" as NumPy does; the devices that were current."""
    entered: list[str] = []

    class OnHost:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **_: Any) -> Any:
            own, self.array.device = self.array.device, (1, 0)
            try:
                return self.array.__dlpack__(stream=5)
            finally:
                self.array.device = own

    class CupyArray:
        def __init__(self, values: Array) -> None:
            self.values = values

    def from_dlpack(array: Any) -> Any:
        assert tuple(array.__dlpack_device__()) == (2, 1)
        return CupyArray(np.from_dlpack(OnHost(array)))

    @contextmanager
    def library(device: str) -> Iterator[Any]:
        entered.append(device)
        yield SimpleNamespace(from_dlpack=from_dlpack)

    monkeypatch.setattr(dlpack, "array_library", library)
    return entered


def test_cuda_memory_is_read_by_cupy_on_its_device_and_stream(devices: list[str]) -> None:
    x = CudaArray(numbers(*SHAPE))
    (own,) = dlpack.readable(x=x)
    np.testing.assert_array_equal(own.values, x.values)
    assert devices == ["cuda:1"]
    assert x.asked == [{"stream": 5}]


def test_foreign_memory_of_a_device_is_not_written(devices: list[str]) -> None:
    """CuPy does not know whether that is allowed."""
    with pytest.raises(ReadOnlyError, match="writable running_mean"):
        dlpack.writable(running_mean=CudaArray(np.zeros(3)))


def test_without_cupy_the_error_says_what_is_missing() -> None:
    arrays = {"x": CudaArray(numbers(*SHAPE))}
    with pytest.raises(BackendError, match=r"machine ready for CUDA|CUDA devices"):
        forward(**arrays)
