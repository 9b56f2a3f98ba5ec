"""`syncbn_core.layout`: dense arrays of any memory order as `[A, C, B]`, without a copy."""

from collections.abc import Callable
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from syncbn_core.layout import layout_of

Array = np.ndarray
NOT_DENSE = {"gaps", "some channels of more", "flipped", "repeated"}


def numbered(shape: tuple[int, ...]) -> Array:
    """Every element different, so that a view shows which one it has where."""
    return np.arange(prod(shape), dtype=np.float32).reshape(shape)


def sizes_of(array: Array) -> tuple[int, int, int] | None:
    layout = layout_of(array)
    return layout and (layout.outer, layout.channels, layout.inner)


@st.composite
def dense_arrays(draw: st.DrawFn) -> Array:
    """Rank 2 to 5, sizes from 1, the axes in any order in memory."""
    shape = draw(st.lists(st.integers(1, 5), min_size=2, max_size=5))
    order = draw(st.permutations(range(len(shape))))
    return numbered(tuple(shape[axis] for axis in order)).transpose(np.argsort(order))


@given(array=dense_arrays())
def test_dense_array_in_any_memory_order_is_viewed_without_a_copy(array: Array) -> None:
    layout = layout_of(array)
    assert layout is not None
    others = [axis for axis, size in enumerate(array.shape) if size > 1 and axis != 1]
    inside = [axis for axis in others if array.strides[axis] < array.strides[1]]
    view = layout.view(array)
    assert np.shares_memory(view, array)
    assert view.flags.c_contiguous
    assert view.shape == (layout.outer, layout.channels, layout.inner)
    assert layout.channels == array.shape[1]
    if array.shape[1] > 1:
        assert layout.inner == prod(array.shape[axis] for axis in inside)
    for channel in range(array.shape[1]):
        assert set(view[:, channel].ravel()) == set(array[:, channel].ravel())


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("C", (8, 6, 5, 4), (8, 6, 20)),
        ("C", (8, 6, 5, 4, 3), (8, 6, 60)),
        ("C", (8, 6), (8, 6, 1)),
        ("channels last", (8, 6, 5, 4), (160, 6, 1)),
        ("channels last", (8, 6, 5, 4, 3), (480, 6, 1)),
        ("Fortran", (8, 6), (1, 6, 8)),
        ("Fortran", (8, 6, 5, 4), (20, 6, 8)),
        ("batch last", (8, 6, 5, 4), (1, 6, 160)),
        ("spatial axes swapped", (8, 6, 5, 4), (8, 6, 20)),
        ("C", (8, 1, 5, 4), (1, 1, 160)),
        ("channels last", (8, 1, 5, 4), (1, 1, 160)),
        ("C", (8, 1), (1, 1, 8)),
        ("C", (1, 6), (1, 6, 1)),
        ("C", (1, 6, 5, 4), (1, 6, 20)),
        ("C", (8, 6, 1, 1), (8, 6, 1)),
        ("C", (1, 1), (1, 1, 1)),
    ],
)
def test_sizes_are_those_of_the_memory_order(
    name: str,
    shape: tuple[int, ...],
    expected: tuple[int, int, int],
    layouts: dict[str, Callable[[Array], Array]],
) -> None:
    assert sizes_of(layouts[name](numbered(shape))) == expected


def test_array_that_is_not_dense_has_no_layout(
    layout: str, layouts: dict[str, Callable[[Array], Array]]
) -> None:
    for shape in ((4, 3), (4, 3, 5), (4, 3, 2, 5), (2, 3, 2, 3, 4)):
        array = layouts[layout](numbered(shape))
        assert (layout_of(array) is None) == (layout in NOT_DENSE), (shape, array.strides)


def test_every_gap_overlap_and_negative_stride_is_seen() -> None:
    base = numbered((6, 6, 6, 6))
    s = base.itemsize
    for axis in range(4):
        index = [slice(None)] * 4
        index[axis] = slice(None, None, 2)
        assert layout_of(base[tuple(index)]) is None, f"every other one on axis {axis}"
        index[axis] = slice(None, None, -1)
        assert layout_of(base[tuple(index)]) is None, f"reversed axis {axis}"
        if axis:
            index[axis] = slice(0, 5)
            assert layout_of(base[tuple(index)]) is None, f"part of axis {axis}"
    assert layout_of(as_strided(base, (4, 3, 5), (s, s, s))) is None, "overlapping windows"
    assert layout_of(as_strided(base, (4, 3, 5), (10 * s, 5 * s, s))) is None, "overlapping rows"
    assert layout_of(as_strided(base, (4, 3, 5), (0, 5 * s, s))) is None, "a broadcast batch"
    assert layout_of(base[1:4]) is not None, "a part of the batch is dense"
