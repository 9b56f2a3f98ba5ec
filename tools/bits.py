"""Compare the bits of all results of two revisions: `python tools/bits.py [REVISION]`.

Runs the same steps with the package of REVISION (HEAD if left out) and with that of the working
tree, on the CPU, and lists the arrays that differ: arrays of NumPy, threads, tensors, replicas,
second derivatives, in-place layers, and two processes over gloo. Needs the `torch` extra. Compare
on one machine: kernels are compiled for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
SHAPES = ((6, 3, 5, 4), (7, 5), (4, 40, 6, 6), (2, 3, 200, 200))
CUTS = ((2, 5), (0, 6), (3, 3))  # where a batch is cut in three parts; some are empty


def batch(shape: tuple[int, ...], dtype: str = "f4") -> list[np.ndarray[Any, Any]]:
    """x, dy, weight, bias."""
    rng, channels = np.random.default_rng(len(shape) * shape[0]), shape[1]
    x, dy = rng.normal(5, 2, shape), rng.normal(size=shape)
    return [each.astype(dtype) for each in (x, dy, *rng.normal(size=(2, channels)))]


def of_arrays() -> Iterator[tuple[str, Any]]:
    """`batch_norm_forward`, `_backward` and `_eval`, alone and by three threads."""
    from syncbn_core.comm import run_in_threads, thread_group
    from syncbn_core.functional import batch_norm_backward, batch_norm_eval, batch_norm_forward

    def step(x: Any, dy: Any, weight: Any, bias: Any, mask: Any = None, **settings: Any) -> Any:
        group, out = settings.get("communicator"), settings.pop("out", None)
        running = {"running_mean": np.zeros_like(weight), "running_var": np.ones_like(weight)}
        counter = np.zeros((), np.int64)
        y, saved = batch_norm_forward(
            x, weight, bias, mask=mask, num_batches_tracked=counter, out=out, **running, **settings
        )
        gradients = batch_norm_backward(dy, saved, communicator=group)
        settings = {
            key: settings[key] for key in settings if key not in ("communicator", "momentum")
        }
        evaluated, kept = batch_norm_eval(x, *running.values(), weight, bias, mask=mask, **settings)
        eval_gradients = batch_norm_backward(dy, kept)
        return [
            y,
            saved.mean,
            saved.invstd,
            *gradients,
            *running.values(),
            evaluated,
            *eval_gradients,
        ]

    modes = [{}, {"eps_mode": "clamp", "eps": 3.0}, {"activation": "silu", "momentum": None}]
    for shape, dtype, (number, mode) in product(SHAPES, ("f4", "f8", "f2"), enumerate(modes)):
        x, dy, weight, bias = batch(shape, dtype)
        mask = np.arange(shape[0]) % 3 != 1
        layouts = {
            "C": x,
            "last": np.moveaxis(np.moveaxis(x, 1, -1).copy(), -1, 1),
            "gaps": x[::-1],
        }
        for layout, own in layouts.items():
            yield f"array {shape} {dtype} {number} {layout}", step(own, dy, weight, bias, **mode)
        yield f"mask {shape} {dtype} {number}", step(x, dy, weight, bias, mask, **mode)
        for first, second in CUTS:
            bounds = [0, first, second, shape[0]]
            members: list[Callable[[], Any]] = []
            for part, one in zip(map(slice, bounds, bounds[1:]), thread_group(3), strict=False):
                settings = {"parallel": False, "communicator": one, **mode}
                members.append(partial(step, x[part], dy[part], weight, bias, **settings))
            results = run_in_threads(members)
            for member, result in enumerate(results):
                yield f"thread {member} {shape} {dtype} {number} {bounds}", result


def of_tensors(rank: int = 0, size: int = 1) -> Iterator[tuple[str, Any]]:
    """Layers: alone, in replicas, in place, second derivatives; with `size` > 1 over processes."""
    import torch

    from syncbn_torch import DataParallelWithCallback, SynchronizedBatchNorm2d
    from syncbn_torch.forward import always_ours
    from syncbn_torch.inplace import InPlaceABNSync

    settings: list[dict[str, Any]] = [{}, {"eps_mode": "clamp", "eps": 3.0}, {"activation": "silu"}]
    settings += [{"momentum": None, "affine": False}]
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    ways = ("alone",) if size > 1 else ("alone", "replicas")
    makes = [lambda c, each=each: SynchronizedBatchNorm2d(c, **each) for each in settings]
    makes.append(InPlaceABNSync)
    for shape, dtype, (number, make), way, mask in product(
        [each for each in SHAPES if len(each) == 4], dtypes, enumerate(makes), ways, (False, True)
    ):
        layer: Any = make(shape[1])
        in_place = number == len(settings)
        if in_place and (way == "replicas" or mask):
            continue
        mine = (
            slice(rank * (shape[0] - 1), None if rank else shape[0] - 1)
            if size > 1
            else slice(None)
        )
        x, dy, weight, bias = (torch.from_numpy(each).to(dtype) for each in batch(shape))
        if layer.affine:
            layer.weight.data, layer.bias.data = weight.float(), bias.float()
        if dtype is torch.float64:
            layer.double()
        called = DataParallelWithCallback(layer, replicas=2) if way == "replicas" else layer
        valid = {"mask": torch.arange(shape[0])[mine] % 3 != 1} if mask else {}
        outcome = []
        for second in (False, True):
            leaf = x[mine].clone().requires_grad_()
            with always_ours():
                y = called(leaf * 1 if in_place else leaf, **valid)
            inputs = [leaf, *layer.parameters()]
            if second and (in_place or dtype is torch.float16):
                continue
            dleaf, *others = torch.autograd.grad((y * dy[mine]).sum(), inputs, create_graph=second)
            outcome += [y, dleaf, *others, *layer.buffers()]
            if second:
                outcome += torch.autograd.grad(dleaf.square().sum(), inputs, allow_unused=True)
        kept = [
            None if each is None else each.detach().double().clone().numpy() for each in outcome
        ]
        yield f"{way} {tuple(shape)} {dtype} {number} {mask} rank {rank} of {size}", kept


def of_rank(rank: int, store: str, path: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    save(f"{path}.{rank}.npz", of_tensors(rank, 2))
    dist.destroy_process_group()


def save(path: str, results: Iterator[tuple[str, Any]]) -> None:
    named = {f"{name}: {n}": each for name, all_ in results for n, each in enumerate(all_)}
    np.savez(path, **{name: each for name, each in named.items() if each is not None})


def run(path: str) -> None:
    """Save all results of the package that is imported."""
    import torch.multiprocessing

    save(f"{path}.arrays.npz", of_arrays())
    save(f"{path}.tensors.npz", of_tensors())
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(of_rank, (f"file://{folder}/store", path), nprocs=2)


def results_of(root: Path, folder: Path) -> dict[str, Any]:
    """All results of the package in `root`, by files in `folder`."""
    path = os.pathsep.join([str(root), str(root / "adapters"), str(ROOT / "tools")])
    command = [sys.executable, "-P", "-c", f"import bits; bits.run({str(folder / 'results')!r})"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
    files = sorted(folder.glob("results.*.npz"))
    return {name: array for file in files for name, array in np.load(file).items()}


def tree_of(revision: str) -> Path:
    """The files of a revision; they stay, because to compile its kernels takes minutes."""
    git = ["git", "-C", str(ROOT)]
    number = subprocess.check_output([*git, "rev-parse", revision], text=True).strip()
    tree = Path(tempfile.gettempdir(), f"syncbn-{number}")
    if not tree.exists():
        tree.mkdir()
        archive = subprocess.check_output([*git, "archive", revision])
        subprocess.run(["tar", "x"], cwd=tree, input=archive, check=True)
    return tree


def main(revision: str = "HEAD") -> None:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        before = results_of(tree_of(revision), Path(first))
        after = results_of(ROOT, Path(second))
    differ = [name for name in before | after if not same(before.get(name), after.get(name))]
    print(*differ, f"{len(differ)} of {len(before)} arrays differ", sep="\n")
    sys.exit(bool(differ))


def same(one: Any, other: Any) -> bool:
    """Whether both are there, with the same shape, dtype and bits."""
    if one is None or other is None:
        return False
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
