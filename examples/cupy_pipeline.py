"""Synchronized batch normalization with CuPy alone: no torch, real digits, a stream for each task.

A small convolutional network on scikit-learn's handwritten digits. Each of three members has a
part of every batch, uneven on purpose, and two CUDA streams: on one it loads the next batch while
the network computes on the other, ordered by events. What members send each other passes the host.
Members share the GPUs that there are, and follow the one-member run to rounding. Without a GPU the
same code runs on NumPy, and says why:

    python examples/cupy_pipeline.py
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from tqdm import tqdm

from syncbn_core import BatchNorm
from syncbn_core.comm import Communicator, run_in_threads, thread_group
from syncbn_core.errors import BackendError

Array = Any  # numpy.ndarray or cupy.ndarray

SHARES = {1: [0, 32], 3: [0, 6, 7, 32]}  # rows of a batch that go to each member
STEPS, BATCH, RATE, MOMENTUM = 300, 32, 0.1, 0.9
TRAINED = 1500  # samples; the others are for validation
CHANNELS = 16
TOLERANCE, ACCURACY = 1e-9, 0.9  # largest difference after all steps, float64; least accuracy


def array_library() -> tuple[ModuleType, str]:
    """CuPy where its arrays can be computed with, else NumPy; and a line that says which."""
    try:
        BatchNorm(1, device="cuda")
    except BackendError as error:
        return np, f"On NumPy: {error}."
    import cupy

    try:  # the wheel of CuPy has no cuBLAS, and the layer needs none
        cupy.ones((2, 2)) @ cupy.ones((2, 2))
    except ImportError as error:
        reason = str(error).partition("\n")[0]
        return np, f"On NumPy: CuPy has no cuBLAS ({reason}); install the CUDA toolkit."
    count = cupy.cuda.runtime.getDeviceCount()
    return cupy, f"On CuPy {cupy.__version__}, {count} GPU{'s' if count > 1 else ''}."


class HostStream:
    """In place of a CUDA stream: NumPy does everything at once."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def record(self) -> None: ...

    def wait_event(self, event: None) -> None: ...


@contextmanager
def place(xp: ModuleType, rank: int) -> Iterator[tuple[Any, Any]]:
    """The member's GPU, made the current one, and two streams on it: to load, to compute."""
    if xp is np:
        yield HostStream(), HostStream()
        return
    with xp.cuda.Device(rank % xp.cuda.runtime.getDeviceCount()):
        yield xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)


class Network:
    """`softmax(relu(bn(conv(x))) @ last)`, one per member, all with the same parameters."""

    def __init__(self, xp: ModuleType, communicator: Communicator) -> None:
        rng = np.random.default_rng(0)
        self.communicator = communicator
        self.conv = xp.asarray(rng.normal(0, 0.3, (9, CHANNELS)))
        self.last = xp.asarray(rng.normal(0, 0.05, (36 * CHANNELS, 10)))
        device = "cpu" if xp is np else f"cuda:{xp.cuda.runtime.getDevice()}"
        self.bn = BatchNorm(CHANNELS, dtype=np.float64, device=device, communicator=communicator)
        self.xp, self.parameters = xp, [self.conv, self.last, *self.bn.parameters()]
        self.velocities = [xp.zeros(parameter.shape) for parameter in self.parameters]

    def forward(self, patches: Array) -> Array:
        """Logits (N, 10) of patches (N, 6, 6, 9)."""
        self.patches = patches
        # channels last, as the product gives them: the layer takes any layout without a copy
        x = (patches @ self.conv).transpose(0, 3, 1, 2)
        y = self.xp.maximum(self.bn(x), 0)
        self.hidden = y.transpose(0, 2, 3, 1).reshape(len(patches), 36 * CHANNELS)
        return self.hidden @ self.last

    def step(self, patches: Array, targets: Array) -> None:
        """Forward, backward and update; targets (N, 10) are this member's part of the batch."""
        xp, logits = self.xp, self.forward(patches)
        exponents = xp.exp(logits - logits.max(1, keepdims=True))
        d_logits = (exponents / exponents.sum(1, keepdims=True) - targets) / BATCH
        d_hidden = (d_logits @ self.last.T) * (self.hidden > 0)
        dy = d_hidden.reshape(*patches.shape[:3], CHANNELS).transpose(0, 3, 1, 2)
        self.bn.zero_grad()
        dx = self.bn.backward(dy).transpose(0, 2, 3, 1).reshape(-1, CHANNELS)
        d_conv = patches.reshape(-1, 9).T @ dx
        gradients = [d_conv, self.hidden.T @ d_logits, *self.bn.gradients()]
        # one message for all of them; like the statistics it goes from stream to stream
        flat = xp.concatenate([gradient.reshape(-1) for gradient in gradients])
        flat, start = self.communicator.all_reduce(flat), 0
        for parameter, velocity in zip(self.parameters, self.velocities, strict=True):
            velocity *= MOMENTUM
            velocity += flat[start : start + parameter.size].reshape(parameter.shape)
            parameter -= RATE * velocity
            start += parameter.size

    def state(self) -> dict[str, np.ndarray]:
        """Parameters and running statistics, on the host."""
        state = {"conv": self.conv, "last": self.last, **self.bn.state_dict()}
        return {name: on_host(array) for name, array in state.items()}


