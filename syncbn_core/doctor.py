"""What this machine has, and whether a split batch gets the results of the undivided one.

`python -m syncbn_core doctor` prints it. A check compares y, dx, the gradients of weight and bias,
and the running statistics with the formulas of docs/how-it-works.md in float64.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module, metadata
from itertools import pairwise
from pathlib import Path
from shutil import which
from subprocess import run as run_program
from typing import Any, NamedTuple

import numpy as np

import syncbn_core
from syncbn_core.backends.devices import array_library
from syncbn_core.comm import Communicator, MPICommunicator, run_in_threads, thread_group
from syncbn_core.errors import BackendError
from syncbn_core.layers import BatchNorm

Facts = dict[str, dict[str, str]]

PACKAGES = ("numpy", "numba", "llvmlite", "numba-cuda", "cuda-bindings", "mpi4py")
CUPY = ("cupy-cuda12x", "cupy-cuda13x")
VARIABLES = ("SYNCBN_", "NUMBA_", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
# Of a result, as a share of its largest value: some roundings of the dtype of x.
ROUNDINGS: dict[str, float] = {"float64": 2**-44, "float32": 2**-18, "float16": 2**-9}
CHANNELS = 12
# The bounds of the parts of 10 samples, by the number of members: even, uneven, all but one empty.
PARTS: tuple[Callable[[int], list[int]], ...] = (
    lambda size: [10 * rank // size for rank in range(size + 1)],
    lambda size: [0, 1, *[4] * (size - 2), 10],
    lambda size: [*[0] * size, 10],
)
CONCLUSIONS = {
    0: "all {} checks give the results of the undivided batch",
    1: "something is wrong: please report it, with this text",
    2: "a check failed, so it says nothing about results; its line has the error",
    3: "nothing is wrong in what was checked, but something is missing",
    4: "nothing is wrong in what was checked, but not all was checked",
}


class Difference(NamedTuple):
    """The largest difference from what is right, in which result, and how much is allowed."""

    value: float
    result: str
    allowed: float


class Check(NamedTuple):
    """A check. `run` may raise `Outcome`; another error means that the check failed."""

    name: str
    run: Callable[[], Difference]


class Outcome(Exception):
    """Ends a check as "WRONG", "failed", "missing" something, or "skipped" for another machine."""

    def __init__(self, verdict: str, text: str) -> None:
        super().__init__(text)
        self.verdict = verdict


class Finding(NamedTuple):
    """What came of a check: `verdict` is "ok", "WRONG", "failed", "missing" or "skipped"."""

    check: str
    verdict: str
    detail: str
    difference: float | None = None
    seconds: float = 0.0


# ---------------------------------------------------------------------------------- facts


def facts() -> Facts:
    """What is installed and set, without torch."""
    return {
        "versions": {"syncbn": found(_version), **versions(PACKAGES + CUPY)},
        "machine": {
            "python": f"{platform.python_version()}, {sys.executable}",
            "system": platform.platform(),
            "processor": f"{os.cpu_count()} cores, {found(_processor)}",
            "GPUs": found(_gpus),
        },
        "arrays": {
            "NumPy": found(_numpy_takes),
            "CuPy": found(cuda_takes) if versions(CUPY) else "not taken: CuPy is not installed",
        },
        "caches": {"CPU kernels": found(_cpu_cache), "CUDA kernels": found(_cuda_cache)},
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
    }


def found(fact: Callable[[], str]) -> str:
    """A fact, or why it can't be told: a sick machine gets a report too."""
    try:
        return fact()
    except Exception as error:
        return f"unknown: {type(error).__name__}: {error}"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    names = {package.metadata["Name"] for package in metadata.distributions()}
    return {package: metadata.version(package) for package in packages if package in names}


