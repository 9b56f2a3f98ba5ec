"""The scripts of `benchmarks` run to their end; those for a GPU make a dry run without one."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"

pytestmark = pytest.mark.timeout(240)  # a dry run of all stages takes a minute on a quiet machine
for_bash = pytest.mark.skipif(sys.platform == "win32", reason="a script for bash")


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join([str(ROOT), str(ROOT / "adapters")])
    return subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": places, "PYTHONWARNINGS": "error"},
    )


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


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("session")
    wanted = {"DRY_RUN": "1", "PYTHON": sys.executable, "OUT": str(folder)}
    command = ["bash", str(FOLDER / "gpu_session.sh")]
    environment = os.environ | wanted
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, env=environment)
    return Session(done.returncode, done.stdout + done.stderr, folder)


@for_bash
def test_dry_run_of_the_session_leaves_one_json_of_all_stages(session: Session) -> None:
    found = session.results["session"]
    status = {stage["name"]: stage["status"] for stage in found["stages"]}
    packages_fit = not found["compile"]["missing"]
    assert status.pop("compile") == (0 if packages_fit else 3), session.output
    assert session.status == (0 if packages_fit else 1), session.output
    expected = "facts tests sanitize memcheck racecheck processes benchmark initcheck"
    assert status == dict.fromkeys(expected.split(), 0), session.output
    assert found["compile"]["done"] == packages_fit
    assert any(line.startswith("torch ") for line in found["facts"])
    assert found["tests"] == {"passed": 1, "failed": 0, "skipped": 0, "failures": []}
    assert found["sanitizer"]["sanitize"]["wrong"] == 0
    assert found["sanitizer"].keys() == {"sanitize"}, "what has not run has no summary"
    assert not (session.folder / "parts").exists()


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
    monkeypatch.syspath_prepend(FOLDER)
    results = FOLDER / "results" / importlib.import_module("figures").H100
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
    (parts / "stages.tsv").write_text("tests\t1\t9\t1 failed\nbenchmark\t124\t0\tno time\n")
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
    done = run("gpu_merge.py", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("gpu-*-no-benchmark-*.json")
    found = json.loads(path.read_text(encoding="utf-8"))["session"]
    assert found["tests"] == {"passed": 1, "failed": 1, "skipped": 1, "failures": ["a::b"]}
    assert found["sanitizer"]["racecheck"] == {
        "cases": 229,
        "of": 324,
        "comparisons": 4021,
        "wrong": 0,
        "summary": "RACECHECK SUMMARY: 0 hazards displayed",
    }
    shown = run("gpu_report.py", str(path))
    assert shown.returncode == 0, shown.stderr
    for words in ("no time", "failed: a::b", "Duplicate GPU", "left no results"):
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


def test_the_model_of_gpus_is_shown_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = run("gpu_model.py")
    assert shown.returncode == 0, shown.stderr
    for name in ("T4", "A10", "RTX 4090", "A100", "H100", "H200", "B200"):
        assert f"{name}, batch 256, by the model" in shown.stdout
    done = run("gpu_model.py", "--markdown", "--picture", str(tmp_path / "model.png"))
    assert done.returncode == 0, done.stderr
    assert "Predicted over measured" in done.stdout
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG")


def test_fodder_for_the_sanitizer_is_right_on_the_cpu() -> None:
    done = run("gpu_sanitize.py", "--device", "cpu", "--seconds", "10")  # as many as fit
    assert done.returncode == 0, done.stdout
    assert " comparisons, 0 wrong" in done.stdout.splitlines()[-1]


def test_scaling_measures_fits_and_simulates(tmp_path: Path) -> None:
    done = run("scaling.py", "--processes", "2", "--rounds", "2", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "assumed, not measured" in done.stdout
    (path,) = tmp_path.glob("scaling-*.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    for found in results["measured"].values():
        assert {"all_gather 2048", "all_reduce 4", "1 message"} <= found["2"].keys()
    assert all(waiting > 0 for _, _, waiting in results["simulated"])


def test_benchmark_of_the_cpu_measures_all_contenders_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    few = ["--quick", "--rounds", "2", "--shapes", "4x8x8x8", "--output", str(tmp_path)]
    other = ["--other", "torch.nn:BatchNorm2d", "--parts", "layers", "kernels"]
    picture = str(tmp_path / "speed.png")
    done = run("cpu.py", *few, *other, "--plot", picture)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("cpu-*-quick-layers-kernels.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    assert len(results["layers"]) == len(results["kernels"]) * 2 == len(results["dtypes"]) == 4
    for row in results["layers"]:
        assert row["found"].keys() == {"shipped", "kernels", "torch", "torch.nn:BatchNorm2d"}
        for found in row["found"].values():
            assert found["both"]["low"] <= found["both"]["median"] <= found["both"]["high"]
    assert Path(picture).read_bytes().startswith(b"\x89PNG")
    assert "Targets" in done.stdout


def test_revisions_are_compared() -> None:
    pytest.importorskip("rich")
    done = run("compare.py", str(ROOT), "--rounds", "2", "--threads", "1", "--shapes", "4x8x8x8")
    assert done.returncode == 0, done.stderr
    assert "geometric mean" in done.stdout


def test_call_counts_of_layers_and_replicas_are_shown() -> None:
    pytest.importorskip("rich")
    done = run("call_counts.py", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    for what in ("layer alone, our kernel: backward", "4 replicas of 8 layers: forward"):
        assert what in done.stdout


@for_bash
def test_session_without_a_device_compiles_then_ends_and_says_so(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    # if numba-cuda is installed, the simulator keeps it from compiling, which takes its time
    wanted = {"PYTHON": sys.executable, "OUT": str(tmp_path), "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run(
        ["bash", str(FOLDER / "gpu_session.sh")],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | wanted,
    )
    assert done.returncode == 2
    assert "expected torch to see a CUDA device" in done.stderr
    assert "NO KERNEL CAN BE COMPILED: " in done.stdout
    assert "no device: kernels are compiled for compute capability 9.0" in done.stdout
    assert done.stdout.count("NO KERNEL") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["compile.log"]