def on_host(array: Array) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def patches_of(xp: ModuleType, images: Array) -> Array:
    """The 3x3 neighbourhoods (N, 6, 6, 9) of images (N, 8, 8)."""
    views = [images[:, i : i + 6, j : j + 6] for i in range(3) for j in range(3)]
    return xp.stack(views, axis=3)


def train(xp: ModuleType, members: int, steps: int) -> list[tuple[dict[str, np.ndarray], float]]:
    """State and validation accuracy of every member."""
    data = load_digits()
    images, targets = data.images / 16, np.eye(10)[data.target]
    order = np.random.default_rng(1).permutation(len(images))
    group, shares = thread_group(members), SHARES[members]
    bar = tqdm(total=steps, desc=f"{members} member{'s' * (members > 1)}", disable=None)

    def member(rank: int) -> tuple[dict[str, np.ndarray], float]:
        def load(step: int) -> tuple[Array, Array, Any]:
            first = step * BATCH % (TRAINED - BATCH)
            rows = order[first : first + BATCH][shares[rank] : shares[rank + 1]]
            with loading:
                batch = patches_of(xp, xp.asarray(images[rows])), xp.asarray(targets[rows])
                return *batch, loading.record()

        with ExitStack() as stack:
            loading, computing = stack.enter_context(place(xp, rank))
            stack.enter_context(computing)
            network = Network(xp, group[rank])
            ahead = load(0)
            for step in range(steps):
                (patches, labels, loaded), ahead = ahead, load(step + 1)
                computing.wait_event(loaded)
                network.step(patches, labels)
                # memory goes back to the stream it came from: that may use it again only then
                loading.wait_event(computing.record())
                if rank == 0:
                    bar.update()
            network.bn.eval()
            held = order[TRAINED:]
            logits = network.forward(patches_of(xp, xp.asarray(images[held])))
            accuracy = float((on_host(logits).argmax(1) == data.target[held]).mean())
            return network.state(), accuracy

    jobs = [lambda rank=rank: member(rank) for rank in range(members)]
    with bar:
        return run_in_threads(
            jobs, abort=group[0].abort, leave=lambda rank: group[rank].leave(), describe="rank"
        )


def main(steps: int = STEPS) -> int:
    console = Console()
    xp, which = array_library()
    console.print(which, soft_wrap=True, markup=False, highlight=False)
    (alone, accuracy_alone), *_ = train(xp, 1, steps)
    together = train(xp, 3, steps)
    table = Table(title=f"Three members after {steps} steps, compared with one")
    table.add_column("rank")
    for column in ("rows", "largest difference", "accuracy"):
        table.add_column(column, justify="right")
    faults = 0
    for rank, (state, accuracy) in enumerate(together):
        difference = float(np.max([np.abs(state[name] - alone[name]).max() for name in alone]))
        faults += not (difference <= TOLERANCE and accuracy >= ACCURACY)  # NaN is a fault too
        rows = str(SHARES[3][rank + 1] - SHARES[3][rank])
        table.add_row(str(rank), rows, f"{difference:.1e}", f"{accuracy:.1%}")
    table.add_row("alone", str(BATCH), "", f"{accuracy_alone:.1%}")
    console.print(table)
    if faults:
        console.print(
            f"[bold red]expected at most {TOLERANCE:.0e} and at least {ACCURACY:.0%} of every rank"
        )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