def _version() -> str:
    """The version, and the commit of a checkout or of what was installed from a repository."""
    version, folder = syncbn_core.__version__, Path(syncbn_core.__file__).parents[1]
    if (folder / ".git").exists() and which("git"):
        git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
        told = run_program(git, capture_output=True, text=True, timeout=10)
        return f"{version}, commit {told.stdout.strip()}" if told.returncode == 0 else version
    for installed in metadata.distributions(name="syncbn"):
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
        if "vcs_info" in origin:
            return f"{version}, commit {origin['vcs_info']['commit_id']}"
    return version


def _processor() -> str:
    import numba
    from llvmlite.binding import get_host_cpu_name

    threads = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    return f"{get_host_cpu_name()}, {threads} threads of Numba"


def _gpus() -> str:
    kernels: Any = import_module("syncbn_core.backends.cuda.kernels")
    try:
        devices = range(kernels.device_count())
    except BackendError as error:
        return f"none: {error}"
    named = (kernels.description(device) for device in devices)
    capabilities = ("{}.{}".format(*kernels.compute_capability(device)) for device in devices)
    each = map("{}, compute capability {}".format, named, capabilities)
    if not devices and not Path("/proc/driver/nvidia").exists():
        return "none of NVIDIA, or its driver is not installed"
    return "; ".join(each) or f"none: {kernels.missing()[0]}"


def _numpy_takes() -> str:
    return "plain operations, slowly: NUMBA_DISABLE_JIT" if _jit_disabled() else "CPU kernels"


def _jit_disabled() -> bool:
    """Without the warning that comes with the first call."""
    import numba

    return bool(numba.config.DISABLE_JIT)  # type: ignore[attr-defined]


def cuda_takes() -> str:
    """Which operations arrays on CUDA devices take."""
    kernels: Any = import_module("syncbn_core.backends.cuda.kernels")
    usable: Any = import_module("syncbn_core.backends.cuda.usable")
    if usable.setting() == "off":
        return "plain operations, slowly: SYNCBN_KERNELS=off"
    lacks = kernels.missing()
    return "no CUDA kernels: " + "; ".join(lacks) if lacks else "CUDA kernels"


def _cpu_cache() -> str:
    if _jit_disabled():
        return "none: NUMBA_DISABLE_JIT"
    from syncbn_core._kernels.cpu.channels import fill_table

    return _described(fill_table._cache.folder)


def _cuda_cache() -> str:
    compiler: Any = import_module("syncbn_core.backends.cuda.compiler")
    return _described(compiler.cache_folder())


def _described(folder: Path | None) -> str:
    if folder is None or not folder.is_dir():
        return "none: this user has no home" if folder is None else f"{folder}, not yet there"
    count = sum(file.is_file() for file in folder.rglob("*"))
    writable = "" if os.access(folder, os.W_OK) else ", can't be written"
    return f"{folder}, {count} files{writable}"


# --------------------------------------------------------------------------------- checks


class Case:
    """A batch of one dtype, and its results by the formulas in float64."""

    def __init__(self, dtype: str) -> None:
        self.dtype: str = dtype
        self.x: Any
        self.dy: Any
        self.weight: Any
        self.bias: Any
        random, shape = np.random.default_rng(0), (10, CHANNELS, 5, 7)
        self.x, self.dy = (random.normal(mean, 2, shape).astype(dtype) for mean in (3.0, 0.0))
        self.weight, self.bias = random.normal(1, 0.5, (2, CHANNELS)).astype("float32")
        x, dy, axes = self.x.astype(float), self.dy.astype(float), (0, 2, 3)
        weight, bias = self.weight[:, None, None], self.bias[:, None, None]
        mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
        invstd, count = 1 / np.sqrt(var + 1e-5), x.size // CHANNELS
        xhat = (x - mean) * invstd
        sums = dy.sum(axes, keepdims=True), (dy * xhat).sum(axes, keepdims=True)
        self.right: dict[str, Any] = {
            "y": xhat * weight + bias,
            "dx": (dy - sums[0] / count - xhat * sums[1] / count) * invstd * weight,
            "weight.grad": sums[1].ravel(),
            "bias.grad": sums[0].ravel(),
            "running_mean": 0.1 * mean.ravel(),
            "running_var": 0.9 + 0.1 * var.ravel() * count / (count - 1),
        }

    def difference(self, found: dict[str, Any], part: slice = slice(None)) -> Difference:
        """The largest difference of what was computed; y and dx are those of a part."""
        shares = {}
        for name, right in self.right.items():
            own = right[part] if name in ("y", "dx") else right
            off = np.abs(np.asarray(found[name], float) - own).max(initial=0)
            share = off / np.abs(right).max()
            shares[name] = float(share) if np.isfinite(share) else float("inf")
        worst = max(shares, key=shares.__getitem__)
        return Difference(shares[worst], worst, ROUNDINGS[self.dtype])


