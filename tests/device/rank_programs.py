"""What each rank of a group does, for `test_ranks_on_device.py`."""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from gpu_nets import ours_in_group, resnet
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_core.comm import SingleCommunicator
from syncbn_torch import SyncBatchNorm
from syncbn_torch.forward import always_ours

STEPS, REPLAYS = 5, 100
# Rounding differs with the sizes of parts, in the convolutions too: so many times torch's own
# error, which is taken to be at least this.
WORSE, LEAST = 20, 2e-6
# Of a replay, relative to the largest value: cuDNN may take other kernels within a graph.
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}


def small(norm, device, width=16):
    """A ResNet of four blocks."""
    width = 4 if device.type == "cpu" else width
    return resnet(norm, width, (1, 1, 1, 1), smooth=True).to(device)


class Run:
    """A net in training by SGD, and what it gave in each step."""

    def __init__(self, net, called=None):
        self.net, self.called, self.steps = net, called or net, []
        self.optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)

    def step(self, x, dy):
        """The loss is sum(y dy)."""
        self.optimizer.zero_grad()
        y = self.called(x)
        (y * dy).sum().backward()
        gradients = [parameter.grad.clone() for parameter in self.net.parameters()]
        self.optimizer.step()
        state = [value.clone() for value in self.net.state_dict().values()]
        self.steps.append(([y.detach().clone()], gradients, state))  # a replay writes over y

    def apart(self, other, rows=slice(None)):
        """Largest relative differences of outputs, gradients, states; `other` has all `rows`."""
        found = [0.0, 0.0, 0.0]
        for own, theirs in zip(self.steps, other.steps, strict=True):
            for kind, (mine, wanted) in enumerate(zip(own, theirs, strict=True)):
                for value, whole in zip(mine, wanted, strict=True):
                    expected = whole[rows] if kind == 0 else whole
                    if value.numel():
                        error = (value.double() - expected.double()).abs().max().item()
                        error /= max(1e-3, whole.double().abs().max().item())
                        found[kind] = max(found[kind], error if error == error else torch.inf)
        return found


def same_on_all_ranks(tensors):
    own = torch.cat([each.detach().double().flatten() for each in tensors])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    assert all(torch.equal(other, own) for other in every), "ranks differ"


def batch(count, device):
    side = 32 if device.type == "cpu" else 64
    return torch.randn(count, 3, side, side, device=device) + 1, torch.randn(
        count, 10, device=device
    )


def train(rank, size, device, parts, without_kernels, compiled=None):
    """Five steps equal those of one process on the undivided batch, bitwise alike on all ranks.

    `parts`: samples of each rank; `without_kernels`: on the last rank; `compiled`: what
    torch.compile gets, or None.
    """
    if without_kernels and rank == size - 1:
        os.environ["SYNCBN_KERNELS"] = "off"
    torch.manual_seed(0)
    of_torch = small(nn.BatchNorm2d, device)
    ours = small(SyncBatchNorm, device)
    ours.load_state_dict(of_torch.state_dict())
    exact, alone = Run(copy.deepcopy(of_torch).double()), copy.deepcopy(ours)
    for layer in alone.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.process_group = SingleCommunicator()
    called = ours if compiled is None else torch.compile(ours, fullgraph=True, **compiled)
    ids = [device] if device.type == "cuda" else None
    together = Run(ours, DistributedDataParallel(called, device_ids=ids))
    undivided = [Run(of_torch), Run(alone)]
    start, total = sum(parts[:rank]), sum(parts)
    rows = slice(start, start + parts[rank])
    for _ in range(STEPS):
        x, dy = batch(total, device)
        with always_ours():
            exact.step(x.double(), dy.double())
            for run in undivided:
                run.step(x, dy)
        # gradients are averaged over ranks, whose losses are parts of a sum
        together.step(x[rows], dy[rows] * size)
    own = undivided[0].apart(exact)
    bounds = [WORSE * max(error, LEAST) for error in own]
    for run in (exact, *undivided):
        found = together.apart(run, rows)
        assert all(f <= b for f, b in zip(found, bounds, strict=True)), (found, bounds)
    same_on_all_ranks(ours.parameters())
    if not without_kernels:  # else they may differ in the last bit
        same_on_all_ranks(ours.buffers())


def replay(rank, size, device, dtype):
    """Forward and backward, captured and replayed on fresh numbers, give what eager ones give."""
    torch.manual_seed(0)
    nets = [small(ours_in_group, device)]
    nets.append(copy.deepcopy(nets[0]))
    torch.manual_seed(1 + rank)
    fill = batch(8, device)
    buffers = [[value.clone() for value in fill] for _ in nets]
    results = [(), ()]

    def run(index):
        x, dy = buffers[index]
        leaves = [x.requires_grad_(), *nets[index].parameters()]
        narrow, kind = dtype != "float32", getattr(torch, dtype)
        # its cache of narrow weights would be of one capture only
        with torch.autocast(device.type, kind, narrow, cache_enabled=False):
            y = nets[index](x)
        results[index] = y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))

    runs = [lambda: run(0), lambda: run(1)]
    if device.type == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compile and check what there is to
            for _ in range(3):
                run(0), run(1)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(1)
        runs[1] = graph.replay
    for _ in range(REPLAYS if device.type == "cuda" else 2):
        fresh = batch(8, device)
        for own, again in zip(buffers, runs, strict=True):
            with torch.no_grad():
                for buffer, values in zip(own, fresh, strict=True):
                    buffer.copy_(values)
            again()
        states = [list(net.state_dict().values()) for net in nets]
        pairs = zip([*results[0], *states[0]], [*results[1], *states[1]], strict=True)
        for eager, replayed in pairs:
            scale = eager.double().abs().max().clamp(min=1e-3)
            error = (replayed.double() - eager.double()).abs().max() / scale
            assert error <= TOLERANCES[dtype], f"a replay is off by {error:.1e}"
