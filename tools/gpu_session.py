"""All that can be known on a GPU, stage by stage, in calls that take as long as you like.

    python tools/gpu_session.py OUT [--seconds 575] [--stages NAME ...]
    python tools/gpu_session.py OUT --dry-run          # tiny, on a CPU: is all of it in order?

A stage is skipped if less time is left than it needs, and ended after its limit. Call again, with
the same OUT, and it goes on with the stages that have no result yet of this commit on this device.
--stages: only these, once more if they have one.

OUT gets NAME.log and stages/NAME.json of each stage, and one JSON with everything: the benchmark's,
with a "session". Compiled kernels are kept there too. The status is 1 if a stage has failed, 2 if
there is nothing to run on. In the environment: SYNCBN_COMMIT, for a copy that is no repository.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import gpu_report  # noqa: E402

Row = dict[str, Any]


class Stage(NamedTuple):
    """Seconds with which it starts, and after which it ends; the words after "python".

    `dry`: those of a dry run; None if it is only named there.
    """

    least: int
    most: int
    command: Sequence[str]
    dry: Sequence[str] | None = None


# plugins may be missing, and what other packages warn of is not asked here
SETTINGS = ("addopts=--import-mode=importlib", "minversion=7", "filterwarnings=default")
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", "XML"]
PYTEST += [word for setting in SETTINGS for word in ("-o", setting)]
RANKS = [*PYTEST, "tests/device/test_ranks_on_device.py"]
ONE_TEST = ["tests/device/test_processes_on_device.py", "-k", "over_torch and float32"]
EACH_KERNEL = [*PYTEST, "tests/device/test_torch_on_device.py", "-k", "sanitized"]
PLANS = ["benchmarks/gpu_plans.py", "--seconds", "SECONDS", "--json", "JSON"]
PROCESSES = ["benchmarks/gpu_processes.py", "--seconds", "SECONDS", "--json", "JSON"]
BENCHMARK = ["benchmarks/gpu.py", "--seconds", "SECONDS", "--json", "JSON"]
DOCTOR = ["-m", "syncbn_torch", "doctor", "--json"]
# JSON: the file for the result; XML: that of pytest; SECONDS: a little less than the limit
STAGES = {
    "compile": Stage(20, 90, ["-c", "import gpu_session; gpu_session.compile_kernels()"]),
    "plans": Stage(120, 360, PLANS, [*PLANS, "--dry-run"]),
    "tests": Stage(
        130, 250, [*PYTEST, "tests/device", "--ignore", RANKS[-1]], [*PYTEST, *ONE_TEST]
    ),
    "ranks": Stage(120, 400, RANKS, [*RANKS, "-k", "captured and 1-float32"]),
    "processes": Stage(60, 200, PROCESSES, [*PROCESSES, "--dry-run"]),
    "benchmark": Stage(200, 320, BENCHMARK, [*BENCHMARK, "--dry-run"]),
    "memcheck": Stage(45, 100, EACH_KERNEL),
    "racecheck": Stage(45, 100, EACH_KERNEL),
    "initcheck": Stage(45, 100, EACH_KERNEL),
    "doctor": Stage(60, 150, DOCTOR, DOCTOR),
}
SANITIZERS = ("memcheck", "racecheck", "initcheck")


def command_of(name: str, seconds: int, parts: Path, dry: bool) -> list[str]:
    """What a stage runs."""
    stage = STAGES[name]
    if dry and stage.dry is None:
        return [sys.executable, "-c", f"print('dry run of {name}')"]
    words = stage.dry if dry and stage.dry else stage.command
    values = {"JSON": f"{parts / name}.json", "XML": f"{parts / name}.xml"}
    values["SECONDS"] = str(max(1, seconds - 20))
    command = [sys.executable, *(values.get(word, word) for word in words)]
    if name not in SANITIZERS:
        return command
    # memory is not cached, so that each tensor has its bounds
    options = ["--tool", name, "--error-exitcode", "86", "--print-limit", "20"]
    if name == "memcheck":  # errors of API calls are the loaders' way of asking what there is
        options += ["--report-api-errors", "no", "--padding", "64"]
    return ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", *options, *command]


def compile_kernels() -> None:
    """Compile all kernels for the device on all cores, and keep them."""
    from concurrent.futures import ProcessPoolExecutor
    from importlib import import_module

    kernels = import_module("syncbn_core.backends.cuda.kernels")
    if lacks := kernels.missing():
        sys.exit("; ".join(lacks))
    sys.path.append(str(ROOT / "tools" / "gpu_emulator"))
    variants = list(import_module("harness").variants())
    capability = kernels.compute_capability(0)
    with ProcessPoolExecutor() as pool:
        done = list(pool.map(_compile, variants, [capability] * len(variants)))
    print(f"{len(done)} kernels for {capability}")


def _compile(kernel: tuple[str, str, int, bool], capability: tuple[int, int]) -> None:
    from syncbn_core.backends.cuda import compiler, grid

    source = grid.source(*kernel, grid.THREADS)
    code = compiler.compile_source(source, capability)
    compiler.store(compiler.cache_file(source, capability), code)


def run(command: list[str], seconds: float, log: Path, environment: dict[str, str]) -> int:
    """The exit status; 124 if all of it had to be ended after `seconds`."""
    with log.open("w", encoding="utf-8") as file:
        options: Row = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
        child = subprocess.Popen(command, cwd=ROOT, env=environment, **options)
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return 124
        finally:  # also when this script is interrupted
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it has none, or was ended while it wrote
        return None


def tests_of(path: Path) -> Row | None:
    """Counts of a JUnit file, which pytest writes."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return None
    found, failures = Counter[str](), []
    for case in cases:
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        kind = "skipped" if kinds == {"skipped"} else "failed" if kinds else "passed"
        found[kind] += 1
        if kind == "failed":
            failures.append(f"{case.get('classname')}::{case.get('name')}")
    return {kind: found[kind] for kind in ("passed", "failed", "skipped")} | {"failures": failures}


