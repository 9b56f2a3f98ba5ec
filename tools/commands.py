"""Run the commands of README, CONTRIBUTING and docs word for word: `commands.py [DOCUMENT ...]`.

Commands are the lines of console blocks (those with a prompt, if there are any), and what stands in
backticks in the text and begins with the name of a program. Those of one document run in their
order, in one shell, in a copy of the tree, with a new virtual environment. A document that installs
nothing gets the README's installation. Python blocks that begin with the name of a file are put
there. What can't run is listed in NOT_RUN with the reason; anything else that fails is an error.
pip's settings come from the environment: PIP_CONSTRAINT pins versions.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

PROGRAMS = {"accelerate", "bash", "git", "mpirun", "nox", "pip", "pytest", "ruff", "source"}
PROGRAMS |= {"python", "python3", "torchrun"}

SESSION = "a session of noxfile.py, which is only looked up: it takes minutes"
PLACEHOLDER = "has a placeholder in it"
WORKS_WITH = "the session works_with runs it, with the program above it"
GPU = "needs a GPU"

NOT_RUN = {
    "python3 dev.py check": SESSION,
    "python3 dev.py quick": SESSION,
    "python3 dev.py tests -- tests/core -k moments": SESSION,
    "python3 dev.py lint types": SESSION,
    "python3 dev.py coverage": SESSION,
    "python3 dev.py kernels": SESSION,
    "python3 dev.py architectures": SESSION,
    "python3 dev.py architectures -- sm_100": SESSION,
    "python3 dev.py tests_benchmarks": SESSION,
    "python3 dev.py benchmark": SESSION,
    "python3 dev.py compare -- main~5 --rounds 15": SESSION,
    "python3 dev.py works_with": SESSION,
    "python3 dev.py commands": SESSION,
    "python3 dev.py soak": SESSION,
    "python3 dev.py docs": SESSION,
    "python3 dev.py release": SESSION,
    "git clone <this repository> syncbn && cd syncbn": PLACEHOLDER,
    "python3 dev.py tests_gpu_session": SESSION,
    "pytest": "all tests: the session tests runs them",
    "pytest -m cuda": GPU,
    "python tools/gpu_session.py results": GPU,
    "python tools/gpu_session.py /tmp/dry --dry-run": "tools/test_gpu_session.py does",
    "python benchmarks/gpu_report.py results/gpu-....json": PLACEHOLDER,
    "python tools/figures/gpu_plot.py results/gpu-....json docs/speed-h100.png": PLACEHOLDER,
    "python -m mpi4py": "the beginning of a command",
    "python train.py": WORKS_WITH,
    "torchrun --nproc-per-node 2 train.py": WORKS_WITH,
    "accelerate launch --cpu --num_processes 2": "the page says that it does not work",
}

INSTALL = 'pip install ".[torch]"'  # as in the README

# Commands that end with another status than 0.
STATUS = {
    "python -m syncbn_torch verify mymodels:make": 1,
    "torchrun --nproc-per-node 2 -m syncbn_torch verify mymodels:make": 1,
}

# Alternatives to a command that runs: pip says whether they would install.
DRY_RUN = {
    'pip install ".[torch,cuda13]"': "the session tests_cuda13 installs it",
}

# Open MPI wants to be told that it may run as root, and more ranks than the machine has cores.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(text: str) -> list[str]:
    """The commands of a document, without prompts and comments, in their order."""
    found = []
    for fence, language, block, inline in re.findall(
        r"^(```+)(\w*)\n(.*?)^```|`([^`]+)`", text, re.DOTALL | re.MULTILINE
    ):
        if fence and language == "console":
            lines = block.split("\n")
            prompted = [line for line in lines if line.startswith("$ ")]
            found += [
                re.sub(r"\s{2,}#.*", "", line).removeprefix("$ ") for line in prompted or lines
            ]
        elif inline:
            words = inline.split()
            if len(words) > 1 and words[0] in PROGRAMS:
                found.append(" ".join(words))  # it may be wrapped
    return [command for command in found if command]


def files(text: str) -> dict[str, str]:
    """The Python blocks of a document that begin with the name of a file, by this name."""
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return dict(blocks)


def stale(texts: list[str]) -> list[str]:
    """What NOT_RUN, DRY_RUN and STATUS list though no document has it."""
    shown = {command for text in texts for command in commands(text)}
    return [command for command in (*NOT_RUN, *DRY_RUN, *STATUS) if command not in shown]


def unknown_sessions() -> list[str]:
    """Commands `python3 dev.py NAME ...` whose session noxfile.py does not have."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} | {"check"}
    wrong = []
    for command, reason in NOT_RUN.items():
        if reason == SESSION:
            wanted = command.partition(" -- ")[0].split()[2:]
            wrong += [command] * (not names.issuperset(wanted))
    return wrong


def shell_script(shown: list[str]) -> str:
    lines = ["set -e"]
    for command in shown:
        run = command
        if command in NOT_RUN:
            lines.append(f"echo {shlex.quote(f'- {command}   # not run: {NOT_RUN[command]}')}")
            continue
        if command in DRY_RUN:
            run = command.replace("pip install", "pip install --dry-run --quiet", 1)
        lines += [f"echo {shlex.quote(f'+ {run}')}", "SECONDS=0"]
        if command in STATUS:
            run = f"{run} || [ $? = {STATUS[command]} ]"
        lines += [run, 'echo "  $SECONDS s"']
    return "\n".join(lines)


def run(document: Path) -> bool:
    """Run the commands of a document; whether all succeeded."""
    text = document.read_text(encoding="utf-8")
    shown = commands(text)
    if not shown:
        return True
    print(f"\n== {document.relative_to(ROOT)}", flush=True)
    if all(command in NOT_RUN for command in shown):
        return subprocess.run(["bash", "-c", shell_script(shown)], check=False).returncode == 0
    if not any(command.startswith("pip install") for command in shown):
        shown.insert(0, INSTALL)
    with tempfile.TemporaryDirectory(prefix="commands-") as folder:
        tree, environment = Path(folder, "tree"), Path(folder, "environment")
        copy_tree(tree)
        for name, code in files(text).items():
            (tree / name).write_text(code, encoding="utf-8")
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        binaries = environment / "bin"
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        done = subprocess.run(
            ["bash", "-c", shell_script(shown)],
            cwd=tree,
            stdin=subprocess.DEVNULL,
            env={
                **inherited,
                **OPEN_MPI,
                "VIRTUAL_ENV": str(environment),
                "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
                "NUMBA_CACHE_DIR": str(Path(folder, "numba")),
                "PIP_QUIET": "1",
            },
            check=False,
        )
        used = subprocess.run(["du", "-sh", folder], capture_output=True, text=True, check=False)
        print(f"  {used.stdout.split()[0]} of disk", flush=True)
    return done.returncode == 0


def copy_tree(target: Path) -> None:
    """Copy what git knows, and what is new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def main(names: list[str]) -> int:
    chosen = [ROOT / name for name in names] or documents()
    faults = [f"no document has: {c}" for c in stale([d.read_text() for d in documents()])]
    faults += [f"no such session: {command}" for command in unknown_sessions()]
    for document in chosen:
        if not run(document):
            faults.append(f"a command of {document.relative_to(ROOT)} failed, see above")
    print("", *faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
