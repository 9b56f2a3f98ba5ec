"""Are all results bitwise those of another revision? For changes of structure alone.

    python tools/same_bits.py REVISION                    # against the working tree
    python tools/same_bits.py record FILE.npz             # the packages first on sys.path
    python tools/same_bits.py compare OLD.npz NEW.npz
    python tools/same_bits.py REVISION --only numpy gloo  # these groups of cases

Outputs, gradients and running statistics on CPU, of arrays and tensors, alone and in threads,
replicas and processes, by public names only. Inputs depend on the name of the case alone. Lists
the results whose bits differ; exit status 1 if any do, or if one is missing on either side.

Only files of one machine, with the same NumPy, torch and Numba, can be compared. Numba's cache
looks at a kernel's own file, not at the helpers it calls: where those may have changed, set
NUMBA_CACHE_DIR to an empty folder. A revision is checked out and compiled anew each time, which
takes minutes: to compare with the same one often, keep what `record` wrote in a checkout of it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import platform
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

# The packages are imported where they are used: `compare` needs none.

HERE = Path(__file__).resolve().parents[1]
THREADS = 2
RANKS = 2
Array = np.ndarray[Any, Any]
Results = dict[str, Any]  # arrays or tensors; None for what there is not

TYPES = ("float64", "float32", "float16", "bfloat16")
ARRAY_TYPES = {name: np.dtype(name) for name in TYPES[:3]}
with suppress(ImportError):
    ARRAY_TYPES["bfloat16"] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)

SHAPES = {
    "nc": (45, 37),
    "nchw": (4, 6, 17, 19),
    "channels_last": (4, 6, 17, 19),
    "short": (9, 20, 7, 7),  # planes that the kernels take side by side
    "ncl": (6, 5, 301),
    "5d": (2, 5, 4, 7, 9),
    "channels_last_5d": (2, 5, 4, 7, 9),
    "gaps": (4, 6, 17, 19),
    "column_major": (45, 37),
    "transposed": (8, 6, 9, 4),
    "members": (8, 19, 6, 5),
    # only of arrays
    "flipped": (4, 6, 17, 19),
    "other_byte_order": (4, 6, 17, 19),
    # enough for our kernels in the torch layer, and for the parallel ones
    "large": (4, 20, 64, 68),
    "large_channels_last": (4, 20, 64, 68),
    "large_short": (32, 230, 7, 7),
    "large_nc": (75, 5000),
}
NAMES = tuple(SHAPES)
EACH_TYPE, IN_FLOAT32, ONLY_ARRAYS, LARGE = NAMES[:4], NAMES[4:10], NAMES[11:13], NAMES[13:]
# Ends of the kernels' tiles, pieces, blocks and chunks:
SIZES = [(2, 3, 4097), (1, 2, 32773), (5000, 3, 3), (1, 1, 2), (5003, 3), (200, 2048)]
MODES: dict[str, dict[str, Any]] = {
    "plus": {},
    "clamp": {"eps_mode": "clamp"},
    "average": {"momentum": None},
    "bare": {"affine": False},
    "untracked": {"track_running_stats": False},
    "clamp_average_bare": {"eps_mode": "clamp", "momentum": None, "affine": False, "eps": 0.1},
}
# Where the parts of a batch of eight end; a member may have none.
BOUNDS = {"one": (0, 8), "two": (0, 3, 8), "three": (0, 1, 4, 8), "five": (0, 2, 2, 3, 7, 8)}


class Numbers:
    """The inputs of one case, which its name decides."""

    def __init__(self, name: str) -> None:
        self.rng = np.random.default_rng(zlib.crc32(name.encode()))

    def array(self, layout: str | Sequence[int], dtype: str = "float64") -> Array:
        """(N, C, *spatial), of unlike means along N; channel 0 varies too little for "clamp"."""
        shape, order = (SHAPES[layout], layout) if isinstance(layout, str) else (layout, "")
        x = self.rng.normal(1, 2, shape)
        x += (np.arange(len(x)) % 8 / 4).reshape(-1, *[1] * (x.ndim - 1))
        x[:, 0] *= 1e-3
        return laid_out(x.astype(ARRAY_TYPES[dtype]), order)

    def tensor(self, layout: str | Sequence[int], dtype: str = "float32") -> Tensor:
        x = self.array(layout)
        strides = [stride // x.itemsize for stride in x.strides]
        made = torch.empty_strided(x.shape, strides, dtype=getattr(torch, dtype))
        return made.copy_(torch.from_numpy(x))

    def channels(self, count: int) -> Array:
        """(C,), positive: a weight, or a running variance."""
        return self.rng.uniform(0.5, 1.5, count)

    def fill(self, module: nn.Module) -> None:
        """Give parameters and running statistics other values than they begin with."""
        for name, own in module.state_dict().items():
            if own.is_floating_point():
                values = torch.from_numpy(self.channels(own.numel()))
                own.copy_(values - 1 if "bias" in name or "mean" in name else values)


def laid_out(x: Array, layout: str) -> Array:
    if layout == "gaps":
        wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "flipped":
        return x[::-1].copy()[::-1]
    if layout == "other_byte_order":
        return x.astype(x.dtype.newbyteorder())
    axes = list(range(x.ndim))  # outermost in memory first
    if "channels_last" in layout:
        axes = [0, *axes[2:], 1]
    elif layout == "transposed":
        axes = [1, 0, *axes[2:]]
    elif layout == "column_major":
        axes.reverse()
    return x.transpose(axes).copy().transpose(np.argsort(axes))


class Case(NamedTuple):
    """`run` makes results of inputs; the name begins with that of the group."""

    name: str
    run: Callable[[Numbers], Results]
    threads: int


def case(name: str, run: Callable[..., Results], *given: Any, threads: int = THREADS) -> Case:
    return Case(name, lambda numbers: run(numbers, *given), threads)


def run_cases(cases: Iterable[Case]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for one in cases:
        torch.set_num_threads(one.threads)
        numba.set_num_threads(min(one.threads, numba.config.NUMBA_NUM_THREADS))
        for result, value in one.run(Numbers(one.name)).items():
            if value is not None:
                name = f"{one.name}-{result.removeprefix('module.').replace('.', '_')}"
                assert name not in found, f"two results are called {name}"
                found[name] = stored(value)
    return found


def stored(value: Array | Tensor) -> Array:
    """A copy as a NumPy array of the same bits; uint16 for bfloat16, and for nothing else."""
    if isinstance(value, Tensor):
        value = value.detach()
        half = value.dtype is torch.bfloat16
        value = value.view(torch.int16).numpy().view(np.uint16) if half else value.numpy()
    if value.dtype.name == "bfloat16":
        value = value.view(np.uint16)
    return np.array(value, value.dtype.newbyteorder("="), order="C")


# ---------------------------------------------------------------------- NumPy arrays


def numpy_cases() -> Iterator[Case]:
    """Without a framework and without a group."""
    every: list[tuple[str, Any]] = [(dtype, one) for dtype in ARRAY_TYPES for one in EACH_TYPE]
    every += [("float32", one) for one in (*IN_FLOAT32, *ONLY_ARRAYS, *LARGE, *SIZES)]
    for dtype, layout in every:
        name = layout if isinstance(layout, str) else "x".join(map(str, layout))
        yield case(f"numpy-{dtype}-{name}-lone", array_alone, dtype, layout)
    yield case("numpy-float32-large-serial", array_alone, "float32", "large", False)
    yield case("numpy-float32-large-one_thread", array_alone, "float32", "large", threads=1)
    yield case("numpy-float32-large_nc-one_thread", array_alone, "float32", "large_nc", threads=1)
    yield case("numpy-float16-nchw-unlike_dy", unlike_dy)
    yield case("numpy-float32-nchw-extreme", extreme, "nchw")
    yield case("numpy-float32-nc-extreme", extreme, "nc")
    for dtype in ("float32", "float16"):
        yield case(f"numpy-{dtype}-nchw-in_place", in_place, dtype)
    for mode, settings in MODES.items():
        yield case(f"numpy-float32-nchw-{mode}", array_layers, "float32", "nchw", settings)


def array_alone(
    numbers: Numbers, dtype: str, layout: str | Sequence[int], parallel: bool = True
) -> Results:
    x, dy = numbers.array(layout, dtype), numbers.array(layout, dtype)
    return forward_and_backward(numbers, x, dy, parallel)


def forward_and_backward(numbers: Numbers, x: Array, dy: Array, parallel: bool = True) -> Results:
    """Running statistics are of float64: they show all bits of the moments."""
    from syncbn_core.functional import batch_norm_backward, batch_norm_forward

    own = np.float64 if x.dtype.itemsize == 8 else np.float32
    weight, bias, mean, var = (numbers.channels(x.shape[1]) for _ in range(4))
    y, saved = batch_norm_forward(
        x,
        weight.astype(own),
        bias.astype(own),
        running_mean=mean,
        running_var=var,
        parallel=parallel,
    )
    dx, by_weight, by_bias = batch_norm_backward(dy, saved, parallel=parallel)
    statistics = {"running_mean": mean, "running_var": var}
    return {"y": y, "dx": dx, "weight": by_weight, "bias": by_bias, **statistics}


def unlike_dy(numbers: Numbers) -> Results:
    """A dy of another dtype and layout than x."""
    x, dy = numbers.array("nchw", "float16"), numbers.array("channels_last", "float32")
    return forward_and_backward(numbers, x, dy)


def extreme(numbers: Numbers, layout: str) -> Results:
    """Large mean, tiny and huge deviations, a constant, infinity and NaN: a channel each."""
    x, dy = numbers.array(layout, "float32"), numbers.array(layout, "float32")
    x[:, 0] += 1e6
    x[:, 1] *= 1e-30
    x[:, 2] *= 1e30
    x[:, 3] = 0.1
    x[0, 4, ...] = np.inf
    x[0, 5, ...] = np.nan
    return forward_and_backward(numbers, x, dy)


def in_place(numbers: Numbers, dtype: str) -> Results:
    """Results in memory that is given, and statistics of eval, in both modes of eps."""
    from syncbn_core.functional import batch_norm_backward, batch_norm_eval, batch_norm_forward

    x, dy = numbers.array("nchw", dtype), numbers.array("nchw", dtype)
    y, dx = np.empty_like(x), dy.copy()
    _, saved = batch_norm_forward(x, out=y)
    batch_norm_backward(dx, saved, out=dx)
    mean, var = numbers.channels(x.shape[1]), numbers.channels(x.shape[1]) * 1e-5
    plus, saved = batch_norm_eval(x, mean, var)
    eval_dx = batch_norm_backward(dy, saved).x
    clamp, _ = batch_norm_eval(x.copy(), mean, var, eps_mode="clamp", out=x)
    return {"y": y, "dx": dx, "eval_plus": plus, "eval_dx": eval_dx, "eval_clamp": clamp}


def array_layers(
    numbers: Numbers, dtype: str, layout: str, settings: Results, bounds: Sequence[int] = ()
) -> Results:
    """Two steps of training and one of eval, in as many threads as there are parts.

    What each member has of its own is stacked. In a group that is of float64, which shows all bits
    of merged moments and sums.
    """
    from syncbn_core import BatchNorm
    from syncbn_core.comm import run_in_threads, thread_group

    channels = SHAPES[layout][1]
    cuts = [slice(*pair) for pair in pairwise(bounds)] or [slice(None)]
    group = thread_group(len(cuts)) if bounds else [None]
    own = "float64" if bounds or dtype == "float64" else "float32"
    layers = [BatchNorm(channels, dtype=own, communicator=c, **settings) for c in group]
    values = [numbers.channels(channels) for _ in range(2)]
    for layer in layers:
        for parameter, value in zip(layer.parameters(), values, strict=False):
            parameter[...] = value
    results: Results = {}
    for prefix in ("", "", "eval_"):
        x, dy = numbers.array(layout, dtype), numbers.array(layout, dtype)
        jobs = [
            partial(array_step, layer.train(not prefix), x[mine], dy[mine])
            for layer, mine in zip(layers, cuts, strict=True)
        ]
        ys, dxs = zip(*run_in_threads(jobs), strict=True)
        results |= {f"{prefix}y": np.concatenate(ys), f"{prefix}dx": np.concatenate(dxs)}
    states = [layer.state_dict() for layer in layers]
    names = ("weight", "bias")
    gradients = [dict(zip(names, layer.gradients(), strict=False)) for layer in layers]
    for members in (states, gradients):  # of parameters the gradients, as everywhere
        results |= {name: np.stack([one[name] for one in members]) for name in members[0]}
    return results


def array_step(layer: Any, x: Array, dy: Array) -> tuple[Array, Array]:
    return layer(x), layer.backward(dy)


def threads_cases() -> Iterator[Case]:
    """Arrays in the threads of a group."""
    for members, bounds in BOUNDS.items():
        for dtype in ARRAY_TYPES if members == "five" else ("float32",):
            name = f"threads-{dtype}-nchw-{members}"
            yield case(name, array_layers, dtype, "members", {}, bounds)
    for mode in ("clamp", "average", "untracked", "clamp_average_bare"):
        name = f"threads-float32-nchw-{mode}"
        yield case(name, array_layers, "float32", "members", MODES[mode], BOUNDS["three"])
    for layout, bounds in (("nc", (0, 1, 30, 45)), ("short", (0, 0, 9)), ("large", (0, 1, 4))):
        name = f"threads-float32-{layout}-uneven"
        yield case(name, array_layers, "float32", layout, {}, bounds)


# --------------------------------------------------------------------------- tensors


def always_ours(on: bool = True) -> AbstractContextManager[None]:
    """Inputs of any size take our kernels, also those for which torch's is faster."""
    for name in ("batchnorm",) if on else ():
        with suppress(ImportError, AttributeError):
            found: Any = importlib.import_module(f"syncbn_torch.{name}").always_ours
            block: AbstractContextManager[None] = found()
            return block
    if on:
        raise SystemExit("no module has always_ours: say in tools/same_bits.py where it is")
    return nullcontext()