def array_checks() -> Iterator[Check]:
    """Members in threads; each GPU by itself."""
    for dtype in ROUNDINGS:
        yield Check(f"4 members in threads, {dtype}", partial(in_threads, Case(dtype)))
    if versions(CUPY):
        kernels: Any = import_module("syncbn_core.backends.cuda.kernels")
        for device in range(kernels.device_count()):
            for dtype in ROUNDINGS:
                run = partial(on_gpu, Case(dtype), device)
                yield Check(f"cuda:{device} by CuPy, {dtype}", run)


def mpi_checks() -> tuple[int, list[Check]]:
    """The rank of this process, and the checks, which all ranks of MPI have to run."""
    try:
        group = MPICommunicator()
        if group.size == 1:
            how = "mpirun -n 4 python -m syncbn_core doctor --mpi"
            raise Outcome("skipped", f"one rank: start several by {how}")
    except BackendError as error:
        return 0, [Check("ranks of MPI", partial(refuse, Outcome("missing", str(error))))]
    except Exception as error:
        return 0, [Check("ranks of MPI", partial(refuse, error))]
    runs = {dtype: partial(over_mpi, Case(dtype), group) for dtype in ROUNDINGS}
    return group.rank, [Check(f"{group.size} ranks of MPI, {d}", run) for d, run in runs.items()]


def refuse(error: Exception) -> Difference:
    """For a check that can't be run."""
    raise error


def over_mpi(case: Case, rank: Communicator) -> Difference:
    """The largest difference on any rank, the same on all of them."""
    names, found = list(case.right), []
    for bounds_of in PARTS:
        part = slice(*bounds_of(rank.size)[rank.rank : rank.rank + 2])
        own = member_differs(case, rank, part)
        told = rank.all_gather(np.array([own.value, names.index(own.result)]))
        found += [Difference(value, names[int(name)], own.allowed) for value, name in told]
    return max(found)


def in_threads(case: Case) -> Difference:
    """Four members."""
    found: list[Difference] = []
    for bounds_of in PARTS:
        pairs = zip(thread_group(4), pairwise(bounds_of(4)), strict=True)
        found += run_in_threads([partial(member_differs, case, m, slice(*p)) for m, p in pairs])
    return max(found)


def member_differs(case: Case, member: Communicator, part: slice) -> Difference:
    """The largest difference of what a member of a group computed for its part."""
    found = _step(case, "cpu", member, part)
    for name in ("weight.grad", "bias.grad"):
        found[name] = member.all_reduce(found[name])
    return case.difference(found, part)


def on_gpu(case: Case, device: int) -> Difference:
    """How far a step on a GPU is off; raises `Outcome` where its kernels can't run."""
    lacks = import_module("syncbn_core.backends.cuda.kernels").missing()
    if lacks:
        raise Outcome("missing", "; ".join(lacks))
    found = _step(case, f"cuda:{device}", None, slice(None))
    return case.difference({name: values.get() for name, values in found.items()})


