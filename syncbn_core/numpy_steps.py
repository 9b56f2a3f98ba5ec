"""The steps of batch normalization on NumPy arrays, by Numba kernels.

Dtypes: float64, float32, float16 and bfloat16 (of the package `ml_dtypes`, or its bits as uint16).
Dense arrays of any layout are used in place; others (gaps, negative strides, foreign byte order)
are copied first. 16-bit numbers pass to the kernels as integers of the same bits; they are computed
in float32 and rounded once. Results have the dtype of x and, if x is dense, its layout. Numbers per
channel are float64 `(C,)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import lru_cache, partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from syncbn_core._kernels.cpu import channels, planes, rows
from syncbn_core._kernels.cpu.activations import activation_of
from syncbn_core._kernels.cpu.launch import launch, most_threads
from syncbn_core._kernels.cpu.numerics import has_half
from syncbn_core.arrays import assign
from syncbn_core.labels import Labels
from syncbn_core.layout import layout_of_strides, writable_view
from syncbn_core.moments import (
    Moments,
    NormRule,
    Statistics,
    averaging_factor,
    mean_gradients,
    total_count,
)
from syncbn_core.steps import Affine, Norm, Operations, RunningStatistics, Sums

Array = np.ndarray[Any, Any]

PARALLEL_SIZE = 32768  # elements; for smaller arrays, threads cost more than they save
SHORT = 64  # elements; shorter planes may be computed by the kernels for rows
NEAR = 1 << 22  # bytes that stay in the last cache; from more, planes far apart are read slowly

_BFLOAT16_BITS = np.dtype(np.uint16)
ABSENT: Array = np.empty(0)  # what kernels take for no weight and no bias
_quiet = partial(np.errstate, invalid="ignore", over="ignore")


class Dense(NamedTuple):
    """An activation as kernels take it.

    `given`: the array of the caller. `flat`: its memory, or that of a dense copy, as kernels index
    it, see `view`; both are None for an empty array. `valid`: a mask as they index it, or None.
    """

    given: Any
    view: View | None
    flat: Any
    valid: Array | None = None


class Wide(NamedTuple):
    """Weight and bias in float64, `(0,)` for none; the dtype of their gradients; and the mask."""

    weight: Array
    bias: Array
    dtype: Any
    mask: Array | None = None


def rounded(values: Array, dtype: np.dtype[Any]) -> Array:
    """A copy of float64 `values` in `dtype`."""
    if dtype != _BFLOAT16_BITS:
        return values.astype(dtype)
    bits = values.astype(np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # even
    return np.where(np.isnan(values), bits >> 16 | 0x40, nearest).astype(np.uint16)


class NumpySteps(Operations):
    """The steps for NumPy arrays. `parallel`: False computes in the calling thread only."""

    takes_masks = True

    def __init__(self, parallel: bool = True) -> None:
        self._parallel = parallel

    @property
    def serial(self) -> NumpySteps:
        serial = copy(self)
        serial._parallel = False
        return serial

    def threads(self) -> int:
        """How many threads a large array is worth."""
        return most_threads() if self._parallel else 1

    rounded: Any = staticmethod(rounded)

    def take(
        self, x: Any, affine: Affine, running: RunningStatistics | None, mask: Any = None
    ) -> Any:
        weight, bias = affine
        own = Wide(wide(weight), wide(bias), (x if weight is None else weight).dtype, mask)
        return _dense(x, mask), own, running

    def take_pair(self, x: Any, dy: Any, affine: Any = None) -> tuple[Dense, Dense]:
        mask, given = None if affine is None else affine.mask, x
        if dy.dtype != x.dtype and x.dtype.itemsize == 2:
            x = x.astype(np.float32)  # a wider dy must not lose digits, or overflow
        _, view, flat, valid = _dense(x, mask)
        if view is None:
            of_dy = None
        elif view_of(dy, mask is not None) == view:
            of_dy = view.of(dy)
        else:
            of_dy = np.empty(view.shape, view.dtype)
            np.copyto(view.whole(of_dy, x), dy, casting="same_kind")
        return Dense(given, view, flat, valid), Dense(dy, view, of_dy)

    def moments(self, x: Dense, labels: Labels | None = None) -> Moments:
        channels, count = x.given.shape[1], 0 if x.view is None else x.view.values
        rows = np.zeros((1, 2 * channels + 2))
        if x.valid is not None:
            count = int(np.count_nonzero(x.valid))
        if count:
            rows[0, 0] = count
            self._run("sums", x, None, None, rows[0, 1:-1].reshape(2, channels))
        return Moments(rows, count)

    def merge(self, parts: Sequence[Moments], labels: Labels | None = None) -> Moments:
        total = parts[0]
        if len(parts) > 1:
            rows = np.concatenate([part.rows for part in parts])
            total = Moments(np.zeros((1, rows.shape[1])), total_count(parts))
            channels.fill_table(rows, total.rows[0], -1.0, False)  # moments alone
        return total

    def statistics(self, total: Moments, rule: NormRule) -> Statistics:
        rows = np.ascontiguousarray(total.rows)
        table = np.empty(rows.shape[1] // 2 * 3 - 2)
        channels.fill_table(rows, table, rule.eps, rule.mode == "clamp")
        return Statistics(table, total.count)

    def forward(
        self,
        x: Dense,
        norm: Norm,
        running: RunningStatistics | None = None,
        out: Any = None,
        total: Moments | None = None,
    ) -> Any:
        y = self._written(out, x, None, norm, None)
        if running is not None:
            self.update_running(running, norm.statistics)
        return y

    def forward_eval(
        self,
        x: Dense,
        running: RunningStatistics,
        affine: Any,
        rule: NormRule,
        out: Any = None,
    ) -> tuple[Any, Statistics]:
        statistics = self.statistics(Moments.of(1, wide(running.mean), wide(running.var)), rule)
        return self.forward(x, Norm(statistics, affine, rule), None, out), statistics

    def backward_reduce(
        self, x: Dense, dy: Dense, norm: Norm, labels: Labels | None = None
    ) -> Sums:
        weight, _, dtype, _ = norm.affine
        sums = np.zeros((2, x.given.shape[1]))
        if x.view is not None:
            self._run("sums", x, dy, norm, sums)
        with _quiet():
            grad_bias, grad_weight = self.rounded(sums, dtype)
            return Sums(sums * weight if weight.size else sums, grad_weight, grad_bias)

    def backward_input(
        self,
        x: Dense,
        dy: Dense,
        norm: Norm,
        total: Array | None,
        out: Any = None,
        labels: Labels | None = None,
    ) -> Any:
        if total is None:
            total = np.zeros((2, x.given.shape[1]))
        statistics, _, rule = norm
        count = max(int(statistics.table[0]), 1)
        clamped = rule.clamped(statistics.m2 / count) if rule.mode == "clamp" else None
        return self._written(out, x, dy, norm, mean_gradients(total, count, clamped))

    def update_running(self, running: RunningStatistics, statistics: Statistics) -> None:
        table = statistics.table
        mean, var, counter, momentum = running[:4]
        factor = averaging_factor(None, counter) if momentum is None else float(momentum)
        counted = np.zeros((), np.int64) if counter is None else counter
        held = [_bits_of(own) for own in (mean, var)]
        in_place = held[0] is not None and held[1] is not None and counted.flags.carray
        if in_place and counted.dtype == np.int64:
            channels.update_running(*held, counted, table, factor)
            return
        own, counted = [wide(mean), wide(var)], np.array(counted, np.int64)
        channels.update_running(*own, counted, table, factor)
        targets = [own for own in (mean, var, counter) if own is not None]
        with _quiet():
            vectors = zip(own, (mean, var), strict=True)
            values = [rounded(new, old.dtype) for new, old in vectors if old is not None]
        assign(targets, [*values, counted])

    def _written(self, out: Any, x: Dense, dy: Dense | None, norm: Norm, means: Any) -> Any:
        """What a kernel writes for each element of x: `out`, or a new array like x."""
        array, view = np.empty_like(x.given) if out is None else out, x.view
        if view is None:
            return array
        sources = [own.flat for own in (x, dy) if own is not None]
        in_place = view_of(array, x.valid is not None) == view and (
            out is None or not any(map(_overlaps, sources, repeat(array)))
        )
        target = view.of(array) if in_place else np.empty(view.shape, view.dtype)
        self._run("write", x, dy, norm, means, target)
        if not in_place:
            with _quiet():  # too large for float16: infinite
                np.copyto(array, view.whole(target, array), casting="unsafe")
        return array

    def _run(self, step: str, x: Dense, dy: Dense | None, norm: Norm | None, *last: Any) -> None:
        """Run a kernel: "sums" or "write", of forward without `dy`; of moments without `norm`."""
        view: Any = x.view
        numbers: tuple[Any, ...] = None, None, None, None
        if norm is not None:
            statistics, (weight, bias, *_), rule = norm
            act = activation_of(rule.activation, rule.negative_slope)
            numbers = statistics.table, weight, bias, act
        threads = self.threads() if view.values * x.given.shape[1] >= PARALLEL_SIZE else 1
        how = (view.inner, threads) if view.inner else ()
        arguments = x.flat, None if dy is None else dy.flat, *how, *numbers, x.valid, *last
        if threads == 1:
            view.kernels[step].serial(*arguments)
        else:
            launch(view.kernels[step], *arguments)


class View(NamedTuple):
    """How kernels take a dense activation: transposed by `axes` and reshaped to `shape`."""

    kernels: dict[str, Any]
    dtype: np.dtype[Any]
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    inner: int  # neighbouring columns of a channel in rows; 0 for planes
    values: int  # per channel

    def of(self, array: Array) -> Array:
        if array.dtype != self.dtype:
            array = array.view(self.dtype)
        flat = array.transpose(self.axes).reshape(self.shape)
        return flat if flat.flags.writeable else writable_view(flat)

    def whole(self, flat: Array, like: Array) -> Array:
        """The inverse of `of`: with the shape of `like`, and its dtype if `flat` holds bits."""
        array = flat.reshape([like.shape[axis] for axis in self.axes])
        array = array.transpose(np.argsort(self.axes))
        native = like.dtype.newbyteorder("=")
        return array.view(native) if self.dtype.kind in "iu" else array

    def of_mask(self, mask: Array, shape: tuple[int, ...]) -> Array:
        """A copy of a bool mask, `(N, 1, *spatial)` or 1 for any axis: uint8, (A, B), or (A,)."""
        whole = np.broadcast_to(mask, (shape[0], 1, *shape[2:])).transpose(self.axes)
        valid = np.array(whole, np.uint8, order="C")
        return valid.reshape(-1) if self.inner else valid.reshape(self.shape[0], -1)


_PLANES = {"sums": planes.planes_sums, "write": planes.planes_write}
_ROWS = {"sums": rows.rows_sums, "write": rows.rows_write}


def view_of(x: Array, masked: bool = False) -> View | None:
    """None where kernels can't use the array in place."""
    return view_of_strides(x.shape, x.strides, x.dtype, masked) if x.flags.aligned else None


