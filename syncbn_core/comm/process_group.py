"""Members that are processes: what they send, in which order, and what is said when it fails.

A `Transport` (MPI, NCCL, torch.distributed) moves bytes. Here is all that does not depend on it:
forward a row of 2 C + 1 numbers from every rank, merged in the order of ranks; backward the two
sums per channel and a label, which says of which call they are. Calls are numbered, so an error
says which one it was, and with `check_order` every call first compares what the ranks are about
to do.
"""

from __future__ import annotations

import hashlib
import os
import re
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from syncbn_core.comm.labels import Labelled, label_of, sums_of
from syncbn_core.comm.site import Located, Site
from syncbn_core.device_moments import DeviceMoments, merge_rows
from syncbn_core.errors import (
    ArgumentError,
    CommError,
    DeviceError,
    DTypeError,
    ProtocolError,
    StateError,
)
from syncbn_core.moments import Moments

__all__ = ["Call", "ProcessCommunicator", "Transport"]

Array = Any

CHECK_ORDER_VARIABLE = "SYNCBN_CHECK_ORDER"
DESCRIPTION = 1024  # bytes of a call's description on the wire
DIGEST = 16  # of them for what has to agree to the letter
LAYER = 8  # and for the number of the layer

# The first number of a row holds the count, which layer it is, and the dtype; exact up to 2^43
# values. Layers are numbered as they first come. Different numbers are an error; equal ones prove
# nothing, because they repeat. 0 is a layer without a number, which may be any.
_DTYPES = ("unknown", "float16", "bfloat16", "float32", "float64")
_KINDS = 16
_LAYERS = 64
_HINT = "SYNCBN_CHECK_ORDER=1 says which rank does what"


class Call(NamedTuple):
    """One call of a group; as text it says what it is.

    `layer`: the number of the layer in its group, from 1; `forward`: of a backward, the number of
    the call that it belongs to. 0 for none.
    """

    number: int
    operation: str
    size: int
    site: Site | None
    layer: int = 0
    forward: int = 0

    def __str__(self) -> str:
        what = f"{self.operation} of {self.site.name()}" if self.site else self.operation
        layer = f", layer {self.layer}" if self.layer else ""
        forward = f", forward in call {self.forward}" if self.forward else ""
        return f"call {self.number} ({what}{layer}{forward}: {self.details()})"

    def details(self) -> str:
        """What messages have to agree in."""
        kinds = () if self.site is None else sorted({d for d in self.site.dtypes if d != "unknown"})
        return ", ".join((f"{self.size} numbers", *kinds))


