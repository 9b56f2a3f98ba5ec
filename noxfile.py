"""What can be run: `python3 dev.py` lists the sessions, `python3 dev.py check` runs the usual ones.

In the end nox says how long each session took.

Versions and groups come from pyproject.toml, tested pins from constraints.txt.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
# A missing Python 3.12 or 3.13 is skipped and listed as skipped, also where CI is set.
nox.options.error_on_missing_interpreters = False
nox.options.download_python = "never"

# Many tests start Python: where no bytecode is kept, each compiles all of torch that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parent
COMPILED = ROOT / ".nox" / "compiled"  # kernels of CPUs
# Tests that run again as if their ranks were a group of more than `exchange.MANY`.
LARGE_GROUPS = ("process_numbers", "process_order", "process_faults", "compiled", "masks")
PROJECT = nox.project.load_toml("pyproject.toml")
# Python compiles what is imported: compiling every installed file takes longer than installing it.
PIP_OPTIONS = ("--no-compile", "-c", "constraints.txt")
NEWEST = ("--no-compile",)  # without pins: torchvision decides which torch
OLDEST_PYTHON, *NEWER_PYTHONS = nox.project.python_versions(PROJECT)
# `tests` comes last: its closing line is what one wants to see at the end.
nox.options.sessions = [
    "lint",
    "types",
    "docs",
    "wheel",
    "examples",
    "tests_oldest",
    f"tests_core-{NEWER_PYTHONS[-1]}",
    "tests_jax",
    "kernels",
    "tests_cuda13",
    "tests",
]
# Sessions with torch run on the oldest Python, where it is there, else on the one that runs nox.
TORCH_PYTHON = OLDEST_PYTHON if shutil.which(f"python{OLDEST_PYTHON}") else None

# Between the oldest and the newest; docs/platforms.md says what ran when.
TORCHES = ("2.10.0", "2.11.0", "2.12.1", "2.14.1")

# Of the core, what can be tested of CUDA without a device.
WITHOUT_DEVICE = [f"tests/core/test_{name}.py" for name in ("driver", "no_device")]
WITHOUT_DEVICE += ["tools/fake_cupy/test_fake_cupy.py"]

# Of kernels alone, and when they last passed.
KERNELS = [f"tests/cuda/test_{name}.py" for name in ("kernels", "ptx")]
KERNELS += ["ptx_emulator", "tools/gpu_emulator"]
KERNELS_PASSED = ROOT / "tests" / "cuda" / "kernels_passed.txt"

BENCHMARKS = "tools/test_scripts.py"  # which measure for so many seconds
DRY_RUN = "tools/test_gpu_session.py"  # of the session on a GPU

# For tests that compute in one thread and wait for nobody.
SIDE_BY_SIDE = ("--numprocesses", "2")

CHECK_README = """
import re
from pathlib import Path
from hatch_build import with_address

text = with_address(Path("README.md").read_text(encoding="utf-8"), "https://example.org/blob/main/")
links = re.findall(r"(!?)\\[[^]]*\\]\\(([^)]+)\\)", text)
assert all(target.startswith(("https://", "#")) for _, target in links), links
pictures = [target for mark, target in links if mark]
assert pictures and all("/raw/main/" in target for target in pictures), pictures
for _, target in links:
    path = target.partition("#")[0].removeprefix("https://example.org/")
    assert "example.org" not in target or Path(path.split("/", 2)[2]).exists(), target
"""

CHECK_WHEEL = """
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import syncbn_core
assert "torch" not in sys.modules, "import syncbn_core has imported torch"
from syncbn_core.__main__ import documentation

for package in ("core", "torch", "verify", "jax", "paddle"):
    try:
        import_module(f"syncbn_{package}")
    except ModuleNotFoundError as error:
        assert error.name == package, error  # the framework alone is not installed here
    place = Path(find_spec(f"syncbn_{package}").origin).parent
    assert place.is_relative_to(sys.prefix), f"{place} is not the installed package"
    assert place.joinpath("py.typed").is_file(), f"no py.typed in {place}"
