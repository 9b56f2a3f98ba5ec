"""A critic with a gradient penalty (WGAN-GP) over several processes, trained as one device.

    torchrun --nproc-per-node 2 examples/gradient_penalty.py

The penalty differentiates the critic by its input, and training differentiates that once more. Each
process has a share of the real digits and of the generated ones (noise, to keep it short).
Afterwards the first process trains a copy with `nn.BatchNorm2d` on the whole batches, from the same
start. The script ends with status 1 if the two differ by more than rounding.
"""

import argparse
import copy
import sys

import torch
import torch.distributed as dist
from digits import TOLERANCE, difference, load
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from syncbn_torch import convert_model


def critic() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.Softplus(),
        nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.Softplus(),
        nn.Flatten(), nn.Linear(16 * 64, 1),
    ).double()  # fmt: skip


def loss_of(model: nn.Module, real: Tensor, fake: Tensor, between: Tensor) -> Tensor:
    """The critic's loss, summed over the samples; `between`: (N, 1, 1, 1), from 0 to 1."""
    mixed = (between * real + (1 - between) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().sum()
    loss: Tensor = model(fake).sum() - model(real).sum() + 10 * penalty
    return loss


def train(
    call: nn.Module,
    model: nn.Module,
    images: Tensor,
    args: argparse.Namespace,
    rank: int,
    size: int,
) -> dict[str, Tensor]:
    """Train `model` by `call` on the share of `rank` among `size`; its state at the end."""
    optimizer = torch.optim.Adam(model.parameters(), lr=args.rate)
    random = torch.Generator().manual_seed(0)
    for _ in tqdm(range(args.steps), unit="step", disable=None if rank == 0 else True):
        real = images[torch.randint(len(images), (args.batch_size,), generator=random)]
        fake = torch.rand(real.shape, dtype=real.dtype, generator=random)
        between = torch.rand(len(real), 1, 1, 1, dtype=real.dtype, generator=random)
        shares = [part.tensor_split(size)[rank] for part in (real, fake, between)]
        optimizer.zero_grad()
        # DistributedDataParallel averages over the processes: this is the mean over the batch
        (loss_of(call, *shares) * (size / args.batch_size)).backward()
        optimizer.step()
    return model.state_dict()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=31, help="over all processes")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)  # processes are parallel already, and the model is tiny

    torch.manual_seed(0)
    images = load(torch.float64)[0]
    alone = critic()
    model = convert_model(copy.deepcopy(alone))
    state = train(DistributedDataParallel(model), model, images, args, rank, size)
    status = 0
    if rank == 0:
        expected = train(alone, alone, images, args, 0, 1)
        off = max(difference(state, expected, running) for running in (False, True))
        bound = TOLERANCE[torch.float64][1]
        status = int(not off <= bound)
        text = f"{size} processes: largest difference from one device {off:.1e}"
        Console(soft_wrap=True).print(text + f", [bold red]expected {bound:.0e}" * status)
    results = [status]
    dist.broadcast_object_list(results, src=0)  # also: the others wait for the first
    dist.destroy_process_group()
    return results[0]


if __name__ == "__main__":
    sys.exit(main())
