"""The worker as a process: restarted by Slurm, stopped, taken over by a colleague."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.store import provenance
from infra.store.traces import read_metrics
from infra.store.workspace import SHARED, StageClaim, Workspace
from refiner_core.contract.records import Attempt, StageRecord
from tests.support.command import environment, wait_until
from tests.support.faulty_disk import FaultyDisk
from tests.support.one_life import one_life
from tests.support.plans import FAKE_WORKER, OWNER, small_plan
from tests.support.users import COLLEAGUE, STRANGER, needs_users, run_as

PLAN = small_plan("data")
STAGE = PLAN.by_name["data"]
STEPS = 8
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Its one stage was submitted to Slurm as job 7."""
    workspace = Workspace.open(tmp_path / "ws", tmp_path / "data")
    assert workspace.claim_attempt(STAGE, PLAN.config, {}, StageClaim(OWNER, "slurm"))
    job = {"job_id": "7", "executor": "slurm", "comment": "c"}
    workspace.layout.attempt(STAGE.id, 1).job.write_text(json.dumps(job))
    tell(workspace, steps=STEPS, step_s=0.05)
    return workspace


def tell(workspace: Workspace, **behaviour: object) -> None:
    (workspace.root / "behaviour.json").write_text(json.dumps({"data": behaviour}))


@pytest.fixture
def start(workspace: Workspace, tmp_path: Path) -> Iterator[Start]:
    """Starts the job's original command, as Slurm does, with what Slurm's commands say."""
    started: list[subprocess.Popen[str]] = []
    programs = tmp_path / "bin"
    programs.mkdir()

    def start_job(restart: int = 0, scontrol: str = "", sacct: str = "") -> subprocess.Popen[str]:
        for name, says in (("scontrol", scontrol), ("sacct", sacct)):
            (programs / name).write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
            (programs / name).chmod(0o755)
        settings = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
        if restart:
            settings["SLURM_RESTART_COUNT"] = str(restart)
        path = os.pathsep.join((str(programs), os.environ["PATH"]))
        process = subprocess.Popen(
            [sys.executable, str(FAKE_WORKER), "--workspace", str(workspace.root), STAGE.id, "1"],
            env={**environment(), **settings, "PATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start_job
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def attempts(workspace: Workspace) -> tuple[Attempt, ...]:
    return record(workspace).attempts


def record(workspace: Workspace) -> StageRecord:
    return workspace.read_record(STAGE.id)


def wait_for_step(workspace: Workspace, step: int) -> None:
    def reached() -> bool:
        return any(
            int(p.name.removeprefix("step-")) >= step and (p / "COMPLETE.json").exists()
            for p in workspace.layout.stage(STAGE.id).checkpoints.glob("step-*")
        )

    wait_until(reached, f"step {step}")


def assert_whole_story(workspace: Workspace, attempt: int) -> None:
    lines = read_metrics(workspace.layout.attempt(STAGE.id, attempt).metrics)
    assert [m.step for m in lines] == list(range(1, STEPS + 1))
    assert record(workspace).state == "done"


def test_a_killed_job_resumes_when_slurm_restarts_it(workspace: Workspace, start: Start) -> None:
    first = start()
    wait_for_step(workspace, 2)
    first.kill()
    second = start(restart=1, sacct="NODE_FAIL\nRUNNING")
    wait_for_step(workspace, 5)
    second.kill()
    third = start(restart=2)
    assert third.wait(400) == 0
    one, two, three = attempts(workspace)
    assert [a.outcome and a.outcome.failure for a in (one, two, three)] == [
        *("node_failure", "preempted", "none")
    ]
    assert [a.restart for a in (one, two, three)] == [0, 1, 2]
    assert [a.node for a in (one, two, three)] == ["n1"] * 3
    assert [a.job_id for a in (one, two, three)] == ["7"] * 3
    assert (one.outcome.step or 0) >= 2
    assert (one.seconds or 0) > 0, "known from its last heartbeat"
    assert (three.resumed_from_step or 0) >= 5
    assert_whole_story(workspace, 3)


def test_a_requeued_job_saves_and_keeps_its_attempt(workspace: Workspace, start: Start) -> None:
    """Its attempt stays open, so that no orchestrator submits a second job beside it."""
    worker = start(scontrol="JobId=7 JobState=COMPLETING Restarts=1")
    wait_for_step(workspace, 2)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(400) == 6
    assert record(workspace).state == "claimed"
    assert start(restart=1, sacct="PREEMPTED\nRUNNING").wait(400) == 0
    one, two = attempts(workspace)
    assert one.outcome.failure == "preempted"
    assert two.resumed_from_step == one.outcome.step, "the step that was under way was saved"
    assert_whole_story(workspace, 2)


@pytest.mark.parametrize(
    ("says", "number", "failure", "count"),
    [
        ("JobState=RUNNING TimeLimit=01:00:00 RunTime=00:50:00", signal.SIGUSR1, "time_limit", 2),
        ("JobState=COMPLETING Restarts=0", signal.SIGTERM, "cancelled", 1),
    ],
)
def test_a_signal_saves_and_is_classified(
    workspace: Workspace, start: Start, says: str, number: signal.Signals, failure: str, count: int
) -> None:
    worker = start(scontrol=f"JobId=7 {says}")
    wait_for_step(workspace, 2)
    worker.send_signal(number)
    assert worker.wait(400) == 6
    outcome = attempts(workspace)[0].outcome
    assert outcome.failure == failure
    saved = workspace.layout.stage(STAGE.id).checkpoints / f"step-{outcome.step:08d}"
    assert (saved / "COMPLETE.json").exists(), "the step that was under way is saved"
    assert start(restart=1).wait(400) == 0
    assert len(attempts(workspace)) == count
    if count == 2:
        assert attempts(workspace)[1].resumed_from_step == outcome.step
        assert_whole_story(workspace, 2)


def test_a_colleague_resumes_from_anothers_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second user takes over checkpoints, metrics and rollouts, and removes the first's."""
    needs_users()
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="refiner-shared-"))
    root, group = folder / "ws", 54_300
    os.chown(folder, STRANGER, group)
    folder.chmod(0o2775)
    monkeypatch.setenv(SHARED, str(root))
    monkeypatch.setattr(provenance, "versions", dict)
    for name in ("pyarrow.parquet", "infra.disk.manager"):
        importlib.import_module(name)  # other users may not read the interpreter's folder

    def live(after: int, fails_at: int) -> int | None:
        with FaultyDisk(root, fails_at, "full from then on").mounted():
            return one_life(root, after)

    try:
        assert run_as(STRANGER, live, 0, 140, groups=(group,), umask=0o002) == 5
        workspace = Workspace.read_only(root)
        (stage_id,) = workspace.stage_ids()
        assert list(workspace.layout.stage(stage_id).checkpoints.glob("step-*"))
        assert run_as(COLLEAGUE, live, 1, 0, groups=(group,), umask=0o002) == 0
        record = workspace.read_record(stage_id)
        assert record.state == "done"
        assert record.attempts[1].resumed_from_step is not None
        assert {p.stat().st_uid for p in root.rglob("*")} == {STRANGER, COLLEAGUE}
    finally:
        shutil.rmtree(folder)