for page in ("troubleshooting.md", "gpu.md"):
    assert (documentation() / page).is_file(), f"no {page} in the wheel"
assert not list(documentation().glob("*.png")), "pictures in the wheel"
assert any(file.name == "LICENSE" for file in metadata.files("syncbn")), "no licence in the wheel"
version = metadata.version("syncbn")
assert getattr(syncbn_core, "__version__", version) == version, "pyproject.toml disagrees"
print("syncbn", version, "imports from the wheel")
"""

# What torchrun sets.
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def install(session: nox.Session, *wanted: str, options: tuple[str, ...] = PIP_OPTIONS) -> None:
    """Install `wanted`; on a CI machine first delete the environments of other sessions.

    Each takes 1 to 2 GB of disk, which such a machine may not have for all of them.
    """
    if os.environ.get("CI"):
        own = Path(session.virtualenv.location).resolve()
        for environment in own.parent.iterdir():
            if environment.is_dir() and environment not in (own, COMPILED):
                shutil.rmtree(environment, ignore_errors=True)
    session.install(*options, *wanted, silent=False)  # pip says what it downloads


def groups(*names: str) -> list[str]:
    return nox.project.dependency_groups(PROJECT, *names)


def fresh_directory(session: nox.Session, name: str) -> Path:
    path = Path(session.virtualenv.location).resolve() / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def kept_numba_cache(session: nox.Session, versions: str = "pinned") -> None:
    """Keep what is compiled, for all sessions with these `versions` of Numba and NumPy.

    Until any kernel's or helper's source changes: Numba's cache looks at a kernel's own file, not
    at the helpers it calls.
    """
    sources = sorted((ROOT / "syncbn_core" / "_kernels").rglob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    path = COMPILED / versions / digest[:16]
    if not path.exists():
        shutil.rmtree(path.parent, ignore_errors=True)
        path.mkdir(parents=True)
    session.env["NUMBA_CACHE_DIR"] = str(path)


def compile_kernels(session: nox.Session, *options: str) -> None:
    """Compile what the tests use, once for what `kept_numba_cache` keeps."""
    done = Path(session.env["NUMBA_CACHE_DIR"] or "", "compiled" + "".join(options))
    if not done.exists():
        session.run("python", "tools/compile_kernels.py", *options)
        done.touch()


@nox.session(python=TORCH_PYTHON)
def quick(session: nox.Session) -> None:
    """The tests in short, with torch: one dtype, one world, nothing slow."""
    install(session, "-e", ".[torch]", *groups("test"))
    kept_numba_cache(session)
    if not session.posargs:
        compile_kernels(session)
    usual = ["tests", "tools", "--ignore", BENCHMARKS, "--ignore", DRY_RUN]
    for folder in ("device", "cuda", "works_with"):
        usual += ["--ignore", f"tests/{folder}"]
    session.run("pytest", "--quick", *(session.posargs or [*SIDE_BY_SIDE, *usual]))


@nox.session(python=TORCH_PYTHON)
def tests(session: nox.Session) -> None:
    """All tests, with torch, and with ranks of MPI; of the benchmarks what docs are made of."""
    install(session, "-e", ".[torch,mpi]", *groups("test", "bench", "mpi"))
    kept_numba_cache(session)
    if session.posargs:
        session.run("pytest", *session.posargs)
    else:
        compile_kernels(session, "--all")
        session.run("pytest", *SIDE_BY_SIDE, "tests/core")
        apart = ("tests/core", "tests/works_with", BENCHMARKS, DRY_RUN)
        others = [word for path in apart for word in ("--ignore", path)]
        session.run("pytest", *SIDE_BY_SIDE, "tests", "tools", *others)
        large = (f"tests/torch/test_{name}.py" for name in LARGE_GROUPS)
        session.run("pytest", *SIDE_BY_SIDE, "--quick", *large, env={"SYNCBN_TEST_MANY": "1"})


@nox.session(python=TORCH_PYTHON)
def tests_gpu_session(session: nox.Session) -> None:
    """The session on a GPU run dry, and its tests on the CPU; not in the usual check."""
    install(session, "-e", ".[torch]", *groups("test", "bench"))
    kept_numba_cache(session)
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    session.run("pytest", DRY_RUN)
    session.run("pytest", *SIDE_BY_SIDE, "tests/device", env={"SYNCBN_TEST_DEVICE": "cpu"})


@nox.session(python=TORCH_PYTHON)
def tests_benchmarks(session: nox.Session) -> None:
    """Every script of `benchmarks` and `tools` runs to its end; not in the usual check: minutes."""
    install(session, "-e", ".[torch]", *groups("test", "bench", "nets"), options=NEWEST)
    kept_numba_cache(session, "newest")
    session.run("pytest", *(session.posargs or [BENCHMARKS]))


@nox.session(python=TORCH_PYTHON)
def works_with(session: nox.Session) -> None:
    """The newest torch: its private names, how its tensors are read, graphs, other libraries.

    Writes docs/works-with.md.
    """
    install(session, "-e", ".[torch]", *groups("test", "works_with"), options=NEWEST)
    kept_numba_cache(session, "newest")
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    rows = fresh_directory(session, "works-with") / "rows.jsonl"
    names = ("alone", "torch_private", "process_autograd", "compiled")
    session.run("pytest", *(f"tests/torch/test_{name}.py" for name in names))
    session.run("pytest", "tests/works_with", env={"SYNCBN_WORKS_WITH": str(rows)})
    session.run("python", "tests/works_with/page.py", str(rows), "docs/works-with.md")


@nox.session(python=TORCH_PYTHON)
def commands(session: nox.Session) -> None:
    """The commands of README and docs, word for word, with pinned torch and the newest."""
    script = ["python", "tools/commands.py"]
    if session.posargs:
        session.run(*script, *session.posargs)
        return
    session.run(*script, env={"PIP_CONSTRAINT": str(ROOT / "constraints.txt")})
    session.run(*script, "README.md")


@nox.session(python=TORCH_PYTHON)
def soak(session: nox.Session) -> None:
    """10,000 random faults: interrupts, replicas, processes; docs/troubleshooting.md."""
    install(session, "-e", ".[torch]", *groups("test", "notebook"))
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    session.run("python", "tests/core/interrupted.py", "3000")
    session.run("python", "tests/torch/interrupted.py", "2000")
    session.run("pytest", "tests/torch/test_jupyter.py")
    runs = {"SYNCBN_REPLICA_FAULT_RUNS": "4500", "SYNCBN_FAULT_RUNS": "500"}
    for first in range(0, 300, 50):
        programs = {"SYNCBN_PROGRAMS": f"{first} {first + 50}"}
        session.run("pytest", "tests/torch/test_process_programs.py", env=programs)
    options = ["-s", "-o", "faulthandler_timeout=0"]
    for test in ("replica", "process"):
        session.run("pytest", *options, f"tests/torch/test_{test}_faults.py", env=runs)


@nox.session(python=NEWER_PYTHONS)
def tests_core(session: nox.Session) -> None:
    """The tests of the core, without torch, on the newer Pythons."""
    install(session, "-e", ".", *groups("test"))
    kept_numba_cache(session)
    # what the kernels compute does not depend on Python: of them, the tests of the layer
    names = ("comm", "comm_failures", "dlpack", "functional_errors", "imports")
    names += ("layers", "exchange", "layout", "moments")
    usual = [*SIDE_BY_SIDE, *(f"tests/core/test_{name}.py" for name in names)]
    session.run("pytest", *(session.posargs or usual))


@nox.session(python=TORCH_PYTHON)
def tests_jax(session: nox.Session) -> None:
    """The adapter for JAX and Flax; arrays of JAX in the core."""
    install(session, "-e", ".[jax]", *groups("test", "jax"))
    kept_numba_cache(session)
    session.run("pytest", *(session.posargs or ["tests/jax", "tests/core/test_dlpack_jax.py"]))


@nox.session(python=TORCH_PYTHON)
def tests_paddle(session: nox.Session) -> None:
    """The adapter for PaddlePaddle, whose wheel is large; not in the usual check."""
    install(session, "-e", ".[paddle]", *groups("test"), options=NEWEST)
    kept_numba_cache(session, "newest")
    session.run("pytest", *(session.posargs or ["tests/paddle"]))


def install_cuda(session: nox.Session, cuda: str, *extras: str) -> None:
    tools = ["ptx"] if cuda == "13" else []
    wanted = ",".join([f"cuda{cuda}", *extras])
    install(session, "-e", f".[{wanted}]", *groups("test", *tools))
    kept_numba_cache(session)


@nox.session(python=TORCH_PYTHON, tags=["cuda"])
def tests_cuda13(session: nox.Session) -> None:
    """What runs CUDA kernels, without a device: torch's tensors, CuPy's arrays; clear errors."""
    install_cuda(session, "13", "torch", "examples")
    others = [word for path in KERNELS for word in ("--ignore", path)]
    usual = [*WITHOUT_DEVICE, "tests/cuda", *others]
    session.run("pytest", *(session.posargs or [*SIDE_BY_SIDE, *usual]))


@nox.session(python=TORCH_PYTHON, tags=["cuda"])
def kernels(session: nox.Session) -> None:
    """The CUDA kernels: compiled, executed on the CPU. Only if they have changed since."""
    digest = digest_of_kernels()
    if not session.posargs and KERNELS_PASSED.read_text(encoding="utf-8").strip() == digest:
        session.log("kernels, emulator and tests are those that have passed: nothing to do")
        return
    install_cuda(session, "13")
    # `architectures` sends all kernels through ptxas, here those that most layers use
    usual = ["-k", "not sm_80 and not (test_ptx and (float64 or bfloat16))", *KERNELS]
    session.run("pytest", *(session.posargs or [*SIDE_BY_SIDE, *usual]))
    if not session.posargs:
        KERNELS_PASSED.write_text(digest + "\n", encoding="utf-8")


def digest_of_kernels() -> str:
    """Of all that says what the session `kernels` finds, and what these files import."""
    core = ROOT / "syncbn_core"
    sources = [ROOT / "constraints.txt", ROOT / "tests" / "cuda" / "conftest.py"]
    sources += [
        core / f"{name}.py" for name in ("arrays", "disk_cache", "labels", "layout", "moments")
    ]
    folders = [core / "_kernels" / "cuda", core / "backends" / "cuda"]
    for path in [*folders, *map(ROOT.joinpath, KERNELS)]:
        sources += [path] if path.is_file() else path.glob("*.py")
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()


@nox.session(python=TORCH_PYTHON, tags=["cuda"])
@nox.parametrize("cuda", ["12", "13"], ids=["12", "13"])
def architectures(session: nox.Session, cuda: str) -> None:
    """The compiled CUDA kernels of each architecture, or of those named, and all mutants."""
    install_cuda(session, cuda, "torch", "examples")
    names = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_121"]
    names = ["sm_70", *names] if cuda == "12" else names
    files = ("kernels", "torch_on_cuda")
    tests = [*(f"tests/cuda/test_{name}.py" for name in files), "tests/cuda/cupy_backend"]
    session.run("pytest", *SIDE_BY_SIDE, *WITHOUT_DEVICE)
    for arch in session.posargs or names:
        session.run("pytest", *SIDE_BY_SIDE, "--arch", arch, *tests)
        session.run("python", "tools/gpu_emulator/mutants.py", "--arch", arch)
    if cuda == "13":
        session.run("pytest", *SIDE_BY_SIDE, "tests/cuda/test_ptx.py")


@nox.session(python=OLDEST_PYTHON)
def tests_oldest(session: nox.Session) -> None:
    """The tests of the core, and of torch beside it, with the oldest supported NumPy and Numba."""
    oldest = [bound.replace(">=", "==") for bound in PROJECT["project"]["dependencies"]]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [
        pin
        for pin in pins
        if not pin.startswith(("numpy==", "numba==", "llvmlite==", "ml_dtypes=="))
    ]
    others = fresh_directory(session, "constraints") / "others.txt"
    others.write_text("\n".join(pins), encoding="utf-8")
    options = ("--no-compile", "-c", str(others))
    install(session, *oldest, "-e", ".[torch]", *groups("test"), options=options)
    kept_numba_cache(session, "oldest")
    # what depends on them: the kernels, and how arrays and tensors are read
    names = ("dlpack", "functional", "half_precision", "kernels", "layers", "layout", "linking")
    names += ("moments",)
    core = [f"tests/core/test_{name}.py" for name in names]
    torch = [f"tests/torch/test_{name}.py" for name in ("arrays", "core_with_tensors", "cpu")]
    session.run("pytest", *(session.posargs or [*SIDE_BY_SIDE, *core, *torch]))


@nox.session(python=TORCH_PYTHON)
@nox.parametrize("torch", TORCHES)
def tests_torch(session: nox.Session, torch: str) -> None:
    """What depends on torch, by a version between the oldest and the newest; some GB each."""
    install(session, f"torch=={torch}", "-e", ".[torch]", *groups("test"), options=NEWEST)
    kept_numba_cache(session)
    names = ["activations", "alone", "autograd", "batchnorm", "compiled", "masks", "replicate"]
    names += [f"process_{name}" for name in ("autograd", "faults", "numbers", "order", "wrappers")]
    files = [f"tests/torch/test_{name}.py" for name in (*names, "replica_faults", "torch_private")]
    session.run("pytest", *(session.posargs or [*SIDE_BY_SIDE, "--timeout", "300", *files]))


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, and who may import whom."""
    install(session, *groups("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join([".", "adapters"])})


@nox.session(python=TORCH_PYTHON)
def types(session: nox.Session) -> None:
    """Mypy, strict, over both packages."""
    install(session, "-e", ".[torch]", *groups("types"))
    session.run("mypy", *session.posargs)


@nox.session(python=TORCH_PYTHON)
def coverage(session: nox.Session) -> None:
    """All tests under coverage; the kernels are left out, because Numba compiles them."""
    install(session, "-e", ".[torch]", *groups("test", "coverage"))
    kept_numba_cache(session)
    session.run("coverage", "erase")
    session.run("coverage", "run", "-m", "pytest", *session.posargs)
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report")


@nox.session(python=TORCH_PYTHON)
def docs(session: nox.Session) -> None:
    """Build the pages of `docs` as a site, with the API reference; a warning is an error."""
    install(session, "-e", ".[torch]", *groups("docs"))
    site = str(ROOT / "site")
    options = ["-q", "-W", "--keep-going", "-c", "tools/docs"]
    session.run("sphinx-build", *options, "docs", site, *session.posargs)
    session.run("python", "tools/docs/check_reference.py", site)
    session.log("open %s/index.html", site)


@nox.session(python=TORCH_PYTHON)
def wheel(session: nox.Session) -> None:
    """Build sdist and wheel; in a fresh environment with the wheel run the README's programs."""
    install(session, *groups("build"))
    dist = fresh_directory(session, "dist")
    session.run("python", "-m", "build", "--no-isolation", "--outdir", str(dist))
    session.run("twine", "check", "--strict", *map(str, dist.iterdir()))
    session.run("python", "-c", CHECK_README)
    (built,) = dist.glob("*.whl")

    in_fresh_environment(session, f"{built}[torch]", CHECK_WHEEL, *programs_of_readme())


@nox.session(python=[OLDEST_PYTHON, *NEWER_PYTHONS])
def release(session: nox.Session) -> None:
    """Wheel and sdist in empty environments, without torch, on every Python that is there."""
    install(session, *groups("build"))
    dist = fresh_directory(session, "dist")
    session.run("python", "-m", "build", "--no-isolation", "--outdir", str(dist))
    programs = [program for program in programs_of_readme() if "torch" not in program]
    for built in sorted(dist.iterdir()):
        in_fresh_environment(session, str(built), *programs)


def programs_of_readme() -> list[str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", readme, re.DOTALL)


def in_fresh_environment(session: nox.Session, wanted: str, *programs: str) -> None:
    fresh = fresh_directory(session, "fresh")
    session.run("python", "-m", "venv", str(fresh))
    python = str(fresh / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    session.run(python, "-m", "pip", "install", *PIP_OPTIONS, wanted, external=True)
    with session.chdir(fresh):
        for program in programs:
            session.run(python, "-c", program, env=ONE_RANK, external=True, log=False)
    shutil.rmtree(fresh)


@nox.session(python=TORCH_PYTHON)
def benchmark(session: nox.Session) -> None:
    """Measure the CPU: tables, JSON, and the picture of the README; fifteen minutes."""
    install(session, "-e", ".[torch]", *groups("bench", "nets"), options=NEWEST)
    kept_numba_cache(session, "newest")
    session.run("python", "benchmarks/cpu.py", *(session.posargs or ["--plot", "docs/speed.png"]))


@nox.session(python=TORCH_PYTHON)
def compare(session: nox.Session) -> None:
    """Speed of the working tree over another revision: `dev.py compare -- REVISION [options]`."""
    given = list(session.posargs)
    revision = given.pop(0) if given and not given[0].startswith("-") else "HEAD"
    install(session, "torch", "numba", "numpy", *groups("bench"))
    session.env["NUMBA_CACHE_DIR"] = str(fresh_directory(session, "numba-cache"))
    other = fresh_directory(session, "other")
    git = {"external": True, "silent": True}
    session.run("git", "worktree", "add", "--force", "--detach", str(other), revision, **git)
    try:
        session.run("python", "benchmarks/compare.py", str(other), *given)
    finally:
        session.run("git", "worktree", "remove", "--force", str(other), **git)


@nox.session(python=TORCH_PYTHON)
def demo(session: nox.Session) -> None:
    """Run examples/digits.py for three epochs, half a minute, and say where its picture is."""
    install(session, "-e", ".[torch,examples]")
    short = ["--epochs", "3", "--output", str(Path(session.create_tmp()) / "digits.png")]
    session.run("python", "examples/digits.py", *(session.posargs or short))


@nox.session(python=TORCH_PYTHON)
def examples(session: nox.Session) -> None:
    """Run every example, digits.py for one epoch; each ends with an error if it is wrong."""
    install(session, "-e", ".[torch,examples,mpi]", *groups("mpi"))
    picture = Path(session.create_tmp()) / "digits.png"
    session.run("python", "examples/digits.py", "--epochs", "1", "--output", str(picture))
    picture.with_suffix(".jsonl").unlink(missing_ok=True)  # what study.py has kept of another run
    session.run("python", "examples/study.py", "--quick", "--output", str(picture))
    session.run("python", "examples/numpy_training.py")
    session.run("python", "examples/cupy_pipeline.py")
    saved = str(picture.with_name("checkpoint.pt"))
    plain = ["--layers", "BatchNorm2d", "--save", saved]
    session.run("python", "examples/train_ddp.py", "--epochs", "1", *plain)
    ranks = ["torchrun", "--standalone", "--nproc-per-node", "4", "examples/train_ddp.py"]
    session.run(*ranks, "--epochs", "1", "--resume", saved, "--save", saved)
    other = ["--layers", "SyncBatchNorm", "--resume", saved]
    session.run("python", "examples/train_ddp.py", "--epochs", "1", *other)
    ranks[-2:] = ["2", "examples/train_compiled.py"]
    session.run(*ranks, "--steps", "10", "--backend", "aot_eager")
    ranks[-1] = "examples/gradient_penalty.py"
    session.run(*ranks, "--steps", "5")
    session.run("python", "examples/word_count.py")
    session.run("python", "examples/processes_numpy.py")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4"]
    session.run(*mpirun, "python", "-m", "mpi4py", "examples/mpi_numpy.py")