def _dense(x: Array, mask: Array | None = None) -> Dense:
    """x as kernels take it: its memory, or that of a dense copy."""
    if 0 in x.shape:
        return Dense(x, None, None)
    array, masked = x, mask is not None
    view = view_of(x, masked)
    if view is None:
        native = x.dtype.newbyteorder("=")
        dtype = np.float32 if _kernel_dtype(native) is None else native
        array = np.array(x, dtype, order="K")
        view = view_of(array, masked)
        assert view is not None
    valid = None if mask is None else view.of_mask(mask, x.shape)
    return Dense(x, view, view.of(array), valid)


@lru_cache(maxsize=1024)
def view_of_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], masked: bool
) -> View | None:
    """`view_of` for an array with elements, aligned, of these strides in bytes."""
    kernel_dtype = _kernel_dtype(dtype)
    layout = layout_of_strides(shape, strides, dtype.itemsize)
    if kernel_dtype is None or layout is None:
        return None
    outer, channels, inner = layout.outer, layout.channels, layout.inner
    # Rows pay for the coefficients of each column, planes for the ends of each plane.
    far = outer * channels * inner * dtype.itemsize > NEAR
    as_rows = inner <= SHORT and outer >= 8 and (far or outer >= inner) and not masked
    if inner == 1 or as_rows:  # with a mask, kernels for rows skip whole rows
        repeats = 1 if masked else rows.joined(outer, channels * inner)
        together = (outer // repeats, channels * inner * repeats)
        return View(_ROWS, kernel_dtype, layout.axes, together, inner, outer * inner)
    apart = outer, channels, inner
    return View(_PLANES, kernel_dtype, layout.axes, apart, 0, outer * inner)


@lru_cache(maxsize=64)
def _kernel_dtype(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """The dtype by which kernels take arrays of `dtype`; None if they don't."""
    if not dtype.isnative:
        return None
    if dtype.itemsize != 2:
        return dtype if dtype.itemsize > 2 else None
    if dtype.name in ("bfloat16", "uint16"):
        return _BFLOAT16_BITS
    return np.dtype(np.int16) if has_half() else None


def _overlaps(target: Array, source: Array) -> bool:
    """Whether they share memory, but not element by element."""
    return np.may_share_memory(target, source) and target.ctypes.data != source.ctypes.data


def _bits_of(vector: Array | None) -> Array | None:
    """Numbers per channel as a kernel can update them; None if it can't."""
    if vector is None:
        return ABSENT
    dtype = _kernel_dtype(vector.dtype)
    if dtype is None or not vector.flags.carray:
        return None
    return vector if dtype == vector.dtype else vector.view(dtype)


def wide(values: Array | None) -> Array:
    """A float64 copy of numbers per channel, which are not of another type for Numba."""
    if values is None:
        return ABSENT
    if values.dtype == _BFLOAT16_BITS:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


OPERATIONS = NumpySteps()
