"""Processes: identified by pid, start and boot; killed where they run; their niceness."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from infra.host import processes
from infra.host.processes import ProcessId
from infra.jobs.dispatch import LocalDispatcher
from infra.jobs.dispatcher import AttemptRef, JobRequest, OpenAttempt, WorkerCommand
from infra.store.workspace import Workspace
from refiner_core.contract.config import Resources
from tests.support.command import wait_until
from tests.support.plans import claim, small_plan

HOUR_S = 3600


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("step_s", [-HOUR_S, -5, 5, HOUR_S])
def test_a_step_of_the_clock_makes_no_process_another(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    """Set by NTP, or a virtual machine that was asleep: else a second worker would begin."""
    before = str(ProcessId.of(sleeper.pid))
    real = psutil._pslinux.boot_time  # the kernel gives a time that follows the clock
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: real() + step_s)
    assert ProcessId.parse(before).alive
    assert str(ProcessId.of(sleeper.pid)) == before


def test_a_reused_pid_is_another_process(sleeper: subprocess.Popen[bytes]) -> None:
    found = ProcessId.of(sleeper.pid)
    assert found == ProcessId.parse(str(found))
    assert not ProcessId(found.host, found.pid, found.started + 1, found.boot).alive
    assert not ProcessId(found.host, found.pid, found.started, "another-boot").alive
    assert not ProcessId("elsewhere", found.pid, found.started, found.boot).alive
    sleeper.kill()
    assert found.wait_ended(10), "its exit code need not be read"


def test_without_a_boot_id_the_clock_identifies_a_process(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Older versions have recorded none."""
    began = psutil.Process(sleeper.pid).create_time()
    host = ProcessId.of().host
    assert ProcessId.parse(f"{host}:{sleeper.pid}:{began:.2f}").alive
    assert not ProcessId.parse(f"{host}:{sleeper.pid}:{began - HOUR_S:.2f}").alive
    monkeypatch.setattr(processes, "_BOOT_ID", tmp_path / "none")
    found = ProcessId.of(sleeper.pid)
    assert "@" not in str(found)
    assert found.alive


def test_hidden_process(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """No file may be opened just now (EMFILE), or the kernel hides it."""
    found = ProcessId.of(sleeper.pid)
    real = Path.read_text

    def read_text(path: Path, *args: object, **more: object) -> str:
        if path.name == "stat":
            raise OSError(24, "Too many open files")
        return real(path, *args, **more)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert found.alive


def test_an_ended_process_can_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["sleep", "60"])
    found = ProcessId.of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    monkeypatch.setattr(ProcessId, "alive", property(lambda self: True))  # by the look before
    found.kill_group()


def test_a_local_job_belongs_to_its_host(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "ws")
    stage = claim(workspace, small_plan("data"), "data")
    attempt, ref = workspace.read_attempt(stage.id, 1), AttemptRef(stage.id, 1)
    dispatcher, here = LocalDispatcher(workspace), ProcessId.of(sleeper.pid)
    elsewhere = replace(here, host="elsewhere")

    def job(process: ProcessId | None) -> OpenAttempt:
        started = None if process is None else {"process": str(process)}
        return OpenAttempt(ref, attempt, started)

    def statuses() -> list[str]:
        return [dispatcher.observe([job(p)])[ref].liveness for p in (here, elsewhere, None)]

    assert statuses() == ["live", "unknown", "unknown"]
    assert dispatcher.kill(job(elsewhere)), "only its fence stops it"
    assert sleeper.poll() is None
    assert dispatcher.kill(job(here))
    assert sleeper.wait(30) == -signal.SIGKILL
    assert statuses() == ["dead", "unknown", "unknown"]


# ---------------------------------------------------------------- niceness


def test_a_local_job_runs_at_the_niceness_of_its_request(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "ws")
    stage = claim(workspace, small_plan("data"), "data")
    script, told = tmp_path / "tell.py", workspace.root / "told"
    script.write_text(f"import os\nopen({str(told)!r}, 'w').write(str(os.nice(0)))\n")
    worker = WorkerCommand(workspace.root, (str(script),))
    request = JobRequest(stage.id, 1, "refiner-nice", Resources(), nice=7)
    assert LocalDispatcher(workspace, worker).submit([request]) == {}
    assert wait_until(lambda: told.exists() and told.read_text(), "a job")
    assert int(told.read_text()) == os.nice(0) + 7
