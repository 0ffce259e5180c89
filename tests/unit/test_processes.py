"""Processes: identified by pid, start and boot; killed where they run; their niceness."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.host import processes
from infra.host.processes import ProcessId
from infra.jobs.dispatch import LocalDispatcher, gives_way
from infra.jobs.dispatcher import AttemptRef, JobRequest, OpenAttempt, WorkerCommand
from infra.store.workspace import Workspace
from refiner_core.contract.config import PublishConfig, Resources
from refiner_core.contract.plan import make_plan
from tests.support.command import wait_until
from tests.support.plans import SOURCES, claim, small_config, small_plan

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
        return [dispatcher.look([job(p)])[ref].liveness for p in (here, elsewhere, None)]

    assert statuses() == ["live", "unknown", "unknown"]
    assert dispatcher.kill(job(elsewhere)), "only its fence stops it"
    assert sleeper.poll() is None
    assert dispatcher.kill(job(here))
    assert sleeper.wait(30) == -signal.SIGKILL
    assert statuses() == ["dead", "unknown", "unknown"]


# ---------------------------------------------------------------- niceness


#: What a job says of itself.
TELL = (
    "import json, os, psutil, sys\n"
    "group = '/proc/self/autogroup'\n"
    "print(json.dumps({'nice': os.nice(0), 'disk': psutil.Process().ionice()[1],\n"
    "    'session': open(group).read().split()[-1] if os.path.exists(group) else None}))\n"
)


def after(script: str) -> tuple[dict[str, Any], str]:
    """What a process says of itself that has done ``script``, and what it warned of."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import json\nfrom infra.jobs.niceness import give_way\n{script}\n{TELL}",
        ],
        capture_output=True,
        text=True,
        check=True,
        start_new_session=True,
    )
    return json.loads(done.stdout), done.stderr


def test_a_job_gives_way_for_processor_session_and_disk() -> None:
    before, _ = after("")
    found, said = after("give_way(5)")
    assert (found["nice"], found["disk"]) == (before["nice"] + 5, 7)
    if before["session"] is not None and os.geteuid() == 0:
        assert found["session"] == "5", "else it counts inside the job's own session only"
    assert said == ""
    found, said = after("import os\nos.getuid() or os.setuid(65534)\ngive_way(-20)")
    assert "could not be lowered fully" in said, "a missing right ends no job"
    assert found["nice"] >= 0


def test_what_moves_bytes_gives_way_and_what_a_run_waits_for_does_not() -> None:
    config = small_config("data", "sft", "grpo", "evaluate", "publish")
    publish = PublishConfig(which="every-save")
    grpo = replace(config.grpo, num_training_steps=2, save_freq=1)
    plan = make_plan(replace(config, publish=publish, grpo=grpo), SOURCES)
    found = {stage.name for stage in plan.stages if gives_way(plan, stage)}
    assert found == {
        *("export-step1", "publish-step1", "evaluate-grpo-step1", "card-step1"),
        *("publish", "card", "card-progression"),
    }


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
