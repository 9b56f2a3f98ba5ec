"""Layers of `syncbn_jax` and `syncbn_paddle` beside those of Flax and Paddle, on a CPU.

    python benchmarks/frameworks.py jax      # 1, 2 and 8 devices of one host; a minute
    python benchmarks/frameworks.py paddle   # two processes of one host

Seconds are medians of forward and backward, over rounds in which the ways take turns. Errors are
the largest of y from float64, for inputs with standard deviation 1 and the means 0, 1e2 and 1e4.
Flax's layer is measured with `use_fast_variance`, its default, and without; Paddle's synchronizes
nothing, because its synchronized layer has no kernel for CPUs. Writes NAME-DATE.json to results/
or --output.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from records import FOLDER, write

SHAPES = ((32, 64, 56, 56), (8, 256, 28, 28), (64, 32, 8, 8))  # (N, C, H, W)
MEANS = (0.0, 1e2, 1e4)
Row = dict[str, Any]


def numbers(shape: tuple[int, ...], mean: float) -> tuple[np.ndarray, np.ndarray]:
    """x in float32, and its y in float64; channels first."""
    x = np.random.default_rng(0).normal(mean, 1, shape).astype(np.float32)
    wide, axes = x.astype(float), (0, 2, 3)
    deviations = wide - wide.mean(axes, keepdims=True)
    return x, deviations / np.sqrt(wide.var(axes, keepdims=True) + 1e-5)


def medians(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds; the first two rounds compile."""
    taken: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(rounds + 2):
        for way, step in steps.items():
            start = time.perf_counter()
            step()
            taken[way].append(time.perf_counter() - start)
    return {way: statistics.median(each[2:]) for way, each in taken.items()}


def of_jax(rounds: int) -> list[Row]:
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from syncbn_jax.nnx import convert_model

    jax.config.update("jax_num_cpu_devices", 8)

    def layers(channels: int) -> Callable[[bool], nnx.BatchNorm]:
        return lambda fast: nnx.BatchNorm(channels, use_fast_variance=fast, rngs=nnx.Rngs(0))

    class Net(nnx.Module):
        """Six convolutions of 64 channels, each with a layer."""

        def __init__(self, fast: bool) -> None:
            rngs = nnx.Rngs(0)
            self.convs = nnx.List([nnx.Conv(64, 64, (3, 3), rngs=rngs) for _ in range(6)])
            self.norms = nnx.List([layers(64)(fast) for _ in range(6)])

        def __call__(self, x: Any) -> Any:
            for conv, norm in zip(self.convs, self.norms, strict=True):
                x = nnx.relu(norm(conv(x)))
            return x

    def jitted(model: Any, devices: int) -> tuple[Any, Any, Any]:
        """A step, what it takes before x, and how x is placed."""
        name = "d" if devices > 1 else None
        for _, node in nnx.iter_graph(model):
            if isinstance(node, nnx.BatchNorm):
                node.axis_name = name
        graph, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)

        def step(params: Any, stats: Any, x: Any, dy: Any) -> Any:
            def forward(params: Any, x: Any) -> Any:
                own = nnx.merge(graph, params, stats, copy=True)
                return own(x), nnx.state(own, nnx.BatchStat)

            y, back, new = jax.vjp(forward, params, x, has_aux=True)
            return y, new, back(dy)

        if not name:
            return jax.jit(step), (params, stats), jnp.asarray
        mesh = jax.make_mesh((devices,), ("d",), devices=jax.devices()[:devices])
        part, whole = P("d"), P()
        specs = {"in_specs": (whole, whole, part, part), "out_specs": (part, whole, (whole, part))}
        place = partial(jax.device_put, device=NamedSharding(mesh, part))
        return jax.jit(jax.shard_map(step, mesh=mesh, **specs)), (params, stats), place

    rows = []
    cases = [("layer", shape) for shape in SHAPES] + [("net", (32, 64, 32, 32))]
    for name, shape in cases:
        make = Net if name == "net" else layers(shape[1])
        x, _ = numbers(shape, 1)
        dy = np.random.default_rng(1).normal(size=shape).astype(np.float32)
        last = [np.ascontiguousarray(np.moveaxis(each, 1, -1)) for each in (x, dy)]
        for devices in (1, 2, 8):
            models = {"flax, fast": make(True), "flax": make(False)}
            models["syncbn"] = convert_model(make(False))
            errors: dict[str, dict[str, float]] = {}
            steps = {}
            for way, model in models.items():
                step, before, place = jitted(model, devices)
                arrays = [place(each) for each in last]
                steps[way] = partial(lambda *args: jax.block_until_ready(args[0](*args[1:])), step)
                steps[way] = partial(steps[way], *before, *arrays)
                if name == "layer":
                    errors[way] = {}
                    for mean in MEANS:
                        own, wanted = numbers(shape, mean)
                        y = step(*before, place(np.moveaxis(own, 1, -1)), arrays[1])[0]
                        off = np.abs(np.asarray(y) - np.moveaxis(wanted, 1, -1)).max()
                        errors[way][f"{mean:g}"] = float(off)
            row = {"case": name, "shape": shape, "members": devices, "errors": errors}
            rows.append({**row, "seconds": medians(steps, rounds)})
    return rows


def in_paddle(path: str, rounds: int) -> None:
    import paddle
    import paddle.distributed as dist

    from syncbn_paddle import SyncBatchNorm

    def step(layer: Any, x: Any, dy: Any) -> None:
        layer(paddle.to_tensor(x, stop_gradient=False)).backward(dy)
        dist.barrier()

    dist.init_parallel_env()
    rank, rows = dist.get_rank(), []
    for shape in SHAPES:
        half = shape[0] // 2
        part = slice(rank * half, (rank + 1) * half)
        layers = {"paddle, each by itself": paddle.nn.BatchNorm2D(shape[1])}
        layers["syncbn"] = SyncBatchNorm(shape[1])
        dy = paddle.to_tensor(np.random.default_rng(1).normal(size=shape).astype("float32")[part])
        errors: dict[str, dict[str, float]] = {"syncbn": {}}
        steps = {}
        for mean in MEANS:
            own, wanted = numbers(shape, mean)
            y = layers["syncbn"](paddle.to_tensor(own[part])).numpy()
            errors["syncbn"][f"{mean:g}"] = float(np.abs(y - wanted[part]).max())
        for way, layer in layers.items():
            steps[way] = partial(step, layer, numbers(shape, 1)[0][part], dy)
        row = {"case": "layer", "shape": shape, "members": 2, "errors": errors}
        rows.append({**row, "seconds": medians(steps, rounds)})
    if rank == 0:
        Path(path).write_text(json.dumps(rows))


def of_paddle(rounds: int) -> list[Row]:
    import paddle.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.json")
        dist.spawn(in_paddle, args=(path, rounds), nprocs=2, backend="gloo")
        rows: list[Row] = json.loads(Path(path).read_text())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("framework", choices=("jax", "paddle"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=FOLDER)
    args = parser.parse_args()
    rows = (of_jax if args.framework == "jax" else of_paddle)(args.rounds)
    facts = {"version": __import__(args.framework).__version__, "rounds": args.rounds}
    path = write(args.output, f"{args.framework}-DATE", facts, rows=rows)
    for row in rows:
        print(row["case"], row["shape"], "members", row["members"])
        for way, seconds in row["seconds"].items():
            errors = ", ".join(f"{each:.0e}" for each in row["errors"].get(way, {}).values())
            print(f"    {way:24} {seconds * 1e3:8.2f} ms   {errors}")
    print(path)


if __name__ == "__main__":
    main()
