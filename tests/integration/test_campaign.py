"""Whole runs with real jobs: after any death each stage is made once, and nothing is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.disk.manager import DiskManager
from infra.host.processes import ProcessId
from infra.orchestrator.observe import observe_actions
from infra.orchestrator.orchestrator import Orchestrator
from infra.orchestrator.timeline import read_events
from infra.store.traces import list_rollouts, read_metrics, read_rollouts
from infra.store.workspace import Workspace
from refiner_core.contract.config import DiskConfig, RetryConfig
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import StageRecord
from refiner_core.contract.types import StageView
from tests.support.command import ROOT, environment, wait_until
from tests.support.plans import fake_router, orchestrator_on, run_record, small_plan
from tests.support.quota import small_tmpfs

PATIENCE_S = 60.0


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    workspace = Workspace.open(tmp_path / "ws")
    yield workspace
    for path in workspace.layout.stages.glob("*/attempts/*/*.json"):
        if path.name in ("started.json", "job.json"):
            process = json.loads(path.read_text()).get("process")
            if process is not None:
                ProcessId.parse(process).kill_group()


def tell(workspace: Workspace, **behaviour: dict[str, Any]) -> None:
    (workspace.root / "behaviour.json").write_text(json.dumps(behaviour))


def campaign_on(workspace: Workspace, plan: Plan, **more: Any) -> Orchestrator:
    run = run_record(workspace, plan)
    disk_manager = DiskManager(workspace, plan.config.disk)
    return orchestrator_on(
        plan, workspace, fake_router(workspace), run=run, disk_manager=disk_manager, **more
    )


def run_to_end(workspace: Workspace, plan: Plan) -> dict[str, StageView]:
    campaign = campaign_on(workspace, plan)
    campaign.start()
    return campaign.join()


def orchestrator(workspace: Workspace, *stages: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.run_campaign", str(workspace.root), *stages],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def until(condition: Callable[[], Any], what: str) -> Any:
    return wait_until(condition, what, PATIENCE_S)


def journal(workspace: Workspace) -> list[tuple[str, str, str]]:
    """(word, stage, attempt) in the order in which it happened."""
    try:
        lines = (workspace.root / "journal.txt").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(w[2], w[3], w[4]) for w in map(json.loads, lines)]


def record(workspace: Workspace, plan: Plan, name: str) -> StageRecord:
    return workspace.read_record(plan.by_name[name].id)


def worker_of(workspace: Workspace, plan: Plan, name: str, attempt: int = 1) -> ProcessId | None:
    path = workspace.layout.attempt(plan.by_name[name].id, attempt).started
    started = workspace.read_control(path)
    return ProcessId.parse(started["process"]) if started else None


def steps_done(workspace: Workspace, plan: Plan, name: str, attempt: int = 1) -> int:
    return len(read_metrics(workspace.layout.attempt(plan.by_name[name].id, attempt).metrics))


# ---------------------------------------------------------------- all goes well


def test_stages_run_in_order_and_are_skipped_the_second_time(workspace: Workspace) -> None:
    plan = small_plan("data", "sft", "publish")
    views = run_to_end(workspace, plan)
    assert list(views) == [s.name for s in plan.stages]
    assert {v.state for v in views.values()} == {"done"}
    assert views["sft"].report["inputs"] == ["data"]
    assert all(v.attempt == 1 and v.seconds > 0 and Path(v.log).exists() for v in views.values())
    # A stage is done with its result; its worker says so in the journal a moment later.
    ends = len(plan.stages)
    until(lambda: [w[0] for w in journal(workspace)].count("end") == ends, "the last words")
    before = journal(workspace)
    assert {v.state for v in run_to_end(workspace, plan).values()} == {"skipped"}
    assert journal(workspace) == before
    assert {a.action for a in observe_actions(plan, workspace)} == {"skip"}
    run = workspace.run_ids()[0]
    events = [json.loads(x) for x in workspace.layout.run(run).events.read_text().splitlines()]
    assert {"claim", "submit", "stage"} <= {e["event"] for e in events}


def test_files_are_private_and_hold_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_averysecretvalue")
    before = os.umask(0)
    try:
        workspace = Workspace.open(tmp_path / "ws")
        assert {v.state for v in run_to_end(workspace, small_plan("data")).values()} == {"done"}
    finally:
        os.umask(before)
    assert list(workspace.root.rglob("printed.log"))
    for path in workspace.root.rglob("*"):
        assert not path.stat().st_mode & 0o022, path
        assert not path.is_file() or b"averysecret" not in path.read_bytes(), path


# ---------------------------------------------------------------- several at once


def test_two_orchestrators_on_one_plan_run_each_stage_once(workspace: Workspace) -> None:
    stages = ("data", "sft")
    tell(workspace, data={"steps": 20}, sft={"steps": 20})
    both = [orchestrator(workspace, *stages) for _ in range(2)]
    outputs = [json.loads(p.communicate(timeout=PATIENCE_S)[0]) for p in both]
    for views in outputs:
        assert {v["state"] for v in views.values()} <= {"done", "skipped"}
    begun = [stage for word, stage, _ in journal(workspace) if word == "begin"]
    assert sorted(begun) == sorted(stages)


# ---------------------------------------------------------------- deaths


def test_jobs_of_a_killed_orchestrator_run_on_and_are_reattached(workspace: Workspace) -> None:
    plan = small_plan("data", "sft")
    tell(workspace, data={"steps": 60, "step_s": 0.05})
    first = orchestrator(workspace, "data", "sft")
    worker = until(lambda: worker_of(workspace, plan, "data"), "the worker")
    os.killpg(first.pid, signal.SIGKILL)  # the whole terminal, not only the process
    first.wait()
    assert worker.alive
    assert [a.action for a in observe_actions(plan, workspace)] == ["reattach", "run"]
    campaign = campaign_on(workspace, plan)
    campaign.start()
    until(lambda: campaign.views()["data"].progress, "progress")
    views = campaign.join()
    assert {v.state for v in views.values()} == {"done"}
    assert views["data"].progress is not None
    assert views["data"].progress.done == 60
    events = read_events(workspace.layout.run(campaign.source.shown[0].run.run).events)
    states = [e["state"] for e in events if e["event"] == "stage" and e["stage"] == "data"]
    assert "reattached" in states
    assert [w[:2] for w in journal(workspace)].count(("begin", "data")) == 1


def test_a_killed_worker_is_resumed_from_its_last_checkpoint(workspace: Workspace) -> None:
    plan = small_plan("data")
    tell(workspace, data={"steps": 30, "step_s": 0.05, "save_every": 5})
    campaign = campaign_on(workspace, plan)
    campaign.start()
    until(lambda: steps_done(workspace, plan, "data") >= 8, "eight steps")
    worker = worker_of(workspace, plan, "data")
    os.kill(worker.pid, signal.SIGKILL)
    view = campaign.join()["data"]
    assert (view.state, view.attempt) == ("done", 2)
    first, second = record(workspace, plan, "data").attempts
    assert (first.outcome.failure, first.outcome.decision) == ("killed", "resume")
    assert second.resumed_from_step is not None
    assert second.resumed_from_step % 5 == 0
    assert view.report["first"] == second.resumed_from_step + 1
    metrics = read_metrics(workspace.layout.attempt(plan.by_name["data"].id, 2).metrics)
    assert [m.step for m in metrics] == list(range(1, 31))


@pytest.mark.slow
def test_kills_at_random_moments_lose_and_double_no_step(workspace: Workspace) -> None:
    dice = random.Random(0)
    plan = small_plan("data", retries=RetryConfig(killed=99))
    stage_id = plan.by_name["data"].id
    tell(workspace, data={"steps": 40, "step_s": 0.03, "save_every": 3, "bytes": 200_000})
    campaign = campaign_on(workspace, plan)
    campaign.start()
    for _ in range(6):
        time.sleep(dice.uniform(0.2, 1.4))
        number = campaign.views()["data"].attempt
        worker = worker_of(workspace, plan, "data", number) if number else None
        if worker is not None and worker.alive:
            os.kill(worker.pid, signal.SIGKILL)
    view = campaign.join()["data"]
    assert view.state == "done"
    paths = workspace.layout.attempt(stage_id, view.attempt)
    assert [m.step for m in read_metrics(paths.metrics)] == list(range(1, 41))
    rollouts = [read_rollouts(p) for p in list_rollouts(paths.rollouts)]
    assert rollouts == [[{"text": f"step {n}"}] for n in range(1, 41)]
    assert len(list(workspace.layout.stage(stage_id).checkpoints.iterdir())) <= 2


def run_dying(workspace: Workspace, dies_at: int) -> int:
    """Run data and SFT with an orchestrator that dies at an operation (0: never); its exit code."""
    script = ROOT / "tests" / "support" / "dying_campaign.py"
    command = [sys.executable, str(script), str(dies_at), str(workspace.root), "data", "sft"]
    code = subprocess.run(command, env=environment(), timeout=PATIENCE_S, check=False).returncode
    assert code in (0, -9)
    return code


def assert_done_once(workspace: Workspace) -> None:
    """All is done, each step once, and no stage twice at a time."""
    plan = small_plan("data", "sft")
    for stage in plan.stages:
        found = record(workspace, plan, stage.name)
        jobs = [a.job_id for a in found.attempts if a.job_id is not None]
        assert len(jobs) == len(set(jobs))
        metrics = read_metrics(workspace.layout.attempt(stage.id, found.result.attempt).metrics)
        assert [m.step for m in metrics] == list(range(1, 10))
        words = [
            (word, attempt) for word, name, attempt in journal(workspace) if name == stage.name
        ]
        for begin, end in zip(words[::2], words[1::2], strict=True):
            assert (begin, end) == (("begin", begin[1]), (end[0], begin[1])), words


@pytest.fixture
def nine_steps(workspace: Workspace) -> Workspace:
    work = {"steps": 9, "step_s": 0.1, "save_every": 3}
    tell(workspace, data=work, sft=work)
    return workspace


def test_kills_at_any_operation_lose_and_double_nothing(nine_steps: Workspace) -> None:
    """Of the orchestrator, before or after any file or job that it makes; `make prove` has ten
    thousand in virtual time."""
    rng = random.Random(1)
    deaths = [rng.randint(1, 40) for _ in range(4)]
    codes = [run_dying(nine_steps, number) for number in deaths]
    assert -9 in codes, "nobody was killed"
    assert run_dying(nine_steps, 0) == 0, f"after deaths at {deaths}"
    assert_done_once(nine_steps)


def test_a_claim_without_a_job_is_resumed(nine_steps: Workspace) -> None:
    """The orchestrator dies at the operation just before the worker is started."""
    plan = small_plan("data", "sft")
    first, number = nine_steps.layout.attempt(plan.by_name["data"].id, 1), 6
    while not first.intent.exists():
        assert run_dying(nine_steps, number) == -9
        number += 1
    assert not first.job.exists()
    assert run_dying(nine_steps, 0) == 0
    assert_done_once(nine_steps)
    found = record(nine_steps, plan, "data")
    assert found.result.attempt == len(found.attempts) == 2


# ---------------------------------------------------------------- stops


def test_ctrl_c_saves_and_the_same_command_resumes(workspace: Workspace) -> None:
    plan = small_plan("data", "sft")
    tell(workspace, data={"steps": 40, "step_s": 0.05, "save_every": 1000})
    process = orchestrator(workspace, "data", "sft")
    until(lambda: steps_done(workspace, plan, "data") >= 3, "three steps")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    views = json.loads(process.communicate(timeout=PATIENCE_S)[0])
    assert {n: (v["state"], v["exit_code"]) for n, v in views.items()} == {
        "data": ("interrupted", 6),
        "sft": ("interrupted", 6),
    }
    outcome = record(workspace, plan, "data").attempts[0].outcome
    assert (outcome.failure, outcome.exit_code) == ("interrupted", 6)
    views_again = run_to_end(workspace, plan)
    assert {v.state for v in views_again.values()} == {"done"}
    assert views_again["data"].report["first"] > 1, "work up to the stop was kept"


def test_a_worker_is_killed_after_the_grace(workspace: Workspace) -> None:
    plan = small_plan("data", grace_s=0.2)
    tell(workspace, data={"steps": 1, "step_s": 120})
    campaign = campaign_on(workspace, plan)
    campaign.start()
    worker = until(lambda: worker_of(workspace, plan, "data"), "the worker")
    campaign.request_stop("Ctrl-C")
    assert (campaign.join()["data"].state, worker.alive) == ("interrupted", False)
    assert not any(
        str(workspace.root) in " ".join(p.info["cmdline"] or ())
        for p in psutil.process_iter(["cmdline"])
        if p.pid != os.getpid()
    ), "nothing of the job is left"


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(("failure", "code", "attempts"), [("bug", 70, 2), ("bad_data", 3, 1)])
def test_a_final_failure_blocks(
    workspace: Workspace, failure: str, code: int, attempts: int
) -> None:
    """A bug is tried once more, since it may have been the machine; at the same step it stops."""
    plan = small_plan("data", "sft", "evaluate")
    tell(workspace, data={"steps": 5, "fail": failure, "fail_at_step": 3})
    views = run_to_end(workspace, plan)
    assert (views["data"].state, views["data"].attempt) == ("failed", attempts)
    assert views["data"].exit_code == code
    assert "told to fail" in views["data"].message
    assert "told to fail" in Path(views["data"].log).read_text()
    assert {v.state for n, v in views.items() if n != "data"} == {"blocked"}
    tell(workspace, data={})
    assert run_to_end(workspace, plan)["data"].state == "done", "fixed: the same command resumes"


def test_a_hung_worker_is_killed_and_resumed(workspace: Workspace) -> None:
    plan = small_plan("data", heartbeat_timeout_s=4.0)
    tell(workspace, data={"steps": 4, "step_s": 0.3})
    campaign = campaign_on(workspace, plan)
    campaign.start()
    until(lambda: steps_done(workspace, plan, "data") >= 1, "a step")
    worker = worker_of(workspace, plan, "data")
    os.kill(worker.pid, signal.SIGSTOP)  # as a process stuck in a dead file system
    view = campaign.join()["data"]
    assert view.state == "done"
    first, *more = record(workspace, plan, "data").attempts
    assert more
    assert first.outcome.failure == "hung"
    assert not worker.alive


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "disk", mib=24) as folder:
        yield folder


@pytest.mark.quota
@pytest.mark.parametrize(
    "behaviour",
    [{"steps": 4, "bytes": 7_000_000}, {"steps": 2, "output_bytes": 30_000_000}],
    ids=["checkpoint", "output"],
)
def test_a_full_disk_resumes_with_new_space(small_disk: Path, behaviour: dict[str, Any]) -> None:
    workspace = Workspace.open(small_disk / "ws")
    plan = small_plan("data", disk=DiskConfig(wait_min=0.0, hold_s=0.0))
    filler = small_disk / "filler"
    filler.write_bytes(os.urandom(12_000_000))
    tell(workspace, data=behaviour)
    view = run_to_end(workspace, plan)["data"]
    assert (view.state, view.exit_code) == ("interrupted", 5), view
    assert Workspace.open(small_disk / "ws").read_record(plan.by_name["data"].id) is not None
    leftovers = list((small_disk / "ws").rglob(".tmp-*"))
    assert not leftovers
    filler.unlink()
    tell(workspace, data={**behaviour, "output_bytes": 10})
    assert run_to_end(workspace, plan)["data"].state == "done"


@pytest.mark.quota
def test_a_stage_pauses_on_a_full_disk_and_continues(small_disk: Path) -> None:
    workspace, plan = Workspace.open(small_disk / "ws"), small_plan("data")
    filler = small_disk / "filler"
    filler.write_bytes(os.urandom(12_000_000))
    tell(workspace, data={"steps": 4, "bytes": 7_000_000})
    campaign = campaign_on(workspace, plan)
    campaign.start()
    until(lambda: campaign.views()["data"].state == "paused", "the pause")
    filler.unlink()
    view = campaign.join()["data"]
    assert (view.state, view.exit_code) == ("done", 0)
    # The worker itself waits for a while, and continues if there is space by then.
    *before, last = [
        a.outcome and a.outcome.failure for a in record(workspace, plan, "data").attempts
    ]
    assert last == "none"
    assert set(before) <= {"disk_full"}
