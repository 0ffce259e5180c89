"""Processes are known again: by pid, start and boot, whatever the clock does meanwhile."""

from __future__ import annotations

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
from infra.jobs.protocol import AttemptRef, OpenAttempt
from infra.store.workspace import Workspace
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


def test_a_number_that_is_used_again_and_another_boot_are_other_processes(
    sleeper: subprocess.Popen[bytes],
) -> None:
    found = ProcessId.of(sleeper.pid)
    assert found == ProcessId.parse(str(found))
    assert not ProcessId(found.host, found.pid, found.started + 1, found.boot).alive
    assert not ProcessId(found.host, found.pid, found.started, "another-boot").alive
    assert not ProcessId("elsewhere", found.pid, found.started, found.boot).alive
    sleeper.kill()
    assert found.wait_gone(10), "also while nobody has asked for its exit code"


def test_what_older_versions_have_recorded_is_still_understood(
    sleeper: subprocess.Popen[bytes],
) -> None:
    began = psutil.Process(sleeper.pid).create_time()
    host = ProcessId.of().host
    assert ProcessId.parse(f"{host}:{sleeper.pid}:{began:.2f}").alive
    assert not ProcessId.parse(f"{host}:{sleeper.pid}:{began - HOUR_S:.2f}").alive


def test_a_process_that_cannot_be_looked_at_is_not_gone(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file may be opened just now (EMFILE), or the kernel hides it."""
    found = ProcessId.of(sleeper.pid)
    real = Path.read_text

    def read_text(path: Path, *args: object, **more: object) -> str:
        if path.name == "stat":
            raise OSError(24, "Too many open files")
        return real(path, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert found.alive


def test_without_a_name_for_the_boot_the_clock_must_do(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "_BOOT_ID", tmp_path / "none")
    found = ProcessId.of(sleeper.pid)
    assert "@" not in str(found)
    assert found.alive


def test_one_that_ends_while_it_is_to_be_killed_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = subprocess.Popen(["sleep", "60"])
    found = ProcessId.of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    monkeypatch.setattr(ProcessId, "alive", property(lambda self: True))  # by the look before
    found.kill_group()


def test_a_local_job_is_killed_and_one_of_another_host_with_its_number_is_not(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    workspace = Workspace.open(tmp_path / "ws")
    stage = claim(workspace, small_plan("data"), "data")
    record = workspace.read_record(stage.id)
    assert record is not None
    here = ProcessId.of(sleeper.pid)
    dispatcher = LocalDispatcher(workspace)

    def kill(process: ProcessId) -> bool:
        started = {"process": str(process)}
        return dispatcher.kill(OpenAttempt(AttemptRef(stage.id, 1), record.attempts[0], started))

    assert kill(replace(here, host="elsewhere")), "its fence must do"
    assert sleeper.poll() is None
    assert kill(here)
    assert sleeper.wait(30) == -signal.SIGKILL


def test_a_local_job_is_dead_only_if_it_ran_here(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    workspace = Workspace.open(tmp_path / "ws")
    stage = claim(workspace, small_plan("data"), "data")
    record = workspace.read_record(stage.id)
    assert record is not None
    here = ProcessId.of(sleeper.pid)
    dispatcher = LocalDispatcher(workspace)

    def sight(process: ProcessId | None) -> str:
        started = None if process is None else {"process": str(process)}
        ref = AttemptRef(stage.id, 1)
        return dispatcher.look([OpenAttempt(ref, record.attempts[0], started)])[ref].sight

    elsewhere = replace(here, host="elsewhere")
    assert [sight(p) for p in (here, elsewhere, None)] == ["live", "unknown", "unknown"]
    sleeper.kill()
    sleeper.wait()
    assert [sight(p) for p in (here, elsewhere, None)] == ["dead", "unknown", "unknown"]
