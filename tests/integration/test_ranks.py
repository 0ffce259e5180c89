"""A stage in several processes: one end ends all, and nothing outlives the worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from infra.host.processes import ProcessId
from infra.store.traces import read_metrics
from infra.store.workspace import StageClaim, Workspace
from refiner_core.contract.records import Attempt, StageRecord
from tests.support.command import ROOT, SMALL, Stage, environment, wait_until
from tests.support.command import start as start_command
from tests.support.listening import beyond_loopback, listening
from tests.support.plans import OWNER, small_plan

PLAN = small_plan("data")
STAGE = PLAN.by_name["data"]
WORKER = ROOT / "tests" / "support" / "ranks_worker.py"
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.open(tmp_path / "ws")


@pytest.fixture
def start(workspace: Workspace) -> Iterator[Start]:
    """Starts the next attempt with a behaviour."""
    started: list[subprocess.Popen[bytes]] = []

    def start_worker(**behaviour: object) -> subprocess.Popen[bytes]:
        for left in workspace.root.glob("rank-*"):
            left.unlink()
        (workspace.root / "behaviour.json").write_text(json.dumps({"steps": 3, **behaviour}))
        after = max(workspace.layout.stage(STAGE.id).attempt_numbers(), default=0)
        claim = StageClaim(OWNER, "local", after)
        assert workspace.claim_attempt(STAGE, PLAN.config, {}, claim) is not None
        number = str(after + 1)
        process = subprocess.Popen(
            [sys.executable, str(WORKER), "--workspace", str(workspace.root), STAGE.id, number],
            env={**environment(), "OMP_NUM_THREADS": "1", "TMPDIR": str(workspace.root)},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start_worker
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(400)


def record(workspace: Workspace) -> StageRecord:
    return workspace.read_record(STAGE.id)


def last(workspace: Workspace) -> tuple[Attempt, str]:
    """The newest attempt and its log."""
    attempt = record(workspace).attempts[-1]
    return attempt, workspace.layout.attempt(STAGE.id, attempt.number).log.read_text()


def rank(workspace: Workspace, number: int) -> int:
    """The process of a rank, once it has begun."""
    path = workspace.root / f"rank-{number}.pid"
    return int(wait_until(lambda: path.exists() and path.read_text(), f"rank {number}"))


def saved(workspace: Workspace) -> list[int]:
    found = workspace.layout.stage(STAGE.id).checkpoints.glob("step-*/COMPLETE.json")
    return sorted(int(p.parent.name.removeprefix("step-")) for p in found)


def launched_for(worker: int) -> list[psutil.Process]:
    """The worker and all that it has started, at whatever depth."""
    top = psutil.Process(worker)
    return [top, *top.children(recursive=True)]


def test_the_error_of_the_first_failing_rank_is_shown(workspace: Workspace, start: Start) -> None:
    """Rank 0 meets the consequence; rank 1 had the cause."""
    worker = start(steps=1000, fails=1)
    assert worker.wait(400) == 2
    attempt, log = last(workspace)
    outcome = attempt.outcome
    assert (outcome.failure, outcome.decision) == ("bad_configuration", "stop")
    assert outcome.message.startswith("told to fail")
    assert "\nrank 0 of 2 is here\n" in log
    assert "\n[rank 1] rank 1 of 2 is here\n" in log
    assert "fake_rank.py" in log, "the traceback of the rank"
    assert list(workspace.layout.stage(STAGE.id).checkpoints.glob(".tmp-*")) == []


def test_a_killed_rank_ends_the_attempt_and_it_resumes(workspace: Workspace, start: Start) -> None:
    worker = start(steps=1000, step_s=0.5)
    wait_until(lambda: len(saved(workspace)) >= 2, "two checkpoints")
    os.kill(rank(workspace, 1), signal.SIGKILL)
    assert worker.wait(400) == 1
    attempt, _ = last(workspace)
    assert (attempt.outcome.failure, attempt.outcome.decision) == ("killed", "resume")
    assert "Rank 1 " in attempt.outcome.message
    assert "SIGKILL" in attempt.outcome.message

    # Asked to stop as Slurm asks: every process, the worker or not. It saves, and can go on.
    worker = start(steps=1000, step_s=0.2)
    begun = max(saved(workspace))
    wait_until(lambda: max(saved(workspace)) > begun, "a checkpoint of the second attempt")
    for process in launched_for(worker.pid):
        process.terminate()
    assert worker.wait(400) == 6
    attempt, _ = last(workspace)
    assert (attempt.outcome.failure, attempt.outcome.decision) == ("interrupted", "resume")
    stopped = int((workspace.root / "rank-0.stopped").read_text())
    assert max(saved(workspace)) == stopped

    worker = start(steps=stopped + 2)
    assert worker.wait(400) == 0
    done = record(workspace)
    assert done.result.report == {"steps": stopped + 2, "begun": stopped}
    lines = read_metrics(workspace.layout.attempt(STAGE.id, 3).metrics)
    assert [m.step for m in lines] == list(range(1, stopped + 3))


def test_a_killed_worker_leaves_no_process_behind(workspace: Workspace, start: Start) -> None:
    worker = start(steps=1000)
    rank(workspace, 1)
    wait_until(lambda: saved(workspace), "a checkpoint")
    family = [ProcessId.of(p.pid) for p in launched_for(worker.pid)]
    assert len(family) >= 5, "worker, watchdog, agent, two ranks"
    worker.kill()
    worker.wait(400)
    for process in family:
        assert process.wait_ended(60), process


# ---------------------------------------------------------------- the real training

TRAINING = (
    *(option for option in SMALL if not option.startswith(("sft.", "grpo."))),
    *("sft.max_train_steps=8", "sft.eval_freq=8", "sft.save_freq=1", "--no-server"),
    *("sft.gradient_accumulation_steps=2", "sft.pack_length=512"),
)


def rank_1_of(stage: Stage) -> psutil.Process:
    """The process of rank 1 of a stage's newest attempt."""
    found = []
    for process in launched_for(stage.worker.pid):
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == "1":
                found.append(process)
    return found[-1]


