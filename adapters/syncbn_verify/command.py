"""The command line: `python -m syncbn_torch verify package.module:factory`, `pays`, `doctor`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncbn_core import __version__
from syncbn_core import doctor as of_core
from syncbn_core.errors import ArgumentError
from syncbn_verify import Conclusion, verify_sync
from syncbn_verify.pays import pays
from syncbn_verify.ranks import Alone, Ranks

_STATUS: dict[Conclusion, int] = {"ok": 0, "wrong": 1, "failed": 2, "incomplete": 3}
_DTYPES = ("float64", "float32", "bfloat16", "float16", "own")


def run() -> int:
    """`main`, but errors of the user's own code give 2: 0 would mean right, and 1 wrong."""
    try:
        return main()
    except ArgumentError as error:
        print(f"python -m syncbn_torch: error: {error}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0 if all is well, else as in `_STATUS`."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    if options.command == "doctor":
        from syncbn_verify import doctor

        found = doctor.checks(options.pretend_gpus)
        return of_core.run(doctor.facts, found, options.json, doctor.timing)
    try:
        return _pays(options) if options.command == "pays" else _verify(options)
    except SystemExit as stopped:
        raise ArgumentError(
            f"expected {options.factory} to return, but it called sys.exit({stopped.code!r})"
        ) from stopped


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m syncbn_torch", description="Tools for synchronized batch normalization."
    )
    parser.add_argument("--version", action="version", version=f"syncbn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    of_core.add_command(commands).add_argument(
        "--pretend-gpus",
        type=int,
        default=0,
        metavar="N",
        help="try the checks of N GPUs with processes on the CPU",
    )
    pays = commands.add_parser(
        "pays",
        help="look whether synchronization matters for a model and its data",
        description="Look, without training, whether the parts of your batches differ so much that "
        "their own statistics are no substitute for those of the whole batch. Under torchrun the "
        "batches of each process are a part.",
        epilog="Exit status: 0 if the parts are alike, 1 if not, 2 if that could not be judged.",
    )
    pays.add_argument(
        "factory",
        metavar="package.module:factory",
        help="a function without arguments that returns (model, loader); without torchrun, a batch "
        "of the loader is that of all ranks or replicas together, in their order. Or (model, "
        "batch), as for verify",
    )
    pays.add_argument("--parts", type=int, metavar="N", help="ranks or replicas (default: 4)")
    pays.add_argument("--batches", type=int, default=20, metavar="N", help="at most (default: 20)")
    pays.add_argument(
        "--forward",
        metavar="package.module:function",
        help="called as function(model, batch), for batches that are dictionaries, for example",
    )
    pays.add_argument(
        "--samples",
        metavar="package.module:function",
        help="called as function(batch), counts its samples, such as the images in a list",
    )
    pays.add_argument("--picture", type=Path, metavar="FILE", help="draw it, such as pays.png")
    pays.add_argument("--json", action="store_true", help="print the figures as JSON")
    verify = commands.add_parser(
        "verify",
        help="check that a model trains over parts of a batch as over the whole batch",
        description="Check that a training step of your model over parts of a batch is that of the "
        "undivided batch, and name the layers for which it is not. Under torchrun the processes "
        "take the parts, else replicas in threads.",
        epilog="Exit status: 0 if it is, 1 if it is not, 2 if that could not be checked, 3 if "
        "nothing is wrong in what was compared, but not all could be compared.",
    )
    verify.add_argument(
        "factory",
        metavar="package.module:factory",
        help="a function without arguments that returns (model, batch); the batch is a tensor, a "
        "tuple of arguments or a dictionary of keyword arguments",
    )
    verify.add_argument("--replicas", type=int, metavar="N", help="number of replicas (default: 2)")
    verify.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="float64",
        help='dtype in which to check; "own" is that of the model (default: float64)',
    )
    return parser


@contextmanager
def _made(path: str, second: str) -> Iterator[tuple[Any, Any, Alone]]:
    """What the factory at `path` returns, and torchrun's ranks, whose process group begins here."""
    factory = _function(path)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    begun = world > 1 and not dist.is_initialized()
    if begun:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        has_device = torch.cuda.device_count() > local and dist.is_nccl_available()
        if has_device:
            torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_device else "gloo")
    group = Ranks(None) if world > 1 else Alone(1)
    made = group.together(factory, f"{path} to return")
    if not (isinstance(made, tuple) and len(made) == 2):
        got = type(made).__name__
        raise ArgumentError(f"expected {path} to return (model, {second}), got {got}")
    if group.rank == 0:  # the steps, as they begin
        logging.basicConfig(format="%(message)s")
        logging.getLogger("syncbn").setLevel(logging.INFO)
    yield *made, group
    if begun:
        dist.destroy_process_group()


def _verify(options: argparse.Namespace) -> int:
    dtype = None if options.dtype == "own" else getattr(torch, options.dtype)
    with _made(options.factory, "batch") as (model, batch, group):
        ranks = dist.group.WORLD if isinstance(group, Ranks) else None  # refused beside --replicas
        report = verify_sync(model, batch, options.replicas, process_group=ranks, dtype=dtype)
        if group.rank == 0:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
            print(report.text(width), flush=True)
    return _STATUS[report.conclusion]


def _pays(options: argparse.Namespace) -> int:
    if options.picture and importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("expected matplotlib for --picture, got none; pip install matplotlib")
    more: dict[str, Any] = {"batches": options.batches}
    for name in ("forward", "samples"):
        if path := getattr(options, name):
            more[name] = _function(path)
    with _made(options.factory, "loader") as (model, loader, group):
        ranks = dist.group.WORLD if isinstance(group, Ranks) else None  # refused beside --parts
        report = pays(model, loader, options.parts, process_group=ranks, **more)
        if group.rank == 0:
            found = asdict(report) | {"conclusion": report.conclusion, "pays": report.pays}
            print(json.dumps(found, indent=1) if options.json else report, flush=True)
        if group.rank == 0 and options.picture and report.layers:
            from syncbn_verify.picture import draw

            kind, samples = report.conclusion, report.samples
            draw([(x.name, samples, x.samples, kind) for x in report.layers], options.picture)
    return {"alike": 0, "not judged": 2}.get(report.conclusion, 1)


def _function(path: str) -> Callable[[], Any]:
    """The function at `package.module:function`; `ArgumentError` if there is none."""
    module, _, name = path.partition(":")
    found, remedy = None, "start in the folder that holds the package, or set PYTHONPATH"
    if re.fullmatch(r"\w+(\.\w+)*:\w+", path):
        try:
            holder = importlib.import_module(module)
            found = getattr(holder, name, None)
            remedy = f"there is no such function in {module} ({holder.__file__})"
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):  # of an import in the user's module
                raise
    if not callable(found):
        raise ArgumentError(
            f"expected package.module:factory, a function that can be imported here, got {path!r}; "
            f"{remedy}"
        )
    return found  # type: ignore[no-any-return]
