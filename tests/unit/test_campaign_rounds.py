"""Single rounds of an orchestrator, and cancels of runs that have none."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from flows.running import cancelling
from infra.host.processes import ProcessId, host_name
from infra.jobs.dispatch import LocalDispatcher, Router
from infra.jobs.dispatcher import AttemptRef, JobRequest, JobStatus, OpenAttempt
from infra.orchestrator import executor as ending
from infra.orchestrator.orchestrator import Orchestrator
from infra.store.orchestrators import wanted_by_others
from infra.store.workspace import StageClaim, Workspace
from refiner_core.contract.config import PublishConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import RunRecord, StageResult
from tests.support.plans import (
    OWNER,
    SOURCES,
    claim,
    orchestrator_on,
    run_record,
    small_config,
    small_plan,
)


class Cluster:
    """Jobs whose statuses the test decides."""

    executor = "slurm"

    def __init__(self, **status: Any) -> None:
        self.liveness = JobStatus(**status)
        self.released: list[AttemptRef] = []

    def check(self, stage: PlannedStage) -> None:
        """It takes everything."""

    def submit(self, requests: Sequence[JobRequest]) -> dict[AttemptRef, Exception]:
        return {}

    def look(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobStatus]:
        return {a.ref: self.liveness for a in attempts}

    def stop(self, attempt: OpenAttempt) -> bool:
        return True

    def kill(self, attempt: OpenAttempt) -> bool:
        return True

    def release(self, attempt: OpenAttempt) -> None:
        self.released.append(attempt.ref)


def campaign_of(workspace: Workspace, plan: Plan, *dispatchers: Any, **more: Any) -> Orchestrator:
    router = Router({d.executor: d for d in dispatchers}, lambda _: dispatchers[0].executor)
    return orchestrator_on(plan, workspace, router, run=run_record(workspace, plan), **more)


def claimed(workspace: Workspace, plan: Plan) -> PlannedStage:
    """`data`, with an attempt that a call of another host has submitted to Slurm."""
    stage = plan.by_name["data"]
    assert workspace.claim_attempt(stage, plan.config, {}, StageClaim(OWNER, "slurm")) is not None
    return stage


def events(campaign: Orchestrator, name: str) -> list[dict[str, Any]]:
    path = campaign.workspace.layout.run(campaign.source.shown[0].run.run).events
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [e for e in found if e["event"] == name]


def test_a_stage_says_why_its_job_cannot_be_seen(workspace: Workspace) -> None:
    """Its executor is not that of this call, or the scheduler does not answer."""
    plan = small_plan("data")
    claimed(workspace, plan)
    silent = Cluster(liveness="unknown", reason="Slurm has not said yet")
    for dispatcher, said in (
        (LocalDispatcher(workspace), "dispatch.executor=slurm"),
        (silent, "Slurm has not said yet"),
    ):
        campaign = campaign_of(workspace, plan, dispatcher)
        campaign.begin()
        campaign.step()
        view = campaign.views()["data"]
        assert not view.terminal
        assert said in view.message


def test_a_broken_call_has_ended(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may live on, in a notebook or a longer script."""
    plan = small_plan("data")
    claim(workspace, plan, "data")
    campaign = campaign_of(workspace, plan, Cluster(liveness="live"))
    campaign.begin()

    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(campaign._actor, "stop_jobs", broken)
    campaign._thread.start()
    with pytest.raises(RuntimeError, match="broken"):
        campaign.join()
    assert workspace.read_orchestrator(campaign.source.shown[0].run.run)["state"] == "ended"


@pytest.mark.parametrize(
    ("error", "traceback"),
    [
        (ConfigurationError("no such partition", expected="one that exists", fix="name it"), False),
        (RuntimeError("nobody thought of this"), True),
    ],
)
def test_refusals_show_no_traceback(
    workspace: Workspace,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    traceback: bool,
) -> None:
    def refuse(requests: Sequence[JobRequest]) -> dict[AttemptRef, Exception]:
        return {request.ref: error for request in requests}

    cluster = Cluster(liveness="dead")
    monkeypatch.setattr(cluster, "submit", refuse)
    campaign = campaign_of(workspace, small_plan("data", backoff_s=0.0), cluster)
    campaign.start()
    view = campaign.join()["data"]
    assert view.state == "failed"
    assert str(error) in view.message
    shown = [r for r in caplog.records if r.levelname == "WARNING" and r.exc_info]
    assert bool(shown) == traceback


