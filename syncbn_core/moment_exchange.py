"""What members of a group send each other: moments forward, two sums per channel backward.

Forward is one `all_gather`: every member sends a row of numbers for each of its parts, and gets the
rows of all. Rows are merged in the order of ranks, by `syncbn_core.moments.merged`, so the moments
of the whole batch are bitwise the same on every member, and over every communicator. A row is

    count, mean (C,), m2 (C,), label        2 C + 2 numbers, float64

whatever computes it, on a host or on a device. `layer_labels` explains the label: by it members
notice that one of them is in another layer, or has input of another dtype, without a further
message. On a device the host looks at labels some calls later. There the rows stay as they are,
and the kernel that normalizes merges them.

Backward is one `all_reduce` of 2 C sums, float64, and the label of the sum (`comm.sum_labels`). Its
key is made of the number of the call in which the forward was, and of what the sum is for (`SUMS`).
All members make the same calls in the same order, so it tells which call of which layer this is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np

from syncbn_core.comm import (
    CollectiveCall,
    Communicator,
    CommunicatorBase,
    SingleCommunicator,
    ThreadCommunicator,
)
from syncbn_core.comm.message_arrays import HostCopy, NumpyArrays, arrays_of
from syncbn_core.comm.process_group import ProcessCommunicator
from syncbn_core.comm.sum_labels import label_of
from syncbn_core.device_moments import DeviceMoments, DeviceStatistics
from syncbn_core.errors import ProtocolError, ShapeError
from syncbn_core.layer_labels import (
    LATER,
    CallSite,
    GroupLabels,
    OwnLabels,
    is_label,
    labels_in,
    not_the_same_layer,
)
from syncbn_core.moments import Moments, merged

__all__ = [
    "BACKWARD",
    "OF_MOMENTS",
    "OF_SUMS",
    "OF_TANGENTS",
    "WITH_GRAPH",
    "CallSite",
    "MomentsRow",
    "exchange_moments",
    "exchange_sums",
    "exchange_sums_of_graph",
    "labelled",
]

Array = Any
PartMoments = Moments | DeviceMoments

_SAME_LAYERS = "all members have to run the same layers in the same order"
_SAME_LOSS = (
    "all members have to run the same layers in the same order, use them in the loss, and agree on "
    "create_graph and forward-mode AD"
)

# What members add up. The first is for all libraries, the others for more derivatives.
BACKWARD, WITH_GRAPH, OF_MOMENTS, OF_SUMS, OF_TANGENTS = range(5)
SUMS = (
    "forward in call",
    "create_graph=True, forward in call",
    "second derivative, moments of call",
    "second derivative, sums of call",
    "forward-mode derivative of call",
)


class MomentsRow(NamedTuple):
    """The numbers of one part on the host, one after the other; or of P members, as columns.

    `count`: values per channel; of columns `(P, 1)`. `mean`, `m2`: `(C,)`; of columns `(P, C)`.
    `label`: see `layer_labels`; of columns a list of P. All are float64.
    """

    count: Any
    mean: Array
    m2: Array
    label: Any

    def write(self, row: Array) -> None:
        """Put the fields into `row`, `(2 C + 2,)`."""
        channels = len(self.mean)
        row[0] = self.count
        row[1 : 1 + channels] = self.mean
        row[1 + channels : -1] = self.m2
        row[-1] = self.label

    @classmethod
    def columns(cls, rows: Array) -> MomentsRow:
        """The fields of `rows`, `(P, 2 C + 2)`."""
        channels = (rows.shape[1] - 2) // 2
        mean, m2 = rows[:, 1 : 1 + channels], rows[:, 1 + channels : -1]
        return cls(rows[:, :1], mean, m2, rows[:, -1].tolist())

    @property
    def counts(self) -> list[float]:
        """The counts of columns."""
        counts: list[float] = self.count[:, 0].tolist()
        return counts


def exchange_moments(
    communicator: Communicator,
    parts: Sequence[PartMoments],
    site: CallSite,
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
    group = labels_in(communicator)
    group.begin(communicator)
    own = group.own(site, len(parts))
    size = sum([2 * part.num_features + 2 for part in parts])
    number = communicator.calls + 1 if isinstance(communicator, CommunicatorBase) else 0
    call = CollectiveCall(
        lambda: f"forward of {site.name()}",
        group.position(site),
        _details(size, site.dtypes),
        0,
        _SAME_LAYERS,
        number,
    )
    on_device = all(isinstance(part, DeviceMoments) for part in parts)
    exchange = _exchange_on_device if on_device else _exchange_on_host
    try:
        totals = exchange(communicator, cast(Any, parts), site, call, group, own)
    except BaseException as error:
        group.forget(own)
        if isinstance(error, ShapeError):
            raise ShapeError(
                f"expected the same number of channels from every member: {error}"
            ) from error
        raise
    return totals, number


def labelled(communicator: Communicator, statistics: Any, forward: int) -> Any:
    """The statistics for backward; on a device with the labels that its kernels write and check.

    `forward`: the number that `exchange_moments` gave. `comm.sum_labels` explains labels.
    """
    if isinstance(statistics, DeviceStatistics) and isinstance(communicator, ProcessCommunicator):
        label, label_of_total = communicator.label(_key(forward, BACKWARD))
        return statistics._replace(label=label, label_of_total=label_of_total)
    return statistics


def exchange_sums(
    communicator: Communicator,
    sums: Array,
    site: CallSite,
    forward: int,
    statistics: Any = None,
    purpose: int = BACKWARD,
) -> Array:
    """`sums` added up over all members: an array of the same shape, dtype and device, to be read.

    `forward`: the number that `exchange_moments` gave. `statistics`: those of `labelled` from which
    the sums were computed. `purpose`: which of `SUMS`; where sums are differentiated, `forward` is
    the number of the call that added up. Raises `ProtocolError` where members are in the backward
    of different calls, if the communicator compares keys, and its other errors.
    """
    if type(communicator) is SingleCommunicator:
        return sums
    group = labels_in(communicator)
    group.begin(communicator)
    position = group.position(site)
    known = [position] * bool(position) + [f"{SUMS[purpose]} {forward}"] * bool(forward)
    has_label = isinstance(statistics, DeviceStatistics) and statistics.label is not None
    call = CollectiveCall(
        lambda: f"backward of {site.name()}",
        ", ".join(known),
        _details(math.prod(sums.shape) - has_label, site.dtypes),
        _key(forward, purpose),
        _SAME_LOSS,
    )
    if has_label:
        group_of_processes = cast(ProcessCommunicator, communicator)
        return group_of_processes.all_reduce_labelled(sums, call)
    return communicator.all_reduce(sums, call)


def exchange_sums_of_graph(communicator: Communicator, sums: Array, site: CallSite) -> Array:
    """`exchange_sums` where only the device knows the number of the call of the forward.

    `sums`: float64 `(2 C + 1,)`, that number behind the sums; may be written to. In the result, of
    the same shape, the last number is 0, or members were in the backward of different calls: then
    the sums are wrong, and a later call raises `ProtocolError`.
    """
    group = cast(ProcessCommunicator, communicator)
    own = label_of(len(SUMS) * sums[-1:] + BACKWARD, group.size, 8)
    sums[-1:] = own
    call = CollectiveCall(
        lambda: f"backward of {site.name()}", "", _details(len(sums), site.dtypes), 0, _SAME_LOSS
    )
    return group.all_reduce_labelled(sums, call, own=own)


def _key(call: int, purpose: int) -> int:
    """The key of a sum; 0, which compares nothing, if calls are not counted."""
    return len(SUMS) * call + purpose if call else 0


def _exchange_on_device(
    communicator: Communicator,
    parts: Sequence[DeviceMoments],
    site: CallSite,
    call: CollectiveCall,
    group: GroupLabels,
    own: OwnLabels,
) -> list[PartMoments]:
    """The rows of all members for each part, `(P, 2 C + 2)`."""
    among_threads = isinstance(communicator, ThreadCommunicator)
    for part, label in zip(parts, own.labels, strict=True):
        place, label = part.rows[:, -1], label if among_threads else label + LATER
        (arrays_of(place) or NumpyArrays).fill(place, label)
    flat = [part.rows.reshape(-1) for part in parts]
    message = flat[0] if len(flat) == 1 else parts[0].join(flat)
    ends = list(accumulate(map(len, flat)))
    counts: list[int | None] = [None] * len(parts)
    if isinstance(communicator, ThreadCommunicator):  # what the host knows goes beside the array
        known = [(part.known_count, label) for part, label in zip(parts, own.labels, strict=True)]
        rows, of_all = communicator.all_gather_with(message, call, note=known)
        of_parts = [[label for _, label in notes] for notes in zip(*of_all, strict=True)]
        group.judge(communicator, of_parts, own, site, call)
        for index, notes in enumerate(zip(*of_all, strict=True)):
            if all(count is not None for count, _ in notes):
                counts[index] = sum(count for count, _ in notes)
    else:
        rows = communicator.all_gather(message, call)
        copies = _labels_on_device(rows, ends)
        if copies and len(rows) > 1:
            group.judge_later(communicator, copies, own, site, call)
    if len(rows) == 1:
        return list(parts)
    begins = [0, *ends[:-1]]
    return [
        part.with_rows(rows[:, begin:end], count)
        for part, count, begin, end in zip(parts, counts, begins, ends, strict=True)
    ]


def _labels_on_device(rows: Array, ends: Sequence[int]) -> list[HostCopy]:
    """Copies of the labels of all members, for each part.

    Empty while a CUDA graph is captured: the host can't look then.
    """
    arrays = arrays_of(rows)
    if arrays is None:
        return []
    copies = [arrays.copy_to_host(rows[:, end - 1]) for end in ends]
    return [copy for copy in copies if copy is not None]


def _exchange_on_host(
    communicator: Communicator,
    parts: Sequence[PartMoments],
    site: CallSite,
    call: CollectiveCall,
    group: GroupLabels,
    own: OwnLabels,
) -> list[PartMoments]:
    """The moments of all members together for each part."""
    on_host = [part.merged() if isinstance(part, DeviceMoments) else part for part in parts]
    widths = [2 * part.num_features + 2 for part in on_host]
    message = np.empty(sum(widths))
    begin = 0
    for part, width, label in zip(on_host, widths, own.labels, strict=True):
        row = MomentsRow(part.count, _to_host(part.mean), _to_host(part.m2), label)
        row.write(message[begin : begin + width])
        begin += width
    combine = partial(_merged_if_alike, widths=widths, group=group)
    if isinstance(communicator, ThreadCommunicator):  # one thread merges for all
        (rows, shared), _ = communicator.all_gather_with(message, call, combine=combine)
        totals = shared and [Moments(n, mean.copy(), m2.copy()) for n, mean, m2 in shared]
    else:
        rows, totals = combine(communicator.all_gather(message, call))
    if len(rows) == 1:
        return list(parts)
    of_parts = None if totals else _columns_of_parts(rows, widths)
    _require_rows(of_parts or (), call)
    labels = [columns.label for columns in of_parts or ()]
    group.judge_now_or_later(communicator, labels, own, site, call)
    if of_parts is not None:
        totals = [_merged(columns) for columns in of_parts]
    return [_like(total, part) for total, part in zip(totals, parts, strict=True)]


def _columns_of_parts(rows: Array, widths: Sequence[int]) -> list[MomentsRow]:
    """The columns of each part; in `rows` the parts stand side by side, `(P, sum(widths))`."""
    if len(widths) == 1:
        return [MomentsRow.columns(rows)]
    ends = accumulate(widths)
    spans = [slice(end - width, end) for width, end in zip(widths, ends, strict=True)]
    return [MomentsRow.columns(rows[:, span]) for span in spans]


def _merged_if_alike(
    rows: Array, widths: Sequence[int], group: GroupLabels
) -> tuple[Array, list[Moments] | None]:
    """`(rows, the moments of all members for each part)`; None for one member or unlike rows."""
    if len(rows) == 1:
        return rows, None
    of_parts = _columns_of_parts(rows, widths)
    for columns in of_parts:
        if not group.are_alike(columns.label) or not _are_counts(columns.counts):
            return rows, None
    return rows, [_merged(columns) for columns in of_parts]


def _are_counts(numbers: list[float]) -> bool:
    """Whether these numbers can be counts: NaN can't."""
    return math.isfinite(sum(numbers)) and min(numbers) >= 0


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


