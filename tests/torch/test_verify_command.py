"""`python -m syncbn_torch verify package.module:factory`: what it prints, and its exit status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from world import needs_gloo

from syncbn_verify import command

MODULE = """
import sys
import torch
from torch import nn
from syncbn_torch import convert_model

def plain():
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), torch.randn(4, 3, 6, 6)

def right():
    model, batch = plain()
    return convert_model(model), batch

def draws():
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)
    model, batch = right()
    return nn.Sequential(model, Noise()), batch

def late():
    import threading
    class Late(nn.Module):
        def forward(self, x):
            if len(x) == 1:
                threading.Event().wait(2)
            return x
    model, batch = right()
    return nn.Sequential(Late(), model), batch[:3]

def raises():
    return 1 / 0

def leaves():
    sys.exit(0)

def one_sample():
    model, batch = right()
    return model, batch[:1]

def too_little():
    return nn.Conv2d(3, 4, 1)

batch = torch.ones(2)
"""


def run(folder: Path, *arguments: str, launcher: str = "") -> subprocess.CompletedProcess[str]:
    package = folder / "mine"
    package.mkdir(exist_ok=True)
    (package / "models.py").write_text(MODULE)
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    return subprocess.run(
        [sys.executable, "-m", *launcher.split(), "syncbn_torch", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=100,
    )


Outcome = tuple[int, str, str]  # status, stdout, stderr


@pytest.fixture
def called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """The same in this process."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["syncbn_torch", *arguments])
        try:
            return command.run(), *capsys.readouterr()
        finally:
            for name in ("mine", "mine.models"):
                sys.modules.pop(name, None)

    return call


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What is on stderr, except that kernels are compiled and which step begins."""
    usual = ("syncbn compiles CPU kernels", "syncbn verify: ")
    return [line for line in done.stderr.splitlines() if not line.startswith(usual)]


def test_the_status_is_0_for_a_right_model_and_the_table_is_printed(tmp_path: Path) -> None:
    done = run(tmp_path, "verify", "mine.models:right", "--replicas", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 replicas with 1 + 1 + 1 + 1 samples, float64\n")
    assert "OK: 1 layer gives the results of the undivided batch" in done.stdout
    assert "syncbn verify: the step in 4 replicas" in done.stderr
    assert not told(done)


def test_the_status_is_1_for_a_wrong_model_and_the_layer_is_named(
    called: Callable[..., Outcome],
) -> None:
    status, printed, _ = called("verify", "mine.models:plain", "--dtype", "own")
    assert status == 1
    assert "2 replicas with 2 + 2 samples, float32" in printed
    assert "- 1: a plain nn.BatchNorm2d" in printed


def test_the_status_is_2_for_a_right_model_with_a_replica_that_comes_too_late(
    called: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNCBN_TIMEOUT", "0.2")
    status, printed, _ = called("verify", "mine.models:late")
    assert status == 2
    assert (
        "COULD NOT BE JUDGED:\n- The split step failed: syncbn_core.errors.CommTimeout: " in printed
    )
    assert "replica 0 waited 0.2 s in call 1 of layer '1.1'; missing: replica 1; to wait" in printed
    assert re.search(r"1\.1 .* not reached ", printed)
    assert "NOT OK" not in printed


def test_the_status_is_3_for_a_model_that_could_not_be_compared_as_a_whole(
    called: Callable[..., Outcome],
) -> None:
    status, printed, _ = called("verify", "mine.models:draws")
    assert status == 3
    assert "INCOMPLETE: 1 layer gives the results of the undivided batch" in printed
    assert "- the whole model: it draws random numbers" in printed


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("mine.models", "expected package.module:factory"),
        ("mine.nothing:right", "set PYTHONPATH"),
        ("mine.models:nothing", "'mine.models:nothing'; there is no such function in mine.models"),
        ("mine.models:batch", "a function that can be imported here, got 'mine.models:batch'"),
        ("mine/models.py:right", "expected package.module:factory"),
        (".models:right", "expected package.module:factory"),
        ("mine.models:leaves", "expected mine.models:leaves to return, but it called sys.exit(0)"),
        ("mine.models:too_little", "expected mine.models:too_little to return (model, batch), got"),
        ("mine.models:one_sample", "expected a batch of at least 2 samples, got 1"),
    ],
)
def test_the_status_is_2_for_what_cannot_be_checked_with_one_line(
    path: str, words: str, called: Callable[..., Outcome]
) -> None:
    status, printed, errors = called("verify", path)
    assert (status, printed) == (2, "")
    assert words in errors.splitlines()[-1]
    assert "Traceback" not in errors


def test_an_error_of_the_factory_comes_with_its_traceback_and_status_2(
    called: Callable[..., Outcome],
) -> None:
    status, _, errors = called("verify", "mine.models:raises")
    assert status == 2
    assert "ZeroDivisionError" in errors
    assert "return 1 / 0" in errors


def test_without_a_command_it_prints_help(called: Callable[..., Outcome]) -> None:
    status, printed, _ = called()
    assert status == 0
    assert "usage: python -m syncbn_torch" in printed
    assert "verify" in printed


@pytest.mark.slow
@needs_gloo
def test_under_torchrun_the_processes_take_the_parts_and_one_prints(tmp_path: Path) -> None:
    launcher = "torch.distributed.run --standalone --nproc-per-node 2 -m"
    done = run(tmp_path, "verify", "mine.models:right", launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks with 2 + 2 samples, float64") == 1


@pytest.mark.parametrize(("name", "status"), [("verify.md", 1), ("is-it-for-me.md", 1)])
def test_the_table_in_the_documents_is_what_is_printed(
    name: str, status: int, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# mymodels.*?)```", page, re.S)
    command, table = re.findall(
        r"```console\n\$ python -m syncbn_torch (.*?)\n(.*?)```", page, re.S
    )[0]
    (tmp_path / "mymodels.py").write_text(code)
    done = run(tmp_path, *command.split())
    assert done.returncode == status, done.stderr

    def without_rounding(text: str) -> str:
        return re.sub(r" +", " ", re.sub(r" (0|\de-1\d)\b", " rounding", text))

    assert without_rounding(done.stdout) == without_rounding(table)
