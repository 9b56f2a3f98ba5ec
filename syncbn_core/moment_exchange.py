"""What members of a group send each other: moments forward, two sums per channel backward.

Forward is one `all_gather`: every member sends a row of numbers for each of its parts, and gets the
rows of all. Rows are merged in the order of ranks, by `syncbn_core.moments.merged`, so the moments
of the whole batch are bitwise the same on every member, and over every communicator.

    on the host     count, mean (C,), m2 (C,), layer, dtype
    on a device     count, mean (C,), m2 (C,)

`layer` is the number of the calling layer in its group, in the order of first calls; `dtype` is a
code for the dtype of the input. Members compare both, so that one which runs another layer, or has
input of another dtype, is noticed without a further message. On a device they are left out: to
compare them, the host would have to wait for the device. There the rows stay as they are, and the
kernel that normalizes merges them.

Backward is one `all_reduce`. Its key is the number of the call in which the forward was. All
members make the same calls in the same order, so it tells which call of which layer this is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np

from syncbn_core.comm import (
    CollectiveCall,
    Communicator,
    CommunicatorBase,
    SingleCommunicator,
    ThreadCommunicator,
    waits,
)
from syncbn_core.comm.message_arrays import arrays_of
from syncbn_core.device_moments import DeviceMoments
from syncbn_core.errors import DTypeError, ProtocolError, ShapeError
from syncbn_core.moments import Moments, merged

__all__ = ["CallSite", "MomentsRow", "exchange_moments", "exchange_sums"]

Array = Any
PartMoments = Moments | DeviceMoments

_DTYPES = ("unknown", "float16", "bfloat16", "float32", "float64")  # their codes: 0, 1, ...
_CODES = {name: code for code, name in enumerate(_DTYPES)}
_SAME_LAYERS = "all members have to run the same layers in the same order"
_SAME_LOSS = (
    "all members have to run the same layers, forward and backward, in the same order, and the "
    "loss has to use the same layers on every member"
)
_HINT = "over processes SYNCBN_CHECK_ORDER=1 says which rank does what"


class CallSite(NamedTuple):
    """Which layer exchanges.

    `name()`: what errors call it; called only when they need it. `dtypes`: those of the inputs, by
    NumPy's names, one for each part. `layer`: the same object in every call of a layer, None where
    there is none.
    """

    name: Callable[[], str]
    dtypes: tuple[str, ...] = ()
    layer: Any = None


class MomentsRow(NamedTuple):
    """The numbers of one part on the host, one after the other; or of P members, as columns.

    `count`: values per channel; of columns `(P, 1)`. `mean`, `m2`: `(C,)`; of columns `(P, C)`.
    `layer`: the number of the layer in its group, 0 for none; `dtype`: the code of the input's
    dtype, 0 for unknown; of columns lists of P. All are float64.
    """

    count: Any
    mean: Array
    m2: Array
    layer: Any
    dtype: Any

    def write(self, row: Array) -> None:
        """Put the fields into `row`, `(2 C + 3,)`."""
        channels = len(self.mean)
        row[0] = self.count
        row[1 : 1 + channels] = self.mean
        row[1 + channels : -2] = self.m2
        row[-2] = self.layer
        row[-1] = self.dtype

    @classmethod
    def columns(cls, rows: Array) -> MomentsRow:
        """The fields of `rows`, `(P, 2 C + 3)`."""
        channels = (rows.shape[1] - 3) // 2
        mean, m2 = rows[:, 1 : 1 + channels], rows[:, 1 + channels : -2]
        return cls(rows[:, :1], mean, m2, rows[:, -2].tolist(), rows[:, -1].tolist())

    @property
    def counts(self) -> list[float]:
        """The counts of columns."""
        found: list[float] = self.count[:, 0].tolist()
        return found


def exchange_moments(
    communicator: Communicator, parts: Sequence[PartMoments], site: CallSite
) -> tuple[list[PartMoments], int]:
    """`(moments of the whole batch for each of parts, number of the call)`, by one message for all.

    `parts`: `Moments` of NumPy arrays or of any that an adapter has registered, or `DeviceMoments`
    of one row; one for each input, with the same channels on all members. Totals are of the same
    kind and on the same device. The count of a device's total is known where the members are
    threads. Pass the number to `exchange_sums`; it is 0 if the communicator counts no calls.

    Raises `ProtocolError` where members are in different layers, `DTypeError` where their inputs
    differ in dtype, `ShapeError` in threads with different channels, and the communicator's errors.
    """
    if type(communicator) is SingleCommunicator:
        return list(parts), 0
    on_device = isinstance(parts[0], DeviceMoments)
    if len(parts) > 1 and any(isinstance(part, DeviceMoments) is not on_device for part in parts):
        return _one_by_one(communicator, parts, site)
    numbers = _layer_numbers(communicator)
    layer, is_new = numbers.number_of(site.layer)
    size = sum([2 * part.num_features + 1 for part in parts])
    number = communicator.calls + 1 if isinstance(communicator, CommunicatorBase) else 0
    call = CollectiveCall(
        lambda: f"forward of {site.name()}",
        f"layer {layer}" if layer else "",
        _details(size, site.dtypes),
        0,
        _SAME_LAYERS,
        number,
    )
    exchange = _exchange_on_device if on_device else _exchange_on_host
    try:
        totals = exchange(communicator, cast(Any, parts), site, layer, call)
    except BaseException as error:
        if is_new:  # members may have numbered different layers here, or none
            numbers.undo_last(site.layer)
        if isinstance(error, ShapeError):
            raise ShapeError(
                f"expected the same number of channels from every member: {error}"
            ) from error
        raise
    return totals, number


def exchange_sums(communicator: Communicator, sums: Array, site: CallSite, forward: int) -> Array:
    """`sums` added up over all members: an array of the same shape, dtype and device, to be read.

    `forward`: the number that `exchange_moments` gave. Raises `ProtocolError` where members are in
    the backward of different calls, if the communicator compares keys, and its other errors.
    """
    if type(communicator) is SingleCommunicator:
        return sums
    layer = _layer_numbers(communicator).known(site.layer)
    known = [f"layer {layer}"] * bool(layer) + [f"forward in call {forward}"] * bool(forward)
    call = CollectiveCall(
        lambda: f"backward of {site.name()}",
        ", ".join(known),
        _details(math.prod(sums.shape), site.dtypes),
        forward,
        _SAME_LOSS,
    )
    return _run(communicator, communicator.all_reduce, sums, call, site)


def _run(
    communicator: Communicator,
    collective: Callable[[Array, CollectiveCall], Array],
    values: Array,
    call: CollectiveCall,
    site: CallSite,
) -> Array:
    """`collective(values, call)`; timed between processes while an `exchange_report` runs."""
    report = waits.watching
    if report is None or isinstance(communicator, ThreadCommunicator):  # which reports by itself
        return collective(values, call)
    key = collective.__name__, call.name() if site.layer is None else id(site.layer)
    return report.timed(communicator, collective, values, call, key)


def _one_by_one(
    communicator: Communicator, parts: Sequence[PartMoments], site: CallSite
) -> tuple[list[PartMoments], int]:
    """Parts on the host and on devices: a message for each."""
    totals, number = [], 0
    for index, part in enumerate(parts):
        own = site._replace(dtypes=site.dtypes[index : index + 1])
        (total,), number = exchange_moments(communicator, [part], own)
        totals.append(total)
    return totals, number


def _exchange_on_device(
    communicator: Communicator,
    parts: Sequence[DeviceMoments],
    site: CallSite,
    layer: int,
    call: CollectiveCall,
) -> list[PartMoments]:
    """The rows of all members for each part, `(P, 2 C + 1)`; nothing waits for the device."""
    own = [part.rows.reshape(-1) for part in parts]
    message = own[0] if len(own) == 1 else parts[0].join(own)
    counts: list[int | None] = [None] * len(parts)
    if isinstance(communicator, ThreadCommunicator):  # what the host knows goes beside the array
        known = [part.known_count for part in parts]
        rows, of_all = communicator.all_gather_with(message, call, note=known)
        counts = [None if None in each else sum(each) for each in zip(*of_all, strict=True)]
    else:
        rows = _run(communicator, communicator.all_gather, message, call, site)
    if len(rows) == 1:
        return list(parts)
    totals: list[PartMoments] = []
    end = 0
    for part, values, count in zip(parts, own, counts, strict=True):
        begin, end = end, end + len(values)
        totals.append(part.with_rows(rows[:, begin:end], count))
    return totals


def _exchange_on_host(
    communicator: Communicator,
    parts: Sequence[Moments],
    site: CallSite,
    layer: int,
    call: CollectiveCall,
) -> list[PartMoments]:
    """The moments of all members together for each part."""
    widths = [2 * part.num_features + 3 for part in parts]
    message = np.empty(sum(widths))
    begin = 0
    for index, (part, width) in enumerate(zip(parts, widths, strict=True)):
        name = site.dtypes[index] if index < len(site.dtypes) else "unknown"
        mean, m2 = _to_host(part.mean), _to_host(part.m2)
        row = MomentsRow(part.count, mean, m2, layer, _CODES.get(name, 0))
        row.write(message[begin : begin + width])
        begin += width
    combine = partial(_merged_if_alike, widths=widths)
    if isinstance(communicator, ThreadCommunicator):  # one thread merges for all
        (rows, shared), _ = communicator.all_gather_with(message, call, combine=combine)
        totals = shared and [Moments(n, mean.copy(), m2.copy()) for n, mean, m2 in shared]
    else:
        rows, totals = combine(_run(communicator, communicator.all_gather, message, call, site))
    if len(rows) == 1:
        return list(parts)
    if totals is None:
        of_parts = _columns_of_parts(rows, widths)
        for columns in of_parts:
            _require_alike(columns, call)
        totals = [_merged(columns) for columns in of_parts]
    return [_like(total, part) for total, part in zip(totals, parts, strict=True)]


def _columns_of_parts(rows: Array, widths: Sequence[int]) -> list[MomentsRow]:
    """The columns of each part; in `rows` the parts stand side by side, `(P, sum(widths))`."""
    if len(widths) == 1:
        return [MomentsRow.columns(rows)]
    ends = accumulate(widths)
    spans = [slice(end - width, end) for width, end in zip(widths, ends, strict=True)]
    return [MomentsRow.columns(rows[:, span]) for span in spans]


def _merged_if_alike(rows: Array, widths: Sequence[int]) -> tuple[Array, list[Moments] | None]:
    """`(rows, the moments of all members for each part)`; None for one member or unlike rows."""
    if len(rows) == 1:
        return rows, None
    of_parts = _columns_of_parts(rows, widths)
    for columns in of_parts:
        _, _, _, layers, codes = columns
        alike = layers.count(layers[0]) == codes.count(codes[0]) == len(rows)
        if not alike or not _are_counts(columns.counts):
            return rows, None
    return rows, [_merged(columns) for columns in of_parts]


def _are_counts(numbers: list[float]) -> bool:
    """Whether these numbers can be counts: NaN can't."""
    return all(0 <= number < math.inf for number in numbers)


