"""The command line: `python -m syncbn_torch verify package.module:factory`, and `doctor`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from syncbn_core import __version__
from syncbn_core import doctor as of_core
from syncbn_core.errors import ArgumentError
from syncbn_verify import Conclusion, verify_sync
from syncbn_verify.ranks import Ranks

__all__ = ["main", "run"]

_STATUS: dict[Conclusion, int] = {"ok": 0, "wrong": 1, "incomplete": 3}
_DTYPES = ("float64", "float32", "bfloat16", "float16", "own")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0 if all is well, else as in `_STATUS`, 2 for errors."""
    parser, verify = _parsers()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    if options.command == "doctor":
        from syncbn_verify import doctor

        found = doctor.checks(options.pretend_gpus)
        return of_core.run(doctor.facts, found, options.json, doctor.timing)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and options.replicas is not None:
        verify.error("--replicas can't be used under torchrun, where each process takes a part")
    try:
        factory = _factory(options.factory)
    except ArgumentError as error:
        verify.error(str(error))
    try:
        return _verify(factory, options.factory, options.replicas, options.dtype, world)
    except SystemExit as stopped:  # 0 would mean that all is well
        code = f"the program called sys.exit({stopped.code!r})"
        print(f"python -m syncbn_torch verify: error: {code} before the end", file=sys.stderr)
        return 2


def run() -> int:
    """`main`, but an error of the user's own code is printed and gives 2."""
    try:
        return main()
    except Exception:  # 1 would mean that the model is wrong
        traceback.print_exc()
        return 2


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
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
    return parser, verify


def _factory(path: str) -> Callable[[], Any]:
    """The function at `package.module:function`; `ArgumentError` if there is none."""
    module_name, colon, name = path.partition(":")
    names = [*module_name.split("."), name]
    if not (colon and all(map(str.isidentifier, names))) or module_name.endswith(".py"):
        raise ArgumentError(
            f"expected package.module:factory, got {path!r}; put dots between packages, and no .py"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # a module that the user's module imports is missing: that needs a traceback
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ArgumentError(
            f"expected a module {module_name}, found none; start in the folder that holds it, or "
            "set PYTHONPATH"
        ) from None
    factory = getattr(module, name, None)
    if not callable(factory):
        kind = "nothing of that name" if factory is None else f"a {type(factory).__name__}"
        raise ArgumentError(f"expected a function {name} in {module_name}, found {kind}")
    return factory  # type: ignore[no-any-return]


def _verify(
    factory: Callable[[], Any], path: str, replicas: int | None, dtype: str, world: int
) -> int:
    begun = world > 1 and not dist.is_initialized()
    if begun:
        _join_world()
    try:
        made = factory() if world == 1 else Ranks(None).together(factory, f"{path} to return")
        if not (isinstance(made, tuple) and len(made) == 2):
            raise ArgumentError(
                f"expected {path} to return (model, batch), got {type(made).__name__}"
            )
        chosen = None if dtype == "own" else getattr(torch, dtype)
        report = verify_sync(*made, replicas, dtype=chosen)
    except ArgumentError as error:
        print(f"python -m syncbn_torch verify: error: {error}", file=sys.stderr)
        return 2
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(report, flush=True)
    if begun:
        dist.destroy_process_group()
    return _STATUS[report.conclusion]


def _join_world() -> None:
    """Join the processes that torchrun has started."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() > local and dist.is_nccl_available():
        torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
