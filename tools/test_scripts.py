"""The scripts of `benchmarks` run to their end."""

import json
from pathlib import Path

import pytest
from scripts import ROOT, run

pytestmark = pytest.mark.timeout(280)


def test_scaling_measures_fits_and_simulates(tmp_path: Path) -> None:
    done = run("scaling.py", "--processes", "2", "--rounds", "2", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "assumed, not measured" in done.stdout
    (path,) = tmp_path.glob("scaling-*.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    for found in results["measured"].values():
        assert {"all_gather 2048", "all_reduce 4"} <= found["2"].keys()
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


def test_benchmark_of_masks(tmp_path: Path) -> None:
    done = run("masks.py", "--rounds", "1", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("masks-*.json")
    assert len(json.loads(path.read_text(encoding="utf-8"))["rows"]) == 32


def test_benchmark_of_first_steps(tmp_path: Path) -> None:
    each = ["--cases", "planes", "--rounds", "1", "--against", str(ROOT)]
    done = run("cold.py", *each, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("cold-*.json")
    for found in json.loads(path.read_text(encoding="utf-8"))["cases"]["planes"].values():
        assert found["seconds"] > 0
        assert found["functions"] > found["files"] > 0


def test_benchmark_of_the_host_of_a_device(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core")
    few = ["--rounds", "2", "--steps", "20", "--against", str(ROOT)]
    done = run("device_host.py", *few, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("device-host-*.json")
    for found in json.loads(path.read_text(encoding="utf-8"))["cases"].values():
        assert found["torch"]["of_torch"] == 1
        assert found["syncbn"]["launches"] == found["against"]["launches"] > 0
        assert found["syncbn"]["low"] <= found["syncbn"]["median"]


def test_benchmark_of_networks(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("timm")
    done = run("cpu.py", "--quick", "--parts", "nets", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("cpu-*-quick-nets.json")
    for (row,) in json.loads(path.read_text(encoding="utf-8"))["nets"].values():
        assert row["faster"] > 0
        kept = row["kept_mib"]
        assert 0 < kept["ours"] <= kept["torch"] * 1.01
    assert "resnet18" in done.stdout


def test_benchmark_of_graphs(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("timm")
    arguments = ["--nets", "test_resnet", "--rounds", "1", "--backend", "aot_eager"]
    done = run("compiled.py", *arguments, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("compiled-*.json")
    (row,) = json.loads(path.read_text(encoding="utf-8"))["nets"]
    assert row["graphs"]["one graph"] == row["graphs"]["unsynchronized"] == 1
    assert row["graphs"]["with breaks"] > 1
    assert row["graphs"]["eager"] == 0
    assert row["over_eager"]["eager"] == 1


def test_benchmark_of_synchronization(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("timm")
    arguments = ["--nets", "test_resnet", "--rounds", "1", "--ranks", "2"]
    done = run("ddp.py", *arguments, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("ddp-*.json")
    (row,) = json.loads(path.read_text(encoding="utf-8"))["nets"]
    assert (row["net"], row["ranks"]) == ("test_resnet", 2)
    assert all(seconds > 0 for seconds in row["step"].values())


def test_benchmark_of_replicas(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("timm")
    arguments = ["--nets", "small", "resnet18", "--rounds", "1", "--output", str(tmp_path)]
    done = run("replicas.py", *arguments)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("replicas-*.json")
    small, resnet18 = json.loads(path.read_text(encoding="utf-8"))["nets"]
    assert (small["layers"], resnet18["layers"]) == (3, 20)
    assert all(seconds > 0 for row in (small, resnet18) for seconds in row["cpu"].values())


def test_revisions_are_compared() -> None:
    pytest.importorskip("rich")
    done = run("compare.py", str(ROOT), "--rounds", "2", "--threads", "1", "--shapes", "4x8x8x8")
    assert done.returncode == 0, done.stderr
    assert "geometric mean" in done.stdout