def _merged(columns: MomentsRow) -> Moments:
    """The moments of all members, in NumPy arrays."""
    mean, m2 = merged(columns.count, columns.mean, columns.m2)
    return Moments(int(sum(columns.counts)), mean, m2)


def _to_host(values: Array) -> Array:
    """`values` (C,) as a NumPy array."""
    if isinstance(values, np.ndarray):
        return values
    arrays = arrays_of(values)
    return np.asarray(values) if arrays is None else arrays.to_host(values)


def _like(total: Moments, part: Moments) -> Moments:
    """`total` as arrays of the library and device of `part`."""
    if isinstance(part.mean, np.ndarray):
        return total
    arrays = arrays_of(part.mean)
    if arrays is None:
        return total
    mean, m2 = (arrays.from_host(values, part.mean) for values in (total.mean, total.m2))
    return Moments(total.count, mean, m2)


def _require_alike(columns: MomentsRow, call: CollectiveCall) -> None:
    """Raise if members report different layers or dtypes.

    Every member sees the same rows, so all raise the same kind of error.
    """
    _, _, _, layers, codes = columns
    # if ranks make different calls, these rows may hold another call's data: any numbers
    is_row = (
        _are_counts(columns.counts)
        and all(layer >= 0 for layer in layers)
        and all(code in range(len(_DTYPES)) for code in codes)
    )
    if not is_row or len(set(layers) - {0.0}) > 1:
        raise ProtocolError(
            f"expected all members in the same layer, they are in different ones in {call}; "
            f"{call.remedy}: {_HINT}"
        )
    if len(set(codes) - {0.0}) > 1:
        named = {rank: _DTYPES[int(code)] for rank, code in enumerate(codes)}
        raise DTypeError(
            f"expected input of one dtype on all members, got {named} in {call}; check autocast "
            "and the dtype of the data there"
        )


