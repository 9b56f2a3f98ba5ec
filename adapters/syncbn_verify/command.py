"""The command line: `python -m syncbn_torch verify package.module:factory`, `pays`, `doctor`."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
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
        if options.command == "pays":
            return _pays(options.factory, options.parts, options.batches, options.json)
        return _verify(options.factory, options.replicas, options.dtype)
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
        "their own statistics are no substitute for those of the whole batch.",
    )
    pays.add_argument(
        "factory",
        metavar="package.module:factory",
        help="a function without arguments that returns (model, loader); a batch of the loader is "
        "that of all ranks or replicas together, in their order",
    )
    pays.add_argument("--parts", type=int, default=4, metavar="N", help="ranks (default: 4)")
    pays.add_argument("--batches", type=int, default=20, metavar="N", help="at most (default: 20)")
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


def _verify(path: str, replicas: int | None, dtype: str) -> int:
    factory = _factory(path)
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
        raise ArgumentError(f"expected {path} to return (model, batch), got {type(made).__name__}")
    if not dist.is_initialized() or dist.get_rank() == 0:  # the steps, as they begin
        logging.basicConfig(format="%(message)s")
        logging.getLogger("syncbn").setLevel(logging.INFO)
    chosen = None if dtype == "own" else getattr(torch, dtype)
    process_group = dist.group.WORLD if world > 1 else None  # refused beside --replicas
    report = verify_sync(*made, replicas, process_group=process_group, dtype=chosen)
    if not dist.is_initialized() or dist.get_rank() == 0:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        print(report.text(width), flush=True)
    if begun:
        dist.destroy_process_group()
    return _STATUS[report.conclusion]


def _pays(path: str, parts: int, batches: int, as_json: bool) -> int:
    made = _factory(path)()
    if not (isinstance(made, tuple) and len(made) == 2):
        raise ArgumentError(f"expected {path} to return (model, loader), got {type(made).__name__}")

    def progress(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\rbatch {done} of {batches}", end="", file=sys.stderr, flush=True)

    report = pays(*made, parts, batches=batches, progress=progress)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    found = asdict(report) | {"conclusion": report.conclusion, "pays": report.pays}
    print(json.dumps(found, indent=1) if as_json else report, flush=True)
    return 0


def _factory(path: str) -> Callable[[], Any]:
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
