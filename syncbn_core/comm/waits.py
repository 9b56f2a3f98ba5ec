"""`exchange_report`: how long each member waited for the others, by exchange, and for whom.

    with exchange_report() as report:
        train()
    print(report.over_ranks())  # on every rank; print(report) without other processes

Members that are threads (replicas) share a clock. A member has waited from its own arrival until
the last one came.

Processes do not share a clock. A rank only knows how long a call took: the time that it waited, and
the time to send. The rank that came last did not wait, so its time is that of sending, and what
others took longer they have waited. `over_ranks` compares the calls of all ranks in this way.

While no report runs, `watching` is None, which is all that an exchange looks at.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from syncbn_core.comm.message_arrays import arrays_of
from syncbn_core.comm.protocol import CollectiveCall, Communicator
from syncbn_core.errors import StateError

__all__ = ["ExchangeReport", "Waits", "exchange_report", "note_arrivals", "now"]

Array = Any

SHOWN = 20  # exchanges in the printed table

watching: ExchangeReport | None = None  # the report that runs
clock: Callable[[], float] = time.perf_counter
_switching = threading.Lock()


class Waits(NamedTuple):
    """What one member waited in all calls of one exchange.

    Attributes:
        exchange: such as "forward of layer1.0.bn1".
        member: such as "replica 2" or "rank 0".
        calls: how many calls there were.
        seconds, longest: how long the member waited for the others, in all and in one call.
        last: in how many calls it came last.
        caused: how long the other members waited in those calls, added up.
    """

    exchange: str
    member: str
    calls: int
    seconds: float
    longest: float
    last: int
    caused: float


class _Tally:
    """The waits of all members in one exchange."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.seconds: list[float] = []
        self.longest: list[float] = []
        self.last: list[int] = []
        self.caused: list[float] = []

    def add(self, waits: Sequence[float]) -> None:
        """Count a call in which the members waited so long."""
        new = len(waits) - len(self.calls)
        for numbers in (self.calls, self.seconds, self.longest, self.last, self.caused):
            numbers.extend([0] * new)
        for member, seconds in enumerate(waits):
            self.calls[member] += 1
            self.seconds[member] += seconds
            self.longest[member] = max(self.longest[member], seconds)
        if max(waits) > 0:
            slowest = waits.index(min(waits))
            self.last[slowest] += 1
            self.caused[slowest] += sum(waits)


class _RankCalls:
    """How long each call of this rank in one group took."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.names: dict[Hashable, Callable[[], str] | str] = {}
        self.keys: list[Hashable] = []
        self.numbers = array("q")
        self.seconds = array("d")

    def add(self, key: Hashable, name: Callable[[], str], seconds: float) -> None:
        self.names.setdefault(key, name)
        self.keys.append(key)
        self.numbers.append(getattr(self.communicator, "calls", None) or len(self.numbers) + 1)
        self.seconds.append(seconds)

    def find_names(self) -> None:
        """Replace functions by the names that they find; they keep layers alive."""
        self.names = {
            key: name if isinstance(name, str) else name() for key, name in list(self.names.items())
        }

    def of_all_ranks(self) -> list[tuple[str, list[float]]]:
        """For each call that all ranks have timed: its name, and how long each rank waited."""
        self.find_names()
        names: dict[Hashable, Any] = self.names
        communicator = self.communicator
        call = CollectiveCall(lambda: "exchange_report", remedy="call over_ranks on every rank")
        own = len(self.numbers)
        lengths = communicator.all_gather(np.array([float(own)]), call)
        rows = np.full((2, int(np.max(lengths))), np.nan)
        rows[:, :own] = self.numbers, self.seconds
        timed = [
            dict(zip(*every.tolist(), strict=True)) for every in communicator.all_gather(rows, call)
        ]
        found = []
        for number, key in zip(self.numbers, self.keys, strict=True):
            if all(number in each for each in timed):
                took = [each[number] for each in timed]
                found.append((names[key], [seconds - min(took) for seconds in took]))
        return found


class ExchangeReport:
    """The waits of all members; made by `exchange_report`. `str` of it is a table."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[str, dict[str, _Tally]] = {}  # by kind of members, then by exchange
        self._ranks: dict[int, _RankCalls] = {}  # by the id of the communicator

    @property
    def rows(self) -> list[Waits]:
        """The waits by exchange and member, the longest first; of ranks only in `over_ranks()`."""
        with self._lock:
            found = [
                Waits(name, f"{kind} {member}", *numbers)
                for kind, tallies in self._tallies.items()
                for name, each in tallies.items()
                for member, numbers in enumerate(
                    zip(
                        *(each.calls, each.seconds, each.longest, each.last, each.caused),
                        strict=True,
                    )
                )
            ]
        return sorted(found, key=lambda row: -row.seconds)

    def over_ranks(self) -> ExchangeReport:
        """A report that also has the waits of all ranks. All ranks must call this.

        It sends two messages in each process group that was used while the report ran, and raises
        the errors of its communicator if a rank is missing. Without processes it sends nothing.
        """
        whole = ExchangeReport()
        with self._lock:
            whole._tallies = {kind: dict(tallies) for kind, tallies in self._tallies.items()}
            groups = list(self._ranks.values())
        for index, calls in enumerate(groups):
            kind = "rank" if index == 0 else f"group {index + 1}, rank"
            for name, waits in calls.of_all_ranks():
                whole._add(kind, name, waits)
        return whole

    def _add(self, kind: str, name: str, waits: Sequence[float]) -> None:
        with self._lock:
            self._tallies.setdefault(kind, {}).setdefault(name, _Tally()).add(waits)

    def timed(
        self,
        communicator: Communicator,
        collective: Callable[[Array, CollectiveCall], Array],
        values: Array,
        call: CollectiveCall,
        key: Hashable,
    ) -> Array:
        """`collective(values, call)` of a process, timed until its device has finished.

        `key`: the same for all calls that share a row.
        """
        arrays = arrays_of(values)
        if arrays is not None:
            arrays.finish(values)
        begin = clock()
        result = collective(values, call)
        if arrays is not None:
            arrays.finish(result)
        seconds = clock() - begin
        with self._lock:
            known = self._ranks.get(id(communicator))
            if known is None:
                known = self._ranks[id(communicator)] = _RankCalls(communicator)
            known.add(key, call.name, seconds)
        return result

    def __str__(self) -> str:
        rows = self.rows
        kinds = dict.fromkeys(row.member.rpartition(" ")[0] for row in rows)
        texts = [
            _table(kind, [r for r in rows if r.member.startswith(f"{kind} ")]) for kind in kinds
        ]
        if "rank" not in kinds:
            for calls in self._ranks.values():
                rank, number, seconds = calls.communicator.rank, len(calls.keys), sum(calls.seconds)
                texts.append(
                    f"rank {rank} was {seconds:.3f} s in {number} exchanges with other processes, "
                    "waiting and sending; call over_ranks() on every rank to see who was slow"
                )
        return "\n\n".join(texts) or "no exchanges"