@lru_cache(maxsize=512)
def _details(size: int, dtypes: tuple[str, ...]) -> str:
    """What has to be the same in the calls of all members."""
    return ", ".join((f"{size} numbers", *sorted(set(dtypes) - {"unknown"})))


class _LayerNumbers:
    """The layers of one group, numbered as they first come, from 1; None has the number 0.

    Numbers are not given again when layers go: the garbage collectors of members run at different
    times.
    """

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._given = 0

    def number_of(self, layer: Any) -> tuple[int, bool]:
        """`(the layer's number, whether it is new)`."""
        number = self.known(layer)
        if number or layer is None:
            return number, False
        self._given += 1
        self._numbers[layer] = self._given
        return self._given, True

    def known(self, layer: Any) -> int:
        """The layer's number, 0 if it has none."""
        return 0 if layer is None else self._numbers.get(layer, 0)

    def undo_last(self, layer: Any) -> None:
        """Take back the newest number, that of `layer`."""
        del self._numbers[layer]
        self._given -= 1


# By communicator, each of which is one member of one group.
_known_numbers: WeakKeyDictionary[Communicator, _LayerNumbers] = WeakKeyDictionary()


def _layer_numbers(communicator: Communicator) -> _LayerNumbers:
    try:
        numbers = _known_numbers.get(communicator)
        if numbers is None:
            numbers = _known_numbers[communicator] = _LayerNumbers()
    except TypeError:  # a class of the user's that has no hash, or takes no weak references
        return _LayerNumbers()
    return numbers
