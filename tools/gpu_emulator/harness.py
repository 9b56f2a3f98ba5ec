"""CUDA kernels on the emulated device: memory, a runner, cases, and the results in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from emulated_device import Device, Launch

from ptx_emulator.machine import Schedule
from ptx_emulator.memory import Range
from syncbn_core._kernels.cuda.constants import SIZES, UNROLL, lanes_of
from syncbn_core.backends.cuda import grid as cuda
from syncbn_core.backends.cuda import kernels
from syncbn_core.backends.cuda.compiler import Source
from syncbn_core.moments import NormRule

Array = np.ndarray[Any, Any]

DTYPES = ["float32", "float64", "float16", "bfloat16"]
STEPS = ["moments", "normalize", "backward_reduce", "backward_input"]
STORAGE = {
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float32": np.float32,
    "float64": np.float64,
}
_MARGIN = 4096  # bytes around each buffer that belong to nobody


def to_bfloat16(values: Any) -> Array:
    """Rounded to nearest even, as uint16; NaN stays NaN."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def from_bfloat16(bits: Any) -> Array:
    values: Array = (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return values


LABEL, OF_ANY_LAYER = 123456789.0, 53.0  # `syncbn_core/labels.py`
PLACE = 7.0


class Buffer:
    """Numbers in memory that kernels may touch; `offset`: bytes from a multiple of 16."""

    def __init__(
        self,
        device: Device,
        size: int,
        dtype: str,
        *,
        offset: int = 0,
        written: bool = False,
        name: str = "",
    ) -> None:
        self.device, self.dtype, self.offset = device, dtype, offset
        kind = np.dtype(STORAGE.get(dtype, dtype))
        raw = np.full(size * kind.itemsize + 2 * _MARGIN, 0xFF, np.uint8)
        start = _MARGIN // 2
        start += -(raw.ctypes.data + start) % 64 + offset
        data = raw[start : start + size * kind.itemsize]
        self.pointer = data.ctypes.data
        self.array: Array = data.view(kind)
        self.area = device.memory.add(Range(self.pointer, data, written=written, name=name))

    def values(self) -> Array:
        """As float64."""
        array = from_bfloat16(self.array) if self.dtype == "bfloat16" else self.array
        return array.astype(np.float64)


@dataclass
class View:
    """An activation in a buffer, `[outer, channels, inner]`."""

    buffer: Buffer
    outer: int
    channels: int
    inner: int

    @property
    def pointer(self) -> int:
        return self.buffer.pointer

    @property
    def offset(self) -> int:
        return self.buffer.offset

    @property
    def dtype(self) -> str:
        return self.buffer.dtype

    @property
    def sizes(self) -> cuda.Sizes:
        return cuda.Sizes(self.dtype, self.outer, self.channels, self.inner)

    def values(self) -> Array:
        """What a kernel sees, as float64."""
        return self.buffer.values().reshape(self.outer, self.channels, self.inner)


class Bench:
    """A device with memory; launches like a backend's runner. Block counters must be left at zero.

    Its memory is freed when it exits.
    """

    threads = cuda.THREADS
    multiprocessors = 132

    def __init__(self, device: Device, index: int = 0) -> None:
        self.device, self.index = device, index
        self.buffers: list[Buffer] = []
        self.counters = self.empty(4096, "int32", name="block counters")
        self.counters.array[:] = 0
        self.counters.area.written = None
        self.keys: list[str] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        for buffer in self.buffers:
            self.device.memory.remove(buffer.area)

    # memory

    def empty(self, size: int, dtype: str, offset: int = 0, name: str = "") -> Buffer:
        """Numbers that a kernel must write before one reads them."""
        buffer = Buffer(self.device, size, dtype, offset=offset, name=name)
        self.buffers.append(buffer)
        return buffer

    def of(self, values: Any, dtype: str, offset: int = 0, name: str = "") -> Buffer:
        values = np.asarray(values)
        buffer = Buffer(
            self.device, values.size, dtype, offset=offset, written=True, name=name or dtype
        )
        self.buffers.append(buffer)
        buffer.array[:] = to_bfloat16(values).ravel() if dtype == "bfloat16" else values.ravel()
        return buffer

    def alarm(self, number: float = 0.0) -> Buffer:
        alarm = self.of([number], "float64", name="alarm")
        alarm.area.ordered = False
        return alarm

    def view(self, values: Array, dtype: str, offset: int = 0, name: str = "x") -> View:
        """`offset`: in numbers."""
        return View(self.of(values, dtype, offset * SIZES[dtype] % 16, name), *values.shape)

    def like(self, view: View, name: str = "y") -> View:
        buffer = self.empty(view.buffer.array.size, view.dtype, view.offset, name)
        return View(buffer, view.outer, view.channels, view.inner)

    # as a runner

    def launch(self, source: Source, grid: tuple[int, int], *arguments: Any) -> None:
        self.keys.append(source.key)
        kernels.launch_of(source, self.index)(grid, 0, *arguments)
        assert not self.counters.array.any(), f"{source.key} leaves counters behind"

    def scratch(self, size: int) -> tuple[int, Buffer]:
        buffer = self.empty(size, "float64", name="partial sums")
        return buffer.pointer, buffer

    def shared_sums(self, partials: int, counters: int) -> tuple[int, int]:
        assert counters <= self.counters.array.size
        return self.scratch(partials)[0], self.counters.pointer

    @property
    def last(self) -> Launch:
        return self.device.launches[-1]


def source_of(form: str, dtype: str, step: str) -> Source:
    """The kernel of a step for activations of a form."""
    lanes = 1 if form.startswith("single") else lanes_of(dtype)
    kind = "rows" if form.endswith("rows") else "planes"
    ragged = form == "ragged planes"
    return cuda.source(f"{kind}_{step}", dtype, lanes, ragged, cuda.THREADS)


def variants() -> Iterator[tuple[str, str, int, bool]]:
    """Name, dtype, lanes, and whether rows are ragged, of every kernel."""
    for step in STEPS:
        for dtype in SIZES:
            for lanes in (lanes_of(dtype), 1):
                yield f"rows_{step}", dtype, lanes, False
                yield f"planes_{step}", dtype, lanes, False
            yield f"planes_{step}", dtype, lanes_of(dtype), True
    yield "merge_parts", "float64", 1, False


def capability(arch: str) -> tuple[int, int]:
    """`(9, 0)` for "sm_90"."""
    return divmod(int(arch.removeprefix("sm_")), 10)


# ---------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """An activation `[outer, channels, inner]`, its first number `offset` numbers off 16 bytes.

    `splits`: into how many blocks, in groups of how many, a reduction cuts a channel or the rows,
    where that is not left to the host's plan; `tall`: an elementwise kernel takes as many rows as
    it may.
    """

    form: str
    outer: int
    channels: int
    inner: int = 1
    offset: int = 0
    splits: tuple[int, int] | None = None
    tall: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.outer, self.channels, self.inner

    def __str__(self) -> str:
        at = f"+{self.offset}" if self.offset else ""
        return f"{self.form} {self.outer}x{self.channels}x{self.inner}{at}"

    @contextmanager
    def planned(self) -> Iterator[None]:
        """The host's plan is the one that this case wants."""
        with pytest.MonkeyPatch.context() as patch:
            if self.splits:
                count, group = self.splits
                plan = cuda._Splits(count, group, -(-count // group))
                patch.setattr(cuda, "_row_splits", lambda multiprocessors, cut, rows: plan)
                patch.setattr(cuda, "_reduction", cuda._reduction.__wrapped__)  # no cache
                walk = cuda._walk
                patch.setattr(cuda, "_walk", lambda *views: replace(walk(*views), splits=count))
            if self.tall:
                patch.setattr(cuda, "_elementwise", cuda._elementwise.__wrapped__)
                patch.setattr(cuda, "ROW_PIECES", 0.01)
            yield


FORMS = ["planes", "ragged planes", "single planes", "rows", "single rows"]


# Splits of a channel, so that the block that adds them up goes round a loop that the compiler has
# unrolled; some compilers do more of it, and `steps` takes more.
MANY, MORE = (1030, 1), (3870, 1)


def cases(form: str, dtype: str) -> list[Case]:
    """Cases that together execute all of the kernels of that form, and some others."""
    lanes = lanes_of(dtype)
    step = cuda.THREADS * UNROLL * lanes  # numbers that a block has in flight
    if form == "planes":  # whole pieces, tails, channels over several blocks, planes in a piece
        shapes = [(30, 5, 16), (1, 2, step + 8 * lanes), (1, 1, 3 * step), (300, 2, 16)]
        shapes += [(2, 3, 300 * lanes)]
        return [*(Case(form, *shape) for shape in shapes), Case(form, 2, 1, 256, splits=MANY)]
    if form == "ragged planes":
        shapes = [
            (3, 5, 49),
            (9, 2, step // 4 + 1),
            (1, 1, 3 * step + 5),
            (300, 3, 17),
            (2, 3, 200, 1),
            (700, 2, 2 * lanes + 1),
            (257, 3, 2 * lanes + 1),
            (130, 2, 3 * lanes - 1),
            (6 * lanes + 1, 3, 49),
            (700, 2, 3 * lanes, 1),
            (300, 2, 3 * lanes, 1),
        ]
        return [*(Case(form, *shape) for shape in shapes), Case(form, 2, 1, 255, splits=MANY)]
    if form == "single planes":
        shapes = [(500, 3, 2), (3, 700, 3), (400, 2, max(2 * lanes - 1, 2)), (2, 300, 2)]
        return [*(Case(form, *shape) for shape in shapes), Case(form, 90, 1, 2, splits=MANY)]
    if form == "rows":
        return [
            Case(form, 40, 2 * lanes),
            Case(form, 700, 3 * lanes),
            Case(form, 30, 37 * lanes, splits=(70, 70), tall=True),
            Case(form, 90, 16 * lanes, splits=(40, 1), tall=True),
            Case(form, 90, 16 * lanes, splits=(70, 1)),
            Case(form, 700, 16 * lanes, tall=True),
            Case(form, 1, lanes),
            Case(form, 70, 16 * lanes),
            Case(form, 1003, 16 * lanes),
            Case(form, 300, 5 * lanes),
            Case(form, 77, 12 * lanes),
            Case(form, 515, 3 * lanes),
            Case(form, 2600, 4 * lanes),
        ]
    return [
        Case(form, 50, 1),
        Case(form, 9000, 3),
        Case(form, 30, 77, splits=(70, 70), tall=True),
        Case(form, 90, 32, splits=(40, 1), offset=1, tall=True),
        Case(form, 700, 32, offset=1, tall=True),
        Case(form, 40, 2 * lanes, offset=1),
        Case(form, 25, 31, offset=1),
        Case(form, 1003, 31, offset=1),
    ]


DEFAULT_RULE = NormRule()


@dataclass(frozen=True)
class Setting:
    """Options of a step; dtypes are those of parameters, gradients and running statistics."""

    weight: str | None = "float32"
    bias: str | None = "float32"
    running: str | None = "float32"
    gradients: str = "float32"
    factor: float = 0.1
    counts: bool = True
    rule: NormRule = DEFAULT_RULE
    members: int = 1
    constant: bool = False  # running statistics in place of the batch's
    other_call: bool = False  # a member has sent the message of another call
    alarm: float = 0.0  # what stands there before
    label: float = LABEL


SETTINGS = [
    Setting(),
    Setting("float64", "float16", "float64", "float64", factor=-1.0, members=15),
    Setting(
        "float16",
        "bfloat16",
        "float16",
        "float16",
        factor=1.0,
        rule=NormRule(4.0, "clamp"),
        members=14,
        label=OF_ANY_LAYER,
    ),
    Setting("bfloat16", "float64", "bfloat16", "bfloat16", counts=False, members=17),
    Setting(None, None, None, "float32", counts=False),
    Setting(running="float32", constant=True),
    Setting("float64", None, "float64", constant=True, rule=NormRule(1.5, "clamp")),
    Setting("float16", "float32", "float16", constant=True),
    Setting("bfloat16", "float32", "bfloat16", constant=True),
    Setting(None, "float32", "float32", constant=True),
    Setting(other_call=True),
    Setting(members=15, other_call=True, alarm=5.0),
]


# ------------------------------------------------------------------------- what is right


def work_epsilon(dtype: str) -> tuple[float, float]:
    """Rounding of one result in the storage dtype, and of the arithmetic behind it."""
    storage = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}[dtype]
    return storage, 2**-53 if dtype == "float64" else 2**-24


def column(values: Array) -> Array:
    return values[None, :, None]


def moments_of(values: Array) -> Array:
    """Packed moments of `[outer, channels, inner]`."""
    if values.size == 0:
        return np.zeros(2 * values.shape[1] + 1)
    mean = values.mean((0, 2))
    m2 = ((values - mean[:, None]) ** 2).sum((0, 2))
    return np.concatenate([[values.size // values.shape[1]], mean, m2])


def rows_of(parts: Any) -> Array:
    """Packed moments of several parts, each followed by a label."""
    return np.stack([np.append(part, LABEL) for part in parts])


def merged(parts: Array) -> Array:
    """Packed moments of all parts, `[P, 2 C + 1]`."""
    channels = parts.shape[1] // 2
    n, means, m2s = parts[:, :1], parts[:, 1 : 1 + channels], parts[:, 1 + channels :]
    mean = (n * means).sum(0) / n.sum()
    return np.concatenate([[n.sum()], mean, (m2s + n * (means - mean) ** 2).sum(0)])


def inverse_deviation(count: float, m2: Array, setting: Setting) -> Array:
    var = m2 / count
    positive = np.maximum(var, setting.rule.eps) if setting.rule.clamps else var + setting.rule.eps
    inverse: Array = 1 / np.sqrt(positive)
    return inverse


def within(actual: Array, expected: Array, bound: Any, what: str) -> None:
    error = np.abs(actual - expected) - bound
    worst = np.unravel_index(np.argmax(error), error.shape) if error.size else ()
    assert (error <= 0).all(), (
        f"{what}: {actual[worst]} instead of {expected[worst]} at {worst}, "
        f"{(error > 0).sum()} of {error.size} wrong"
    )


@dataclass
class Steps:
    """A batch on a bench, taken through the four steps, each compared with float64."""

    bench: Bench
    case: Case
    dtype: str
    setting: Setting
    rng: np.random.Generator
    x: View = field(init=False)
    dy: View = field(init=False)
    weight: Buffer | None = None
    bias: Buffer | None = None
    statistics: Buffer = field(init=False)
    alarm: Buffer = field(init=False)

    def __post_init__(self) -> None:
        channels, shape = self.case.channels, self.case.shape
        means = self.rng.normal(0, 3, (1, channels, 1))
        spread = self.rng.uniform(0.5, 2, (1, channels, 1))
        bench, offset = self.bench, self.case.offset
        self.x = bench.view(self.rng.normal(means, spread, shape), self.dtype, offset)
        self.dy = bench.view(self.rng.normal(size=shape), self.dtype, offset, "dy")
        self.alarm = bench.alarm()
        if self.setting.weight:
            self.weight = bench.of(self.rng.normal(1, 0.3, channels), self.setting.weight)
        if self.setting.bias:
            self.bias = bench.of(self.rng.normal(size=channels), self.setting.bias)

    @property
    def parameters(self) -> cuda.Parameters:
        numbers: list[int] = []
        for buffer in (self.weight, self.bias):
            numbers += [buffer.pointer, cuda.CODES[buffer.dtype]] if buffer else [0, 0]
        return cuda.Parameters(*numbers)

    def all(self) -> None:
        self.moments()
        self.normalize()
        self.backward_reduce()
        self.backward_input()

    def moments(self) -> None:
        into = self.bench.empty(2 * self.case.channels + 2, "float64", name="moments")
        cuda.moments(self.bench, self.x, into.pointer, LABEL)
        expected = moments_of(self.x.values())
        # sums are float64: of float32 what is left is the rounding within a thread's numbers
        bound = work_epsilon(self.dtype)[1] * (512 if self.dtype == "float64" else 64)
        np.testing.assert_allclose(into.array, [*expected, LABEL], rtol=bound, atol=bound)

    def normalize(self) -> None:
        channels, setting, bench = self.case.channels, self.setting, self.bench
        values = self.x.values()
        # members without samples at every place of a loop that takes four at a time
        sizes = [0 if n in (1, 4, 6, 11) else n for n in range(17)]
        parts = [moments_of(self.rng.normal(2, 3, (n, channels, 5))) for n in sizes]
        parts[0] = moments_of(values)
        rows = rows_of(parts[: setting.members])
        rows[-1, -1] += setting.other_call
        packed = bench.of(rows, "float64", name="parts")
        running = cuda.NO_RUNNING
        tracked = bench.of(np.array([4]), "int64", name="num_batches_tracked")
        mean, var = (
            bench.of(numbers, setting.running or "float32", name="running")
            for numbers in (self.rng.normal(size=channels), self.rng.uniform(1, 2, channels))
        )
        old = {"mean": mean.values(), "var": var.values()}
        if setting.running or setting.counts:
            running = cuda.Running(
                mean.pointer if setting.running else 0,
                var.pointer if setting.running else 0,
                cuda.CODES[mean.dtype],
                tracked.pointer if setting.counts and not setting.constant else 0,
                setting.factor,
            )
        y = bench.like(self.x)
        self.statistics = bench.empty(3 * channels + 1, "float64", name="statistics")
        cuda.normalize(
            bench,
            self.x,
            y,
            self.parameters,
            0 if setting.constant else packed.pointer,
            0 if setting.constant else setting.members,
            self.statistics.pointer,
            rule=setting.rule,
            running=running,
            check=self._check(),
        )
        self._check_alarm(setting.other_call)
        if setting.constant:
            whole = np.concatenate([[1], old["mean"], old["var"]])
        else:
            whole = merged(np.stack(parts[: setting.members]))
        count, means, m2 = np.split(whole, [1, 1 + channels])
        invstd = inverse_deviation(count[0], m2, setting)
        kept = np.concatenate([whole, invstd])
        np.testing.assert_allclose(self.statistics.array, kept, rtol=1e-12, atol=1e-12)
        scale = invstd * (self.weight.values() if self.weight else 1)
        shift = self.bias.values() if self.bias else np.zeros(channels)
        expected = (values - column(means)) * column(scale) + column(shift)
        unit, arithmetic = work_epsilon(self.dtype)
        bound = 2 * unit * np.abs(expected) + 32 * arithmetic * (1 + np.abs(expected))
        within(y.values(), expected, bound, "y")
        self._check_running(whole, mean, var, tracked, old)

    def _check(self) -> cuda.Check:
        """Of the labels, where a group of processes has some."""
        self.alarm.array[:] = self.setting.alarm
        label = self.setting.label
        return cuda.Check(label, self.alarm.pointer, PLACE) if self.weight else cuda.NO_CHECK

    def _check_alarm(self, sounds: bool) -> None:
        before = self.setting.alarm
        assert self.alarm.array[0] == (before or PLACE if sounds and self.weight else before)

    def _check_running(
        self, whole: Array, mean: Buffer, var: Buffer, tracked: Buffer, old: dict[str, Array]
    ) -> None:
        setting, channels = self.setting, self.case.channels
        counts = setting.counts and setting.factor >= 0 and not setting.constant
        assert tracked.array[0] == 4 + counts
        if setting.constant or not setting.running:
            assert (mean.values() == old["mean"]).all()
            assert (var.values() == old["var"]).all()
            return
        share = 1 / 5 if setting.factor < 0 else setting.factor
        batch = {
            "mean": whole[1 : 1 + channels],
            "var": whole[1 + channels :] / max(whole[0] - 1, 1),
        }
        unit = work_epsilon(setting.running)[0]
        for name, buffer in (("mean", mean), ("var", var)):
            expected = (1 - share) * old[name] + share * batch[name]
            rounding = 1.01 * unit * np.abs(expected) + 1e-12
            within(buffer.values(), expected, rounding, f"running_{name}")

    def keep_statistics(self) -> None:
        """What `normalize` keeps, without it."""
        whole = moments_of(self.x.values())
        invstd = inverse_deviation(whole[0], whole[1 + self.case.channels :], self.setting)
        kept = np.concatenate([whole, invstd])
        self.statistics = self.bench.of(kept, "float64", name="statistics")

    def _normalized(self) -> tuple[Array, Array, Array, Array, Array]:
        """`(xhat, count, m2, invstd, weight)` of the statistics kept."""
        channels = self.case.channels
        ends = [1, 1 + channels, 1 + 2 * channels]
        count, mean, m2, invstd = np.split(self.statistics.array, ends)
        xhat = (self.x.values() - column(mean)) * column(invstd)
        weight = self.weight.values() if self.weight else np.ones(channels)
        return xhat, count, m2, invstd, weight

    def backward_reduce(self) -> None:
        channels, setting, bench = self.case.channels, self.setting, self.bench
        grad = self.dy.values()
        xhat, _, _, _, weight = self._normalized()
        by_bias, by_weight = grad.sum((0, 2)), (grad * xhat).sum((0, 2))
        labels = [LABEL] if self.weight else []  # a group of processes has one
        sums = bench.empty(2 * channels + len(labels), "float64", name="sums")
        ours = [bench.empty(channels, setting.gradients, name="gradients") for _ in range(2)]
        cuda.backward_reduce(
            bench,
            self.x,
            self.dy,
            self.statistics.pointer,
            self.parameters,
            sums.pointer,
            *(buffer.pointer for buffer in (ours if self.weight else ())),
            code=cuda.CODES[setting.gradients],
            **({"label": LABEL} if labels else {}),
        )
        np.testing.assert_array_equal(sums.array[2 * channels :], labels)
        arithmetic = work_epsilon(self.dtype)[1]
        bound = np.abs(grad * (1 + np.abs(xhat))).sum((0, 2)) * 8 * arithmetic + 1e-300
        first, second = sums.array[: 2 * channels].reshape(2, -1)
        within(first, by_bias * weight, bound * np.abs(weight), "sum_dy")
        within(second, by_weight * weight, bound * np.abs(weight), "sum_dy_xhat")
        if self.weight:
            rounding = 1.01 * work_epsilon(setting.gradients)[0]
            for buffer, wanted in zip(ours, (by_weight, by_bias), strict=True):
                within(buffer.values(), wanted, bound + rounding * np.abs(wanted), "gradients")

    def backward_input(self) -> None:
        channels, setting, bench = self.case.channels, self.setting, self.bench
        grad = self.dy.values()
        xhat, count, m2, invstd, weight = self._normalized()
        sums = np.stack([grad.sum((0, 2)), (grad * xhat).sum((0, 2))]) * weight * 1.5
        labels = [LABEL] if self.weight else []
        message = np.append(sums.ravel(), [setting.label + setting.other_call for _ in labels])
        total = bench.of(message, "float64", name="sums of all members")
        dx = bench.like(self.x, "dx")
        cuda.backward_input(
            bench,
            self.x,
            self.dy,
            dx,
            self.statistics.pointer,
            self.parameters,
            0 if setting.constant else total.pointer,
            rule=setting.rule,
            check=self._check(),
        )
        self._check_alarm(setting.other_call)
        if setting.other_call:
            assert np.isnan(dx.values()).all()
            return
        first, second = np.zeros((2, channels)) if setting.constant else sums
        if setting.rule.clamps:
            second = np.where(m2 / count < setting.rule.eps, 0, second)
        inner = grad * column(weight) - column(first) / count
        expected = column(invstd) * (inner - xhat * column(second) / count)
        unit, arithmetic = work_epsilon(self.dtype)
        size = 1 + np.abs(grad) + np.abs(xhat) + np.abs(column(second)) / count
        bound = 2 * unit * np.abs(expected) + 64 * arithmetic * size * column(invstd)
        within(dx.values(), expected, bound, "dx")


ORDERS = [Schedule("first"), Schedule("last"), Schedule("random", 1000)]


def steps(device: Device, form: str, dtype: str) -> Iterator[list[str]]:
    """All cases of a form, compared with what is right; gives the kernels that each has run.

    The first case has all settings, each other one the next few.
    """
    rng = np.random.default_rng(len(form) * 100 + len(dtype))
    for number, case in enumerate(cases(form, dtype)):
        some = [SETTINGS[(2 * number + k) % len(SETTINGS)] for k in range(2)]
        if case.splits == MANY:
            some = some[:1]
            if device.capability >= (10, 0):
                case = replace(case, splits=MORE)
        device.schedule = ORDERS[number % len(ORDERS)]
        for setting in SETTINGS if number == 0 else some:
            with Bench(device) as bench, case.planned():
                step = Steps(bench, case, dtype, setting, rng)
                step.all()
                yield bench.keys
