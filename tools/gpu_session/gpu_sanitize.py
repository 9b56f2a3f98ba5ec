"""Every CUDA kernel once, through the torch layer, against float64: fodder for compute-sanitizer.

    python tools/gpu_session/gpu_sanitize.py --seconds 60  # also without the sanitizer
    compute-sanitizer --tool racecheck python tools/gpu_session/gpu_sanitize.py
    python tools/gpu_session/gpu_sanitize.py --device cpu  # is this script in order?
    python tools/gpu_session/gpu_sanitize.py --replicas  # on all GPUs: they equal one

The reference is computed on the CPU, so hardly any kernel but ours runs on the device. Ends with
status 1 if a result is off.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from syncbn_core.moments import NormRule
from syncbn_core.steps import Affine, Norm
from syncbn_torch import DataParallelWithCallback, SyncBatchNorm
from syncbn_torch.forward import always_ours, operations_for

# Largest error of a result of that dtype, relative to the largest value or 1.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 3e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
HALF = (torch.float16, torch.bfloat16)
DENSE = {4: torch.channels_last, 5: torch.channels_last_3d}

SPATIAL = [
    (4, 8, 16, 16),  # whole vectors
    (6, 8, 7, 7),  # misaligned planes
    (5, 3, 5, 5, 1),
    (9, 4, 3, 1),  # planes shorter than a vector
    (9, 64, 2, 1),
    (5, 5, 2, 3, 4),
    (3, 1, 97, 101),  # one channel, many blocks; with a tail
    (3, 3, 128, 96),
    (70, 8, 7, 7),
    (8, 64, 9, 9),
    (2, 130, 6, 6),
    (2, 2048, 7, 7),
    (32, 64, 1, 1),  # one value per plane
    (11, 16, 31),
]
FLAT = [(64, 8), (33, 130), (700, 3), (2100, 1), (300, 64), (16, 2048), (9, 7)]


@dataclass(frozen=True)
class Case:
    """An input and a layer: `offset` elements of misalignment, `settings` of the layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "contiguous"  # "channels_last"; "sliced", "expanded dy" are copied
    offset: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    parameters: torch.dtype | None = None
    replicas: int = 1

    def __str__(self) -> str:
        fields = {k: v for k, v in vars(self).items() if v != getattr(type(self), k, None)}
        return ", ".join(f"{k} {v}" for k, v in fields.items() if v != {})


def cases() -> Iterator[Case]:
    """The different ones first, for when time is short."""
    dtypes = list(TOLERANCE)
    for dtype in dtypes:
        shape = (6, 8, 5, 5)
        for settings in (
            {"momentum": None},
            {"affine": False},
            {"track_running_stats": False},
            {"eps_mode": "clamp", "eps": 1.0},
        ):
            yield Case(shape, dtype, settings=settings)
            yield Case(shape, dtype, "channels_last", settings=settings)
        for layout in ("sliced", "expanded dy"):
            yield Case(shape, dtype, layout)
        for layout in ("contiguous", "channels_last"):
            yield Case(shape, dtype, layout, replicas=3)
        if dtype in HALF:
            yield Case(shape, dtype, parameters=dtype)
            yield Case(shape, dtype, "channels_last", parameters=dtype)
    for shape, dtype, offset in product(SPATIAL, dtypes, (0, 1)):
        yield Case(shape, dtype, offset=offset)
        if len(shape) in DENSE:
            yield Case(shape, dtype, "channels_last", offset)
    for shape, dtype, offset in product(FLAT, dtypes, (0, 1)):
        yield Case(shape, dtype, offset=offset)


def placed(values: Tensor, case: Case, device: torch.device, offset: int) -> Tensor:
    """`values` on the device, in the layout of the case, `offset` elements into its memory."""
    if case.layout == "sliced":
        whole = nn.functional.pad(values, (1, 1), value=float("nan"))
        return whole.to(device)[..., 1:-1]
    if case.layout == "channels_last":
        values = values.contiguous(memory_format=DENSE[values.dim()])
    memory = torch.empty(values.numel() + offset, dtype=values.dtype, device=device)
    return memory.as_strided(values.shape, values.stride(), offset).copy_(values)


