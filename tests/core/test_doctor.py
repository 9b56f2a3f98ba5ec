"""The doctor of arrays: what it finds, which words and which exit status."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jsonschema
import numpy as np
import pytest

import syncbn_core
from syncbn_core import doctor
from syncbn_core.__main__ import main
from syncbn_core.backends.cuda import kernels
from syncbn_core.comm import SingleCommunicator
from syncbn_core.doctor import Case, Check, Finding, Outcome, status_of
from syncbn_core.errors import BackendError

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "doctor.schema.json").read_text(encoding="utf-8")
)


def test_the_version_names_the_commit_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def told() -> str:
        return doctor.facts()["versions"]["syncbn"]

    folder = tmp_path / "syncbn-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: syncbn\nVersion: 1\n")
    monkeypatch.syspath_prepend(tmp_path)

    monkeypatch.setattr("syncbn_core.__file__", str(tmp_path / "syncbn_core" / "__init__.py"))
    for text, words in (
        ("", ""),
        ('{"url": "file:///somewhere"}', ""),
        ('{"url": "", "vcs_info": {"vcs": "git", "commit_id": "0123abc"}}', ", commit 0123abc"),
    ):
        (folder / "direct_url.json").write_text(text)
        assert told() == syncbn_core.__version__ + words
    if shutil.which("git") is None:
        return
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    assert re.fullmatch(re.escape(syncbn_core.__version__) + ", commit [0-9a-f]{7,}", told())


def test_a_right_machine_is_told_so_in_json_and_in_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "versions", lambda packages: {})  # no CuPy
    monkeypatch.setenv("SYNCBN_TIMEOUT", "77")
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, SCHEMA)
    assert len(found["findings"]) == 3
    assert all(0 < finding["difference"] < 1e-3 for finding in found["findings"])
    assert found["facts"]["variables"]["SYNCBN_TIMEOUT"] == "77"
    if not Path("/proc/driver/nvidia").exists():  # who has no such GPU installs no driver
        assert found["facts"]["machine"]["GPUs"].startswith("none of NVIDIA")

    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n  ok       4 members in threads, ") == 3
    assert printed.endswith("all 3 checks give the results of the undivided batch\n")


def test_a_wrong_result_is_named_and_gives_1(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("float64")
    found = {name: values.copy() for name, values in case.right.items()}
    assert doctor.examine(Check("x", lambda: case.difference(found))).verdict == "ok"
    found["dx"][3, 2] += 1e-9
    finding = doctor.examine(Check("x", lambda: case.difference(found)))
    assert finding.verdict == "WRONG"
    assert " of dx, where 6e-14 is allowed" in finding.detail
    assert status_of([finding]) == 1
    found["dx"][3, 2] = np.nan
    finding = doctor.examine(Check("x", lambda: case.difference(found)))
    assert (finding.verdict, finding.difference) == ("WRONG", None)


def outcome(error: Exception) -> Finding:
    return doctor.examine(Check("x", partial(doctor.refuse, error)))


def test_each_kind_of_trouble_has_its_word_and_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Check("y", lambda: doctor.Difference(0.0, "y", 1e-9))
    kinds = {"failed": (OSError("no"), 2), "missing": (Outcome("missing", "no"), 3)}
    kinds["skipped"] = Outcome("skipped", "no"), 4
    for verdict, (error, status) in kinds.items():
        finding = outcome(error)
        assert finding.verdict == verdict
        assert finding.detail.endswith("no")
        checks = [right, Check("x", partial(doctor.refuse, error))]
        monkeypatch.setattr(doctor, "array_checks", partial(iter, checks))
        assert main(["doctor", "--json"]) == status
        jsonschema.validate(json.loads(capsys.readouterr().out), SCHEMA)
    all_kinds = [outcome(error) for error, _ in kinds.values()]
    assert status_of(all_kinds) == 2
    assert status_of(all_kinds[1:]) == 3


def test_a_gpu_without_numba_cuda_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "versions", lambda packages: {"cupy-cuda13x": "14"})
    monkeypatch.setattr(kernels, "device_count", lambda: 1)
    monkeypatch.setattr(kernels, "missing", lambda: ["numba-cuda is not installed"])
    findings = [doctor.examine(check) for check in doctor.array_checks() if "cuda" in check.name]
    assert {finding.verdict for finding in findings} == {"missing"}
    assert "numba-cuda" in findings[0].detail


def test_without_mpi_that_is_missing_and_one_rank_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_mpi() -> None:
        raise BackendError("expected mpi4py")

    monkeypatch.setattr(doctor, "MPICommunicator", no_mpi)
    assert main(["doctor", "--mpi"]) == 3
    assert "missing  ranks of MPI" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "MPICommunicator", SingleCommunicator)
    assert main(["doctor", "--mpi"]) == 4
    assert "mpirun -n 4" in capsys.readouterr().out


def test_a_machine_without_compilation_gets_a_report(fresh_python: Callable[..., str]) -> None:
    code = "from syncbn_core.__main__ import main; print(main(['doctor', '--json']))"
    *text, status = fresh_python(code, NUMBA_DISABLE_JIT="1").splitlines()
    findings = json.loads("\n".join(text))["findings"]
    assert [finding["verdict"] for finding in findings].count("missing") == 1
    assert "NUMBA_DISABLE_JIT" in findings[0]["detail"]
    assert status == "3"
