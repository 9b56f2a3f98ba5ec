"""What synchronizing costs by number of processes: measured here, fitted, and simulated further.

    python benchmarks/scaling.py            # one host and gloo, and MPI where mpirun is found
    python benchmarks/scaling.py --processes 2 4 --rounds 50
    python benchmarks/scaling.py --simulate            # the model alone, no measurement

Measures in worlds of P processes on this machine: the collectives by message size and the whole
exchange of a layer with what Python adds. A group of torch.distributed is measured twice, in turn:
"one host" by local connections, "gloo" as if its ranks were on several hosts. Fits
`latency(P) + bytes / bandwidth`. Writes JSON to benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

CHANNELS = (4, 64, 256, 1024, 2048)
RESNET50 = [64, *[64, 64, 256] * 3, 256, *[128, 128, 512] * 4, 512, *[256, 256, 1024] * 6, 1024]
RESNET50 += [*[512, 512, 2048] * 3, 2048]  # channels of its 53 layers


# ----------------------------------------------------------------------- one process


def member(engine: str, rounds: int) -> None:
    """In a process of a world: measure; the first one prints JSON."""
    if engine == "mpi":
        from syncbn_core.comm import MPICommunicator

        ways: dict[str, Any] = {"mpi": MPICommunicator()}
    else:
        import torch
        import torch.distributed as dist

        from syncbn_core.comm import local
        from syncbn_torch import DistributedCommunicator

        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
        ways = {
            "one host": DistributedCommunicator(),
            "gloo": DistributedCommunicator(dist.new_group()),
        }
        ways["one host"].all_gather(np.ones(1))
        local.host_name = lambda: str(os.getpid())
        ways["gloo"].all_gather(np.ones(1))
        assert (ways["one host"].is_local, ways["gloo"].is_local) == (True, False)
    calls = {way: calls_of(own) for way, own in ways.items()}
    times: dict[str, Any] = {way: {name: [] for name in calls[way]} for way in ways}
    for _ in range(rounds + 5):
        for name in next(iter(calls.values())):
            for way in ways:
                calls[way][name]()  # so that no rank is still in another way's call
                begin = time.perf_counter()
                calls[way][name]()
                times[way][name].append(time.perf_counter() - begin)
    if next(iter(ways.values())).rank == 0:
        found = {
            way: {
                name: {"median": statistics.median(t[5:]), "worst": max(t[5:])}
                for name, t in times[way].items()
            }
            for way in ways
        }
        print(json.dumps(found), flush=True)
    if engine != "mpi":
        dist.destroy_process_group()


def calls_of(own: Any) -> dict[str, Callable[[], Any]]:
    """What is measured of a communicator."""
    from syncbn_core.exchange import Exchange
    from syncbn_core.moments import Moments

    exchange, transport = Exchange(own, lambda: "a layer", "float64"), own.transport
    rng = np.random.default_rng(own.rank)
    calls: dict[str, Callable[[], Any]] = {}
    for channels in CHANNELS:
        row, sums = rng.normal(size=2 * channels + 2), rng.normal(size=2 * channels)
        part = Moments.of(32, rng.normal(size=channels), rng.uniform(1, 2, channels))
        calls[f"all_gather {channels}"] = lambda row=row: transport.all_gather(row, None)
        calls[f"all_reduce {channels}"] = lambda sums=sums: transport.all_reduce(sums, None)
        calls[f"merge_moments {channels}"] = lambda part=part: exchange.moments(
            part, exchange.begin(part.num_features)
        )
    return calls


# ------------------------------------------------------------------------ all worlds


def measure(engine: str, size: int, rounds: int) -> dict[str, Any]:
    """What the first of `size` processes has measured."""
    script = [sys.executable, str(Path(__file__)), "--member", engine, "--rounds", str(rounds)]
    root = Path(__file__).resolve().parents[1]
    places = [str(root), str(root / "adapters"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    if engine == "mpi":
        start = [mpirun(), "--allow-run-as-root", "--oversubscribe", "-n", str(size)]
        done = subprocess.run(
            [*start, *script], capture_output=True, text=True, env=environment, timeout=600
        )
        if done.returncode != 0:
            raise RuntimeError(f"mpirun failed: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])
    with tempfile.TemporaryDirectory() as folder:
        environment |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(size)}
        environment |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        outputs = [Path(folder, str(rank)) for rank in range(size)]
        processes = []
        for rank, output in enumerate(outputs):
            with output.open("w") as file:
                own = {**environment, "RANK": str(rank)}
                processes.append(subprocess.Popen(script, stdout=file, env=own))
        try:
            codes = [process.wait(600) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise RuntimeError(f"processes ended with {codes}")
        return json.loads(outputs[0].read_text().splitlines()[-1])


def mpirun() -> str | None:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def free_port() -> int:
    """Below the ports that the system gives to anybody who asks for one."""
    import random
    import socket

    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# ----------------------------------------------------------------------------- model


def received(operation: str, channels: int, size: int) -> int:
    """Bytes that a rank receives: all rows but its own; a reduction in a ring, twice its own."""
    if operation == "all_gather":
        return (size - 1) * (2 * channels + 2) * 8
    if operation == "two sums":  # of groups of more than `exchange.MANY`
        return round(2 * 2 * (size - 1) / size * (2 * channels + 2) * 8)
    return round(2 * (size - 1) / size * 2 * channels * 8)


def fit(found: dict[int, dict[str, Any]], operation: str) -> dict[str, Any]:
    """Latency by number of processes and one bandwidth, by least squares of relative errors."""
    sizes = sorted(found)
    rows, ones = [], []
    for size in sizes:
        for channels in CHANNELS:
            seconds = found[size][f"{operation} {channels}"]["median"]
            latencies = [float(size == other) for other in sizes]
            rows.append([v / seconds for v in (*latencies, received(operation, channels, size))])
            ones.append(1.0)
    solution = np.linalg.lstsq(np.array(rows), np.array(ones), rcond=None)[0]
    errors = np.abs(np.array(rows) @ solution - 1)
    per_byte = float(solution[-1])
    return {
        "latency": {size: float(s) for size, s in zip(sizes, solution, strict=False)},
        "bytes_per_second": 1 / per_byte if per_byte > 0 else None,
        "mean_error": float(errors.mean()),
        "worst_error": float(errors.max()),
    }


def payload(size: int, group: int = 1) -> dict[str, float]:
    """Bytes that a rank receives per step of ResNet-50, within nodes of `group` and across."""
    layers = len(RESNET50)
    if group == 1:
        forward = sum(received("all_gather", c, size) for c in RESNET50)
    else:  # gather in the node, merge, then one row per node
        nodes = size // group
        forward = sum(received("all_gather", c, n) for c in RESNET50 for n in (group, nodes))
    backward = sum(received("all_reduce", c, size) for c in RESNET50)
    sums = sum(received("two sums", c, size) for c in RESNET50)
    return {"forward": forward, "sums": sums, "backward": backward, "collectives": 2 * layers}


def predict(size: int, group: int, hop: float, bandwidth: float) -> dict[str, float]:
    """Seconds that a step of ResNet-50 spends in collectives, for a hop and a bandwidth given.

    A gather takes `size - 1` hops where it goes around a ring, `log2 size` where it doubles;
    with `group` it goes within nodes first and then across. A reduction doubles, there and back.
    "sums" is the forward of a large group, by two reductions in the place of a gather.
    """
    levels = (size,) if group == 1 else (group, size // group)
    bytes_received = payload(size, group)
    layers = len(RESNET50)
    return {
        "ring": layers * hop * sum(level - 1 for level in levels),
        "doubling": layers * hop * sum(math.ceil(math.log2(level)) for level in levels),
        "gathered bytes": bytes_received["forward"] / bandwidth,
        "sums": layers * hop * 4 * math.ceil(math.log2(size)) + bytes_received["sums"] / bandwidth,
        "backward": layers * hop * 2 * math.ceil(math.log2(size))
        + bytes_received["backward"] / bandwidth,
    }


def simulate(size: int, jitter: float, steps: int = 200, layers: int = 2 * 53) -> float:
    """Mean time of a step in which all wait for the slowest after each layer, over 1.

    The pieces between two collectives take `1 / layers` times a log-normal with deviation
    `jitter`, independent over ranks and pieces; without synchronization a step would take 1.
    """
    rng = np.random.default_rng(0)
    total = 0.0
    for _ in range(steps):
        total += rng.lognormal(0, jitter, (layers, size)).max(1).sum() / layers
    return total / steps


# ---------------------------------------------------------------------------- report


def report(results: dict[str, Any]) -> None:
    for engine, found in results.get("measured", {}).items():
        sizes = sorted(map(int, found))
        print(f"\n{engine}, us (median of {results['rounds']}, in brackets the worst)")
        print(f"{'':>22}" + "".join(f"{f'P = {size}':>18}" for size in sizes))
        for name in next(iter(found.values())):
            cells = (found[size][name] for size in sizes)
            texts = (f"{c['median'] * 1e6:.0f} ({c['worst'] * 1e6:.0f})" for c in cells)
            print(f"{name:>22}" + "".join(f"{text:>18}" for text in texts))
        for operation, model in results["fitted"][engine].items():
            latency = ", ".join(f"{P}: {s * 1e6:.0f}" for P, s in model["latency"].items())
            rate = model["bytes_per_second"]
            text = "too fast to tell" if rate is None else f"{rate / 1e9:.2f} GB/s"
            print(
                f"{operation}: latency by P {latency} us; {text}; "
                f"off by {model['mean_error']:.0%} on average, {model['worst_error']:.0%} at worst"
            )
    print("\nResNet-50, MB that a rank receives per step, and the cost of waiting for the slowest")
    jitters = sorted({jitter for _, jitter, _ in results["simulated"]})
    head = "".join(f"{f'jitter {jitter:.0%}':>12}" for jitter in jitters)
    print(f"{'ranks':>6}{'gather':>10}{'by nodes of 8':>15}{'reduce':>9}{head}")
    for size in sorted({size for size, _, _ in results["simulated"]}):
        flat, nodes = payload(size), payload(size, 8) if size >= 16 else payload(size)
        waits = [w for s, _, w in results["simulated"] if s == size]
        print(
            f"{size:>6}{flat['forward'] / 1e6:>10.1f}{nodes['forward'] / 1e6:>15.1f}"
            f"{flat['backward'] / 1e6:>9.1f}" + "".join(f"{wait:>11.2f}x" for wait in waits)
        )

    hop, bandwidth = results["assumed"]["hop"], results["assumed"]["bandwidth"]
    print(
        f"\nResNet-50, ms per step, IF a hop takes {hop * 1e6:g} us and a rank receives "
        f"{bandwidth / 1e9:g} GB/s (assumed, not measured)"
    )
    heads = ("gather: ring", "or doubling", "its bytes", "or by sums", "backward")
    print(f"{'':>30}" + "".join(f"{head:>14}" for head in heads))
    for size, group, name in (
        (1024, 1, "1,024 ranks"),
        (1024, 8, "1,024 ranks, nodes of 8"),
        (64, 1, "groups of 64"),
        (64, 8, "groups of 64, nodes of 8"),
        (8, 1, "groups of 8"),
    ):
        times = predict(size, group, hop, bandwidth).values()
        print(f"{name:>30}" + "".join(f"{1e3 * seconds:>14.2f}" for seconds in times))


def plot(path: Path, hop: float, bandwidth: float) -> None:
    """Bytes and time of the forward of ResNet-50's layers, by both ways, for 8 to 16,384 ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = [2**n for n in range(3, 15)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(5.6, 3.2), layout="constrained")
    for key, label in (("forward", "a row of each rank"), ("sums", "two sums")):
        left.plot(sizes, [payload(size)[key] / 1e6 for size in sizes], marker="o", label=label)
    times = [predict(size, 1, hop, bandwidth) for size in sizes]
    for key, label in (("ring", ", ring"), ("doubling", ", doubling")):
        rows = [1e3 * (each[key] + each["gathered bytes"]) for each in times]
        right.plot(sizes, rows, marker="o", label=f"rows{label}")
    right.plot(sizes, [1e3 * each["sums"] for each in times], marker="o", label="two sums")
    for axis, title in ((left, "MB that a rank receives"), (right, "ms, by the model")):
        axis.set(xscale="log", yscale="log", xlabel="ranks")
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=240)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--simulate", action="store_true", help="measure nothing")
    parser.add_argument("--hop", type=float, default=5e-6, help="seconds, for the prediction")
    parser.add_argument("--bandwidth", type=float, default=25e9, help="bytes per second, for it")
    parser.add_argument("--plot", type=Path, help="draw the forward by both ways into this PNG")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--member", choices=["torch", "mpi"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member:
        member(args.member, args.rounds)
        return 0
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "rounds": args.rounds,
        "assumed": {"hop": args.hop, "bandwidth": args.bandwidth},
        "measured": {},
        "fitted": {},
    }
    with_mpi = mpirun() is not None and find_spec("mpi4py") is not None
    engines = [] if args.simulate else ["torch", *(["mpi"] if with_mpi else [])]
    for engine in engines:
        for size in args.processes:
            for way, found in measure(engine, size, args.rounds).items():
                results["measured"].setdefault(way, {})[size] = found
    for way, found in results["measured"].items():
        operations = ("all_gather", "all_reduce")
        results["fitted"][way] = {name: fit(found, name) for name in operations}
    results["simulated"] = [
        (size, jitter, simulate(size, jitter, steps=max(2, 20_000 // size)))
        for size in (2, 8, 64, 256, 1024)
        for jitter in (0.01, 0.05, 0.2)
    ]
    report(results)
    if args.plot:
        plot(args.plot, args.hop, args.bandwidth)
    if engines:
        args.output.mkdir(parents=True, exist_ok=True)
        path = args.output / f"scaling-{results['date']}.json"
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"\n{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
