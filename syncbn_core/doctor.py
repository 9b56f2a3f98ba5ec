"""What this machine has, and whether a split batch gets the results of the undivided one.

`python -m syncbn_core doctor` prints it. A check compares y, dx, the gradients of weight and bias,
and the running statistics with the formulas of docs/how-it-works.md in float64:

    y  = (x - mean) * invstd * weight + bias
    dx = (dy - mean(dy) - xhat * mean(dy * xhat)) * invstd * weight
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module, metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

import syncbn_core
from syncbn_core.backends.devices import array_library
from syncbn_core.comm import Communicator, MPICommunicator, run_in_threads, thread_group
from syncbn_core.errors import BackendError
from syncbn_core.layers import BatchNorm

__all__ = [
    "PARTS",
    "Case",
    "Check",
    "Difference",
    "Finding",
    "Report",
    "array_checks",
    "examine",
    "facts",
    "mpi_checks",
]

Verdict = Literal["ok", "WRONG", "failed", "missing", "skipped"]
Facts = dict[str, dict[str, str]]

PACKAGES = ("numpy", "numba", "llvmlite", "numba-cuda", "cuda-bindings", "mpi4py")
CUPY = ("cupy-cuda12x", "cupy-cuda13x")
VARIABLES = ("SYNCBN_", "NUMBA_", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
# Of a result, as a share of its largest value: some roundings of the dtype of x.
ROUNDINGS = {"float64": 2**-44, "float32": 2**-18, "float16": 2**-9, "bfloat16": 2**-6}
ARRAY_DTYPES = ("float64", "float32", "float16")
LAYOUTS = ("NCHW", "channels_last", "(N, C)")
CHANNELS = 12
# The bounds of the parts of 10 samples, by the number of members.
PARTS: dict[str, Callable[[int], list[int]]] = {
    "even": lambda size: [10 * rank // size for rank in range(size + 1)],
    "uneven": lambda size: [0, 1, *[4] * (size - 2), 10],
    "only the last has samples": lambda size: [*[0] * size, 10],
}
STYLES = {"ok": "green", "WRONG": "bold red", "failed": "bold red"}
STYLES |= dict.fromkeys(("missing", "skipped"), "yellow")


class Difference(NamedTuple):
    """The largest difference from the formulas, in which result, and how much is allowed."""

    value: float
    result: str
    allowed: float


class Check(NamedTuple):
    """A check. `run` may raise `Missing` or `Skipped`; another error means that it failed."""

    name: str
    run: Callable[[], Difference]


class Missing(Exception):
    """What a check needs is not installed, or can't be used."""


class Skipped(Exception):
    """A check would need another machine, or more time."""


@dataclass
class Finding:
    """What came of a check."""

    check: str
    verdict: Verdict
    detail: str
    difference: float | None = None
    seconds: float = 0.0


@dataclass
class Report:
    """The facts about a machine, by topic, and the findings."""

    facts: Facts
    findings: list[Finding] = field(default_factory=list)

    @property
    def status(self) -> int:
        """For a process: 0 all is well, 1 wrong or failed, 3 something missing, 4 or skipped."""
        found = {finding.verdict for finding in self.findings}
        if found & {"WRONG", "failed"}:
            return 1
        return 3 if "missing" in found else 4 if "skipped" in found else 0

    def conclusion(self) -> str:
        """The last line."""
        count = len(self.findings)
        return {
            0: f"all {count} checks give the results of the undivided batch",
            1: "something is wrong: please report it, with this text",
            3: "nothing is wrong in what was checked, but something is missing",
            4: "nothing is wrong in what was checked, but not all was checked",
        }[self.status]

    def to_json(self) -> str:
        return json.dumps({"version": 1, **asdict(self), "status": self.status}, indent=1)


# ---------------------------------------------------------------------------------- facts


def facts() -> Facts:
    """What is installed and set, without torch."""
    return {
        "versions": {"syncbn": syncbn_core.__version__, **versions(PACKAGES + CUPY)},
        "machine": {
            "python": f"{platform.python_version()}, {sys.executable}",
            "system": platform.platform(),
            "processor": f"{os.cpu_count()} cores, {found(_processor)}",
            "GPUs": found(gpus),
        },
        "arrays": {"NumPy": found(numpy_takes), "CuPy": found(_cupy_takes)},
        "caches": {
            "CPU kernels": found(_cache_of_cpu_kernels),
            "CUDA kernels": found(_cache_of_cuda_kernels),
        },
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)
        },
    }


