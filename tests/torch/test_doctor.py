"""The doctor of torch's layers: right on this machine, and never silent of what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import bad_ranks
import numpy as np
import pytest
import torch.distributed as dist
from world import needs_gloo

from syncbn_core import doctor as of_core
from syncbn_core.doctor import Case
from syncbn_torch import SyncBatchNorm
from syncbn_verify import doctor
from syncbn_verify.command import main


@needs_gloo
@pytest.mark.slow
@pytest.mark.timeout(280)  # it compiles many kernels, if it is the first that needs them
def test_this_machine_is_right_also_as_if_it_had_two_gpus() -> None:
    command = [sys.executable, "-m", "syncbn_torch", "doctor", "--json", "--pretend-gpus", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["facts"]["engines"]["gloo"] == "found"
    names = [finding["check"] for finding in found["findings"]]
    assert len(names) == 32
    assert "2 processes over gloo, bfloat16, NCHW" in names
    assert "2 GPUs over gloo, float32, channels_last" in names
    assert "2 GPUs over gloo, five steps under DistributedDataParallel" in names
    times = found["facts"]["timing"]
    assert "a layer alone takes" in times["cpu"]
    assert re.search(r"ResNet-50, .*: syncbn \d+ ms, without", times["2 GPUs over gloo"])


def test_a_layer_that_computes_wrongly_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = SyncBatchNorm.forward

    def wrong(self: Any, x: Any) -> Any:
        return forward(self, x) * (1 + 1e-9)

    monkeypatch.setattr(SyncBatchNorm, "forward", wrong)
    check = of_core.Check(
        "4 replicas", partial(doctor.in_replicas, Case("float64", "NCHW"), ["cpu"] * 4)
    )
    monkeypatch.setattr(doctor, "checks", lambda _: iter([check]))
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "  WRONG    4 replicas" in printed
    assert printed.endswith("something is wrong: please report it, with this text\n")


@pytest.mark.parametrize(
    ("work", "deadline", "words"),
    [
        (bad_ranks.one_dies, 100, "rank 0 did not end, and was killed; rank 1 ended with status 3"),
        (bad_ranks.one_raises, 100, "rank 1: OSError: no network"),
        (bad_ranks.one_hangs, 5, "rank 1 did not end, and was killed"),
    ],
    ids=["dies", "raises", "hangs"],
)
def test_a_rank_that_fails_is_named_and_the_others_end(
    work: Any, deadline: float, words: str, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=words):
        doctor.in_ranks(work, 2, "cpu", tmp_path, deadline)


def test_ranks_that_fail_start_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def fail(*_: Any) -> None:
        started.append(1)
        raise RuntimeError("rank 1 did not end in 120 s")

    monkeypatch.setattr(doctor, "in_ranks", fail)
    found = [of_core.examine(check) for check in doctor.over_ranks("ranks", "cpu", 2)]
    assert {finding.verdict for finding in found} == {"failed"}
    assert len(started) == 1
    assert "rank 1" in found[-1].detail


def save_results(rank: int, folder: Path, running_var: float, training: float) -> None:
    saved: dict[str, Any] = {doctor.TRAINING: np.array(training)}
    for case in doctor.cases():
        for parts in doctor.PARTS:
            results = case.right | {"running_var": case.right["running_var"] * running_var}
            for name in ("y", "dx"):  # rank 0 has the whole batch
                results[name] = results[name][: 0 if rank else None]
            for name in ("weight.grad", "bias.grad"):
                results[name] = results[name] * (rank == 0)
            saved |= {f"{case.name}, {parts}, {name}": v for name, v in results.items()}
    np.savez(folder / f"{rank}.npz", **saved)
    (folder / "times.txt").write_text("none")


@pytest.mark.parametrize("wrong", ["running statistics", "NaN"])
def test_what_is_wrong_on_the_last_rank_only_is_found(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ranks(work: Any, size: int, kind: str, folder: Path) -> None:
        save_results(0, folder, 1, 1e-15)
        off = wrong == "running statistics"
        save_results(1, folder, 1.1 if off else 1, 1e-15 if off else float("nan"))

    monkeypatch.setattr(doctor, "in_ranks", ranks)
    *layers, training = [of_core.examine(c) for c in doctor.over_ranks("ranks", "cpu", 2)]
    bad = layers if wrong == "running statistics" else [training]
    good = [training] if wrong == "running statistics" else layers
    assert {finding.verdict for finding in bad} == {"WRONG"}
    assert {finding.verdict for finding in good} == {"ok"}


def test_an_engine_that_is_not_there_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    for kind, name in (("cpu", "gloo"), ("cuda", "NCCL")):
        (finding, *_) = [of_core.examine(c) for c in doctor.over_ranks("ranks", kind, 2)]
        assert finding.verdict == "missing"
        assert name in finding.detail


def test_one_gpu_leaves_the_checks_of_several_out() -> None:
    (several,) = [check for check in doctor.checks(1) if check.name == "several GPUs"]
    assert of_core.examine(several).verdict == "skipped"
