"""The session on a GPU, run dry on a CPU: its stages, the JSON of all, and what is drawn of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import path_of, run

# a dry run takes 150 s on two quiet cores
pytestmark = [pytest.mark.slow, pytest.mark.timeout(290)]
FIRST = ("doctor", "ranks")


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, path_of("gpu_session.py"), str(folder), "--dry-run", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"SYNCBN_COMMIT": "abc"},
    )


def status(folder: Path) -> dict[str, int]:
    rows = (json.loads(path.read_text("utf-8")) for path in (folder / "stages").iterdir())
    return {row["stage"]: row["status"] for row in rows}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After a call that was told two stages, and one that did the rest."""
    folder = tmp_path_factory.mktemp("session")
    first = call(folder, "--stages", *FIRST)
    assert status(folder) == dict.fromkeys(FIRST, 0), first.stdout + first.stderr
    (folder / "ranks.log").write_text("of the first call")
    rest = call(folder, "--seconds", "2000")
    assert (first.returncode, rest.returncode) == (0, 0), rest.stdout + rest.stderr
    return folder


def results(folder: Path) -> Any:
    (path,) = folder.glob("gpu-*.json")
    return json.loads(path.read_text("utf-8"))


def test_a_call_goes_on_where_the_one_before_ended(folder: Path) -> None:
    names = "compile plans tests ranks processes benchmark memcheck racecheck initcheck doctor"
    assert status(folder) == dict.fromkeys(names.split(), 0)
    assert (folder / "ranks.log").read_text() == "of the first call"


def test_the_json_of_all_has_each_result(folder: Path) -> None:
    found = results(folder)
    session = found["session"]
    assert found["machine"]["commit"] == "abc"
    assert len(session["stages"]) == 10
    for name in ("tests", "ranks"):
        assert session[name] == {"passed": 1, "failed": 0, "skipped": 0, "failures": []}
    assert {row["verdict"] for row in session["doctor"]["findings"]} == {"ok"}
    rows = [row for group in session["plans"] for row in group["rows"]]
    assert {row["what"] for row in rows} == {"bits", "streams", "host", "told"}
    assert all(row["equal"] for row in rows if row["what"] == "bits")
    assert all("different ones" in row["told"] for row in rows if row["what"] == "told")
    (group,) = session["processes"]
    for row in group["rows"]:
        assert row["found"]["ours"]["wall"] > 0
        assert "expected input tensor to be on GPU" in row["found"]["nn.SyncBatchNorm"]["error"]
    for row in found["cases"] + found["host"] + found["errors"]:
        assert {"ours", "torch native", "plain operations"} <= row["found"].keys()
        assert not any("error" in each for each in row["found"].values()), row
    assert all("apex (formula)" in row["found"] for row in found["errors"])


def test_it_is_shown_and_drawn_as_a_dry_run(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (path,) = folder.glob("gpu-*.json")
    shown = run("gpu_report.py", str(path))
    drawn = run("gpu_plot.py", str(path), str(tmp_path / "picture.png"))
    assert (shown.returncode, drawn.returncode) == (0, 0), shown.stderr + drawn.stderr
    assert "Stages" in shown.stdout
    assert "NO GPU FIGURE WAS MEASURED" in drawn.stdout
    assert "| gloo, 2 | layer 2x8x6x6 float32 | ours: " in drawn.stdout


def test_what_takes_longer_than_the_time_that_is_left_waits(tmp_path: Path) -> None:
    done = call(tmp_path, "--seconds", "60", "--stages", "tests", "benchmark")
    assert "no time was left for: tests (130 s), benchmark (200 s)" in done.stdout, done.stderr
    assert status(tmp_path) == {}


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    done = run("gpu_session.py", str(tmp_path))
    assert done.returncode == 2
    assert "expected torch to see a CUDA device" in done.stderr