def _step(case: Case, device: str, communicator: Any, part: slice) -> dict[str, Any]:
    dtype = "float64" if case.dtype == "float64" else "float32"
    layer = BatchNorm(CHANNELS, dtype=dtype, device=device, communicator=communicator)
    with array_library(device) as xp:
        layer.weight[...], layer.bias[...] = xp.asarray(case.weight), xp.asarray(case.bias)
        found = {"y": layer(xp.asarray(case.x[part]))}
        found["dx"] = layer.backward(xp.asarray(case.dy[part]))
    found |= {"weight.grad": layer.weight_grad, "bias.grad": layer.bias_grad}
    return found | {"running_mean": layer.running_mean, "running_var": layer.running_var}


def examine(check: Check) -> Finding:
    """Run a check; whatever it raises is a finding, and so are kernels that could not be used."""
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            value, result, allowed = check.run()
    except Outcome as outcome:
        return Finding(check.name, outcome.verdict, str(outcome))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Finding(check.name, "failed", text, None, time.perf_counter() - begin)
    seconds = time.perf_counter() - begin
    detail = f"largest difference {value:.1g} of {result}"
    if not value <= allowed:
        detail += f", where {allowed:.1g} is allowed"
        known = value if np.isfinite(value) else None  # JSON has no infinity
        return Finding(check.name, "WRONG", detail, known, seconds)
    plain = [str(each.message) for each in told if "syncbn uses plain" in str(each.message)]
    verdict = "missing" if plain else "ok"
    return Finding(check.name, verdict, "; ".join([detail, *plain]), value, seconds)


# ------------------------------------------------------------------------------- commands


def add_command(commands: Any) -> Any:
    """Add the command `doctor` to those of a parser; returns its parser."""
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine has, and whether results are right here",
        description="Print what a report of a fault needs: versions, devices, settings. Then "
        "compare the results of parts with those of the undivided batch in float64.",
        epilog="Exit status: 0 if all is well, 1 if a result is WRONG, 2 if a check failed or for "
        "wrong arguments, 3 if something is missing, 4 if a check was skipped.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead")
    return doctor


def run_for_arrays(as_json: bool, mpi: bool) -> int:
    """The doctor without torch; `mpi`: this process is one of those that mpirun has started."""
    rank, checks = mpi_checks() if mpi else (0, array_checks())
    return run_on_rank(rank, checks) if rank else run(facts, checks, as_json)


def run(
    facts: Callable[[], Facts],
    checks: Iterable[Check],
    as_json: bool,
    timing: Callable[[], Facts] = dict,
) -> int:
    """Print facts, findings as they come, and what `timing` returns; returns the exit status."""

    def say(text: str) -> None:
        if not as_json:
            print(text, flush=True)

    known, findings = facts(), []
    print_facts(known, say)
    say("checks")
    for check in checks:
        findings.append(finding := examine(check))
        say(f"  {finding.verdict:8} {finding.check:48} {finding.detail}")
    times = timing()
    print_facts(times, say)
    status = status_of(findings)
    if as_json:
        rows = [finding._asdict() for finding in findings]
        report = {"version": 1, "facts": known | times, "findings": rows, "status": status}
        print(json.dumps(report, indent=1))
    say(CONCLUSIONS[status].format(len(findings)))
    return status


def status_of(findings: Iterable[Finding]) -> int:
    """For a process: that of the worst verdict, as `add_command` tells."""
    verdicts = {finding.verdict for finding in findings}
    ranked = ("WRONG", "failed", "missing", "skipped")
    return next((n for n, each in enumerate(ranked, 1) if each in verdicts), 0)


def run_on_rank(rank: int, checks: Iterable[Check]) -> int:
    """Run the checks beside rank 0, which prints; print only what failed here."""
    failed = [finding for finding in map(examine, checks) if finding.verdict == "failed"]
    for finding in failed:
        print(f"rank {rank}: {finding.check}: {finding.detail}", file=sys.stderr, flush=True)
    return 2 if failed else 0


def print_facts(facts: Facts, say: Callable[[str], None]) -> None:
    """Print facts by `say(text)`."""
    for topic, rows in facts.items():
        if rows:
            say(topic)
        for name, text in rows.items():
            say(f"  {name:22} {text}")
