"""Synchronized batch normalization with NumPy alone: no framework, four threads, real digits.

A two-layer network on scikit-learn's handwritten digits. Each of four threads has a quarter of
every batch, uneven on purpose; a communicator carries the statistics and, by the same call,
the sums of the gradients. It follows the one-member run to rounding. Run it:

    python examples/numpy_training.py
"""

import sys
from dataclasses import dataclass, field

import numpy as np
from sklearn.datasets import load_digits

from syncbn_core import BatchNorm
from syncbn_core.comm import Communicator, run_in_threads, thread_group

Array = np.ndarray
SHARES = [0, 5, 6, 20, 32]  # rows of a batch that go to each of the four members


@dataclass
class Network:
    """`softmax(relu(bn(x @ first)) @ second)`, one per member, all with the same parameters."""

    communicator: Communicator
    seed: int = 0
    first: Array = field(init=False)
    second: Array = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.first = rng.normal(0, 0.1, size=(64, 48))
        self.second = rng.normal(0, 0.1, size=(48, 10))
        self.bn = BatchNorm(48, dtype=np.float64, communicator=self.communicator)

    def forward(self, x: Array) -> Array:
        self.x = x
        self.hidden = np.maximum(self.bn(x @ self.first), 0)
        return self.hidden @ self.second

    def step(self, x: Array, labels: Array, total: int, rate: float) -> float:
        """One step of gradient descent on `total` samples, of which x are this member's."""
        logits = self.forward(x)
        shifted = np.exp(logits - logits.max(1, keepdims=True))
        probabilities = shifted / shifted.sum(1, keepdims=True)
        rows = np.arange(len(x))
        loss = -np.log(probabilities[rows, labels]).sum() / total
        d_logits = probabilities
        d_logits[rows, labels] -= 1
        d_logits /= total
        d_second = self.hidden.T @ d_logits
        self.bn.zero_grad()
        d_first = self.x.T @ self.bn.backward((d_logits @ self.second.T) * (self.hidden > 0))
        parameters = [self.first, self.second, *self.bn.parameters()]
        gradients = [d_first, d_second, *self.bn.gradients()]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= rate * self.communicator.all_reduce(gradient)
        return float(self.communicator.all_reduce(np.array([loss]))[0])


def train(members: int, steps: int = 200, batch: int = 32) -> tuple[list[Network], float]:
    """The members' networks after training, and the last loss."""
    images, labels = load_digits(return_X_y=True)
    images = images / 16
    order = np.random.default_rng(1).permutation(len(images))
    group = thread_group(members)
    shares = SHARES if members == 4 else [0, batch]

    def member(rank: int) -> tuple[Network, float]:
        network = Network(group[rank])
        loss = 0.0
        for step in range(steps):
            rows = order[(step * batch) % 1700 :][:batch][shares[rank] : shares[rank + 1]]
            loss = network.step(images[rows], labels[rows], batch, rate=0.5)
        return network, loss

    results = run_in_threads(
        [lambda r=r: member(r) for r in range(members)], abort=group[0].abort, describe="rank"
    )
    return [network for network, _ in results], results[0][1]


def main() -> int:
    (alone,), loss_alone = train(1)
    together, loss = train(4)
    pairs = [(alone.first, together[2].first), (alone.second, together[2].second)]
    pairs += zip(alone.bn.state_dict().values(), together[2].bn.state_dict().values(), strict=True)
    difference = max(float(np.abs(a - b).max()) for a, b in pairs)
    images, labels = load_digits(return_X_y=True)
    together[2].bn.eval()
    accuracy = float((together[2].forward(images / 16).argmax(1) == labels).mean())
    print(f"loss with one member {loss_alone:.6f}, with four {loss:.6f}")
    print(f"largest difference in parameters and running statistics {difference:.1e}")
    print(f"accuracy {accuracy:.1%}")
    return 0 if difference < 1e-10 and accuracy > 0.98 else 1


if __name__ == "__main__":
    sys.exit(main())
