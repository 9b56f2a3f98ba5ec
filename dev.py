#!/usr/bin/env python3
"""Set up everything on a fresh machine, and run it: `python3 dev.py NAME`.

    demo     trains a network in four replicas, and draws it beside one device: {demo}
    quick    every promise once: {quick}
    check    what must pass: tests, examples, lint, types, site, wheel: {check}
    docs     the site of the documentation: {docs}

    python3 dev.py                     lists all that can be run
    python3 dev.py tests -- -k name    runs one, with arguments for pytest
    python3 dev.py nox --help          options of nox, which runs them

Times are of two cores. Needs Python 3.11 or newer and a package index, nothing else. nox goes into
`.venv-dev/`, the environments of the sessions into `.nox/`; both are kept for the next time.
"""

import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv-dev")
BIN = os.path.join(VENV, "Scripts" if os.name == "nt" else "bin")
OLDEST = (3, 11)
TAKES = {  # the installation included
    "demo": "two minutes the first time",
    "quick": "ten minutes the first time, then five",
    "check": "20 minutes the first time, then ten",
    "docs": "two minutes the first time",
}


def show_all_pythons_of_pyenv():
    """Let `python3.12` and its like be found: pyenv hides all versions but the chosen ones."""
    pyenv = shutil.which("pyenv")
    if pyenv is None:
        return
    listed = subprocess.check_output([pyenv, "versions", "--bare"]).decode()
    versions = [tuple(map(int, v.split("."))) for v in re.findall(r"(?m)^\d+\.\d+\.\d+$", listed)]
    # the running one first, so that `python3` stays what it is
    versions = sorted((v != sys.version_info[:3], v) for v in versions if v >= OLDEST)
    if versions:
        os.environ["PYENV_VERSION"] = ":".join(".".join(map(str, v)) for _, v in versions)


def find_newer_python():
    for minor in range(OLDEST[1], OLDEST[1] + 10):
        python = shutil.which("python3.%d" % minor)
        if python and subprocess.call([python, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            return python
    sys.exit("dev.py: needs Python 3.11 or newer, found only %s." % sys.version.split()[0])


def install_nox():
    """Make `.venv-dev/` with the pinned nox, unless it is there."""
    with open(os.path.join(ROOT, "constraints.txt"), encoding="utf-8") as file:
        pin = re.search(r"(?m)^nox==\S+", file.read()).group()
    done = os.path.join(VENV, pin + ".installed")
    if os.path.exists(done):
        return
    print("dev.py: installing %s into %s" % (pin, VENV), flush=True)
    if subprocess.call([sys.executable, "-m", "venv", "--clear", VENV]) != 0:
        sys.exit("dev.py: no virtual environment (Debian, Ubuntu: install python3-venv).")
    pip = [os.path.join(BIN, "python"), "-m", "pip", "install", "-c", "constraints.txt"]
    if subprocess.call([*pip, pin], cwd=ROOT) != 0:
        sys.exit("dev.py: pip could not install %s; is a package index within reach?" % pin)
    open(done, "w").close()


def main(args):
    if args[:1] in (["-h"], ["--help"]):
        print(__doc__.format(**TAKES))
        return 0
    show_all_pythons_of_pyenv()
    if sys.version_info < OLDEST:
        return subprocess.call([find_newer_python(), os.path.abspath(__file__), *args])
    if args and args[0] in TAKES:
        print("dev.py: on two cores, %s takes %s" % (args[0], TAKES[args[0]]), flush=True)
    install_nox()
    if not args:
        args = ["--list"]
    elif args[0] in ("check", "nox"):  # the default sessions of noxfile.py
        args = args[1:]
    elif not args[0].startswith("-"):
        args = ["-s", *args]
    return subprocess.call([os.path.join(BIN, "nox"), *args], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
