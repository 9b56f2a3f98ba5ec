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

`number`: of the layer, by its first call in this group; a call without a layer (a graph on a device
does not know its own) sends 0 and is never compared.
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
from syncbn_core.comm.message_arrays import (
    HostCopy,
    MessageArrays,
    NumpyArrays,
    arrays_of,
    is_on_device,
)
from syncbn_core.comm.sum_labels import label_of
from syncbn_core.errors import DTypeError, ProtocolError, ShapeError
from syncbn_core.moments import Moments, NormRule
from syncbn_core.steps import Labels

__all__ = [
    "BACKWARD",
    "FORWARD",
    "FORWARD_IN_GRAPH",
    "OF_MOMENTS",
    "OF_SUMS",
    "WITH_GRAPH",
    "Exchange",
    "LayerNames",
    "Message",
]

Array = Any

FORWARD, BACKWARD, WITH_GRAPH, OF_MOMENTS, OF_SUMS, FORWARD_IN_GRAPH = range(6)
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
_NUMBERS, _EXTRA_LIMIT = 1 << 19, 1 << 28
_SETTINGS, _NAMED = 1 << 12, 1 << 15
_EXTRA_UNIT = 32 * _NUMBERS  # what 1 of the extra adds to a label,
_NAME_UNIT = _EXTRA_UNIT * _SETTINGS  # and 1 of the hash of a name: labels without one are less
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
        return (self.layers + 1, True) if number is None else (number, False)

    def has_exchanged(self, layer: Any, new: bool) -> None:
        """Count an exchange that went well: after an error members may differ in new layers."""
        self.exchanges += 1
        if new:
            self.layers += 1
            self._numbers[layer] = self.layers


_members: WeakKeyDictionary[Communicator, Member] = WeakKeyDictionary()


