"""The commands of `python -m syncbn_core`; docs/diagnostics.md describes them.

    python -m syncbn_core warmup                     compile the CPU kernels for float32
    python -m syncbn_core warmup float32 bfloat16    for these dtypes
    python -m syncbn_core warmup all                 for all dtypes
    python -m syncbn_core docs                       print the folder of the documentation
    python -m syncbn_core doctor                     say what this machine has, and check results

The import of this module is cheap: it imports no kernels.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import syncbn_core
from syncbn_core import doctor

DTYPES = ("float32", "float16", "bfloat16", "float64")


class _Printed(logging.Handler):
    """Prints a line for each kernel that was compiled."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.DEBUG:
            self.count += 1
            print(f"  {record.getMessage()}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m syncbn_core")
    parser.add_argument("--version", action="version", version=f"syncbn {syncbn_core.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    warmup = commands.add_parser(
        "warmup",
        help="compile the CPU kernels now, so that the first call of a layer need not",
        description="Compile the CPU kernels and keep them in the cache. Kernels that are there "
        "already are loaded. Status: 0 if all are in the cache, 1 if it can't be written.",
    )
    warmup.add_argument(
        "dtype",
        nargs="*",
        default=["float32"],
        help=f"{', '.join(DTYPES)} or all; default is float32",
    )
    doctor.add_command(commands).add_argument(
        "--mpi",
        action="store_true",
        help="check the ranks of MPI instead: mpirun -n 4 python -m syncbn_core doctor --mpi",
    )
    commands.add_parser("docs", help="print the folder of the documentation")
    given = parser.parse_args(arguments)
    if given.command == "doctor":
        return doctor.run_for_arrays(given.json, given.mpi)
    if given.command == "docs":
        print(documentation())
        return 0
    unknown = set(given.dtype) - {*DTYPES, "all"}
    if unknown:
        warmup.error(f"expected {', '.join(DTYPES)} or all, got {', '.join(sorted(unknown))}")
    return _warm_up([dtype for dtype in DTYPES if {dtype, "all"} & set(given.dtype)])


def documentation() -> Path:
    """The folder that has troubleshooting.md: of the wheel, else of the checkout."""
    package = Path(__file__).parent
    installed = package / "docs"
    return installed if installed.exists() else package.parent / "docs"


def _warm_up(dtypes: Sequence[str]) -> int:
    # with one core, too, compile the parallel builds: the cache may be for other machines
    os.environ.setdefault("NUMBA_NUM_THREADS", "2")
    import numba

    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        print("expected kernels that may be compiled: unset NUMBA_DISABLE_JIT", file=sys.stderr)
        return 1
    from syncbn_core.backends.cpu.warmup import cache_folder, warm_up

    printed = _Printed()
    logger = logging.getLogger("syncbn")
    logger.addHandler(printed)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    print(f"CPU kernels for {', '.join(dtypes)}, kept in {cache_folder()}", flush=True)
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # that the cache can't be used
        try:
            for dtype in dtypes:
                warm_up(dtype)
        except RuntimeWarning as warning:
            print(warning, file=sys.stderr)
            return 1
    seconds = time.perf_counter() - begin
    if printed.count:
        print(f"{printed.count} kernels compiled in {seconds:.0f} s")
    else:
        print(f"all were there; loaded in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
