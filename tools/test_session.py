"""The scripts of the GPU session and its benchmark, run to their end without a GPU."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from scripts import ROOT, path_of, run

# One dry run serves all; half of the stages take 100 s on two quiet cores.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
for_bash = pytest.mark.skipif(sys.platform == "win32", reason="a script for bash")


class Session(NamedTuple):
    """A dry run of the whole `gpu_session.sh`."""

    status: int
    output: str
    folder: Path

    @property
    def json(self) -> Path:
        (path,) = self.folder.glob("*.json")
        return path

    @property
    def results(self) -> dict[str, Any]:
        return json.loads(self.json.read_text(encoding="utf-8"))

    def stage(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / "stages" / f"{name}.json").read_text(encoding="utf-8"))


def call_session(folder: Path, *arguments: str, **wanted: str) -> subprocess.CompletedProcess[str]:
    settings = {"PYTHON": sys.executable, "OUT": str(folder), "SYNCBN_COMMIT": "abc"} | wanted
    return subprocess.run(
        ["bash", path_of("gpu_session.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | settings,
    )


FIRST_STAGES = ("facts", "shared", "capture", "compiled")


@pytest.fixture(scope="module")
def first_call(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A call that is told to run some stages."""
    folder = tmp_path_factory.mktemp("session")
    done = call_session(folder, "600", *FIRST_STAGES, DRY_RUN="1")
    return Session(done.returncode, done.stdout + done.stderr, folder)


@pytest.fixture(scope="module")
def session(first_call: Session) -> Session:
    """All stages, by a second call."""
    folder = first_call.folder
    (folder / "facts.log").write_text("of the first call")
    done = call_session(folder, DRY_RUN="1")
    return Session(done.returncode, first_call.output + done.stdout + done.stderr, folder)


STAGES = """facts tests sanitize shared capture compiled processes benchmark
    memcheck racecheck initcheck doctor driver"""


@for_bash
def test_dry_run_of_a_call_runs_the_stages_that_it_is_told(first_call: Session) -> None:
    names = {path.stem for path in (first_call.folder / "stages").iterdir()}
    assert names == {"compile", *FIRST_STAGES}, first_call.output


@for_bash
def test_dry_run_of_the_session_leaves_a_json_of_each_stage_and_one_of_all(
    session: Session,
) -> None:
    found = session.results["session"]
    status = {stage["name"]: stage["status"] for stage in found["stages"]}
    packages_fit = not found["compile"]["missing"]
    assert status.pop("compile") == (0 if packages_fit else 3), session.output
    assert session.status == (0 if packages_fit else 1), session.output
    assert status == dict.fromkeys(STAGES.split(), 0), session.output
    assert found["compile"]["done"] == packages_fit
    assert any(line.split()[:1] == ["torch"] for line in found["facts"])
    assert found["tests"] == {"passed": 1, "failed": 0, "skipped": 0, "failures": []}
    assert {row["verdict"] for row in found["doctor"]["findings"]} == {"ok"}
    assert found["sanitizer"]["sanitize"]["wrong"] == 0
    assert found["sanitizer"].keys() == {"sanitize"}, "what has not run has no summary"
    assert {path.name for path in session.folder.iterdir() if path.is_dir()} == {"stages"}
    for name in STAGES.split():
        machine = session.stage(name)["machine"]
        assert machine["commit"] == "abc"
        assert {"date", "device", "torch", "versions"} <= machine.keys()


def test_the_docs_say_what_each_stage_of_the_session_takes() -> None:
    script = Path(path_of("gpu_session.sh")).read_text(encoding="utf-8")
    page = (ROOT / "docs" / "internals" / "gpu-results.md").read_text(encoding="utf-8")
    stages = script.partition('STAGES="\n')[2].partition('"')[0]
    assert [line.split()[0] for line in stages.splitlines()] == [*STAGES.split(), "replicas"]
    for name, least, most in map(str.split, stages.splitlines()):
        (row,) = (
            line for line in page.splitlines() if line.startswith("| `") and name in line[:30]
        )
        assert f"| {least} s | {most} s |" in row


