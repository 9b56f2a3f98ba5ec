"""The doctor of torch's layers: right on this machine, and never silent of what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import bad_ranks
import pytest
import torch.distributed as dist
from world import needs_gloo

from syncbn_core import doctor as of_core
from syncbn_torch import SynchronizedBatchNorm2d
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
    assert len(names) == 12
    assert {"2 processes over gloo, bfloat16", "2 GPUs over gloo, float32"} <= {*names}
    times = found["facts"]["timing"]
    wanted = r"steps of a network .*: without synchronization [\d.]+ ms, syncbn [\d.]+ ms"
    assert re.match(wanted, times["2 GPUs over gloo"])


def test_a_layer_that_computes_wrongly_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = SynchronizedBatchNorm2d.forward

    def wrong(self: Any, x: Any) -> Any:
        return forward(self, x) * (1 + 1e-3 * (len(x) < 10))  # in parts

    monkeypatch.setattr(SynchronizedBatchNorm2d, "forward", wrong)
    check = of_core.Check("4 replicas", partial(doctor.differs, "cpu", "float64", replicas=4))
    monkeypatch.setattr(doctor, "checks", lambda _: iter([check]))
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "  WRONG    4 replicas" in printed
    assert printed.endswith("something is wrong: please report it, with this text\n")


@pytest.mark.parametrize(
    ("work", "deadline", "words"),
    [
        (bad_ranks.one_dies, 100, "process 1 terminated with exit code 3"),
        (bad_ranks.one_raises, 100, "Process 1 terminated(?s:.*)OSError: no network"),
        (bad_ranks.one_hangs, 5, r"ranks \[(0, )?1\] did not end in 5 s, and were killed"),
    ],
    ids=["dies", "raises", "hangs"],
)
def test_a_rank_that_fails_is_named_and_the_others_end(
    work: Any, deadline: float, words: str
) -> None:
    with pytest.raises(Exception, match=words):
        doctor.in_ranks(work, (), 2, deadline)


def test_ranks_that_fail_start_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def fail(*_: Any) -> None:
        started.append(1)
        raise RuntimeError("rank 1 did not end in 120 s")

    monkeypatch.setattr(doctor, "in_ranks", fail)
    found = [of_core.examine(check) for check in doctor.over_ranks("ranks", "gloo", 2)]
    assert {finding.verdict for finding in found} == {"failed"}
    assert len(started) == 1
    assert "rank 1" in found[-1].detail


def test_what_is_wrong_over_ranks_is_told_by_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(work: Any, args: Any, size: int) -> None:
        found: dict[str, Any] = {key: [1e-15, "output", 1.0] for key in doctor.DTYPES}
        found |= {"float32": ["WRONG", "NOT OK: layer 1"], "step": "5 ms"}
        found["float16"] = ["failed", "could not be judged: CommTimeout"]
        (args[-1] / "found.json").write_text(json.dumps(found))

    monkeypatch.setattr(doctor, "in_ranks", ranks)
    found = [of_core.examine(check) for check in doctor.over_ranks("ranks", "gloo", 2)]
    assert [each.verdict for each in found] == ["ok", "WRONG", "ok", "failed"]
    assert found[1].detail == "NOT OK: layer 1"


def test_a_deadline_is_no_wrong_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SYNCBN_TIMEOUT", "0.2")
    forward, late = SynchronizedBatchNorm2d.forward, threading.Event()

    def waits(self: Any, x: Any) -> Any:
        if self._replica_sync is not None and not self._replica_sync.is_master:
            late.wait(60)
        return forward(self, x)

    monkeypatch.setattr(SynchronizedBatchNorm2d, "forward", waits)
    check = of_core.Check("4 replicas", partial(doctor.differs, "cpu", "float64", replicas=4))
    monkeypatch.setattr(doctor, "checks", lambda _: iter([check]))
    assert main(["doctor"]) == 2
    late.set()
    printed = capsys.readouterr().out
    assert "  failed   4 replicas" in printed
    assert (
        "could not be judged: syncbn_core.errors.CommTimeout: replica 0 waited 0.2 s in call 1 "
        "of layer '1'; missing: replica 1, replica 2, replica 3; to wait longer, raise "
        "SYNCBN_TIMEOUT, now 0.2" in printed
    )
    assert "WRONG" not in printed


def test_an_engine_that_is_not_there_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    for engine in ("gloo", "nccl"):
        (finding, *_) = [of_core.examine(c) for c in doctor.over_ranks("ranks", engine, 2)]
        assert finding.verdict == "missing"
        assert engine in finding.detail


def test_one_gpu_leaves_the_checks_of_several_out() -> None:
    (several,) = [check for check in doctor.checks(1) if check.name == "several GPUs"]
    assert of_core.examine(several).verdict == "skipped"
