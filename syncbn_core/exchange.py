"""What members of a group send each other: moments forward, two sums per channel backward.

On a host both directions are one `all_gather` of a row of float64 `(2 C + 2,)`:

    forward     count, mean (C,), m2 (C,), label      merged in the order of ranks
    backward    0, two sums (C,), label               added in the order of ranks

So results are bitwise the same on every member. All rows of a layer have one length, so a member in
forward beside one in backward is told so. On a device the rows of forward stay as they are, the
kernel that normalizes merges them, and backward is an `all_reduce` with a label behind the sums.

A group of more than `MANY` processes sends messages of constant size, see `Exchange._by_sums`.

By the label (`labels`) members notice that they are in different layers, without a further message.
Members whose labels differ send their names. Other numbers, settings, kinds or calls are an error
on every member. Other names are one if a member's own model holds another layer whose name is more
like the names that the others have sent; if not, the members hold the model differently, which is
right.

On a device the host waits for the labels in the first call of a layer only. Later ones are compared
by the kernels that read the messages, which tell the host by an `Alarm`.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from syncbn_core.arrays import NUMPY, arrays_of
from syncbn_core.comm import (
    CollectiveCall,
    Communicator,
    ProcessCommunicator,
    SingleCommunicator,
)
from syncbn_core.errors import DTypeError, ProtocolError, ShapeError
from syncbn_core.labels import (
    BACKWARD,
    DTYPES,
    FORWARD,
    FORWARD_IN_GRAPH,
    KINDS,
    NAME_UNIT,
    NAMED,
    SETTINGS,
    Labels,
    label_of,
    label_of_sum,
    may_be_one_layer,
    modulus_of,
    place_of,
    same_settings,
    what_is_at,
)
from syncbn_core.moments import Moments, NormRule

Array = Any

REMEDY = (
    "all members have to run the same layers in the same order, use them in the loss, and agree on "
    "create_graph and on torch.compile"
)
MANY = 64  # members; docs/scaling.md says why
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

    def __init__(self, communicator: Any = None) -> None:
        # of threads of this member one exchanges at a time
        self.lock: Any = getattr(communicator, "lock", None) or threading.RLock()
        self.layers: int = 0
        self.exchanges: int = 0
        self.titles: dict[int, str] = {}  # of the layers that exchange on a device
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def number_of(self, layer: Any) -> tuple[int, bool]:
        """The number of a layer, from 1, and whether it is new; 0 for None."""
        if layer is None:
            return 0, False
        number = self._numbers.get(layer)
        return (self.layers + 1, True) if number is None else (number, False)

    def give_number(self, layer: Any) -> None:
        """Count a layer after its first exchange: after an error members may differ in new ones."""
        self.layers += 1
        self._numbers[layer] = self.layers

    def call_at(self, place: float) -> CollectiveCall:
        """The call in which a device found wrong labels, as an `Alarm` tells it."""
        call, kind, number = what_is_at(place)
        return CollectiveCall(
            lambda: f"{KINDS[kind]} of {self.titles.get(number)}", remedy=REMEDY, number=call
        )


_members: WeakKeyDictionary[Communicator, Member] = WeakKeyDictionary()


class Message(NamedTuple):
    """What a member is about to send.

    Attributes:
        member: who sends it.
        label: what stands at its end.
        call: what errors call it.
        labels: where the message stays on a device; None where the host compares labels.
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
                member = _members[self.communicator] = Member(self.communicator)
        except TypeError:
            return Member()
        return member

    def begin(self, channels: int, like: Array = None, kind: int = FORWARD) -> Message:
        """The message of a forward of that `kind`, before its moments are computed.

        `like`: an array on the device of the moments; None for NumPy's.
        """
        member = self.member
        number, new = member.number_of(self.layer)
        name = self.names.name(self.layer) if new else ""
        name_hash = _hash(name, NAMED) + NAMED if name else 0
        extra = name_hash * SETTINGS + (_hash(self.rule, SETTINGS) if number else 0)
        call = self._call(member, kind, 2 * channels + 2)
        label = label_of(kind, number, extra, self.dtype)
        arrays, index = self._on_its_device(like)
        labels = None
        if arrays is not None:
            members, rank = self.communicator.size, self.communicator.rank
            if members > MANY:
                members, rank = 1, 0
            rows = arrays.empty((members, 2 * channels + 2), "float64", index)
            rows_and_row = rows, rows[rank : rank + 1]
            labels = self._labels(member, kind, label, label, like, (number, new), rows_and_row)
        elif new and isinstance(self.communicator, ProcessCommunicator):
            self.communicator.connect(call)
        return Message(member, label, call, labels, new)

    def moments(self, own: Moments, message: Message) -> tuple[Moments, int]:
        """`(the rows of all members, number of the call)`, given this member's row.

        `own`: of NumPy, CuPy, or a library that an adapter has registered, with the same channels
        on all members, with the label of `message` if it has `labels`. The rows are of the same
        library and on the same device; those with `labels` have yet to be compared. Pass the number
        to `begin_sums`; it is 0 for a `SingleCommunicator`.

        Raises `ProtocolError` where members are in different layers, `DTypeError` where their
        inputs differ in dtype, `ShapeError` in threads with different channels, and the
        communicator's errors.
        """
        if type(self.communicator) is SingleCommunicator:
            return own, 0
        with message.member.lock:
            if message.new and message.labels is None:  # another thread's may have come first
                message = self.begin(own.num_features, None, int(message.label) // 4 % 8)
            if message.labels is not None:
                together = self._by_sums if self.communicator.size > MANY else self._on_device
                total = Moments(together(own.rows, message), None, message.labels)
            else:
                total = self._of_host(own, message)
            message.member.exchanges += 1
            if message.new:
                message.member.give_number(self.layer)
            return total, message.member.exchanges

    def _of_host(self, own: Moments, message: Message) -> Moments:
        on_host = isinstance(own.rows, np.ndarray)
        row = own.rows[0] if on_host else np.asarray(_to_host(own.rows), np.float64)[0]
        row[-1] = message.label
        if own.count is not None:
            row[0] = own.count
        try:
            if self.communicator.size > MANY and _of_processes(self.communicator):
                rows = self._by_sums(row[None], message)
            else:
                rows = self._gather(row, message.call)
        except ShapeError as error:
            raise ShapeError(
                f"expected the same number of channels from every member: {error}"
            ) from error
        return Moments(rows if on_host else _like(own.rows, rows), int(sum(rows[:, 0].tolist())))

    def begin_sums(self, like: Array, forward: int, kind: int = BACKWARD) -> Message:
        """The message of a backward.

        `like`: an array on the device of the sums, `(2, C)`, or the table of `Statistics`.
        `forward`: the number that `moments` gave. `kind`: one of `KINDS`; where sums are
        differentiated, `forward` is the number of the exchange that added up
        (`member.exchanges` after it).
        """
        member = self.member
        channels = like.shape[-1] // 3 if len(like.shape) == 1 else like.shape[-1]
        if self._on_its_device(like)[0] is not None:
            size = self.communicator.size
            label = float(label_of_sum(_key(kind, forward), size))
            call = self._call(member, kind, 2 * channels, forward)
            labels = self._labels(member, kind, label, label * size, like)
            return Message(member, label, call, labels)
        label = label_of(kind, member.number_of(self.layer)[0], forward, self.dtype)
        return Message(member, label, self._call(member, kind, 2 * channels + 2, forward))

    def sums(self, sums: Array, message: Message) -> Array:
        """`sums` added up over all members: an array of the same shape, dtype and device, to read.

        `sums`: `(2, C)`; `(2 C + 1,)` where a kernel has written the label behind them. Raises
        `ProtocolError` where members are in the backward of different calls, and the
        communicator's errors.
        """
        if type(self.communicator) is SingleCommunicator:
            return sums
        with message.member.lock:
            if message.labels is not None:
                total = self._added_on_device(sums, message.labels, message.call)
            else:
                row = np.zeros(math.prod(sums.shape) + 2)
                on_host = isinstance(sums, np.ndarray)
                row[1:-1] = (sums if on_host else _to_host(sums)).reshape(-1)
                row[-1] = message.label
                with np.errstate(invalid="ignore", over="ignore"):
                    if self.communicator.size > MANY and _of_processes(self.communicator):
                        added = self._labelled_sum(row, message)
                    else:
                        added = self._gather(row, message.call).sum(0)
                    total = added[1:-1].reshape(sums.shape)
                if not on_host:
                    total = _like(sums, total)
            message.member.exchanges += 1
        return total

    def sums_of_graph(self, sums: Array) -> Array:
        """`sums` where only the device knows the number of the call of the forward.

        `sums`: float64 `(2 C + 1,)`, that number behind the sums; may be written to. In the result,
        of the same shape, the last number is 0, or members were in the backward of different calls:
        then the sums are wrong, and a later call raises `ProtocolError`.
        """
        member, size = self.member, self.communicator.size
        own = label_of_sum(len(KINDS) * sums[-1:] + BACKWARD, size)
        labels = self._labels(member, BACKWARD, 0.0, 0.0, sums)
        sums[-1:] = own
        total = self._add_up(sums, self._call(member, BACKWARD, len(sums)))
        total[-1:] -= own * size
        labels.check_total(total)
        member.exchanges += 1
        return total

    def _on_its_device(self, values: Array) -> tuple[Any, int]:
        """The `Arrays` of `values` and their device, if the group sends them without the host."""
        communicator = self.communicator
        if isinstance(communicator, ProcessCommunicator) and communicator.on_device:
            arrays = arrays_of(values) or NUMPY
            index = arrays.device_of(values)
            if index >= 0:
                return arrays, index
        return None, -1

    def _labels(
        self,
        member: Member,
        kind: int,
        own: float,
        expected: float,
        like: Array,
        known: tuple[int, bool] | None = None,
        memory: tuple[Array, Array] = (None, None),
    ) -> Labels:
        """Those of a message that stays on the device of `like`.

        `known`: by `number_of`. `memory`: the `rows` and `row` of `Labels`.
        """
        number, new = known or member.number_of(self.layer)
        if new or number not in member.titles:
            member.titles[number] = self._title()
        communicator: Any = self.communicator
        alarm = communicator.alarm(like, member.call_at)
        place = place_of(member.exchanges + 1, kind, number)
        return Labels(own, expected, alarm, place, *memory)

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
        labels, own = rows[:, -1].tolist(), float(row[-1])
        if labels.count(own) < len(labels):
            self._compare(labels, own, call)
        return rows

    def _by_sums(self, own: Array, message: Message) -> Array:
        """The moments of all members together, `(1, 2 C + 2)`, by two sums of `2 C + 2` numbers.

        n = sum(n_i)    mean = sum(n_i mean_i) / n    m2 = sum(m2_i + n_i (mean_i - mean)**2)
        """
        row = own[0]
        channels = len(row) // 2 - 1
        n, mean, m2 = row[:1], row[1 : 1 + channels], row[1 + channels : -1]
        with np.errstate(invalid="ignore", over="ignore"):
            total = self._labelled_sum(_row(row, n, n * mean, 0), message)
            count = total[:1]
            joint = total[1 : 1 + channels] / (count + (count == 0))
            delta = mean - joint
            squares = self._labelled_sum(_row(row, 0, m2 + n * delta * delta, 0), message, True)
        if message.new:
            self._compare_labels(message, own)
        return _row(row, count, joint, squares[1 : 1 + channels], message.label)[None]

    def _labelled_sum(self, row: Array, message: Message, second: bool = False) -> Array:
        """`row` added up over all members, with a label in the place of its last number.

        On a host, labels that differ are gathered and compared. On a device an alarm sounds.
        `second`: the second sum of a message, whose label tells apart what the first does not.
        """
        size = self.communicator.size
        # a graph on a device does not know its layer: there kind and dtype are compared
        key = int(message.label) % (32 if message.labels is not None else 1 << 53)
        own = label_of_sum(1 + (key // modulus_of(size) if second else key), size)
        row[-1:] = own
        total = self._add_up(row, message.call)
        if message.labels is not None:
            message.labels._replace(own=own, expected=own * size).check_total(total)
        elif total[-1] != own * size:
            self._compare_labels(message)
        return total

    def _compare_labels(self, message: Message, like: Array = None) -> None:
        """Gather the labels of all members, and raise if they do not go together."""
        sent, wait = np.array([message.label]), None
        if message.labels is not None:
            if _is_captured(like):
                return
            sent = _like(like, sent)
            wait = getattr(self.communicator, "synchronize", None)  # with a deadline
        gathered = self.communicator.all_gather(sent, _follow_up_call(message.call))
        if wait is not None:
            wait()
        found = _to_host(gathered)
        self._compare(found[:, 0].tolist(), message.label, message.call)

    def _on_device(self, own: Array, message: Message) -> Array:
        """The rows of all members `(P, 2 C + 2)`."""
        labels: Any = message.labels
        label, call, rows = message.label, message.call, labels.rows
        if own is not labels.row:
            labels.row[...] = own
        communicator: Any = self.communicator
        communicator.gather_in_place(rows, labels.row, call)
        if message.new and not _is_captured(rows):
            wait = getattr(self.communicator, "synchronize", None)  # with a deadline
            if wait is not None:
                wait()
            found = _to_host(rows[:, -1]).tolist()
            self._compare(found, label, call, all(label >= NAME_UNIT for label in found))
        return rows

    def _added_on_device(self, sums: Array, labels: Labels, call: CollectiveCall) -> Array:
        """The sums of all members; NaN if their labels differ, unless they still have them."""
        if len(sums.shape) == 1:  # `Operations.backward_input` compares
            return self._add_up(sums, call)
        arrays, index = self._on_its_device(sums)
        sent = arrays.empty((math.prod(sums.shape) + 1,), "float64", index)
        sent[:-1], sent[-1:] = sums.reshape(-1), labels.own
        total = self._add_up(sent, call)
        same = ~labels.check_total(total)
        return (total[:-1] / same * same).reshape(sums.shape)  # x / 0 * 0 is NaN

    def _add_up(self, message: Array, call: CollectiveCall) -> Array:
        """The sum over all members; may be written into `message`."""
        add_up = getattr(self.communicator, "add_up", self.communicator.all_reduce)
        return add_up(message, call)

    def _compare(
        self, labels: list[float], own: float, call: CollectiveCall, all_wait: bool = True
    ) -> None:
        """Raise if the labels of the members do not go together; all members raise alike.

        `all_wait`: whether every member waits in this call, so that names can be exchanged.
        """
        if labels.count(own) == len(labels):
            return
        if labels[self.communicator.rank] != own:
            raise ProtocolError(f"{call} has got the answer to another call of this rank")
        if not all(label.is_integer() and label >= 32 for label in labels):
            raise ProtocolError(f"{_difference(call)}; {REMEDY}")  # a message of something else
        forward = same = False
        if may_be_one_layer(labels):
            dtypes = {rank: DTYPES[int(label) % 4] for rank, label in enumerate(labels)}
            if len(set(dtypes.values())) > 1:
                raise DTypeError(
                    f"expected input of one dtype on all members, got {dtypes} in {call}; check "
                    "autocast and the dtype of the data there"
                )
            forward, same = own // 4 % 8 in (FORWARD, FORWARD_IN_GRAPH), same_settings(labels)
            named = {label // NAME_UNIT for label in labels} - {0.0}  # hashes; 0 after first calls
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


def _of_processes(communicator: Communicator) -> bool:
    """Whether a large group adds up, instead of gathering a row of each member."""
    return isinstance(communicator, ProcessCommunicator)


def _row(like: Array, count: Any, first: Array, second: Any, label: float = 0.0) -> Array:
    """A new row `(2 C + 2,)` of these numbers, of the library and device of `like`."""
    row, channels = _arrays(like).copy(like), len(like) // 2 - 1
    row[:1], row[1 : 1 + channels], row[1 + channels : -1], row[-1:] = count, first, second, label
    return row


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


def _key(kind: int, forward: int) -> int:
    """The key of a sum on a device; 0, which compares nothing, if the forward has no number."""
    return len(KINDS) * forward + kind if forward else 0


@cache
def _hash(thing: Any, limit: int) -> int:
    """Of the text of a thing: the same on all members, less than `limit`."""
    digest = blake2b(str(thing).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % limit


def _difference(call: CollectiveCall) -> str:
    return f"expected all members in the same layer, they are in different ones in {call}"


def _follow_up_call(call: CollectiveCall) -> CollectiveCall:
    return CollectiveCall(lambda: f"comparison of layers after {call}", remedy=call.remedy)


def _arrays(values: Array) -> Any:
    return arrays_of(values) or NUMPY


def _is_captured(values: Array) -> bool:
    arrays = _arrays(values)
    return arrays.is_captured(arrays.device_of(values))  # type: ignore[no-any-return]


def _to_host(values: Array) -> Array:
    return _arrays(values).to_host(values)


def _like(like: Array, values: Array) -> Array:
    """NumPy's `values` as an array of the library and device of `like`."""
    return _arrays(like).from_host(values, like)