def torch_cases() -> Iterator[Case]:
    """One layer, by our kernels or, `as_chosen`, by those that it takes by itself."""
    every = [(dtype, layout) for dtype in TYPES for layout in EACH_TYPE]
    for dtype, layout in [*every, *(("float32", layout) for layout in IN_FLOAT32)]:
        yield case(f"torch-{dtype}-{layout}-lone", tensor_alone, dtype, layout)
    every = [(dtype, "nchw") for dtype in TYPES]
    for dtype, layout in [*every, *(("float32", layout) for layout in ("channels_last", *LARGE))]:
        yield case(f"torch-{dtype}-{layout}-as_chosen", tensor_alone, dtype, layout, False)
    for layout in ("nchw", "large", "large_channels_last"):
        name = f"torch-float32-{layout}-one_thread"
        yield case(name, tensor_alone, "float32", layout, threads=1)
    for mode, settings in MODES.items():
        yield case(f"torch-float32-nchw-{mode}", tensor_layer, settings, True)
    for mode in ("average", "untracked"):
        yield case(f"torch-float32-nchw-{mode}_as_chosen", tensor_layer, MODES[mode], False)
    for dtype in ("float16", "bfloat16"):
        yield case(f"torch-{dtype}-nchw-half_parameters", half_parameters, dtype)
    for wanted in ("x", "weight", "bias", "nothing"):
        yield case(f"torch-float32-nchw-gradient_of_{wanted}", one_gradient, wanted)
    yield case("torch-float32-nchw-unlike_dy", unlike_tensor_dy)


