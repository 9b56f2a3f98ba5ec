"""Two ranks that share a GPU train a small ResNet as one process trains it on the whole batch.

Five steps of SGD under DistributedDataParallel: the batch in even and uneven parts, and with an
empty one; then the same with one rank that has no kernels. Each step is compared with that of one
process on the undivided batch: torch's layer in float64, torch's layer, our layer alone. Numbers
are largest differences over the largest value of each tensor. Parameters and running statistics of
the ranks have to be bitwise the same; where one rank computes without kernels, running statistics
may differ in the last bit.

Over NCCL from 2.30 on, which lets ranks share a GPU, else over gloo; the JSON says which it was.

    python tools/gpu_session/gpu_shared.py --seconds 90 --json FILE
    python tools/gpu_session/gpu_shared.py --dry-run  # gloo, tensors on the CPU
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import sys
import time
from collections.abc import Sequence

import torch
from gpu_nets import resnet
from gpu_ranks import Row, backend_for_two, be_rank, begin, launch, name_of, save
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_core.comm import SingleCommunicator
from syncbn_torch import SyncBatchNorm
from syncbn_torch.forward import always_ours

STEPS, RATE = 5, 0.05
KINDS = ("output", "gradient", "state")
PARTS = {"even": (8, 8), "uneven": (11, 5), "empty": (16, 0)}  # samples of each rank
KERNELS = {  # the environment of each rank
    "kernels on both ranks": ({}, {}),
    "no kernels on rank 1": ({}, {"SYNCBN_KERNELS": "off"}),
}
WIDTH, SIDE = 16, 64
DRY_WIDTH, DRY_SIDE = 4, 32
# Rounding differs with the sizes of parts, in the convolutions too: so many times torch's own
# error, which is taken to be at least this.
WORSE, LEAST = 20, 2e-6

# ------------------------------------------------------------------------------- one rank


def largest_of(values: Sequence[Tensor | float]) -> float:
    """0 if there are none, NaN if one is NaN."""
    return torch.tensor([0.0, *values]).max().item()


class Run:
    """A net in training: what it gave in each step, by name."""

    def __init__(self, net: nn.Module, of_ranks: nn.Module | None = None) -> None:
        self.net, self.called = net, of_ranks or net
        self.optimizer = torch.optim.SGD(net.parameters(), RATE, momentum=0.9)
        self.steps: list[dict[str, Tensor]] = []

    def step(self, x: Tensor, dy: Tensor) -> None:
        """The loss is sum(y dy)."""
        self.optimizer.zero_grad()
        y = self.called(x)
        (y * dy).sum().backward()
        found = {"output": y.detach().clone()}  # the next replay of a graph writes over y
        for name, parameter in self.net.named_parameters():
            assert parameter.grad is not None
            found[f"gradient {name}"] = parameter.grad.clone()
        self.optimizer.step()
        kept = {f"state {name}": value.clone() for name, value in self.net.state_dict().items()}
        self.steps.append(found | kept)

    def apart(self, other: Run, rows: slice) -> dict[str, float]:
        """Largest difference from another run in any step, whose outputs have all `rows`."""
        found: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        for own, theirs in zip(self.steps, other.steps, strict=True):
            for name, value in own.items():
                kind = name.partition(" ")[0]
                expected = theirs[name][rows] if kind == "output" else theirs[name]
                if value.numel():
                    difference = (value.double() - expected.double()).abs().max()
                    largest = theirs[name].double().abs().max().clamp(min=1e-3)
                    found[kind].append(difference / largest)
        return {kind: largest_of(values) for kind, values in found.items()}

    def digests(self) -> list[dict[str, str]]:
        """Of the bits of each step's parameters and gradients, and of its running statistics."""
        return [
            {
                kind: hashlib.sha256(
                    b"".join(
                        value.cpu().numpy().tobytes()
                        for name, value in step.items()
                        if name != "output" and ("running" in name) is (kind == "running")
                    )
                ).hexdigest()[:16]
                for kind in ("parameters", "running")
            }
            for step in self.steps
        ]


