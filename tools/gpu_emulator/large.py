"""Activations of more than 2**32 numbers, of which a kernel runs only some thread blocks.

The blocks are those with the numbers 2**31 and 2**32, and the last one. Memory is mapped but not
filled, so that it has only the pages that these blocks touch.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from harness import STORAGE, Bench, Buffer, View, to_bfloat16, within, work_epsilon

from ptx_emulator.machine import Schedule
from ptx_emulator.memory import Range
from syncbn_core._kernels.cuda.constants import SIZES, THREADS, UNROLL, lanes_of
from syncbn_core.backends.cuda import grid as cuda
from syncbn_core.moments import NormRule

__all__ = ["run"]

Array = np.ndarray[Any, Any]
SPLITS = 60000  # of a reduction: a block has a small part
EDGES = (2**31, 2**32)
_NORESERVE = 0x4000  # of Linux; in the module `mmap` from Python 3.13 on


class Mapped(Buffer):
    """Zeros that take no memory until they are touched."""

    def __init__(self, bench: Bench, size: int, dtype: str, skipped: int, name: str) -> None:
        self.dtype, self.offset = dtype, skipped * SIZES[dtype]
        kind = np.dtype(STORAGE.get(dtype, dtype))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        pages = mmap.mmap(-1, (size + skipped) * kind.itemsize, flags=flags)
        raw = np.frombuffer(pages, np.uint8)[self.offset :]
        self.pointer = raw.ctypes.data
        self.array = raw.view(kind)
        self.area = bench.device.memory.add(Range(self.pointer, raw, name=name))
        bench.buffers.append(self)

    def part(self, start: int, stop: int) -> Array:
        """As float64."""
        whole, self.array = self.array, self.array[start:stop]
        try:
            return self.values()
        finally:
            self.array = whole

    def fill(self, start: int, values: Array) -> None:
        if self.dtype == "bfloat16":
            values = to_bfloat16(values)
        self.array[start : start + values.size] = values


@dataclass
class Large:
    """A large activation on a bench, and what its steps give."""

    bench: Bench
    dtype: str
    outer: int
    channels: int
    inner: int
    rng: np.random.Generator
    skipped: int = 0  # numbers by which it misses 16 bytes

    @property
    def total(self) -> int:
        return self.outer * self.channels * self.inner

    def view(self, name: str) -> View:
        return View(
            Mapped(self.bench, self.total, self.dtype, self.skipped, name),
            self.outer,
            self.channels,
            self.inner,
        )

    def channel_of(self, start: int, stop: int) -> Array:
        return np.arange(start, stop) // self.inner % self.channels

    @contextmanager
    def only(self, blocks: set[int]) -> Iterator[None]:
        device = self.bench.device
        before = device.schedule, device.memory.tracked
        device.schedule = Schedule(only=blocks)
        device.memory.tracked = False
        try:
            yield
        finally:
            device.schedule, device.memory.tracked = before

    def elementwise(self) -> None:
        """Both elementwise kernels on the blocks at the edges."""
        x, y, dy, dx = map(self.view, ("x", "y", "dy", "dx"))
        numbers, blocks = self._pieces(x)
        for start, stop in numbers:
            for view in (x, dy):
                self._mapped(view).fill(start, self.rng.normal(size=stop - start))
        channels = self.channels
        mean, var = self.rng.normal(size=channels), self.rng.uniform(1, 2, channels)
        weight, bias = self.rng.normal(1, 0.3, channels), self.rng.normal(size=channels)
        count = 1e3
        parts = self.bench.of(np.concatenate([[count], mean, var * count]), "float64")
        operands = [self.bench.of(values, "float64") for values in (weight, bias)]
        code = cuda.CODES["float64"]
        parameters = cuda.Parameters(operands[0].pointer, code, operands[1].pointer, code)
        kept = self.bench.of(np.zeros(3 * channels + 1), "float64")
        settings: dict[str, Any] = {"rule": NormRule()}
        with self.only(blocks):
            into = kept.pointer
            cuda.normalize(self.bench, x, y, parameters, parts.pointer, 1, into, **settings)
        invstd = 1 / np.sqrt(var + 1e-5)
        kept.array[:] = np.concatenate([[count], mean, var * count, invstd])
        unit, arithmetic = work_epsilon(self.dtype)
        for start, stop in numbers:
            c = self.channel_of(start, stop)
            values = self._mapped(x).part(start, stop)
            xhat = (values - mean[c]) * invstd[c]
            expected = xhat * weight[c] + bias[c]
            bound = 2 * unit * np.abs(expected) + 64 * arithmetic * (1 + np.abs(expected))
            within(self._mapped(y).part(start, stop), expected, bound, "y")
        # the compiler makes code of its own for constant statistics, and for no weight
        for sums in (self.rng.normal(size=(2, channels)), np.zeros((2, channels))):
            for slopes in (weight, np.ones(channels)):
                total = self.bench.of(sums, "float64").pointer if sums.any() else 0
                given = parameters if slopes is weight else cuda.Parameters()
                with self.only(blocks):
                    arguments = (kept.pointer, given, total)
                    cuda.backward_input(self.bench, x, dy, dx, *arguments, **settings)
                for start, stop in numbers:
                    c = self.channel_of(start, stop)
                    values, grad = (self._mapped(view).part(start, stop) for view in (x, dy))
                    xhat = (values - mean[c]) * invstd[c]
                    slope = slopes[c] * grad - (sums[0][c] + xhat * sums[1][c]) / count
                    expected = invstd[c] * slope
                    bound = 2 * unit * np.abs(expected) + 64 * arithmetic * (2 + np.abs(grad))
                    within(self._mapped(dx).part(start, stop), expected, bound, "dx")

    def reductions(self) -> None:
        """Partial sums of the blocks at the edges; nothing else is read."""
        x, dy = self.view("x"), self.view("dy")
        rows = cuda.channels_innermost(x.sizes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda, "_reduction", cuda._reduction.__wrapped__)  # no cache
            walk = cuda._walk
            patch.setattr(cuda, "_walk", lambda *views: replace(walk(*views), splits=SPLITS))
            plan = cuda._Splits(SPLITS, 1, SPLITS)
            patch.setattr(cuda, "_row_splits", lambda multiprocessors, cut, rows: plan)
            patch.setattr(self.bench, "shared_sums", self._shared_sums)
            if rows:
                cut = cuda._tiles(THREADS, cuda.REDUCTION_WIDTH, x.sizes, [x.offset])
                slots, lanes, span = self.outer, 1, cut.width * cut.lanes
                assert cut.tiles == 1
            else:
                shape = walk(cuda.THREADS, 132, x.sizes, [x.offset])
                slots, lanes, span = self.outer * shape.slots, shape.lanes, 1
            per = self.channels if rows else lanes
            at_edges = {edge // per * SPLITS // slots for edge in EDGES}
            chosen = at_edges | {k + 1 for k in at_edges} | {SPLITS - 1}
            grid = self.channels if not rows else 1
            parts = {}
            for k in chosen:
                begin, end = slots * k // SPLITS * per, slots * (k + 1) // SPLITS * per
                begin, end = max(begin, 0), min(end, self.total)
                for view in (x, dy):
                    self._mapped(view).fill(begin, self.rng.normal(size=end - begin))
                parts[k] = begin, end
            assert all(any(b <= e < end for b, end in parts.values()) for e in EDGES)
            blocks = {k * grid for k in chosen}  # of channel 0 or tile 0
            into = self.bench.of(np.zeros(4 * self.channels + 2), "float64").pointer
            with self.only(blocks):
                cuda.moments(self.bench, x, into)
            moments = self._partials(sorted(chosen), span)
            statistics = self.bench.of(np.zeros(3 * self.channels + 1), "float64").pointer
            with self.only(blocks):
                cuda.backward_reduce(self.bench, x, dy, statistics, cuda.Parameters(), into)
            sums = self._partials(sorted(chosen), span)
        channel = np.arange(span)
        arithmetic = work_epsilon(self.dtype)[1] * (1024 if self.dtype == "float64" else 64)
        for k, found, totals in zip(sorted(chosen), moments, sums, strict=True):
            begin, end = parts[k]
            values, grad = (self._mapped(view).part(begin, end) for view in (x, dy))
            values, grad = values.reshape(-1, span), grad.reshape(-1, span)
            pivot = self._mapped(x).part(0, span)
            off = values - pivot[channel]
            pairs = (off, off * off), (grad, grad * values)
            for actual, wanted in zip((found, totals), pairs, strict=True):
                for side, numbers in zip(actual, wanted, strict=True):
                    bound = np.abs(numbers).sum(0) * arithmetic
                    within(side, numbers.sum(0), bound, f"partial sums of block {k}")

    def _shared_sums(self, partials: int, counters: int) -> tuple[int, int]:
        zeros = self.bench.of(np.zeros(counters), "int32")
        return self.bench.scratch(partials)[0], zeros.pointer

    def _partials(self, chosen: list[int], span: int) -> list[Array]:
        """What the chosen blocks have stored for the last one, `[2, span]` each."""
        scratch = next(b for b in reversed(self.bench.buffers) if b.area.name == "partial sums")
        places = scratch.array[: SPLITS * 2 * span].reshape(SPLITS, 2, span)
        return [places[k] for k in chosen]

    def _mapped(self, view: View) -> Mapped:
        assert isinstance(view.buffer, Mapped)
        return view.buffer

    def _pieces(self, x: View) -> tuple[list[tuple[int, int]], set[int]]:
        """Numbers in the pieces of an elementwise kernel, and the blocks that have these pieces."""
        if cuda.channels_innermost(x.sizes):
            cut = cuda._tiles(THREADS, cuda.ELEMENTWISE_WIDTH, x.sizes, [x.offset])
            piece, count = cuda._row_piece(cut, self.outer)
            assert cut.tiles == 1
            size = piece * self.channels
        else:
            lanes = cuda._plane_lanes(x.sizes, [x.offset])
            size = THREADS * UNROLL * lanes
            count = cuda._pieces(THREADS, lanes, self.total)
        edges = {*EDGES, self.inner, self.total - 1 - size, self.total - 1}
        pieces = sorted({min(edge // size, count - 1) for edge in edges if edge < self.total})
        numbers = [(p * size, min((p + 1) * size, self.total)) for p in pieces]
        return numbers, {count - 1 - p for p in pieces}


def run(bench: Bench, form: str, dtype: str) -> None:
    """All kernels of a form on activations whose numbers need more than 32 bits."""
    lanes, rng = lanes_of(dtype), np.random.default_rng(5)

    def large(outer: int, channels: int, inner: int, skipped: int = 0) -> Large:
        return Large(bench, dtype, outer, channels, inner, rng, skipped)

    if form.endswith("rows"):
        channels = 2 * lanes if form == "rows" else 3
        activation = large(2**32 // channels + 70000, channels, 1)
        activation.elementwise()
        activation.reductions()
        return
    if form == "single planes":  # taken number by number, as they are short or miss 16 bytes
        large(2**32 // 3 + 1000, 3, 2).elementwise()
        for beyond in (8, 1500):  # where in a piece the plane ends
            large(1, 2, 2**32 + beyond, 1).elementwise()
        large(2**31 + 50000, 1, 2).reductions()
        return
    tail = 5 if form == "ragged planes" else 0
    for beyond in (8, 1500):  # long planes; where in a piece they end
        large(1, 2, 2**32 + beyond * lanes + tail).elementwise()
    large(2**32 // 3 + 1000, 3, 16 + tail).elementwise()  # many planes
    large(1, 1, 2**32 * lanes + tail).reductions()