@for_bash
def test_a_session_goes_on_with_the_stages_that_have_no_result_of_this_commit(
    session: Session, tmp_path: Path
) -> None:
    assert (session.folder / "facts.log").read_text() == "of the first call"
    stages, machine = tmp_path / "stages", session.stage("facts")["machine"]
    stages.mkdir()
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "machine.json").write_text(json.dumps(machine))
    rows = {"facts": {}, "tests": {"commit": "other"}, "shared": {"device": "other"}, "capture": {}}
    for name, other in rows.items():
        row = {"stage": name, "again": name == "capture", "machine": machine | other}
        (stages / f"{name}.json").write_text(json.dumps(row))
    done = run("gpu_merge.py", str(tmp_path), "--waiting", *STAGES.split(), "replicas")
    assert done.stdout.split() == [name for name in STAGES.split() if name != "facts"]


@for_bash
def test_a_session_skips_what_takes_longer_than_the_time_that_is_left(tmp_path: Path) -> None:
    done = call_session(tmp_path, "60", "tests", "benchmark", DRY_RUN="1")
    assert "no time was left for: tests (130 s) benchmark (200 s)" in done.stdout, done.stderr
    assert {path.name for path in (tmp_path / "stages").iterdir()} == {"compile.json"}
    for arguments, why in ((("9",), "at least 25 seconds"), (("60", "blurb"), "got blurb")):
        done = call_session(tmp_path, *arguments, DRY_RUN="1")
        assert done.returncode == 2
        assert why in done.stderr


@for_bash
def test_dry_run_of_ranks_that_share_a_device_equals_the_undivided_batch(session: Session) -> None:
    found = session.results["session"]["shared"]
    assert found["nccl"] == "none"
    assert len(found["groups"]) == 2
    for group in found["groups"]:
        assert "error" not in group
        assert [row["batch"] for row in group["rows"]] == ["even", "uneven", "empty"]
        for row in group["rows"]:
            assert row["right"]
            assert row["bitwise over ranks"] == {"parameters": True, "running": True}
            assert row["from"].keys() == {"float64", "torch's layer", "our layer"}


@for_bash
def test_dry_run_of_compiled_ranks_equals_the_undivided_batch(session: Session) -> None:
    (group,) = session.results["session"]["compiled"]["groups"]
    found = {row["way"]: row for row in group["ways"]}
    assert found.keys() == {"eager", "one graph", "reduce-overhead", "unsynchronized"}
    for way, row in found.items():
        assert row["graphs"] == [0 if way == "eager" else 1] * 2
        assert row["step"] > 0
        assert way == "unsynchronized" or row["right"]


@for_bash
def test_dry_run_of_captured_groups_compares_every_replay(session: Session) -> None:
    groups = session.results["session"]["capture"]["groups"]
    assert [group["ranks"] for group in groups] == [1, 2]
    for group in groups:
        assert len(group["rows"]) == 2 * group["ranks"]
        assert all(row["right"] and row["bitwise"] == row["replays"] for row in group["rows"])


@for_bash
def test_dry_run_of_the_process_groups_times_ours_and_says_why_torch_has_no_layer(
    session: Session,
) -> None:
    (group,) = session.results["session"]["processes"]
    assert (group["backend"], group["ranks"]) == ("gloo", 2)
    assert "error" not in group
    assert len(group["rows"]) == 2
    for row in group["rows"]:
        assert row["found"]["ours"]["wall"] > 0
        assert "expected input tensor to be on GPU" in row["found"]["nn.SyncBatchNorm"]["error"]


@for_bash
def test_dry_run_of_the_benchmark_measures_every_contender_and_says_it_is_none(
    session: Session,
) -> None:
    log = (session.folder / "benchmark.log").read_text(encoding="utf-8")
    assert "NO GPU FIGURE WAS MEASURED" in log
    results = session.results
    assert results["dry_run"] is True
    assert results["aborted"] is None
    assert results["skipped"] == []
    formula = {"apex (formula)"}
    for row in results["cases"] + results["host"] + results["errors"]:
        assert {"ours", "torch native", "plain operations"} <= row["found"].keys()
        assert not any("error" in found for found in row["found"].values()), row
    for row in results["errors"]:
        assert formula <= row["found"].keys()
        assert max(row["found"]["apex (formula)"].values()) < 0.02
    assert any(formula <= row["found"].keys() for row in results["cases"])
    layouts = {(row["layout"], row["dtype"]) for row in results["cases"]}
    assert len(layouts) == 9
    assert any("floor" in target["target"] for target in results["targets"])
    shown = run("gpu_report.py", str(session.json))
    assert shown.returncode == 0, shown.stderr
    assert "Stages" in shown.stdout
    assert "Targets" in shown.stdout