class Transport(Protocol):
    """What moves the bytes; each call ends, or raises a `CommError` that names `call`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, row: Array, call: Call) -> Array:
        """`row` (n,) float64 of every rank, in their order: (size, n), on the same device."""

    def all_reduce(self, values: Array, call: Call) -> Array:
        """Elementwise sum over the ranks; a new array."""


class _Group:
    """What all views of one group share."""

    __slots__ = (
        "calls",
        "check_order",
        "failure",
        "first",
        "layers",
        "pending",
        "seen",
        "transport",
    )

    def __init__(self, transport: Transport, check_order: bool) -> None:
        self.transport = transport
        self.check_order = check_order
        self.calls = 0
        self.failure: str | None = None
        self.seen = 0
        self.layers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.first = 0  # the call in which the newest of them came
        self.pending: deque[tuple[Callable[[], bool | None], Call]] = deque()

    def number_of(self, layer: Any) -> int:
        """The layers in the order in which they first came, from 1; 0 for none."""
        if layer is None:
            return 0
        number = self.layers.get(layer)
        if number is None:  # not their count: layers go when the garbage collector of a rank comes
            self.seen += 1
            number = self.layers[layer] = self.seen
            self.first = self.calls
        return number

    def forget(self, call: Call) -> None:
        """Take back the number of a layer that came first in `call`, where ranks disagreed.

        They may have numbered different layers there, or none.
        """
        if call.site is not None and call.layer and self.first == call.number:
            del self.layers[call.site.layer]
            self.seen -= 1
            self.first = 0


class ProcessCommunicator(Located):
    """A member of a group of processes; each makes one, and all make the same calls in order.

    Args:
        transport: what moves the bytes.
        check_order: before each call compare what the ranks are about to do, by one more message
            of 256 bytes: a `ProtocolError` on every rank then says who does what. None: as the
            environment variable SYNCBN_CHECK_ORDER says, else not.

    After a call that failed (`CommTimeout`, `CommAborted`) ranks may be out of step, so all later
    ones raise `CommError`. A `ProtocolError` or `DTypeError` comes to all ranks, and the group can
    go on. On a GPU nobody waits for what a backward comes to: sums of different layers are NaN
    there, the `ProtocolError` is raised by a later call of each rank, and the group has failed. A
    copy is the communicator itself, and there is no pickle of it.
    """

    def __init__(self, transport: Transport, *, check_order: bool | None = None) -> None:
        check = _check_order_by_default() if check_order is None else check_order
        self._group = _Group(transport, check)

    @property
    def rank(self) -> int:
        """This process's number, 0 to `size - 1`."""
        return self._group.transport.rank

    @property
    def size(self) -> int:
        """Processes in the group."""
        return self._group.transport.size

    def __copy__(self) -> ProcessCommunicator:
        return self

    def __deepcopy__(self, memo: Any) -> ProcessCommunicator:
        return self

    def __reduce__(self) -> Any:
        raise StateError(
            f"expected something that can be pickled, got a {type(self).__name__}, which belongs "
            "to its process; save the layer's state_dict() instead"
        )

    def merge_moments(self, moments: Moments) -> Moments:
        """Moments over all ranks, bitwise the same on each; an empty part takes part.

        Packed moments stay on their device, where the next kernel merges them: nothing waits, and
        the count over all ranks is known there only. Others raise `DTypeError` where the ranks'
        inputs differ in dtype.
        """
        return self.merge_several([moments])[0]

    def merge_several(self, parts: Sequence[Moments]) -> list[Moments]:
        """What `merge_moments` gives for each of `parts`, by one message for all of them.

        All on one device. Ranks have to give parts of the same channels.
        """
        if len({isinstance(part, DeviceMoments) for part in parts}) > 1:
            return [self.merge_moments(part) for part in parts]
        sizes = [2 * part.num_features + 1 for part in parts]
        ends = np.cumsum(sizes)
        call = self._begin("forward", int(ends[-1]))
        gather = self._group.transport.all_gather
        first = parts[0]
        if isinstance(first, DeviceMoments):
            own = [cast(DeviceMoments, part).one_row() for part in parts]
            rows = self._run(gather, own[0] if len(own) == 1 else first.join(own), call)
            columns = [rows[:, end - size : end] for size, end in zip(sizes, ends, strict=True)]
            self._remember(call)
            return [DeviceMoments(some, None, first.join) for some in columns]
        codes = np.array([_code(call, index) for index in range(len(parts))], float)
        packed = [
            ([part.count * _KINDS * _LAYERS + code], part.mean, part.m2)
            for part, code in zip(parts, codes, strict=True)
        ]
        rows = self._run(gather, np.concatenate([v for one in packed for v in one]), call)
        with np.errstate(invalid="ignore"):  # of ranks out of step any number may come
            counts, found = np.divmod(rows[:, ends - sizes], _KINDS * _LAYERS)
        self._compare_codes(found, codes, counts, call)
        rows[:, ends - sizes] = counts
        self._remember(call)
        return [merge_rows(rows[:, end - n : end]) for n, end in zip(sizes, ends, strict=True)]

    def all_reduce_sums(self, sums: Array) -> Array:
        """Elementwise sum over all ranks; a new array.

        For a layer, the backward of what it last merged: `ProtocolError` where ranks are in the
        backward of different layers or calls.
        """
        operation = "backward" if self._site else "all_reduce_sums"
        all_reduce = self._group.transport.all_reduce
        library = self._labelled(sums)
        if library is None:  # the transport says what it takes
            return self._run(all_reduce, sums, self._begin(operation, _size(sums)))
        label = label_of(self._forward, self.size, sums.dtype.itemsize)
        message = library.pack(sums, label)
        call = self._begin(operation, len(message) - 1)
        total = self._run(all_reduce, message, call)
        result, verdict = library.unpack(total, sums.shape, label * self.size)
        if verdict is False:
            raise _mixed_up(call)
        if verdict is not True:
            self._group.pending.append((verdict, call))
        return result

    def _labelled(self, sums: Array) -> Labelled | None:
        return sums_of(sums)

    def _remember(self, call: Call) -> None:
        """The next backward of this view belongs to `call`."""
        if self._site is not None:
            self._forward = call.number

    def _compare_codes(self, found: Array, own: Array, counts: Array, call: Call) -> None:
        """Raise what every rank sees alike: other layers there, or other dtypes."""
        if (found == own).all() and (counts >= 0).all():
            return
        with np.errstate(invalid="ignore"):
            layers, kinds = np.divmod(found, _KINDS)
        known = np.isin(kinds, np.arange(len(_DTYPES))).all() and (counts >= 0).all()
        numbered = np.where(layers == 0, layers.max(0), layers)
        if not known or (numbered != numbered[0]).any():
            self._group.forget(call)
            raise ProtocolError(
                f"expected all ranks in the same layer, they are in different ones in {call}; all "
                f"have to run the same layers in the same order: {_HINT}"
            )
        unlike = np.flatnonzero((kinds != own % _KINDS).any(0))
        if len(unlike) == 0:
            return
        named = {rank: _DTYPES[int(kind)] for rank, kind in enumerate(kinds[:, int(unlike[0])])}
        raise DTypeError(
            f"expected input of one dtype on all ranks, got {named} in {call}; check autocast "
            "and the dtype of the data there"
        )

    def _begin(self, operation: str, size: int) -> Call:
        """The number of the next call, once all ranks agree what it is if that is to be checked."""
        group = self._group
        if group.failure is not None:
            raise CommError(
                f"expected a group in which every call has ended, but this one failed before: "
                f"{group.failure}; make a new group, or start the program again"
            )
        if group.pending:
            self._look_back()
        site = self._site
        group.calls += 1
        layer = 0 if site is None else group.number_of(site.layer)
        forward = self._forward if operation == "backward" else 0
        call = Call(group.calls, operation, size, site, layer, forward)
        if group.check_order:
            self._compare(call)
        return call

    def _look_back(self) -> bool:
        """Raise what a device has found in earlier calls, as far as it is done; whether with all.

        Ranks come to know it at different moments, so they are out of step then.
        """
        group = self._group
        while group.pending:
            verdict, call = group.pending[0]
            right = verdict()
            if right is None:
                return False
            group.pending.popleft()
            if not right:
                error = _mixed_up(call)
                group.failure = str(error)
                raise error
        return True

    def _run(self, collective: Callable[[Array, Call], Array], values: Array, call: Call) -> Array:
        try:
            return collective(values, call)
        except (DeviceError, DTypeError) as error:
            if self._group.check_order:  # the others know of this call already
                self._group.failure = str(error)
            else:  # nothing has been sent
                self._group.calls -= 1
            raise
        except BaseException as error:  # Ctrl-C too leaves the others in this call
            self._group.failure = str(error) or type(error).__name__
            raise

    def _compare(self, call: Call) -> None:
        exact = f"{call.number} {call.operation} {call.forward} {call.details()}"
        digest = hashlib.sha256(exact.encode()).digest()[:DIGEST]
        message = digest + call.layer.to_bytes(LAYER, "little") + str(call).encode()
        row = np.frombuffer(bytearray(message[:DESCRIPTION].ljust(DESCRIPTION)), np.float64)
        rows = self._run(self._group.transport.all_gather, row, call)
        messages = [bytes(other.tobytes()) for other in rows]
        said = [text[DIGEST + LAYER :].decode(errors="replace").rstrip() for text in messages]
        layers = {int.from_bytes(text[DIGEST : DIGEST + LAYER], "little") for text in messages}
        same = len({text[:DIGEST] for text in messages}) == 1 and len(layers - {0}) <= 1
        if not (same and _one_name(said)):
            self._group.forget(call)
            each = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said))
            raise ProtocolError(
                f"expected the same call from every rank, got {each}; all ranks have to run the "
                "same layers, forward and backward, in the same order"
            )