def layer_for(numbers: Numbers, x: Tensor, settings: Results | None = None) -> Any:
    """A layer whose numbers are not those it begins with; of float32 for 16 bits."""
    import syncbn_torch

    kind = getattr(syncbn_torch, f"SynchronizedBatchNorm{max(x.dim() - 2, 1)}d")
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    layer = kind(x.shape[1], dtype=dtype, **(settings or {}))
    numbers.fill(layer)
    return layer


def state_of(module: nn.Module) -> Results:
    """Gradients of parameters, and running statistics."""
    gradients = {name: own.grad for name, own in module.named_parameters()}
    return {**gradients, **dict(module.named_buffers())}


def step(module: nn.Module, x: Tensor, dy: Tensor, ours: bool = True) -> Results:
    """Forward and backward."""
    x = x.detach().requires_grad_()
    with always_ours(ours):
        y = module(x)
    y.backward(dy)
    return {"y": y, "dx": x.grad, **state_of(module)}


def tensor_alone(numbers: Numbers, dtype: str, layout: str, ours: bool = True) -> Results:
    x, dy = numbers.tensor(layout, dtype), numbers.tensor(layout, dtype)
    results = step(layer_for(numbers, x), x, dy, ours)
    del results["num_batches_tracked"]  # the modes have it
    return results


