"""Masks: the valid elements are normalized as a batch of their own, and all others are 0."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncbn_core import BatchNorm, batch_norm_backward, batch_norm_forward
from syncbn_core.comm import Communicator
from syncbn_core.errors import BatchSizeError, DTypeError, ShapeError

Array = np.ndarray
Function = Callable[..., Any]


def rows(array: Array, mask: Array) -> Array:
    """The valid elements, (n, C)."""
    return np.moveaxis(array, 1, -1)[np.broadcast_to(mask, (len(array), *array.shape[2:]))]


@settings(max_examples=150)
@given(
    data=st.data(),
    shape=st.sampled_from([(6, 3), (5, 2, 7), (4, 3, 5, 6), (4, 40, 20, 20), (2, 2, 2, 3, 4)]),
    mean=st.sampled_from([0.0, 1e4]),
    share=st.sampled_from([0.0, 0.1, 0.9]),
    seed=st.integers(0, 2**32 - 1),
)
def test_members_with_masks_equal_the_valid_elements(
    data: st.DataObject,
    shape: tuple[int, ...],
    mean: float,
    share: float,
    seed: int,
    layouts: dict[str, Function],
    in_group: Function,
    pytestconfig: pytest.Config,
) -> None:
    # each combination has kernels of its own
    dtypes, activations = ["f8", "f4", "f2"], [None, "silu"]
    if pytestconfig.getoption("--quick"):
        dtypes, activations = dtypes[:1], activations[:1]
    dtype = data.draw(st.sampled_from(dtypes))
    activation = data.draw(st.sampled_from(activations))
    rng = np.random.default_rng(seed)
    mean = 0.0 if dtype == "f2" else mean
    x, dy = ((rng.normal(size=shape) + at).astype(dtype) for at in (mean, 0))
    mask = rng.random((len(x), *shape[2:])) < share
    mask[:2], mask[-1] = True, False
    weight, bias = rng.uniform(-2, 2, (2, shape[1]))
    hidden = ~np.expand_dims(mask, 1) & np.ones(shape, bool)
    x[hidden], dy[hidden] = np.nan, np.inf  # what nobody sees
    name = data.draw(st.sampled_from(sorted(set(layouts) - {"repeated"})))
    cuts = [slice(0, 1), slice(1, len(x) - 1), slice(len(x) - 1, None)]  # the last has none

    def member(rank: int, communicator: Communicator) -> tuple[Any, ...]:
        own = cuts[rank]
        given = None if mask[own].all() else mask[own]
        options = {"activation": activation, "communicator": communicator}
        part = layouts[name](x[own])
        y, saved = batch_norm_forward(part, weight, bias, mask=given, **options)
        return y, saved, batch_norm_backward(dy[own], saved, communicator=communicator)

    found = in_group(3, member)
    y, dx = (np.concatenate(parts) for parts in zip(*((r[0], r[2].x) for r in found), strict=True))
    assert not y[hidden].any()
    assert not dx[hidden].any()
    valid = rows(x, mask).astype("f8")
    options = {"activation": activation}
    expected, saved = batch_norm_forward(valid, weight, bias, **options)
    wanted = batch_norm_backward(rows(dy, mask).astype("f8"), saved)
    allowed = {"f2": 2e-2, "f4": 1e-5 + 3e-9 * mean, "f8": 1e-7}[dtype]
    np.testing.assert_allclose(found[0][1].mean, saved.mean, rtol=1e-6, atol=allowed)
    np.testing.assert_allclose(rows(y, mask), expected, rtol=0, atol=20 * allowed)
    scale = 1 + np.abs(wanted.x).max()
    np.testing.assert_allclose(rows(dx, mask), wanted.x, rtol=0, atol=20 * allowed * scale)
    for key in ("weight", "bias"):
        total = sum(getattr(gradients, key) for *_, gradients in found)
        scale = 1 + np.abs(rows(dy, mask).astype("f8")).sum()
        np.testing.assert_allclose(total, getattr(wanted, key), rtol=0, atol=allowed * scale)


def test_every_form_of_a_mask_and_eval() -> None:
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 4, 3, 5, 6))
    sample, place = np.array([True, False, True, True]), rng.random((5, 6)) < 0.5
    forms = {
        "samples": (sample, sample[:, None, None]),
        "places": (place[None], place),
        "both": (sample[:, None, None] & place, sample[:, None, None] & place),
        "with the axis of channels": ((sample[:, None, None] & place)[:, None],) * 2,
        "columns": (place[:1][None, None], place[:1]),
    }
    for name, (mask, whole) in forms.items():
        whole = np.broadcast_to(np.squeeze(whole, 1) if whole.ndim == 4 else whole, (4, 5, 6))
        twin, layer = (BatchNorm(3, dtype=np.float64) for _ in range(2))
        y, expected = layer(x, mask), twin(rows(x, whole))
        np.testing.assert_allclose(rows(y, whole), expected, err_msg=name)
        np.testing.assert_allclose(rows(layer.backward(dy), whole), twin.backward(rows(dy, whole)))
        for key, value in layer.state_dict().items():
            np.testing.assert_allclose(value, twin.state_dict()[key])
        hidden = np.where(np.expand_dims(whole, 1), x, np.nan)
        y, expected = layer.eval()(hidden, mask), twin.eval()(rows(x, whole))
        np.testing.assert_allclose(rows(y, whole), expected)
        np.testing.assert_allclose(rows(layer.backward(dy), whole), twin.backward(rows(dy, whole)))
        assert np.isfinite(layer.weight_grad).all()


def test_no_valid_element_is_an_empty_batch_and_one_is_refused() -> None:
    layer = BatchNorm(3)
    assert not layer(np.full((2, 3, 4), np.nan, np.float32), np.zeros((2, 4), bool)).any()
    assert not layer.backward(np.ones((2, 3, 4), np.float32)).any()
    assert (layer.num_batches_tracked, *layer.running_var) == (1, 1, 1, 1)
    with pytest.raises(BatchSizeError, match="more than 1 value per channel"):
        layer(np.ones((2, 3, 1), np.float32), np.array([True, False]))


@pytest.mark.parametrize(
    ("mask", "error", "text"),
    [
        (np.ones((4, 5), int), DTypeError, "a mask of bool.*got int64"),
        (np.ones((4, 3, 5), bool), ShapeError, r"\(N, 1, \*spatial\) .*got \(4, 3, 5\)"),
        (np.ones(5, bool), ShapeError, r"got \(5,\)"),
        (np.ones((4, 4), bool), ShapeError, r"got \(4, 4\)"),
    ],
    ids=str,
)
def test_wrong_masks_are_told(mask: Array, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        BatchNorm(3)(np.ones((4, 3, 5), np.float32), mask)


@pytest.mark.parametrize("kind", [lambda x: x.astype(">f8"), np.asfortranarray])
def test_results_keep_byte_order_and_layout_of_x(kind: Function) -> None:
    x = np.random.default_rng(0).normal(size=(4, 3, 5, 6))
    mask, given = np.arange(30).reshape(1, 5, 6) < 17, kind(x)
    layer, twin = BatchNorm(3, dtype=np.float64), BatchNorm(3, dtype=np.float64)
    for actual, expected in (
        (layer(given, mask), twin(x, mask)),
        (layer.backward(given), twin.backward(x)),
    ):
        assert (actual.dtype, actual.strides) == (given.dtype, given.strides)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-14)