def _one_name(said: Sequence[str]) -> bool:
    """Whether the ranks' texts name the same layers.

    A rank may hold its model in one more container, so of two names one may end with the other.
    """
    without_number = {re.sub(r", layer \d+(?=[,:])", "", text) for text in said}
    names = [re.split(r"[ ,(]+", text) for text in without_number]
    shortest = min(names, key=lambda words: sum(map(len, words)))
    return all(
        len(words) == len(shortest)
        and all(
            long == short or long.endswith(f".{short}")
            for long, short in zip(words, shortest, strict=True)
        )
        for words in names
    )


def _code(call: Call, index: int) -> int:
    """The layer and the dtype of the part with that index, as the row's first number has it."""
    if call.site is None:
        return 0
    dtypes = call.site.dtypes
    dtype = dtypes[index] if index < len(dtypes) else "unknown"
    kind = _DTYPES.index(dtype) if dtype in _DTYPES else 0
    number = 1 + (call.layer - 1) % (_LAYERS - 1) if call.layer else 0
    return kind + _KINDS * number


def _mixed_up(call: Call) -> ProtocolError:
    return ProtocolError(
        f"expected all ranks in the backward of one layer and one call of it, they are in "
        f"different ones in {call}; the loss has to use the same layers on every rank: {_HINT}"
    )


def grace_after(seconds: float) -> float:
    """Seconds for ranks to say, after a failure, that they have seen it too.

    They don't begin to wait at the same moment; and after a long wait a while is no matter.
    """
    return min(max(1.0, 0.1 * seconds), 30.0)


def _check_order_by_default() -> bool:
    """What the environment variable SYNCBN_CHECK_ORDER says: 1 or 0 (or nothing)."""
    text = os.environ.get(CHECK_ORDER_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ArgumentError(
            f"expected the environment variable {CHECK_ORDER_VARIABLE} to be 0 or 1, got {text!r}"
        )
    return text == "1"


def _size(values: Array) -> int:
    return int(np.prod(np.shape(values)))