class Message(NamedTuple):
    """What a member is about to send.

    Attributes:
        member: who sends it.
        label: what stands at its end.
        call: what errors call it.
        labels: those of sums that are added up on a device; None where labels are compared.
        new: whether it is the first of its layer.
    """

    member: Member
    label: float
    call: CollectiveCall
    labels: Labels | None = None
    new: bool = False


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

    def begin(self, channels: int, kind: int = FORWARD) -> Message:
        """The message of a forward of that `kind`, before its moments are computed."""
        member = self.member
        number, new = member.number_of(self.layer)
        name = self.names.name(self.layer) if new else ""
        name_hash = _hash(name, _NAMED) + _NAMED if name else 0
        extra = name_hash * _SETTINGS + (_hash(self.rule, _SETTINGS) if number else 0)
        call = self._call(member, kind, 2 * channels + 2)
        return Message(member, self._label(kind, number, extra), call, None, new)

    def moments(self, own: Moments, message: Message) -> tuple[Moments, int]:
        """`(the rows of all members, number of the call)`, given this member's row.

        `own`: of NumPy, CuPy, or a library that an adapter has registered, with the same channels
        on all members, and with the label of `message` (`Operations.merge`). The rows are of the
        same library and on the same device. Pass the number to `begin_sums`; it is 0 for a
        `SingleCommunicator`.

        Raises `ProtocolError` where members are in different layers, `DTypeError` where their
        inputs differ in dtype, `ShapeError` in threads with different channels, and the
        communicator's errors.
        """
        if type(self.communicator) is SingleCommunicator:
            return own, 0
        member = message.member
        try:
            if _stays_on_device(self.communicator, own.rows):
                total = Moments(self._on_device(own.rows, message), None)
            else:
                row = np.asarray(_to_host(own.rows), np.float64)[0]
                row[-1] = message.label  # a device without float64 has rounded it
                if own.count is not None:
                    row[0] = own.count
                rows = self._gather(row, message.call)
                total = Moments(_like(own.rows, rows), int(rows[:, 0].sum()))
        except ShapeError as error:
            raise ShapeError(
                f"expected the same number of channels from every member: {error}"
            ) from error
        member.has_exchanged(self.layer, message.new)
        return total, member.exchanges

    def begin_sums(self, like: Array, forward: int, kind: int = BACKWARD) -> Message:
        """The message of a backward.

        `like`: an array on the device of the sums, `(2, C)`, or the table of `Statistics`.
        `forward`: the number that `moments` gave. `kind`: one of `KINDS`; where sums are
        differentiated, `forward` is the number of the exchange that added up
        (`member.exchanges` after it).
        """
        member = self.member
        channels = like.shape[-1] // 3 if len(like.shape) == 1 else like.shape[-1]
        if _stays_on_device(self.communicator, like):
            size = self.communicator.size
            label = label_of(_key(kind, forward), size)
            call = self._call(member, kind, 2 * channels, forward)
            return Message(member, label, call, Labels(label, label * size))
        label = self._label(kind, member.number_of(self.layer)[0], forward)
        return Message(member, label, self._call(member, kind, 2 * channels + 2, forward))

    def sums(self, sums: Array, message: Message) -> Array:
        """`sums` added up over all members: an array of the same shape, dtype and device, to read.

        `sums`: `(2, C)`; `(2 C + 1,)` where a kernel has written the label behind them. Raises
        `ProtocolError` where members are in the backward of different calls, and the
        communicator's errors.
        """
        if type(self.communicator) is SingleCommunicator:
            return sums
        if message.labels is not None:
            total = self._added_on_device(sums, message)
        else:
            row = np.zeros(math.prod(sums.shape) + 2)
            row[1:-1], row[-1] = _to_host(sums).reshape(-1), message.label
            rows = self._gather(row, message.call)
            with np.errstate(invalid="ignore", over="ignore"):
                total = _like(sums, rows[:, 1:-1].sum(0).reshape(sums.shape))
        message.member.exchanges += 1
        return total

    def sums_of_graph(self, sums: Array) -> Array:
        """`sums` where only the device knows the number of the call of the forward.

        `sums`: float64 `(2 C + 1,)`, that number behind the sums; may be written to. In the result,
        of the same shape, the last number is 0, or members were in the backward of different calls:
        then the sums are wrong, and a later call raises `ProtocolError`.
        """
        own = label_of(len(KINDS) * sums[-1:] + BACKWARD, self.communicator.size)
        sums[-1:] = own
        call = self._call(self.member, BACKWARD, len(sums))
        total = self._add_up(sums, call)
        total[-1:] -= own * self.communicator.size
        self._look_later(total[-1:], 0, call)
        self.member.exchanges += 1
        return total

    def _label(self, kind: int, number: int, extra: int) -> float:
        dtype = DTYPES.index(self.dtype) if self.dtype in DTYPES else 0
        numbers = extra % _EXTRA_LIMIT * _NUMBERS + 1 + number % (_NUMBERS - 1)
        return float((numbers * 8 + kind) * 4 + dtype)

    def _call(self, member: Member, kind: int, size: int, forward: int = 0) -> CollectiveCall:
        return CollectiveCall(
            lambda: f"{KINDS[kind]} of {self._title()}",
            f"forward in call {forward}" if forward else "",
            f"{size} numbers, {self.dtype}",
            REMEDY,
            member.exchanges + 1,
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

    def _on_device(self, own: Array, message: Message) -> Array:
        """The rows of all members `(P, 2 C + 2)`."""
        label, call = message.label, message.call
        rows = self.communicator.all_gather(own.reshape(-1), call)
        copy = _arrays(rows).copy_to_host(rows[:, -1])
        if copy is not None and message.new:
            wait = getattr(self.communicator, "wait_until", None)  # with a deadline
            if wait is not None:
                wait(copy.done)
            labels = copy.values().tolist()
            self._compare(labels, label, call, all(label >= _NAME_UNIT for label in labels))
        elif copy is not None:
            _processes(self).look_later(lambda: _are_all(label, copy), call)
        return rows

    def _added_on_device(self, sums: Array, message: Message) -> Array:
        """The sums of all members, NaN if their labels differ; a later call then raises."""
        assert message.labels is not None
        by_kernels, of_total = len(sums.shape) == 1, message.labels.total
        sent = sums if by_kernels else _arrays(sums).with_label(sums, message.label)
        total = self._add_up(sent, message.call)
        self._look_later(total[-1:], of_total, message.call)
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
        copy = _arrays(found).copy_to_host(found)

        def is_right() -> bool | None:
            assert copy is not None
            ready = copy.may_wait() and copy.done()
            return bool(copy.values()[0] == expected) if ready else None

        if copy is not None:
            _processes(self).look_later(is_right, call)

    def _compare(
        self, labels: list[float], own: float, call: CollectiveCall, all_wait: bool = True
    ) -> None:
        """Raise if the labels of the members do not go together; all members raise alike.

        `all_wait`: whether every member waits in this call, so that names can be exchanged.
        """
        if labels.count(own) == len(labels):
            return
        if not all(label.is_integer() and label >= 32 for label in labels):
            raise ProtocolError(f"{_difference(call)}; {REMEDY}")  # a message of something else
        forward = same = False
        if _may_be_one_layer(labels):
            dtypes = {rank: DTYPES[int(label) % 4] for rank, label in enumerate(labels)}
            if len(set(dtypes.values())) > 1:
                raise DTypeError(
                    f"expected input of one dtype on all members, got {dtypes} in {call}; check "
                    "autocast and the dtype of the data there"
                )
            forward, same = own // 4 % 8 in (FORWARD, FORWARD_IN_GRAPH), _same_settings(labels)
            named = {label // _NAME_UNIT for label in labels} - {0.0}  # hashes; 0 after first calls
            if not forward or (same and len(named) < 2):
                return
        if not all_wait:
            raise ProtocolError(f"{_difference(call)}; {REMEDY}")
        held = [] if self.layer is None else self.names.held(self.layer)
        mine = [name for name, is_own in held if is_own]
        text = f"{call.what()} {self.rule}" if forward and not same else call.what()
        every = self._texts_of_all(json.dumps([mine[:20], text])[:_NAMES], call)
        try:
            names, texts = zip(*map(json.loads, every), strict=True)
        except ValueError as error:
            raise ProtocolError(f"{_difference(call)}; {REMEDY}") from error
        wrong = not same
        if same:
            others = {name for of_rank in names for name in of_rank}
            verdict = np.array([float(_holds_another(held, others))])
            wrong = bool(self.communicator.all_gather(verdict, _follow_up_call(call)).any())
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
            raise ProtocolError(f"{_difference(call)}: {each}; {REMEDY}")

    def _texts_of_all(self, text: str, call: CollectiveCall) -> list[str]:
        """The texts of all members; as float64 numbers, which every communicator can send."""
        row = np.frombuffer(bytearray(text.encode().ljust(_NAMES)), np.float64)
        rows = self.communicator.all_gather(row, _follow_up_call(call))
        return [np.asarray(row).tobytes().decode(errors="replace").rstrip() for row in rows]


def _may_be_one_layer(labels: Sequence[float]) -> bool:
    """Whether kinds and layers agree, in backward the calls too; 0 matches every layer."""
    kinds = {label // 4 % 8 for label in labels}
    numbers = {label // 32 % _NUMBERS for label in labels} - {1.0}
    calls = {label // _EXTRA_UNIT for label in labels}
    of_one_call = kinds <= {FORWARD, FORWARD_IN_GRAPH} or len(calls) == 1
    return len(kinds) == 1 and len(numbers) < 2 and of_one_call


def _same_settings(labels: Sequence[float]) -> bool:
    """Whether the settings in labels of forwards agree, but for calls without a layer."""
    own = {label // _EXTRA_UNIT % _SETTINGS for label in labels if label // 32 % _NUMBERS != 1}
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


def _difference(call: CollectiveCall) -> str:
    return f"expected all members in the same layer, they are in different ones in {call}"


def _follow_up_call(call: CollectiveCall) -> CollectiveCall:
    return CollectiveCall(lambda: f"comparison of layers after {call}", remedy=call.remedy)


def _stays_on_device(communicator: Communicator, values: Array) -> bool:
    """Whether the group sends these values without the host."""
    if isinstance(values, np.ndarray) or not getattr(communicator, "on_device", False):
        return False
    return is_on_device(values) or bool(getattr(values, "is_cuda", False))  # of CuPy or torch


def _arrays(values: Array) -> MessageArrays:
    return arrays_of(values) or NumpyArrays()


def _to_host(values: Array) -> Array:
    return values if isinstance(values, np.ndarray) else _arrays(values).to_host(values)


def _like(like: Array, values: Array) -> Array:
    """NumPy's `values` as an array of the library and device of `like`."""
    return values if isinstance(like, np.ndarray) else _arrays(like).from_host(values, like)