def train(parts: tuple[int, ...], rank: int, device: torch.device, dry: bool) -> Row:
    width, side = (DRY_WIDTH, DRY_SIDE) if dry else (WIDTH, SIDE)
    torch.manual_seed(0)
    total, start = sum(parts), sum(parts[:rank])
    rows = slice(start, start + parts[rank])
    of_torch = resnet(nn.BatchNorm2d, width, (1, 1, 1, 1), smooth=True).to(device)
    ours = resnet(SyncBatchNorm, width, (1, 1, 1, 1), smooth=True).to(device)
    ours.load_state_dict(of_torch.state_dict())
    exact = copy.deepcopy(of_torch).double()
    alone = copy.deepcopy(ours)
    for layer in alone.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.process_group = SingleCommunicator()
    ids = [device] if device.type == "cuda" else None
    ranks = DistributedDataParallel(ours, device_ids=ids)
    undivided = {"float64": Run(exact), "torch's layer": Run(of_torch), "our layer": Run(alone)}
    together = Run(ours, ranks)
    for _ in range(STEPS):
        x = torch.randn(total, 3, side, side, device=device) + 1
        dy = torch.randn(total, 10, device=device) / total
        with always_ours():
            for name, run in undivided.items():
                dtype = torch.float64 if name == "float64" else torch.float32
                run.step(x.to(dtype), dy.to(dtype))
        # gradients are averaged over ranks, whose losses are parts of a sum
        together.step(x[rows], dy[rows] * len(parts))
    whole = slice(None)
    return {
        "from": {name: together.apart(run, rows) for name, run in undivided.items()},
        "torch's error": undivided["torch's layer"].apart(undivided["float64"], whole),
        "digests": together.digests(),
    }


def be_one(options: argparse.Namespace) -> None:
    def work(device: torch.device, result: Row) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
        result["rows"] = {}
        for name, parts in PARTS.items():
            result["rows"][name] = train(parts, options.rank, device, options.dry_run)
            save(options.json, result)

    be_rank(options, work)


# ------------------------------------------------------------------------------ all ranks


def judged(ranks: list[Row], same_kernels: bool) -> Row:
    """What all ranks together have found for one way to part the batch."""
    first = ranks[0]
    differences = {
        name: {kind: largest_of([rank["from"][name][kind] for rank in ranks]) for kind in KINDS}
        for name in first["from"]
    }
    bitwise = {
        kind: all(
            rank["digests"][step][kind] == first["digests"][step][kind]
            for rank in ranks
            for step in range(len(first["digests"]))
        )
        for kind in ("parameters", "running")
    }
    within = all(
        differences["float64"][kind] <= WORSE * max(first["torch's error"][kind], LEAST)
        for kind in KINDS
    )
    right = within and bitwise["parameters"] and (bitwise["running"] or not same_kernels)
    return {
        "from": differences,
        "torch's error": first["torch's error"],
        "bitwise over ranks": bitwise,
        "right": right,
    }


def attempt(backend: str, kernels: str, seconds: float, dry: bool) -> Row:
    """All ways to part the batch; those before an error are kept."""
    print(f"{kernels}: ", end="")
    told, error = launch(__file__, backend, 2, seconds, dry, KERNELS[kernels])
    rows = [rank.get("rows", {}) for rank in told]
    row: Row = {"backend": backend, "kernels": kernels, "rows": []}
    for name, parts in PARTS.items():
        if all(name in found for found in rows):
            found = judged([found[name] for found in rows], kernels == next(iter(KERNELS)))
            row["rows"].append({"batch": name, "parts": parts, **found})
    return row if error is None else row | {"error": error}


def show(row: Row) -> None:
    where = f"{name_of(row['backend'], 2)}, {row['kernels']}"
    for case in row["rows"]:
        apart = ", ".join(
            f"{max(found.values()):.1e} from {name}" for name, found in case["from"].items()
        )
        bitwise = [kind for kind, same in case["bitwise over ranks"].items() if same]
        verdict = "right" if case["right"] else "WRONG"
        own = max(case["torch's error"].values())
        print(
            f"{where}, {case['batch']}: {verdict}: {apart}; torch's own error {own:.1e}; bitwise "
            f"the same over ranks: {' and '.join(bitwise) or 'nothing'}"
        )
    if "error" in row:
        print(f"{where}: failed: {row['error']}")


def main() -> int:
    options = begin(__doc__.split("\n")[0], be_one)
    end = time.monotonic() + options.seconds
    backend, version = backend_for_two(options.dry_run)
    result: Row = {"nccl": version, "steps": STEPS, "groups": []}
    for index, kernels in enumerate(KERNELS):
        for wanted in dict.fromkeys((backend, "gloo")):  # gloo where NCCL has failed
            seconds = (end - time.monotonic()) / (len(KERNELS) - index)
            row = attempt(wanted, kernels, seconds, options.dry_run)
            result["groups"].append(row)
            show(row)
            if options.json:
                save(options.json, result)
            if "error" not in row:
                break
    groups = result["groups"]
    cases = [case for row in groups for case in row["rows"]]
    failed = sum("error" in row for row in groups)
    wrong = sum(not case["right"] for case in cases)
    backends = " and ".join(dict.fromkeys(row["backend"] for row in groups))
    print(
        f"{len(cases)} of {len(KERNELS) * len(PARTS)} cases over {backends}, NCCL {version}: "
        f"{wrong} wrong, {failed} of {len(groups)} groups failed"
    )
    return 0 if cases and not wrong and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