def result_of(name: str, log: Path, parts: Path) -> Any:
    if name == "doctor":  # between lines of the log; its facts have paths of the machine
        text = log.read_text(encoding="utf-8")
        found = json.loads(text[text.index("{") : text.rindex("}") + 1] if "}" in text else "null")
        return found and {"timing": found["facts"]["timing"], "findings": found["findings"]}
    return json_of(parts / f"{name}.json") or tests_of(parts / f"{name}.xml")


def stages_of(folder: Path, machine: Row) -> dict[str, Row]:
    """The results of this commit on this device, as they came."""
    rows = [json_of(path) for path in (folder / "stages").glob("*.json")]
    same = [r for r in rows if all(r["machine"][k] == machine[k] for k in ("commit", "device"))]
    return {row["stage"]: row for row in sorted(same, key=lambda row: row["machine"]["date"])}


def merge(folder: Path, machine: Row) -> Path:
    """The file that has all."""
    stages = stages_of(folder, machine)
    results = {name: row["result"] for name, row in stages.items() if row["result"] is not None}
    keys = ("status", "seconds", "last")
    session: Row = {
        "stages": [{"name": n} | {k: row[k] for k in keys} for n, row in stages.items()]
    }
    benchmark = results.pop("benchmark", None) or {}
    name = gpu_report.file_name(machine)
    path = folder / (name if benchmark else f"no-benchmark-{name}")
    whole = benchmark | {"session": session | results, "machine": machine}
    path.write_text(gpu_report.as_lines(whole), encoding="utf-8")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), metavar="NAME")
    parser.add_argument("--seconds", type=int, default=575, help="the whole call takes no longer")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    end, folder = time.monotonic() + options.seconds, options.out.resolve()
    parts = folder / "parts"
    for each in (parts, folder / "stages"):
        each.mkdir(parents=True, exist_ok=True)
    places = [str(ROOT / place) for place in ("", "adapters", "benchmarks", "tools")]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder / "kernels"), "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])
    dry = ["--dry-run"] if options.dry_run else []
    if dry:
        environment |= {"SYNCBN_TEST_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    asks = [sys.executable, str(ROOT / "benchmarks" / "gpu_timers.py"), str(parts / "machine.json")]
    if subprocess.call([*asks, *dry], env=environment) != 0:
        print("expected torch to see a CUDA device, it does not", file=sys.stderr)
        return 2
    machine = json_of(parts / "machine.json")
    done = {name for name, row in stages_of(folder, machine).items() if not row["again"]}
    late, failed = [], False
    for name in options.stages or [name for name in STAGES if name not in done]:
        stage, left = STAGES[name], int(end - time.monotonic()) - 5
        if left < stage.least:
            late.append(f"{name} ({stage.least} s)")
            continue
        seconds, start = min(stage.most, left), time.monotonic()
        log = folder / f"{name}.log"
        command = command_of(name, seconds, parts, options.dry_run)
        print(f"== {name}, at most {seconds} s: {' '.join(command)}", flush=True)
        status = run(command, seconds, log, environment)
        status = 0 if name == "doctor" and status == 4 else status  # one GPU is fewer than it likes
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        row: Row = {"stage": name, "status": status, "seconds": round(time.monotonic() - start)}
        row |= {"last": lines[-1] if lines else "", "again": status == 124 and seconds < stage.most}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        row |= {"machine": machine | {"date": now}, "result": result_of(name, log, parts)}
        text = gpu_report.as_lines(row)
        (folder / "stages" / f"{name}.json").write_text(text, encoding="utf-8")
        failed |= status != 0
        print(*lines[-15 if status else -1 :], f"   status {status}, {row['seconds']} s", sep="\n")
    print(f"written: {merge(folder, machine)}")
    if late:
        print(f"no time was left for: {', '.join(late)}; call again with the same folder")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