def test_evaluations_during_training_give_way(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config("data", "grpo", "evaluate", "publish")
    grpo = replace(config.grpo, num_training_steps=2, save_freq=1)
    publish = PublishConfig(which="every-save")
    plan = make_plan(replace(config, publish=publish, grpo=grpo), SOURCES)
    evaluations = ("evaluate-base", "evaluate-grpo-step1")
    for stage in plan.stages:
        if stage.name not in evaluations and stage.kind in ("data", "grpo", "export"):
            claim(workspace, plan, stage.name)
            made = StageResult(1, 1, "output", (), {}, {}, 1.0, "then")
            workspace.publish_result(stage.id, made)
    submitted: dict[str, int] = {}

    def submit(requests: Sequence[JobRequest]) -> dict[AttemptRef, Exception]:
        submitted.update({r.stage_id: r.nice for r in requests})
        return {}

    cluster = Cluster(liveness="live")
    monkeypatch.setattr(cluster, "submit", submit)
    campaign = campaign_of(workspace, plan, cluster)
    campaign.begin()
    campaign.step()
    nices = [submitted[plan.by_name[name].id] for name in evaluations]
    assert nices == [0, config.dispatch.nice]
    assert config.dispatch.nice > 0


# ---------------------------------------------------------------- cancels without an orchestrator


class Scheduler(Cluster):
    """One job that runs, and a scheduler that does not always answer."""

    def __init__(self, answers: Sequence[bool]) -> None:
        super().__init__(liveness="unknown")
        self.answers, self.killed = list(answers), False

    def stop(self, attempt: OpenAttempt) -> bool:
        return False

    def kill(self, attempt: OpenAttempt) -> bool:
        self.killed = self.answers.pop(0) if self.answers else False
        self.liveness = JobStatus("dead" if self.killed else "unknown")
        return self.killed


@pytest.fixture
def run(workspace: Workspace) -> RunRecord:
    """A call whose orchestrator is gone; its one job works."""
    plan = small_plan("data")
    found = run_record(workspace, plan)
    workspace.write_run(found)
    stage = claimed(workspace, plan)
    workspace.start_attempt(stage.id, 1, {"process": str(ProcessId.of())})
    return found


def cancel(
    workspace: Workspace, run: RunRecord, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> cancelling.CancelOutcome:
    router = Router({"slurm": scheduler}, lambda _: "slurm")
    monkeypatch.setattr(ending, "make_router", lambda *_: router)
    monkeypatch.setattr(ending, "POLL_S", 0.01)
    return cancelling.cancel(workspace, run, wait_s=2.0)


def test_a_job_that_lives_on_is_not_closed(
    workspace: Workspace, run: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = cancel(workspace, run, Scheduler([]), monkeypatch)
    assert (outcome.ended, outcome.left) == (False, ("data",))
    attempt = workspace.read_attempt(run.stages["data"], 1)
    assert attempt is not None
    assert attempt.outcome is None
    assert workspace.stop_requested(run.stages["data"], 1) is not None, "its worker reads that"


def test_kills_repeat(
    workspace: Workspace, run: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = cancel(workspace, run, Scheduler([False, False, True]), monkeypatch)
    assert (outcome.ended, outcome.left) == (True, ())
    assert workspace.read_attempt(run.stages["data"], 1).outcome.failure == "cancelled"


@pytest.mark.parametrize("room_comes_back", [True, False])
def test_jobs_are_ended_on_a_full_disk(
    workspace: Workspace, run: RunRecord, monkeypatch: pytest.MonkeyPatch, room_comes_back: bool
) -> None:
    """The run has no orchestrator and the quota is full: the job must end all the same."""
    scheduler, real = Scheduler([True] * 1000), os.open

    def full(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & os.O_CREAT and not (room_comes_back and scheduler.killed):
            raise OSError(errno.EDQUOT, "Disk quota exceeded", str(path))
        return real(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", full)
    outcome = cancel(workspace, run, scheduler, monkeypatch)
    assert scheduler.killed
    assert outcome.by == "here"
    assert outcome.ended == room_comes_back
    assert (workspace.read_attempt(run.stages["data"], 1).outcome is not None) == room_comes_back


def test_stages_of_another_run_stay(
    workspace: Workspace, run: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publication by hand shares the export with the run that trains."""
    other = replace(run, run=f"{run.run}-other")
    workspace.write_run(other)
    me = {"process": str(ProcessId.of()), "host": host_name(), "state": "running"}
    workspace.write_orchestrator(other.run, me)
    outcome = cancel(workspace, run, Scheduler([True]), monkeypatch)
    assert workspace.read_record(run.stages["data"]).state == "claimed", "it goes on"
    assert outcome.stages == ()
    workspace.write_orchestrator(other.run, {**me, "process": "login9:77:1.00"})
    assert wanted_by_others(workspace, {run.run}) == {}
    workspace.write_orchestrator(other.run, me)
    named = cancelling.cancel(workspace, run, ["data"], wait_s=5)
    assert named.ended, "who names it means it"
