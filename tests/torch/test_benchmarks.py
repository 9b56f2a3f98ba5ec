"""The scripts of `benchmarks` run to their end; those for a GPU make a dry run without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join([str(ROOT), str(ROOT / "adapters")])
    return subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": places, "PYTHONWARNINGS": "error"},
    )


def test_dry_run_of_the_benchmark_measures_every_contender_and_says_it_is_none(
    tmp_path: Path,
) -> None:
    done = run("gpu.py", "--dry-run", "--seconds", "60", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "NO GPU FIGURE WAS MEASURED" in done.stdout
    (path,) = tmp_path.glob("gpu-*-cpu-dry-run-*.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    assert results["dry_run"] is True
    assert results["aborted"] is None
    assert results["skipped"] == []
    for row in results["cases"] + results["host"] + results["errors"]:
        assert {"ours", "torch native", "plain operations"} <= row["found"].keys()
        assert not any("error" in found for found in row["found"].values()), row
    layouts = {(row["layout"], row["dtype"]) for row in results["cases"]}
    assert len(layouts) == 9
    assert any("floor" in target["target"] for target in results["targets"])
    shown = run("gpu_report.py", str(path))
    assert shown.returncode == 0, shown.stderr
    assert "Targets" in shown.stdout


def test_the_table_in_the_docs_is_that_of_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = max(FOLDER.glob("results/gpu-*-H100-*-809ee92.json"))
    picture = tmp_path / "picture.png"
    done = run("gpu_plot.py", str(results), str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert done.stdout in (FOLDER.parent / "docs" / "speed.md").read_text(encoding="utf-8")


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


@pytest.mark.skipif(sys.platform == "win32", reason="a script for bash")
def test_session_without_a_device_ends_at_once_and_says_so(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    done = subprocess.run(
        ["bash", str(FOLDER / "gpu_session.sh")],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)},
    )
    assert done.returncode == 2
    assert "expected torch to see a CUDA device" in done.stderr
    assert list(tmp_path.iterdir()) == []
