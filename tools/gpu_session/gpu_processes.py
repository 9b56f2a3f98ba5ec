"""`nn.SyncBatchNorm` itself beside our layer, in a process group: eager forward + backward.

Tried in turn, each in processes of their own that end by themselves, talking over loopback:

    NCCL, 2 ranks    on two GPUs, or both on one; NCCL before 2.30 refuses to share one
    NCCL, 1 rank     nn.SyncBatchNorm would not communicate alone, so its function is called
    gloo, 2 ranks    if NCCL has refused; gloo's messages go through host memory

Wall time per step, of rank 0: ranks on one GPU share it, so these are no times of two GPUs. What
was refused is kept as the library's own sentence.

    python tools/gpu_session/gpu_processes.py --seconds 60 --json FILE
    python tools/gpu_session/gpu_processes.py --dry-run  # gloo on the CPU, where torch has no layer
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from gpu_ranks import Row, be_rank, begin, launch, name_of, save, sentence_of

SHAPES = [(32, 64, 56, 56), (32, 512, 7, 7), (2, 256, 14, 14)]
DRY_SHAPES = [(2, 8, 6, 6)]
DTYPES = ("float32", "float16")
ROUNDS, CALLS = 5, 20

# -------------------------------------------------------------------------------- a rank


def layers_of(channels: int, device: Any, size: int) -> dict[str, Any]:
    """Layers over the default group by name."""
    from gpu_nets import ours_in_group, torch_in_group

    name = "nn.SyncBatchNorm" if size > 1 else "function of nn.SyncBatchNorm"
    kinds = {"ours": ours_in_group, name: torch_in_group}
    return {name: kind(channels).to(device) for name, kind in kinds.items()}


def measure(shape: tuple[int, ...], dtype: str, device: Any, size: int, dry: bool) -> Row:
    """Seconds per step of each layer, in turns, and how far their results are apart."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())
    x, dy = (torch.randn(shape, device=device).to(getattr(torch, dtype)) for _ in range(2))
    x.requires_grad_()
    found: dict[str, Row] = {}
    results: dict[str, tuple[Any, ...]] = {}
    layers = layers_of(shape[1], device, size)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for number in range((2 if dry else ROUNDS) + 1):
        for name, layer in layers.items():
            row = found.setdefault(name, {})
            if "error" in row:
                continue
            dist.barrier()
            wait()
            try:
                start = time.perf_counter()
                for _ in range(2 if dry else CALLS):
                    y = layer(x)
                    results[name] = (
                        y.detach(),
                        *torch.autograd.grad(y, [x, *layer.parameters()], dy),
                    )
                wait()
            except (RuntimeError, ValueError) as error:  # each rank gets the same one
                row["error"] = sentence_of(error)
                continue
            if number > 0:  # the first warmed up
                spent = (time.perf_counter() - start) / (2 if dry else CALLS)
                row.setdefault("wall_samples", []).append(spent)
    for row in found.values():
        if "error" not in row:
            row["wall"] = statistics.median(row["wall_samples"])
    row = {"shape": shape, "dtype": dtype, "found": found}
    if len(results) == 2:
        pairs = zip(*results.values(), strict=True)
        apart = [(a.double() - b.double()).abs().max() / b.double().abs().max() for a, b in pairs]
        row["difference"] = max(apart).item()
    return row


def be_one(options: argparse.Namespace) -> None:
    def work(device: Any, result: Row) -> None:
        result["rows"] = []
        for shape in DRY_SHAPES if options.dry_run else SHAPES:
            for dtype in DTYPES:
                row = measure(shape, dtype, device, options.size, options.dry_run)
                result["rows"].append(row)
                save(options.json, result)

    be_rank(options, work)


# ------------------------------------------------------------------------------ all ranks


def attempt(backend: str, size: int, seconds: float, dry: bool) -> Row:
    """What rank 0 has measured, and why the ranks failed, if they did."""
    told, error = launch(__file__, backend, size, seconds, dry)
    row: Row = {"backend": backend, "ranks": size, "rows": told[0].get("rows", [])}
    return row if error is None else row | {"error": error}


def attempts(seconds: float, dry: bool) -> list[Row]:
    end = time.monotonic() + seconds
    if dry:
        return [attempt("gloo", 2, seconds, dry)]
    rows = [attempt("nccl", 2, seconds / 2, dry)]
    for backend, size in (("nccl", 1), ("gloo", 2)):
        if (backend == "nccl" or "error" in rows[0]) and end - time.monotonic() > 5:
            rows.append(attempt(backend, size, end - time.monotonic(), dry))
    return rows


def show(rows: list[Row]) -> None:
    """A line per case; the last one counts."""
    for row in rows:
        where = name_of(row["backend"], row["ranks"])
        for case in row["rows"]:
            times = [
                f"{name} " + (found.get("error") or f"{found['wall'] * 1e6:.0f} us")
                for name, found in case["found"].items()
            ]
            apart = f"; apart {case['difference']:.1e}" if "difference" in case else ""
            print(f"{where}: {case['shape']} {case['dtype']}: {', '.join(times)}{apart}")
        if "error" in row:
            print(f"{where}: failed: {row['error']}")
    done = [row for row in rows if "error" not in row]
    print(f"{len(done)} of {len(rows)} groups ran, {sum(len(row['rows']) for row in rows)} cases")


def main() -> int:
    options = begin(__doc__.split("\n")[0], be_one)
    rows = attempts(options.seconds, options.dry_run)
    if options.json:
        options.json.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    show(rows)
    ours = [case["found"].get("ours", {}) for row in rows for case in row["rows"]]
    return 0 if ours and all("wall" in row for row in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
