"""What members of a group send each other: moments forward, two sums per channel backward.

On a host both directions are one `all_gather` of a row of float64 `(2 C + 2,)`:

    forward     count, mean (C,), m2 (C,), label      merged in the order of ranks
    backward    0, two sums (C,), label               added in the order of ranks

So results are bitwise the same on every member. All rows of a layer have one length, so a member in
forward beside one in backward is told so. On a device the rows of forward stay as they are, the
kernel that normalizes merges them, and backward is an `all_reduce` with a label behind the sums
(`comm.sum_labels`).

By the label, the last number of a row, members notice that they are in different layers, without
a further message:

    label = ((extra * 2**19 + number) * 8 + kind) * 4 + dtype

`number`: of the layer, by its first call in this group; calls without a layer have 0, and go with
any (a graph on a device does not know its layer).
`kind`: see `KINDS`. `extra`: in backward the number of the call in which the forward was; in
forward 12 bits of a hash of the layer's settings, and above them, in its first call, a hash of its
name, because two members may take their layers in another order from the first call on.

Members whose labels differ send their names. Other numbers, settings, kinds or calls are an error
on every member. Other names are one if a member's own model holds another layer whose name is more
like the names that the others have sent; if not, the members hold the model differently, which is
right.

On a device the host waits for the labels in the first call of a layer only. It looks at later ones
when the device has finished them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from syncbn_core.comm import (
    CollectiveCall,
    Communicator,
    ProcessCommunicator,
    SingleCommunicator,
)
from syncbn_core.comm.message_arrays import HostCopy, NumpyArrays, arrays_of, is_on_device
from syncbn_core.comm.sum_labels import label_of
from syncbn_core.device_moments import DeviceMoments, DeviceStatistics
from syncbn_core.errors import DTypeError, ProtocolError, ShapeError
from syncbn_core.moments import Moments, NormRule, merged

__all__ = [
    "BACKWARD",
    "COMPILED",
    "FORWARD",
    "OF_MOMENTS",
    "OF_SUMS",
    "WITH_GRAPH",
    "Exchange",
    "LayerNames",
    "PartMoments",
]

Array = Any
PartMoments = Moments | DeviceMoments

FORWARD, BACKWARD, WITH_GRAPH, OF_MOMENTS, OF_SUMS, COMPILED = range(6)
KINDS = (
    "forward",
    "backward",
    "backward with create_graph=True",
    "second derivative, by moments,",
    "second derivative, by sums,",
    "forward, compiled within DistributedDataParallel,",
)
DTYPES = ("float32", "float64", "float16", "bfloat16")
REMEDY = (
    "all members have to run the same layers in the same order, use them in the loss, and agree on "
    "create_graph and on torch.compile"
)
_NUMBERS, _EXTRAS = 1 << 19, 1 << 28
_SETTINGS, _NAMED = 1 << 12, 1 << 15
_EXTRA = 32 * _NUMBERS  # the place of the extra in a label,
_NAME = _EXTRA * _SETTINGS  # and of the name in that: labels with a name are not less
_NAMES = 8192  # bytes of the message with a member's names


class LayerNames(NamedTuple):
    """How a framework names its layers.

    `name(layer)`: in its model, "" outside of models. `held(layer)`: the names of all layers in the
    models that hold `layer`, each with whether it is a name of `layer`.
    """

    name: Callable[[Any], str]
    held: Callable[[Any], Sequence[tuple[str, bool]]]


UNNAMED = LayerNames(lambda layer: "", lambda layer: ())


class Member:
    """What a member of a group counts: its layers, and its exchanges."""

    def __init__(self) -> None:
        self.layers: int = 0
        self.exchanges: int = 0
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def number_of(self, layer: Any) -> tuple[int, bool]:
        """The number of a layer, from 1, and whether it is new; 0 for None."""
        if layer is None:
            return 0, False
        number = self._numbers.get(layer)
        if number is not None:
            return number, False
        self.layers += 1
        self._numbers[layer] = self.layers
        return self.layers, True

    def forget(self, layer: Any) -> None:
        """Take back the number of a new layer, after an error: members may differ in it."""
        del self._numbers[layer]
        self.layers -= 1


_members: WeakKeyDictionary[Communicator, Member] = WeakKeyDictionary()


class Exchange(NamedTuple):
    """A layer's access to its group.

    Attributes:
        communicator: this member of the group.
        name: returns what errors call the layer; called only for an error.
        dtype: that of the layer's input, by NumPy's name.
        layer: an object, the same in every call of the layer; None for calls without one.
        names: how to name it.
        rule: the settings of the layer, with any activation; the same on all members.
    """

    communicator: Communicator
    name: Callable[[], str]
    dtype: str
    layer: Any = None
    names: LayerNames = UNNAMED
    rule: NormRule | None = None

    @property
    def member(self) -> Member:
        """What this member counts; nothing with a class of the user's that takes no references."""
        try:
            member = _members.get(self.communicator)
            if member is None:
                member = _members[self.communicator] = Member()
        except TypeError:
            return Member()
        return member

    def moments(self, own: PartMoments, kind: int = FORWARD) -> tuple[PartMoments, int]:
        """`(moments of the whole batch, number of the call)`, given those of this member's part.

        `own`: `Moments` of NumPy arrays, or of any that an adapter has registered, or
        `DeviceMoments` of one row; with the same channels on all members. The total is of the same
        kind and on the same device. Pass the number to `sums`; it is 0 for a `SingleCommunicator`.
        `kind`: FORWARD or COMPILED.

        Raises `ProtocolError` where members are in different layers, `DTypeError` where their
        inputs differ in dtype, `ShapeError` in threads with different channels, and the
        communicator's errors.
        """
        if type(self.communicator) is SingleCommunicator:
            return own, 0
        member = self.member
        number, new = member.number_of(self.layer)
        try:
            name = self.names.name(self.layer) if new else ""
            extra = _hash(name, _NAMED) + _NAMED if name else 0
            extra = extra * _SETTINGS + (_hash(self.rule, _SETTINGS) if number else 0)
            label = self._label(kind, number, extra)
            size = 2 * own.num_features + 2
            call = self._call(kind, size)
            if isinstance(own, DeviceMoments) and _stays_on_device(self.communicator, own.rows):
                total: PartMoments = self._on_device(own, label, new, call)
            else:
                host = own.merged() if isinstance(own, DeviceMoments) else own
                row = np.empty(size)
                row[0], row[-1], middle = host.count, label, size // 2
                row[1:middle], row[middle:-1] = _to_host(host.mean), _to_host(host.m2)
                rows = self._gather(row, call)
                mean, m2 = merged(rows[:, :1], rows[:, 1:middle], rows[:, middle:-1])
                total = own
                if len(rows) > 1:
                    total = _like(Moments(int(rows[:, 0].sum()), mean, m2), own)
        except BaseException as error:
            if new:
                member.forget(self.layer)
            if isinstance(error, ShapeError):
                raise ShapeError(
                    f"expected the same number of channels from every member: {error}"
                ) from error
            raise
        member.exchanges += 1
        return total, member.exchanges

    def sums(
        self, sums: Array, forward: int, statistics: Any = None, kind: int = BACKWARD
    ) -> Array:
        """`sums` added up over all members: an array of the same shape, dtype and device, to read.

        `forward`: the number that `moments` gave. `statistics`: those of `with_labels`, from which
        the sums were computed. `kind`: one of `KINDS`; where sums are differentiated, `forward` is
        the number of the exchange that added up (`member.exchanges` after it). Raises
        `ProtocolError` where members are in the backward of different calls, and the
        communicator's errors.
        """
        if type(self.communicator) is SingleCommunicator:
            return sums
        member = self.member
        if _stays_on_device(self.communicator, sums):
            total = self._added_on_device(sums, forward, statistics, kind)
        else:
            row = np.zeros(math.prod(sums.shape) + 2)
            row[1:-1] = _to_host(sums).reshape(-1)
            row[-1] = self._label(kind, member.number_of(self.layer)[0], forward)
            rows = self._gather(row, self._call(kind, len(row), forward))
            with np.errstate(invalid="ignore", over="ignore"):
                added = rows[:, 1:-1].sum(0).reshape(sums.shape)
            arrays = None if isinstance(sums, np.ndarray) else arrays_of(sums)
            total = added if arrays is None else arrays.from_host(added, sums)
        member.exchanges += 1
        return total

    def sums_of_graph(self, sums: Array) -> Array:
        """`sums` where only the device knows the number of the call of the forward.

        `sums`: float64 `(2 C + 1,)`, that number behind the sums; may be written to. In the result,
        of the same shape, the last number is 0, or members were in the backward of different calls:
        then the sums are wrong, and a later call raises `ProtocolError`.
        """
        own = label_of(len(KINDS) * sums[-1:] + BACKWARD, self.communicator.size)
        sums[-1:] = own
        call = self._call(BACKWARD, len(sums))
        total = self._add_up(sums, call)
        total[-1:] -= own * self.communicator.size
        self._look_later(total[-1:], 0, call)
        self.member.exchanges += 1
        return total

    def with_labels(self, statistics: Any, forward: int) -> Any:
        """The statistics for backward; on a device with the labels that kernels write and check."""
        stays = isinstance(statistics, DeviceStatistics) and forward
        if not (stays and _stays_on_device(self.communicator, statistics.packed)):
            return statistics
        size = self.communicator.size
        label = label_of(_key(BACKWARD, forward), size)
        return statistics._replace(label=label, label_of_total=label * size)

    def _label(self, kind: int, number: int, extra: int) -> float:
        dtype = DTYPES.index(self.dtype) if self.dtype in DTYPES else 0
        numbers = extra % _EXTRAS * _NUMBERS + 1 + number % (_NUMBERS - 1)
        return float((numbers * 8 + kind) * 4 + dtype)

    def _call(self, kind: int, size: int, forward: int = 0) -> CollectiveCall:
        return CollectiveCall(
            lambda: f"{KINDS[kind]} of {self._title()}",
            f"forward in call {forward}" if forward else "",
            f"{size} numbers, {self.dtype}",
            REMEDY,
            self.member.exchanges + 1,
        )

    def _title(self) -> str:
        """The layer's name, and of layers outside of models the number too."""
        number, _ = self.member.number_of(self.layer)
        outside = number and not self.names.name(self.layer)
        title = f"{self.name()}, layer {number}" if outside else self.name()
        activation = self.rule and self.rule.activation
        return f"{title} with {activation}" if activation else title

    def _gather(self, row: Array, call: CollectiveCall) -> Array:
        """The rows of all members, after comparing their labels."""
        rows = self.communicator.all_gather(row, call)
        self._compare(rows[:, -1].tolist(), float(row[-1]), call)
        return rows

    def _on_device(
        self, own: DeviceMoments, label: float, new: bool, call: CollectiveCall
    ) -> DeviceMoments:
        """The rows of all members `(P, 2 C + 2)`."""
        place = own.rows[:, -1]
        (arrays_of(place) or NumpyArrays).fill(place, label)
        rows = self.communicator.all_gather(own.rows.reshape(-1), call)
        copy = (arrays_of(rows) or NumpyArrays).copy_to_host(rows[:, -1])
        if copy is not None and new:
            wait = getattr(self.communicator, "wait_until", None)  # with a deadline
            if wait is not None:
                wait(copy.done)
            labels = copy.values().tolist()
            self._compare(labels, label, call, all(label >= _NAME for label in labels))
        elif copy is not None:
            _processes(self).look_later(lambda: _are_all(label, copy), call)
        return own.with_rows(rows, None)

    def _added_on_device(self, sums: Array, forward: int, statistics: Any, kind: int) -> Array:
        """The sums of all members, NaN if their labels differ; a later call then raises."""
        label = label_of(_key(kind, forward), self.communicator.size)
        of_total = label * self.communicator.size
        by_kernels = isinstance(statistics, DeviceStatistics) and statistics.label is not None
        arrays = arrays_of(sums) or NumpyArrays
        message = sums if by_kernels else arrays.with_label(sums, label)
        call = self._call(kind, len(message) - 1, forward)
        total = self._add_up(message, call)
        self._look_later(total[-1:], of_total, call)
        if by_kernels:
            return total
        same = total[-1:] == of_total
        return (total[:-1] / same * same).reshape(sums.shape)  # x / 0 * 0 is NaN

    def _add_up(self, message: Array, call: CollectiveCall) -> Array:
        """The sum over all members; may be written into `message`."""
        add_up = getattr(self.communicator, "add_up", self.communicator.all_reduce)
        return add_up(message, call)

    def _look_later(self, found: Array, expected: float, call: CollectiveCall) -> None:
        """Let a later call raise `ProtocolError` if the number in `found`, `(1,)`, is another."""
        copy = (arrays_of(found) or NumpyArrays).copy_to_host(found)

        def is_right() -> bool | None:
            assert copy is not None
            ready = copy.may_wait() and copy.done()
            return bool(copy.values()[0] == expected) if ready else None

        if copy is not None:
            _processes(self).look_later(is_right, call)

    def _compare(
        self, labels: list[float], own: float, call: CollectiveCall, together: bool = True
    ) -> None:
        """Raise if the labels of the members do not go together; all members raise alike.

        `together`: whether all members are here, and can send their names.
        """
        if labels.count(own) == len(labels):
            return
        if not all(label.is_integer() and label >= 32 for label in labels):
            raise ProtocolError(f"{_differ(call)}; {REMEDY}")  # a message of something else
        forward = same = False
        if _may_be_one_layer(labels):
            dtypes = {rank: DTYPES[int(label) % 4] for rank, label in enumerate(labels)}
            if len(set(dtypes.values())) > 1:
                raise DTypeError(
                    f"expected input of one dtype on all members, got {dtypes} in {call}; check "
                    "autocast and the dtype of the data there"
                )
            forward, same = own // 4 % 8 in (FORWARD, COMPILED), _same_settings(labels)
            hashes = {label // _NAME for label in labels} - {0.0}  # of names; 0 after first calls
            if not forward or (same and len(hashes) < 2):
                return
        if not together:
            raise ProtocolError(f"{_differ(call)}; {REMEDY}")
        held = [] if self.layer is None else self.names.held(self.layer)
        mine = [name for name, is_own in held if is_own]
        text = f"{call.what()} {self.rule}" if forward and not same else call.what()
        every = self._told(json.dumps([mine[:20], text])[:_NAMES], call)
        try:
            names, texts = zip(*map(json.loads, every), strict=True)
        except ValueError as error:
            raise ProtocolError(f"{_differ(call)}; {REMEDY}") from error
        wrong = not same
        if same:
            others = {name for of_rank in names for name in of_rank}
            verdict = np.array([float(_holds_another(held, others))])
            wrong = bool(self.communicator.all_gather(verdict, _further(call)).any())
        if wrong:
            each = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            if forward and not same:
                raise ProtocolError(
                    f"expected the same settings of a layer on all members, they differ in {call}: "
                    f"{each}; set them alike"
                )
            if len(set(texts)) == 1:
                each += (
                    " (alike, but not the same layers: if some members have copied the model after "
                    "its first step, copy it on all)"
                )
            raise ProtocolError(f"{_differ(call)}: {each}; {REMEDY}")

    def _told(self, text: str, call: CollectiveCall) -> list[str]:
        """The texts of all members; as float64 numbers, which every communicator can send."""
        row = np.frombuffer(bytearray(text.encode().ljust(_NAMES)), np.float64)
        rows = self.communicator.all_gather(row, _further(call))
        return [np.asarray(row).tobytes().decode(errors="replace").rstrip() for row in rows]


def _may_be_one_layer(labels: Sequence[float]) -> bool:
    """Whether kinds and layers agree, in backward the calls too; no layer agrees with every one."""
    kinds = {label // 4 % 8 for label in labels}
    numbers = {label // 32 % _NUMBERS for label in labels} - {1.0}
    calls = {label // _EXTRA for label in labels}
    of_one_call = kinds <= {FORWARD, COMPILED} or len(calls) == 1
    return len(kinds) == 1 and len(numbers) < 2 and of_one_call


def _same_settings(labels: Sequence[float]) -> bool:
    """Whether the settings in labels of forwards agree, but for calls without a layer."""
    own = {label // _EXTRA % _SETTINGS for label in labels if label // 32 % _NUMBERS != 1}
    return len(own) < 2


def _holds_another(held: Sequence[tuple[str, bool]], others: set[str]) -> bool:
    """Whether a model holds another layer whose name is more like one of `others`."""
    for other in others - {""}:
        likeness = [(_likeness(name, other), own) for name, own in held]
        own = max((like for like, is_own in likeness if is_own), default=0)
        if any(like > own for like, _ in likeness):
            return True
    return False


def _likeness(name: str, other: str) -> int:
    """How many parts of two dotted names agree, in their order; one more if all do."""
    parts, others = name.split("."), other.split(".")
    longest = [0] * (len(others) + 1)
    for part in parts:
        before = longest[:]
        for n, their in enumerate(others, 1):
            longest[n] = before[n - 1] + 1 if part == their else max(before[n], longest[n - 1])
    return longest[-1] + (name == other)


def _are_all(label: float, copy: HostCopy) -> bool | None:
    """Whether the copy has arrived and holds only `label`, but for hashes; None before."""
    if not (copy.may_wait() and copy.done()):
        return None
    labels: list[float] = copy.values().tolist()
    dtypes = {each % 4 for each in (label, *labels)}
    return len(dtypes) == 1 and _may_be_one_layer(labels) and _same_settings(labels)


def _key(kind: int, forward: int) -> int:
    """The key of a sum on a device; 0, which compares nothing, if the forward has no number."""
    return len(KINDS) * forward + kind if forward else 0


def _processes(exchange: Exchange) -> ProcessCommunicator:
    assert isinstance(exchange.communicator, ProcessCommunicator)
    return exchange.communicator


@cache
def _hash(thing: Any, limit: int) -> int:
    """Of the text of a thing: the same on all members, less than `limit`."""
    digest = blake2b(str(thing).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % limit


def _differ(call: CollectiveCall) -> str:
    return f"expected all members in the same layer, they are in different ones in {call}"


def _further(call: CollectiveCall) -> CollectiveCall:
    return CollectiveCall(lambda: f"comparison of layers after {call}", remedy=call.remedy)


def _stays_on_device(communicator: Communicator, values: Array) -> bool:
    """Whether the group sends these values without the host."""
    if not getattr(communicator, "on_device", False):
        return False
    return is_on_device(values) or bool(getattr(values, "is_cuda", False))  # of CuPy or torch


def _to_host(values: Array) -> Array:
    """`values` as a NumPy array."""
    if isinstance(values, np.ndarray):
        return values
    arrays = arrays_of(values)
    return np.asarray(values) if arrays is None else arrays.to_host(values)


def _like(total: Moments, part: PartMoments) -> PartMoments:
    """`total` in the form, and as arrays of the library and device, of `part`."""
    like = part.rows if isinstance(part, DeviceMoments) else part.mean
    arrays = None if isinstance(like, np.ndarray) else arrays_of(like)
    if isinstance(part, DeviceMoments):
        row = np.concatenate([[total.count], total.mean, total.m2, [0]])[None]
        return part.with_rows(arrays.from_host(row, like) if arrays else row, total.count)
    if arrays is None:
        return total
    mean, m2 = (arrays.from_host(values, like) for values in (total.mean, total.m2))
    return Moments(total.count, mean, m2)