@for_bash
def test_a_dry_run_is_drawn_as_one(session: Session, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run("gpu_plot.py", str(session.json), str(tmp_path / "picture.png"))
    assert done.returncode == 0, done.stderr
    assert "NO GPU FIGURE WAS MEASURED" in done.stdout
    assert "apex's formula" in done.stdout
    assert "| gloo, 2 | 2x8x6x6 float32 | ours: " in done.stdout


def test_the_tables_in_the_docs_are_those_of_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    results = ROOT / "benchmarks" / "results" / importlib.import_module("figures").H100
    picture = tmp_path / "picture.png"
    done = run("gpu_plot.py", str(results), str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    docs = ROOT / "docs"
    tables = done.stdout.split("\n\n")[1::2]
    pages = [docs / "speed.md", docs / "speed.md", docs / "internals" / "gpu-results.md"]
    assert len(tables) == len(pages)
    for table, page in zip(tables, pages, strict=True):
        assert table.count("\n") > 4
        assert table in page.read_text(encoding="utf-8"), f"{page} lacks\n{table}"


def test_results_without_a_benchmark_are_merged_and_shown(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    machine = {"commit": "abc", "device": "a GPU", "date": "2026-11-22T00:00:00+00:00"}
    (parts / "machine.json").write_text(json.dumps(machine))
    (parts / "tests.xml").write_text(
        "<testsuites><testsuite><testcase classname='a' name='b'><failure/></testcase>"
        "<testcase classname='a' name='c'/><testcase classname='a' name='d'><skipped/></testcase>"
        "</testsuite></testsuites>"
    )
    refused = [{"backend": "nccl", "ranks": 2, "rows": [], "error": "Duplicate GPU detected"}]
    (parts / "processes.json").write_text(json.dumps(refused))
    (tmp_path / "racecheck.log").write_text(
        "== racecheck\n229 of 324 cases in 40 s, 4021 comparisons, 0 wrong; skipped for lack of "
        "time: 95, from shape\n========= RACECHECK SUMMARY: 0 hazards displayed\n"
    )
    (tmp_path / "tests.log").write_text("1 failed\n")
    for name, status in (
        ("tests", "1"),
        ("processes", "1"),
        ("racecheck", "0"),
        ("capture", "124"),
    ):
        done = run("gpu_merge.py", str(tmp_path), "--stage", name, "--status", status)
        assert done.returncode == 0, done.stderr
    done = run("gpu_merge.py", str(tmp_path))
    assert done.returncode == 0, done.stderr
    path = tmp_path / "gpu-2026-11-22-no-benchmark-abc.json"
    found = json.loads(path.read_text(encoding="utf-8"))["session"]
    assert found["tests"] == {"passed": 1, "failed": 1, "skipped": 1, "failures": ["a::b"]}
    assert found["sanitizer"]["racecheck"] == {
        "cases": 229,
        "of": 324,
        "comparisons": 4021,
        "wrong": 0,
        "summary": "RACECHECK SUMMARY: 0 hazards displayed",
    }
    assert "capture" not in found, "a stage that was killed has left nothing"
    shown = run("gpu_report.py", str(path))
    assert shown.returncode == 0, shown.stderr
    for words in ("status 124", "failed: a::b", "Duplicate GPU", "left no results"):
        assert words in shown.stdout


def test_process_groups_that_hang_are_ended(tmp_path: Path) -> None:
    path = tmp_path / "processes.json"
    start = time.monotonic()
    done = run("gpu_processes.py", "--dry-run", "--seconds", "0.5", "--json", str(path))
    assert done.returncode == 1
    assert time.monotonic() - start < 10
    (group,) = json.loads(path.read_text(encoding="utf-8"))
    assert group["error"].startswith("ended after ")
    assert group["error"].endswith("status [-9, -9]")


def test_fodder_for_the_sanitizer_is_right_on_the_cpu() -> None:
    done = run("gpu_sanitize.py", "--device", "cpu", "--seconds", "10")  # as many as fit
    assert done.returncode == 0, done.stdout
    assert " comparisons, 0 wrong" in done.stdout.splitlines()[-1]


@for_bash
def test_session_without_a_device_compiles_then_ends_and_says_so(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    # if numba-cuda is installed, the simulator keeps it from compiling, which takes its time
    done = call_session(tmp_path, NUMBA_ENABLE_CUDASIM="1")
    assert done.returncode == 2
    assert "expected torch to see a CUDA device" in done.stderr
    assert "NO KERNEL CAN BE COMPILED: " in done.stdout
    assert "no device: kernels are compiled for compute capability 9.0" in done.stdout
    assert done.stdout.count("NO KERNEL") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["compile.log"]