def _table(kind: str, rows: Sequence[Waits]) -> str:
    """The waits of one kind of members as text: by exchange, by member, and who was slowest."""
    exchanges = list(dict.fromkeys(row.exchange for row in rows))
    members = sorted({row.member for row in rows}, key=lambda name: int(name.rpartition(" ")[2]))
    total = sum(row.seconds for row in rows)
    calls = sum(max(r.calls for r in rows if r.exchange == name) for name in exchanges)
    lines = [f"{total:.3f} s of waiting in {calls} exchanges between {kind}s", ""]
    lines.append("  waited    longest   calls   came last            exchange")
    by_exchange = [[row for row in rows if row.exchange == name] for name in exchanges]
    by_exchange.sort(key=lambda own: -sum(row.seconds for row in own))
    for own in by_exchange[:SHOWN]:
        waited, longest = sum(row.seconds for row in own), max(row.longest for row in own)
        slow = max(own, key=lambda row: row.caused)
        who = f"{slow.member}, {slow.last} times" if slow.last else "nobody"
        number = max(row.calls for row in own)
        lines.append(
            f"{waited:8.3f} s {longest:8.3f} s {number:7}   {who:<20} {own[0].exchange}".rstrip()
        )
    if len(by_exchange) > SHOWN:
        lines.append(f"and {len(by_exchange) - SHOWN} exchanges more, in `rows`")
    lines += ["", "  waited   came last   waited for it   member"]
    caused = dict.fromkeys(members, 0.0)
    for member in members:
        own = [row for row in rows if row.member == member]
        caused[member] = sum(row.caused for row in own)
        waited, last = sum(row.seconds for row in own), sum(row.last for row in own)
        lines.append(f"{waited:8.3f} s {last:10} {caused[member]:13.3f} s   {member}")
    slowest = max(members, key=lambda member: caused[member])
    lines.append("")
    if total > 0:
        lines.append(
            f"{slowest} was the slowest: {caused[slowest]:.3f} of {total:.3f} s were spent "
            "waiting for it."
        )
    else:
        lines.append("nobody waited.")
    return "\n".join(lines)


@contextmanager
def exchange_report() -> Iterator[ExchangeReport]:
    """In the block, note how long each member of every exchange waits for the others.

    Yields the `ExchangeReport`. Replicas and groups of threads wait in it, and processes, over any
    communicator. On a GPU the host then waits for the device before and after each message between
    processes, which slows it down. Keeps three numbers for each message between processes.

    Raises `StateError` if another report runs in this process.
    """
    global watching
    with _switching:
        if watching is not None:
            raise StateError(
                "expected one exchange_report at a time, got a second; end the first one"
            )
        report = watching = ExchangeReport()
    try:
        yield report
    finally:
        watching = None
        with report._lock:  # another thread may be in a call that began in the block
            groups = list(report._ranks.values())
        for calls in groups:
            calls.find_names()


def now() -> float | None:
    """The time at which a member that is a thread comes to an exchange; None without a report."""
    return None if watching is None else clock()


def note_arrivals(kind: str, name: str, arrivals: Sequence[float | None]) -> None:
    """Count an exchange between threads, given the results of `now()` of all, in their order."""
    report = watching
    known = [time for time in arrivals if time is not None]
    if report is not None and len(known) == len(arrivals):  # else it began or ended in between
        report._add(kind, name, [max(known) - time for time in known])
