"""The commands of `python -m syncbn_core`; docs/diagnostics.md describes them.

    python -m syncbn_core docs      print the folder of the documentation
    python -m syncbn_core doctor    say what this machine has, and check results

The import of this module is cheap: it imports no kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import syncbn_core
from syncbn_core import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m syncbn_core")
    parser.add_argument("--version", action="version", version=f"syncbn {syncbn_core.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor.add_command(commands).add_argument(
        "--mpi",
        action="store_true",
        help="check the ranks of MPI instead: mpirun -n 4 python -m syncbn_core doctor --mpi",
    )
    commands.add_parser("docs", help="print the folder of the documentation")
    given = parser.parse_args(arguments)
    if given.command == "doctor":
        return doctor.run_for_arrays(given.json, given.mpi)
    print(documentation())
    return 0


def documentation() -> Path:
    """The folder that has troubleshooting.md: of the wheel, else of the checkout."""
    package = Path(__file__).parent
    installed = package / "docs"
    return installed if installed.exists() else package.parent / "docs"


if __name__ == "__main__":
    sys.exit(main())
