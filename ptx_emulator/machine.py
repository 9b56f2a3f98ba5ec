"""Runs a grid: some thread blocks side by side, the lowest basic block first.

At a branch threads may part. The lowest basic block that any thread has reached runs next, so
threads that are ahead wait in the text, and all meet again behind the branch. A barrier lets the
threads of a block go on when all of them have reached it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .memory import Fault, GlobalMemory, SharedMemory
from .translate import Program

__all__ = ["Counts", "Schedule", "run"]

Array = np.ndarray[Any, Any]
_FAR = 1 << 30  # where threads are that wait or have ended


@dataclass(frozen=True)
class Schedule:
    """In which order thread blocks run.

    `order`: "first", "last" or "random"; `width`: how many side by side; `only`: the numbers of
    those that run at all, None for all. In random order blocks also leave barriers at random.
    """

    order: str = "first"
    width: int = 32
    only: Collection[int] | None = None
    seed: int = 0


@dataclass
class Counts:
    """What a launch has executed."""

    threads: list[int]  # per basic block: how many came by
    warps: list[int]


class _Side:
    """Thread blocks that run side by side; what the functions of basic blocks call."""

    def __init__(
        self,
        program: Program,
        memory: GlobalMemory,
        parameters: Sequence[Array],
        grid: tuple[int, int, int],
        threads: int,
        blocks: Array,
    ) -> None:
        self.program, self.memory, self.parameters = program, memory, parameters
        self.grid, self.threads, self.blocks = grid, threads, blocks
        self.size = blocks.size * threads
        self.shared = SharedMemory(blocks, threads, program.kernel.shared.values())
        self.lanes = np.arange(self.size)
        self.tids = np.tile(np.arange(threads), blocks.size)
        self.of_grid = np.repeat(blocks * threads, threads) + self.tids
        across = (blocks % grid[0], blocks // grid[0] % grid[1], blocks // (grid[0] * grid[1]))
        self.places = [np.repeat(number, threads) for number in across]
        self.registers: list[Array | None] = [None] * len(program.numbers)
        self.line = 0

    # what the functions of basic blocks use

    def put(self, number: int, values: Array, some: Array) -> None:
        register = self.registers[number]
        if register is None:
            register = self.registers[number] = np.zeros(self.size, self.program.held[number])
        register[some] = values

    def tid(self, some: Array | None, axis: int) -> Array:
        numbers = self.tids if axis == 0 else np.zeros_like(self.tids)
        return numbers if some is None else numbers[some]

    def ctaid(self, some: Array | None, axis: int) -> Array:
        return self.places[axis] if some is None else self.places[axis][some]

    def ntid(self, some: Array | None, axis: int) -> Array:
        return np.full(self.size if some is None else some.size, self.threads if axis == 0 else 1)

    def nctaid(self, some: Array | None, axis: int) -> Array:
        return np.full(self.size if some is None else some.size, self.grid[axis])

    def load_global(self, at: Array, some: Array | None, dtype: Any, count: int) -> Array:
        return self.memory.load(at, dtype, count, self._threads(some))

    def store_global(self, at: Array, some: Array | None, values: Array) -> None:
        self.memory.store(at, values, self._threads(some))

    def load_shared(self, at: Array, some: Array | None, dtype: Any, count: int) -> Array:
        return self.shared.load(at, dtype, count, self.lanes if some is None else some)

    def store_shared(self, at: Array, some: Array | None, values: Array) -> None:
        self.shared.store(at, values, self.lanes if some is None else some)

    def count(self, at: Array, some: Array | None, values: Array) -> Array:
        return self.memory.add_atomically(at, values.dtype, values, self._threads(some))

    def fence(self, some: Array | None) -> None:
        self.memory.fence(self._threads(some))

    def _threads(self, some: Array | None) -> Array:
        return self.of_grid if some is None else self.of_grid[some]

    # the run

    def run(self, counts: Counts, random: np.random.Generator | None) -> None:
        at: int | None = 0  # where all threads are; None: each where `place` says
        place = np.zeros(self.size, np.int64)
        waits = np.full(self.size, -1)  # for the barrier at the end of that basic block
        while True:
            if at is not None:
                some, number = None, at
            else:
                number = int(place.min())
                if number == _FAR:
                    if (waits < 0).all():
                        return
                    at = self._leave_barrier(place, waits, random)
                    continue
                some = np.flatnonzero(place == number)
                if some.size == self.size:
                    some = None
            step = self.program.steps[number]
            size = self.size if some is None else some.size
            counts.threads[number] += size
            counts.warps[number] += _warps(some, size)
            function = self.program.function(number, some is not None)
            taken = function(self.registers, some, size, self)
            where: Any = slice(None) if some is None else some
            at = None
            if step.ends == "branch":
                following = np.where(taken, step.target, number + 1)
                if some is None and (taken.all() or not taken.any()):
                    at = int(following[0])
                else:
                    place[where] = following
            elif step.ends == "barrier":
                place[where], waits[where] = _FAR, number
            elif step.ends == "exit":
                place[where] = _FAR
            elif some is None:
                at = step.target
            else:
                place[where] = step.target

    def _leave_barrier(
        self, place: Array, waits: Array, random: np.random.Generator | None
    ) -> int | None:
        of_block = waits.reshape(-1, self.threads)
        waiting = np.flatnonzero((of_block >= 0).any(1))
        different = of_block != of_block[:, :1]
        if different.any():
            block = int(np.flatnonzero(different.any(1))[0])
            lines = {
                "ended" if n < 0 else f"line {self.program.steps[n].lines[1]}"
                for n in of_block[block].tolist()
            }
            raise Fault(
                f"block {self.blocks[block]} diverges at a barrier: threads are at {sorted(lines)}"
            )
        if random is not None and waiting.size > 1:
            waiting = random.permutation(waiting)[: random.integers(1, waiting.size + 1)]
            waiting.sort()
        self.memory.meet(self.blocks[waiting].tolist())
        self.shared.meet(waiting)
        numbers = of_block[waiting, 0] + 1
        place.reshape(-1, self.threads)[waiting] = numbers[:, None]
        of_block[waiting] = -1
        if waiting.size == self.blocks.size and (numbers == numbers[0]).all():
            return int(numbers[0])
        return None


def _warps(some: Array | None, size: int) -> int:
    if some is None:
        return -(-size // 32)
    warps = some >> 5
    return int(np.count_nonzero(np.diff(warps))) + 1


def run(
    program: Program,
    memory: GlobalMemory,
    parameters: Sequence[Array],
    grid: tuple[int, int, int],
    threads: int,
    schedule: Schedule = Schedule(),
) -> Counts:
    """Execute all blocks of a grid; raises `Fault` for what a kernel must not do."""
    counts = Counts([0] * len(program.steps), [0] * len(program.steps))
    memory.begin(threads)
    line = 0
    try:
        with np.errstate(all="ignore"):
            for blocks, random in _in_order(schedule, grid):
                side = _Side(program, memory, parameters, grid, threads, blocks)
                try:
                    side.run(counts, random)
                finally:
                    line = side.line
    except (Fault, ZeroDivisionError) as error:
        raise Fault(f"{error}; near line {line} of the PTX of {program.kernel.name}") from error
    return counts


def _in_order(
    schedule: Schedule, grid: tuple[int, int, int]
) -> Iterable[tuple[Array, np.random.Generator | None]]:
    random = np.random.default_rng(schedule.seed) if schedule.order == "random" else None
    total = grid[0] * grid[1] * grid[2]
    numbers = np.arange(total) if schedule.only is None else np.array(sorted(schedule.only))
    if schedule.order == "last":
        numbers = numbers[::-1]
    elif random is not None:
        numbers = random.permutation(numbers)
    for start in range(0, numbers.size, schedule.width):
        yield numbers[start : start + schedule.width], random