def tensor_layer(numbers: Numbers, settings: Results, ours: bool) -> Results:
    """Two steps of training and one of eval."""
    x, dy = numbers.tensor("nchw"), numbers.tensor("nchw")
    layer = layer_for(numbers, x, settings)
    step(layer, dy, x, ours)
    results = {name: stored(v) for name, v in step(layer, x, dy, ours).items() if v is not None}
    last = step(layer.eval(), x, dy, ours)
    return {**results, "eval_y": last["y"], "eval_dx": last["dx"]}


def half_parameters(numbers: Numbers, dtype: str) -> Results:
    x, dy = numbers.tensor("nchw", dtype), numbers.tensor("nchw", dtype)
    return step(layer_for(numbers, x).to(x.dtype), x, dy)


def one_gradient(numbers: Numbers, wanted: str, replicas: int = 1) -> Results:
    x, dy = numbers.tensor("nchw"), numbers.tensor("nchw")
    layer = layer_for(numbers, x)
    own = {"x": x, "weight": layer.weight, "bias": layer.bias}
    for name, tensor in own.items():
        tensor.requires_grad_(name == wanted)
    with always_ours():
        y = replicated(layer, replicas)(x)
    gradient = torch.autograd.grad(y, own[wanted], dy)[0] if wanted in own else None
    return {"y": y, "gradient": gradient}