def found(fact: Callable[[], str]) -> str:
    """A fact, or why it can't be told: a sick machine gets a report too."""
    try:
        return fact()
    except Exception as error:
        return f"unknown: {type(error).__name__}: {error}"


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {package: version_of(package) for package in packages}
    return {package: version for package, version in found.items() if version != "not installed"}


def _processor() -> str:
    import numba
    from llvmlite.binding import get_host_cpu_name

    threads = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    return f"{get_host_cpu_name()}, {threads} threads of Numba"


def gpus() -> str:
    driver: Any = import_module("syncbn_core.backends.cuda.driver")
    try:
        count = driver.device_count()
    except BackendError as error:
        return f"none: {error}"
    each = [
        "{}, compute capability {}.{}".format(
            driver.description(device), *driver.compute_capability(device)
        )
        for device in range(count)
    ]
    return "; ".join(each) or f"none: {driver.missing()[0]}"


def numpy_takes() -> str:
    """Which operations arrays and tensors on the CPU take."""
    return "plain operations, slowly: NUMBA_DISABLE_JIT" if jit_disabled() else "CPU kernels"


def jit_disabled() -> bool:
    """Without the warning that comes with the first call."""
    import numba

    return bool(numba.config.DISABLE_JIT)  # type: ignore[attr-defined]


def _cupy_takes() -> str:
    if not versions(CUPY):
        return "not taken: CuPy is not installed"
    return cuda_takes()


def cuda_takes() -> str:
    """Which operations arrays on CUDA devices take."""
    driver: Any = import_module("syncbn_core.backends.cuda.driver")
    usable: Any = import_module("syncbn_core.backends.cuda.usable")
    if usable.setting() == "off":
        return "plain operations, slowly: SYNCBN_KERNELS=off"
    lacks = driver.missing()
    return "no CUDA kernels: " + "; ".join(lacks) if lacks else "CUDA kernels"


def _cache_of_cpu_kernels() -> str:
    if jit_disabled():
        return "none: NUMBA_DISABLE_JIT"
    from syncbn_core.kernels.cpu.numerics import share

    return _described(share._cache.folder)


def _cache_of_cuda_kernels() -> str:
    compiler: Any = import_module("syncbn_core.backends.cuda.compiler")
    return _described(compiler.cache_folder())


def _described(folder: Path | None) -> str:
    if folder is None:
        return "none: this user has no home"
    if not folder.is_dir():
        return f"{folder}, not yet there"
    count = sum(1 for file in folder.rglob("*") if file.is_file())
    writable = "" if os.access(folder, os.W_OK) else ", can't be written"
    return f"{folder}, {count} files{writable}"


# --------------------------------------------------------------------------------- checks