def _like(total: Moments, part: PartMoments) -> PartMoments:
    """`total` in the form, and as arrays of the library and device, of `part`."""
    like = part.rows if isinstance(part, DeviceMoments) else part.mean
    arrays = None if isinstance(like, np.ndarray) else arrays_of(like)
    if isinstance(part, DeviceMoments):
        row = np.empty((1, 2 * total.num_features + 2))
        MomentsRow(total.count, total.mean, total.m2, 0).write(row[0])
        return part.with_rows(arrays.from_host(row, like) if arrays else row, total.count)
    if arrays is None:
        return total
    mean, m2 = (arrays.from_host(values, like) for values in (total.mean, total.m2))
    return Moments(total.count, mean, m2)


def _require_rows(of_parts: Sequence[MomentsRow], call: CollectiveCall) -> None:
    """Raise if these are no rows: members that make different calls may have sent any numbers."""
    for columns in of_parts:
        if not (_are_counts(columns.counts) and all(map(is_label, columns.label))):
            raise ProtocolError(not_the_same_layer(call))


@lru_cache(maxsize=512)
def _details(size: int, dtypes: tuple[str, ...]) -> str:
    """What has to be the same in the calls of all members."""
    return ", ".join((f"{size} numbers", *sorted(set(dtypes) - {"unknown"})))