def unlike_tensor_dy(numbers: Numbers) -> Results:
    """A dy of another layout than x, then an expanded one."""
    x = numbers.tensor("nchw")
    layer = layer_for(numbers, x)
    first = step(layer, x, numbers.tensor("channels_last"))
    return {**step(layer, x, torch.ones(()).expand(x.shape)), "first_dx": first["dx"]}


# -------------------------------------------------------------------------- replicas


def replicas_cases() -> Iterator[Case]:
    """In the threads of `DataParallelWithCallback`."""
    every = [("float32", "nchw", count) for count in (1, 2, 3)]
    every += [(dtype, "nchw", 3) for dtype in TYPES if dtype != "float32"]
    for dtype, layout, count in [*every, ("float32", "channels_last", 2), ("float32", "large", 2)]:
        yield case(f"replicas-{dtype}-{layout}-{count}", in_replicas, dtype, layout, count)
    name = "replicas-float32-large-one_thread"
    yield case(name, in_replicas, "float32", "large", 2, threads=1)
    for mode in ("clamp", "average", "untracked", "clamp_average_bare"):
        name = f"replicas-float32-nchw-{mode}"
        yield case(name, in_replicas, "float32", "nchw", 3, MODES[mode])
    for dtype, members in (("float32", "three"), ("float64", "five"), ("float16", "five")):
        yield case(f"replicas-{dtype}-nchw-{members}_parts", in_parts, dtype, BOUNDS[members])
    yield case("replicas-float32-nchw-some_outputs", some_outputs)
    yield case("replicas-float32-nchw-gradient_of_weight", one_gradient, "weight", 2)
    yield case("replicas-float32-nchw-model", trained, partial(replicated, count=3))


def replicated(module: nn.Module, count: int) -> Any:
    from syncbn_torch import DataParallelWithCallback

    return DataParallelWithCallback(module, replicas=count)


def in_replicas(
    numbers: Numbers, dtype: str, layout: str, count: int, settings: Results | None = None
) -> Results:
    x, dy = numbers.tensor(layout, dtype), numbers.tensor(layout, dtype)
    layer = layer_for(numbers, x, settings)
    return step(replicated(layer, count), x, dy)


