"""Storms of interrupts over layers of NumPy in threads: `interrupted.py COUNT`, run by tests.

A timer signals at a random moment of each forward and backward, in a third of them again and again
while things are being put in order. After each: the call has ended, running statistics are of whole
batches, and the next call is right. In the end no thread is left. (An interrupt in `Thread.start`
can leave an entry in Python's list of threads for one that never began: those are not counted.)
"""

import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from syncbn_core import BatchNorm
from syncbn_core.comm import run_in_threads, thread_group

SIZE, LAYERS = 3, 4


class Storm:
    """Runs things under a timer that raises KeyboardInterrupt in the main thread."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.armed = False
        self.interrupts = 0
        self.slowest = 0.0  # seconds from the first signal to the end of the call
        self.first = 0.0
        self.usual = 0.01  # seconds that an undisturbed run takes
        signal.signal(signal.SIGALRM, self._signalled)

    def _signalled(self, number: int, frame: Any) -> None:
        if self.armed:
            self.first = self.first or time.monotonic()
            raise KeyboardInterrupt

    def run(self, call: Callable[[], Any]) -> bool:
        """Whether the call was interrupted."""
        again = self.random.choice([0.0, 0.0, 0.0005])
        self.first = 0.0
        begin = time.monotonic()
        try:
            try:
                self.armed = True
                signal.setitimer(signal.ITIMER_REAL, self.random.uniform(1e-5, self.usual), again)
                call()
            finally:
                self.armed = False
        except KeyboardInterrupt:
            pass
        self.armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.first == 0.0:
            self.usual = 0.9 * self.usual + 0.1 * (time.monotonic() - begin)
            return False
        self.interrupts += 1
        self.slowest = max(self.slowest, time.monotonic() - self.first)
        return True


def join_members() -> None:
    """Wait for the threads of members: after a second signal the call does not wait for them."""
    for thread in threading.enumerate():
        if thread.name.startswith(("member", "replica")) and thread.ident is not None:
            thread.join(60)


def check_statistics(layer: Any, mean: np.ndarray, var: np.ndarray) -> None:
    """Running statistics are those of as many batches, all alike, as the counter says."""
    share = 1 - 0.9 ** int(layer.num_batches_tracked)
    np.testing.assert_allclose(layer.running_mean, share * mean, rtol=1e-9, err_msg="torn")
    np.testing.assert_allclose(layer.running_var, 1 - share + share * var, rtol=1e-9)


def main(count: int) -> None:
    rng = np.random.default_rng(count)
    x = rng.normal(3, 2, (6, 4, 5))
    dy = rng.normal(size=x.shape)
    bounds = [0, 1, 3, 6]
    parts = [slice(bounds[i], bounds[i + 1]) for i in range(SIZE)]
    mean, var = x.mean((0, 2)), x.var((0, 2), ddof=1)
    expected = (x - x.mean((0, 2), keepdims=True)) / np.sqrt(x.var((0, 2), keepdims=True) + 1e-5)
    storm = Storm(count)

    def make() -> list[list[BatchNorm]]:
        group = thread_group(SIZE)
        return [
            [BatchNorm(4, dtype=np.float64, communicator=member) for _ in range(LAYERS)]
            for member in group
        ]

    def train(layers: list[list[BatchNorm]]) -> list[np.ndarray]:
        def member(rank: int) -> np.ndarray:
            for layer in layers[rank]:
                y = layer(x[parts[rank]])
                layer.backward(dy[parts[rank]])
            return y

        master = layers[0][0].communicator
        members = [lambda rank=rank: member(rank) for rank in range(SIZE)]
        return run_in_threads(members, abort=master.abort)  # type: ignore[union-attr]

    layers = make()
    for _ in range(3):
        train(layers)
    while storm.interrupts < count:
        if storm.run(partial(train, layers)):
            join_members()
            for own in layers:
                for layer in own:
                    check_statistics(layer, mean, var)
            layers = make()  # a group ends with the error of a member
        np.testing.assert_allclose(np.concatenate(train(layers)), expected, rtol=1e-9)
        if int(layers[0][0].num_batches_tracked) > 50:
            layers = make()
    begun = [thread.name for thread in threading.enumerate() if thread.ident is not None]
    print(f"{storm.interrupts} interrupts, slowest {storm.slowest:.3f} s, threads: {begun}")
    assert begun == ["MainThread"]


if __name__ == "__main__":
    main(int(sys.argv[1]))