class Check:
    """Compares, and keeps what is off."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.compared = 0

    def __call__(self, case: Case, name: str, actual: Tensor | None, expected: Tensor) -> None:
        self.compared += 1
        if actual is None:
            self.wrong.append(f"{case}: no {name}")
            return
        expected = expected.detach()
        scale = max(1.0, expected.abs().max().item())
        error = (actual.detach().cpu().double() - expected).abs().max().item() / scale
        if not error <= TOLERANCE[actual.dtype]:  # NaN neither
            self.wrong.append(f"{case}: {name} is off by {error:.1e}")


def run(case: Case, device: torch.device, check: Check) -> None:
    """Forward and backward twice, then eval, beside torch in float64."""
    torch.manual_seed(sum(case.shape))
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    layer = SyncBatchNorm(case.shape[1], dtype=case.parameters or wide, **case.settings)
    if layer.affine:
        nn.init.normal_(layer.weight, 1, 0.3)
        nn.init.normal_(layer.bias)
    twin = copy.deepcopy(layer).double()
    model = layer.to(device)
    if case.replicas > 1:
        model = DataParallelWithCallback(layer, device_ids=[device] * case.replicas)
    for step in range(3):
        training = step < 2
        values, dy = (torch.randn(case.shape).to(case.dtype) for _ in range(2))
        if case.layout == "expanded dy":
            dy = dy[:1, :1].expand(case.shape)
        values = values * 0.5 + 3
        x = placed(values, case, device, case.offset).detach().requires_grad_()
        wide_x = values.double().requires_grad_()
        for module in (model, twin):
            module.train(training).zero_grad()
        with always_ours():
            y = model(x)
        if case.layout == "expanded dy":
            y.backward(dy[:1, :1].to(device).expand(case.shape))
        else:  # another misalignment than that of x, in the second step
            y.backward(placed(dy, case, device, step * case.offset))
        with always_ours(False):
            expected = exact(twin, wide_x)
        expected.backward(dy.double())
        check(case, f"y of step {step}", y, expected)
        if training:  # else it is torch's backward
            check(case, f"dx of step {step}", x.grad, wide_x.grad)
            for (name, ours), theirs in zip(
                layer.named_parameters(), twin.parameters(), strict=True
            ):
                check(case, f"gradient of {name}, step {step}", ours.grad, theirs.grad)
        for (name, ours), theirs in zip(layer.named_buffers(), twin.buffers(), strict=True):
            if name == "num_batches_tracked":
                theirs, ours = theirs.double(), ours.double()
            check(case, f"{name} after step {step}", ours, theirs)


def exact(twin: SyncBatchNorm, x: Tensor) -> Tensor:
    """By torch's kernel, or by plain operations where torch has none for it."""
    if twin.effective_eps_mode == "plus" or not twin.training:
        return twin(x)
    axes = [axis for axis in range(x.dim()) if axis != 1]
    twin(x)  # for its running statistics
    var, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    column = (1, -1, *[1] * (x.dim() - 2))
    xhat = (x - mean) * var.clamp(min=twin.eps).rsqrt()
    return xhat * twin.weight.view(column) + twin.bias.view(column)


def run_functional(device: torch.device, check: Check) -> None:
    """The steps alone: statistics, and y without parameters."""
    case = Case((6, 8, 7, 7), torch.float32)
    x = torch.randn(case.shape)
    operations, rule = operations_for(x.to(device)), NormRule(1e-5)
    own, affine, _ = operations.take(x.to(device), Affine(), None)
    known = operations.statistics(operations.moments(own), rule)
    y = operations.forward(own, Norm(known, affine, rule))
    var, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0, keepdim=True)
    check(case, "y of the steps", y, (x.double() - mean) * (var + 1e-5).rsqrt())
    found = torch.as_tensor(known.mean), torch.as_tensor(known.invstd)
    wanted = mean, (var + 1e-5).rsqrt()
    for name, actual, expected in zip(("mean", "invstd"), found, wanted, strict=True):
        check(case, f"{name} of the steps", actual.float(), expected.flatten())


def run_replicas(check: Check) -> None:
    """On all GPUs, with one model on the whole batch beside it."""
    case = Case((13, 16, 9, 9), torch.float64, replicas=torch.cuda.device_count())
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Conv2d(16, 16, 3), SyncBatchNorm(16)).double().cuda()
    model = DataParallelWithCallback(copy.deepcopy(alone))
    for step in range(3):
        x = torch.randn(case.shape, dtype=torch.float64, device="cuda").requires_grad_()
        parts = x.detach().clone().requires_grad_()
        y, expected = model(parts), alone(x)
        y.pow(3).mean().backward()
        expected.pow(3).mean().backward()
        check(case, f"y of step {step}", y, expected.cpu())
        check(case, f"dx of step {step}", parts.grad, x.grad.cpu())
    found = model.module.state_dict()
    for name, expected in alone.state_dict().items():
        check(case, name, found[name].double(), expected.cpu().double())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=100.0, help="then no case begins")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--replicas", action="store_true", help="only the check on all GPUs")
    options = parser.parse_args()
    warnings.filterwarnings("error", message="syncbn uses plain")
    device, check = torch.device(options.device), Check()
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    start = time.monotonic()
    waiting: list[Case] = []
    if options.replicas:
        run_replicas(check)
    else:
        run_functional(device, check)
        waiting = list(cases())
    total = len(waiting)
    while waiting and time.monotonic() - start < options.seconds:
        run(waiting.pop(0), device, check)
    if device.type == "cuda":
        torch.cuda.synchronize()
        report_kernels()
    for line in check.wrong[:40]:
        print("WRONG", line)
    print(
        f"{total - len(waiting)} of {total} cases in {time.monotonic() - start:.0f} s, "
        f"{check.compared} comparisons, {len(check.wrong)} wrong"
        + (f"; skipped for lack of time: {len(waiting)}, from {waiting[0]}" if waiting else "")
    )
    return 1 if check.wrong or not check.compared else 0


def report_kernels() -> None:
    """Which of the kernels have run; this looks behind the public layer."""
    from syncbn_core.backends.cuda import kernels

    keys = sorted({key for key, _ in kernels._machine.launches})
    print(f"{len(keys)} kernels: {' '.join(keys)}")
    if not keys:
        raise RuntimeError("expected our kernels to run, none did")


if __name__ == "__main__":
    sys.exit(main())