@pytest.fixture
def call(
    tmp_path: Path, trained: Path, with_data: Callable[[Path], Path]
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``refiner run`` in this test's workspace; nothing of it is left at the end."""
    called: list[subprocess.Popen[str]] = []
    where = f"workspace={with_data(tmp_path / 'runs')}"

    def call_refiner(*overrides: str) -> subprocess.Popen[str]:
        model = f"model.name_or_path={trained}"
        called.append(start_command("run", "tiny", where, *TRAINING, model, *overrides))
        return called[-1]

    yield call_refiner
    for process in called:
        if process.poll() is None:
            process.kill()
            process.communicate()
    for kind in ("data", "sft"):
        stage = Stage(tmp_path / "runs", kind)
        if stage.attempts and stage.worker is not None and stage.worker.alive:
            stage.kill()


def test_training_in_two_processes_outlives_a_killed_rank(
    tmp_path: Path, call: Callable[..., subprocess.Popen[str]]
) -> None:
    """GRPO under ZeRO-3 does so on two nodes: test_rollout_nodes."""
    sft = Stage(tmp_path / "runs", "sft")
    process = call("stages=[data,sft]", "sft.nproc_per_node=2")
    wait_until(lambda: len(sft.steps()) >= 2 or process.poll() is not None, "two steps")
    assert listening(sft.worker.pid), "gloo does, as long as they train"
    assert beyond_loopback(sft.worker.pid) == []
    rank_1_of(sft).kill()
    _, told = process.communicate(timeout=400)
    assert process.returncode == 0, told
    outcomes = [json.loads((a / "outcome.json").read_text())["outcome"] for a in sft.attempts]
    assert [o["failure"] for o in outcomes] == ["killed", "none"]
    assert "Rank 1 " in outcomes[0]["message"]
    assert sft.steps() == list(range(1, 9)), "no step twice, none missing"
    report = sft.result()["report"]
    assert (report["ranks"], report["nodes"], report["engine"]) == (2, 1, "torch")
    assert report["resumed_on"] == []