class Case:
    """A batch of one dtype and layout, and its results by the formulas in float64."""

    def __init__(self, dtype: str, layout: str, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        shape = {"NCHW": (10, CHANNELS, 5, 7), "channels_last": (10, 5, 7, CHANNELS)}.get(
            layout, (10, CHANNELS)
        )
        self.name = f"{dtype}, {layout}"
        self.dtype = dtype
        self.x, self.dy = (rounded(random.normal(mean, 2, shape), dtype) for mean in (3.0, 0.0))
        if layout == "channels_last":
            self.x, self.dy = (np.moveaxis(values, -1, 1) for values in (self.x, self.dy))
        self.weight = rounded(random.normal(1, 0.5, CHANNELS), "float32")
        self.bias = rounded(random.normal(0, 1, CHANNELS), "float32")
        self.right = self._formulas()

    def _formulas(self) -> dict[str, np.ndarray[Any, Any]]:
        axes = (0, *range(2, self.x.ndim))
        column = (CHANNELS, *[1] * (self.x.ndim - 2))
        count = self.x.size // CHANNELS
        mean, var = self.x.mean(axes), self.x.var(axes)
        invstd = 1 / np.sqrt(var + 1e-5).reshape(column)
        xhat = (self.x - mean.reshape(column)) * invstd
        bias_grad, weight_grad = self.dy.sum(axes), (self.dy * xhat).sum(axes)
        means = (sums.reshape(column) / count for sums in (bias_grad, weight_grad))
        dx = self.dy - next(means) - xhat * next(means)
        return {
            "y": xhat * self.weight.reshape(column) + self.bias.reshape(column),
            "dx": dx * invstd * self.weight.reshape(column),
            "weight.grad": weight_grad,
            "bias.grad": bias_grad,
            "running_mean": 0.1 * mean,
            "running_var": 0.9 + 0.1 * var * count / (count - 1),
        }

    def difference(self, found: Mapping[str, Any], part: slice = slice(None)) -> Difference:
        """The largest difference of what was computed; y and dx are those of a part."""
        shares = {}
        for name, right in self.right.items():
            values = np.asarray(found[name], np.float64)
            own = right[part] if name in ("y", "dx") else right
            share = np.abs(values - own).max(initial=0) / np.abs(right).max()
            shares[name] = float(share) if np.isfinite(share) else float("inf")
        worst = max(shares, key=shares.__getitem__)
        return Difference(shares[worst], worst, ROUNDINGS[self.dtype])


def rounded(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """The nearest values that the dtype can hold, as float64."""
    if dtype == "bfloat16":  # NumPy has none: the upper half of a float32
        bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).astype(np.float64)
    return values.astype(dtype).astype(np.float64)


def array_checks() -> Iterator[Check]:
    """Members in threads with uneven parts, one of them empty; each GPU by itself."""
    for dtype in ARRAY_DTYPES:
        for layout in LAYOUTS:
            case = Case(dtype, layout)
            yield Check(f"4 members in threads, {case.name}", partial(in_threads, case))
    if versions(CUPY):
        driver: Any = import_module("syncbn_core.backends.cuda.driver")
        for device in range(driver.device_count()):
            for dtype in ARRAY_DTYPES:
                case = Case(dtype, "NCHW")
                name = f"cuda:{device} by CuPy, {case.name}"
                yield Check(name, partial(on_gpu, case, device))


def mpi_checks() -> tuple[int, list[Check]]:
    """The rank of this process, and the checks, which all ranks of MPI have to run."""
    try:
        group = MPICommunicator()
    except BackendError as error:
        return 0, [Check("ranks of MPI", partial(refuse, Missing(str(error))))]
    except Exception as error:
        return 0, [Check("ranks of MPI", partial(refuse, error))]
    if group.size == 1:
        alone = Skipped("one rank: start several by mpirun -n 4 python -m syncbn_core doctor --mpi")
        return 0, [Check("ranks of MPI", partial(refuse, alone))]
    checks = [
        Check(f"{group.size} ranks of MPI, {case.name}", partial(over_mpi, case, group))
        for case in (Case(dtype, layout) for dtype in ARRAY_DTYPES for layout in LAYOUTS)
    ]
    return group.rank, checks


def refuse(error: Exception) -> Difference:
    """For a check that can't be run."""
    raise error


def over_mpi(case: Case, rank: Communicator) -> Difference:
    """The largest difference on any rank, the same on all of them."""
    names = list(case.right)
    found = []
    for bounds_of in PARTS.values():
        part = slice(*bounds_of(rank.size)[rank.rank : rank.rank + 2])
        own = member_differs(case, rank, part)
        told = rank.all_gather(np.array([own.value, names.index(own.result)]))
        found += [Difference(value, names[int(name)], own.allowed) for value, name in told]
    return max(found)


def in_threads(case: Case) -> Difference:
    """Four members."""
    found: list[Difference] = []
    for bounds_of in PARTS.values():
        bounds = bounds_of(4)
        jobs = [
            partial(member_differs, case, member, slice(*pair))
            for member, pair in zip(thread_group(4), pairwise(bounds), strict=True)
        ]
        found += run_in_threads(jobs)
    return max(found)


def member_differs(case: Case, member: Communicator, part: slice) -> Difference:
    """The largest difference of what a member of a group computed for its part."""
    layer = _layer(case, "cpu", member)
    found = {"y": layer(case.x[part].astype(case.dtype))}
    found["dx"] = layer.backward(case.dy[part].astype(case.dtype))
    found["weight.grad"] = member.all_reduce(layer.weight_grad)
    found["bias.grad"] = member.all_reduce(layer.bias_grad)
    found |= {"running_mean": layer.running_mean, "running_var": layer.running_var}
    return case.difference(found, part)


def on_gpu(case: Case, device: int) -> Difference:
    lacks = import_module("syncbn_core.backends.cuda.driver").missing()
    if lacks:
        raise Missing("; ".join(lacks))
    with array_library(f"cuda:{device}") as xp:
        layer = _layer(case, f"cuda:{device}", None)
        found = {"y": layer(xp.asarray(case.x.astype(case.dtype)))}
        found["dx"] = layer.backward(xp.asarray(case.dy.astype(case.dtype)))
        found |= {"weight.grad": layer.weight_grad, "bias.grad": layer.bias_grad}
        found |= {"running_mean": layer.running_mean, "running_var": layer.running_var}
        return case.difference({name: values.get() for name, values in found.items()})


def _layer(case: Case, device: str, communicator: Any) -> BatchNorm:
    kept = "float64" if case.dtype == "float64" else "float32"
    layer = BatchNorm(CHANNELS, dtype=kept, device=device, communicator=communicator)
    with array_library(device) as xp:
        layer.weight[...] = xp.asarray(case.weight)
        layer.bias[...] = xp.asarray(case.bias)
    return layer


def examine(check: Check) -> Finding:
    """Run a check; whatever it raises is a finding, and so are kernels that could not be used."""
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = check.run()
    except Missing as missing:
        return Finding(check.name, "missing", str(missing))
    except Skipped as skipped:
        return Finding(check.name, "skipped", str(skipped))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Finding(check.name, "failed", text, None, time.perf_counter() - begin)
    seconds = time.perf_counter() - begin
    detail = f"largest difference {found.value:.1g} of {found.result}"
    if not found.value <= found.allowed:
        detail += f", where {found.allowed:.1g} is allowed"
        known = found.value if np.isfinite(found.value) else None  # JSON has no infinity
        return Finding(check.name, "WRONG", detail, known, seconds)
    plain = [str(each.message) for each in told if "syncbn uses plain" in str(each.message)]
    verdict: Verdict = "missing" if plain else "ok"
    return Finding(check.name, verdict, "; ".join([detail, *plain]), found.value, seconds)


def add_command(commands: Any) -> Any:
    """Add the command `doctor` to those of a parser; returns its parser."""
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine has, and whether results are right here",
        description="Print what a report of a fault needs: versions, devices, settings. Then "
        "compare the results of parts with those of the undivided batch in float64.",
        epilog="Exit status: 0 if all is well, 1 if a result is WRONG or a check failed, 2 for "
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
    report = Report(facts())
    say = silent if as_json else printer()
    print_facts(report.facts, say)
    say("checks", "bold")
    for check in checks:
        finding = examine(check)
        report.findings.append(finding)
        say(f"  {finding.verdict:8} {finding.check:48} {finding.detail}", STYLES[finding.verdict])
    times = timing()
    report.facts |= times
    print_facts(times, say)
    if as_json:
        print(report.to_json())
    say(report.conclusion(), "bold")
    return report.status


def run_on_rank(rank: int, checks: Iterable[Check]) -> int:
    """Run the checks beside rank 0, which prints; print only what failed here."""
    failed = [finding for finding in map(examine, checks) if finding.verdict == "failed"]
    for finding in failed:
        print(f"rank {rank}: {finding.check}: {finding.detail}", file=sys.stderr, flush=True)
    return 1 if failed else 0


def print_facts(facts: Facts, say: Callable[[str, str], None]) -> None:
    """Print facts by `say(text, style)`."""
    for topic, rows in facts.items():
        if rows:
            say(topic, "bold")
        for name, text in rows.items():
            say(f"  {name:22} {text}", "")


def printer() -> Callable[[str, str], None]:
    """Print lines in a style: by rich where it is installed, else plain."""
    try:
        rich = import_module("rich.console")
    except ImportError:
        return lambda text, style: print(text, flush=True)
    console = rich.Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    return lambda text, style: console.print(text, style=style)


def silent(text: str, style: str) -> None:
    """Print nothing."""