def outputs_of_parts(layer: nn.Module, x: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    """Those of replicas that get exactly these parts."""
    parts = [(x[slice(*pair)],) for pair in pairwise(bounds)]
    parallel = replicated(layer, len(parts))
    replicas = parallel.replicate(layer, parallel.device_ids)
    return parallel.parallel_apply(replicas, parts, [{}] * len(parts))


def in_parts(numbers: Numbers, dtype: str, bounds: Sequence[int]) -> Results:
    x, dy = numbers.tensor("members", dtype).requires_grad_(), numbers.tensor("members", dtype)
    layer = layer_for(numbers, x)
    y = torch.cat(outputs_of_parts(layer, x, bounds))
    y.backward(dy)
    return {"y": y, "dx": x.grad, **state_of(layer)}


def some_outputs(numbers: Numbers) -> Results:
    """Two passes over one graph, neither with the outputs of all replicas."""
    x, dy = numbers.tensor("members").requires_grad_(), numbers.tensor("members")
    layer = layer_for(numbers, x)
    first, _, last = outputs_of_parts(layer, x, BOUNDS["three"])
    (dx,) = torch.autograd.grad(last, x, dy[4:], retain_graph=True)
    torch.autograd.backward([first, last], [dy[:1], dy[4:]])
    return {"first_dx": dx, "dx": x.grad, **state_of(layer)}


def trained(
    numbers: Numbers, wrap: Callable[[nn.Module], nn.Module], mine: slice = slice(None)
) -> Results:
    """The state of a converted model after two steps of SGD, and its output in eval.

    What else is in the model is exact.
    """
    from syncbn_torch import convert_model

    layers = (nn.BatchNorm2d(19), nn.LeakyReLU(0.125), nn.BatchNorm2d(19, momentum=None))
    plain = nn.Sequential(*layers, nn.SyncBatchNorm(19))
    numbers.fill(plain)
    model = convert_model(plain)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        x, dy = numbers.tensor("members")[mine], numbers.tensor("members")[mine]
        optimizer.zero_grad()
        wrapped(x).backward(dy)
        optimizer.step()
    with torch.no_grad():
        return {**model.state_dict(), "eval_y": model.eval()(x)}


# ------------------------------------------------ second derivatives, transforms, checkpoints


def second_cases() -> Iterator[Case]:
    """Plain operations, and forwards that run again."""
    for mode in ("plus", "clamp", "bare"):
        for count in (1, 3):
            name = f"second-float64-nchw-{mode}_{count}"
            yield case(name, second_derivatives, MODES[mode], count)
    yield case("second-float64-nchw-transforms", transforms)
    for count in (1, 2):
        yield case(f"second-float32-nchw-checkpoint_{count}", checkpointed, count)


def second_derivatives(numbers: Numbers, settings: Results, count: int) -> Results:
    x, dy = (numbers.tensor("members", "float64").requires_grad_() for _ in range(2))
    layer = layer_for(numbers, x, settings)
    with always_ours():
        y = replicated(layer, count)(x)
    first = torch.autograd.grad(y, [x, *layer.parameters()], dy, create_graph=True)
    torch.stack([gradient.square().sum() for gradient in first]).sum().backward()
    return {"y": y, "first_dx": first[0], "dx": x.grad, "ddy": dy.grad, **state_of(layer)}


def transforms(numbers: Numbers) -> Results:
    """Forward-mode AD, a function transform, gradients in batches."""
    x, dy, tangent = (numbers.tensor("members", "float64") for _ in range(3))
    untracked = MODES["untracked"]
    plus, clamp = (layer_for(numbers, x, {**untracked, **MODES[m]}) for m in ("plus", "clamp"))
    _, plus_tangent = torch.func.jvp(plus, (x,), (tangent,))
    _, clamp_tangent = torch.func.jvp(clamp, (x,), (tangent,))
    gradient = torch.func.grad(lambda x: (clamp(x) * dy).sum())(x)
    x.requires_grad_()
    with always_ours():
        y = plus(x)
    (dx,) = torch.autograd.grad(y, x, torch.stack([dy, tangent]), is_grads_batched=True)
    tangents = {"plus_tangent": plus_tangent, "clamp_tangent": clamp_tangent}
    return {**tangents, "gradient": gradient, "batched_dx": dx}


class Checkpointed(nn.Module):
    """A layer that runs again in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False)


def checkpointed(numbers: Numbers, count: int) -> Results:
    x, dy = numbers.tensor("nchw"), numbers.tensor("nchw")
    model = Checkpointed(layer_for(numbers, x))
    return step(replicated(model, count), x, dy)


# ------------------------------------------------------------------------- processes


def gloo_cases() -> Iterator[Case]:
    """What each rank runs, on its part of the batch."""
    for dtype, layout, bounds in (
        ("float32", "members", (0, 3, 8)),
        ("float64", "members", (0, 3, 8)),
        ("float16", "members", (0, 0, 8)),
        ("bfloat16", "channels_last", (0, 3, 4)),
        ("float32", "nc", (0, 20, 45)),
        ("float32", "5d", (0, 1, 2)),
    ):
        yield case(f"gloo-{dtype}-{layout}-uneven", rank_step, dtype, layout, bounds)
    for mode in ("clamp", "untracked", "clamp_average_bare"):
        name = f"gloo-float32-members-{mode}"
        yield case(name, rank_step, "float32", "members", (0, 3, 8), MODES[mode])
    yield case("gloo-float32-members-replicas", rank_step, "float32", "members", (0, 3, 8), {}, 2)
    yield case("gloo-float32-members-parameters_only", rank_parameters)
    yield case("gloo-float32-members-model", rank_trained)


def part_of_rank(bounds: Sequence[int]) -> slice:
    return slice(bounds[dist.get_rank()], bounds[dist.get_rank() + 1])


def rank_step(
    numbers: Numbers,
    dtype: str,
    layout: str,
    bounds: Sequence[int],
    settings: Results | None = None,
    replicas: int = 1,
) -> Results:
    x, dy = (numbers.tensor(layout, dtype)[part_of_rank(bounds)] for _ in range(2))
    layer = layer_for(numbers, x, settings)
    return step(replicated(layer, replicas), x, dy)


def rank_parameters(numbers: Numbers) -> Results:
    """An x that needs no gradient, and the layer for any rank of input."""
    from syncbn_torch import SyncBatchNorm

    x, dy = (numbers.tensor("members")[part_of_rank((0, 3, 8))] for _ in range(2))
    layer = SyncBatchNorm(x.shape[1])
    y = layer(x)
    y.backward(dy)
    return {"y": y, **state_of(layer)}


def rank_trained(numbers: Numbers) -> Results:
    return trained(numbers, DistributedDataParallel, part_of_rank((0, 3, 8)))


def run_ranks() -> dict[str, Array]:
    """All of `gloo_cases`, in new processes whose results come through files."""
    found: dict[str, Array] = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (folder,), RANKS)
        for rank in range(RANKS):
            with np.load(Path(folder, f"{rank}.npz")) as file:
                found |= {f"{name}-rank{rank}": file[name] for name in file.files}
    return found


def run_rank(rank: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store, deadline = Path(folder, "store").as_uri(), datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", store, deadline, RANKS, rank)
    np.savez(Path(folder, f"{rank}.npz"), **run_cases(gloo_cases()))
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------------------- files

GROUPS: dict[str, Callable[[], dict[str, Array]]] = {
    "numpy": lambda: run_cases(numpy_cases()),
    "threads": lambda: run_cases(threads_cases()),
    "torch": lambda: run_cases(torch_cases()),
    "replicas": lambda: run_cases(replicas_cases()),
    "second": lambda: run_cases(second_cases()),
    "gloo": run_ranks,
}


def record(target: Path, only: Sequence[str]) -> None:
    import syncbn_core

    begin = time.perf_counter()
    found: dict[str, Array] = {}
    for group in only:
        found |= GROUPS[group]()
    root = Path(syncbn_core.__file__).parents[1]
    versions = [f"{module.__name__} {module.__version__}" for module in (np, torch, numba)]
    environment = ", ".join([platform.node(), *versions])
    np.savez(target, _root=np.array(str(root)), _environment=np.array(environment), **found)
    print(f"{len(found)} arrays of {root} in {time.perf_counter() - begin:.0f} s", flush=True)


def compare(old_file: Path, new_file: Path, only: Sequence[str]) -> int:
    """Print what differs; the exit status."""
    with np.load(old_file) as old, np.load(new_file) as new:
        if old["_environment"] != new["_environment"]:
            print(f"unlike environments: {old['_environment']}; {new['_environment']}")
        names = [n for n in dict.fromkeys([*old.files, *new.files]) if n.split("-")[0] in only]
        missing = differing = 0
        for name in names:
            if name not in old or name not in new:
                missing += 1
                print(f"{name}: only in {new_file if name in new else old_file}")
                continue
            difference = difference_of(old[name], new[name])
            if difference:
                differing += 1
                print(f"{name}: {difference}")
    print(f"{len(names)} arrays, {differing} differ, {missing} missing")
    return int(bool(differing or missing or not names))


def difference_of(old: Array, new: Array) -> str:
    """How their bits differ; "" where they don't."""
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return f"{old.dtype} {old.shape} became {new.dtype} {new.shape}"
    changed = bits_of(old) != bits_of(new)
    if not changed.any():
        return ""
    words = [f"{changed.sum()} of {old.size} elements"]
    before, after = real_numbers(old), real_numbers(new)
    finite = np.isfinite(before) & np.isfinite(after)
    if (changed & finite).any():
        a, b = (ordered(values[changed & finite]) for values in (old, new))
        steps = np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
        with np.errstate(over="ignore"):
            largest = np.abs(after - before)[finite].max() / (np.abs(before[finite]).max() or 1)
        words.append(f"up to {steps.max()} units in the last place")
        words.append(f"{largest:.1e} of the largest value")
    if (changed & ~finite).any():
        words.append(f"{(changed & ~finite).sum()} of them with NaN or infinity")
    return ", ".join(words)


def bits_of(values: Array) -> Array:
    return values.view(f"i{values.itemsize}")


def ordered(values: Array) -> Array:
    """Integers that are one apart where the numbers are neighbours."""
    bits = bits_of(values)
    wide = bits.astype(np.int64)
    if values.dtype.kind == "i":
        return wide
    return np.where(wide < 0, int(np.iinfo(bits.dtype).min) - wide, wide)


def real_numbers(values: Array) -> Array:
    """In float64; uint16 are the bits of bfloat16."""
    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


# ------------------------------------------------------------------------- revisions


def record_tree(root: Path, target: Path, only: Sequence[str]) -> None:
    """`record` the packages of `root`, in a new process."""
    command = [sys.executable, str(Path(__file__).resolve()), "record", str(target)]
    places = os.pathsep.join([str(root), str(root / "adapters")])
    environment = {**os.environ, "PYTHONPATH": places}
    if subprocess.run([*command, "--only", *only], env=environment).returncode:
        raise SystemExit(f"could not record {root}; see the error above")
    with np.load(target) as file:
        if not root.samefile(str(file["_root"])):
            raise SystemExit(f"expected the packages of {root}, got those of {file['_root']}")


def against(revision: str, only: Sequence[str]) -> int:
    """The revision, in a worktree for the time of recording, against this tree."""
    worktree = ["git", "-C", str(HERE), "worktree"]
    with tempfile.TemporaryDirectory(prefix="same-bits-") as folder:
        tree, old, new = (Path(folder, name) for name in ("tree", "old.npz", "new.npz"))
        subprocess.run([*worktree, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            record_tree(HERE, new, only)
            record_tree(tree, old, only)
        finally:
            subprocess.run([*worktree, "remove", "--force", str(tree)], check=True)
        return compare(old, new, only)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", metavar="record | compare | REVISION")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.npz")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    args = parser.parse_args()
    expected = {"record": 1, "compare": 2}.get(args.command, 0)
    if len(args.files) != expected:
        parser.error(f"expected {expected} files after {args.command}, got {len(args.files)}")
    if args.command == "record":
        record(args.files[0], args.only)
        return 0
    if args.command == "compare":
        return compare(*args.files, args.only)
    return against(args.command, args.only)


if __name__ == "__main__":
    sys.exit(main())
