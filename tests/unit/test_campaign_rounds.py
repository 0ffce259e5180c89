"""Single rounds of an orchestrator: one observation, and the views and actions that follow."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.host.processes import ProcessId
from infra.jobs.dispatch import LocalDispatcher, Router
from infra.jobs.dispatcher import AttemptRef, JobRequest, JobStatus, OpenAttempt
from infra.jobs.failures import outcome_of
from infra.orchestrator.orchestrator import Orchestrator
from infra.store.workspace import StageClaim, Workspace
from refiner_core.contract.config import DiskConfig, PublishConfig
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import StageResult
from tests.support.plans import (
    OWNER,
    SOURCES,
    claim,
    orchestrator_on,
    run_record,
    small_config,
    small_plan,
)
from tests.support.probing import ProbingKeeper


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


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.open(tmp_path / "w")


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


def test_a_claim_that_was_not_submitted_is_closed(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full when it was submitted, and when that was to be noted."""
    plan, local = small_plan("data"), LocalDispatcher(workspace)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(local, "submit", lambda requests: {r.ref: full for r in requests})
    real, refused = workspace.void_attempt, [full]

    def void(*ref: Any) -> bool:
        if refused:
            raise refused.pop()
        return real(*ref)

    monkeypatch.setattr(workspace, "void_attempt", void)
    campaign = campaign_of(workspace, plan, local)
    campaign.begin()
    campaign.step()
    campaign.step()
    found = workspace.read_attempt(plan.by_name["data"].id, 1)
    assert found.outcome is not None, campaign.views()["data"]


def test_an_end_on_a_full_disk_keeps_its_class(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By when it can be written down there is room, and the scheduler has forgotten the job."""
    plan, full = small_plan("data", disk=DiskConfig(watch_s=0.0)), [True]
    stage = claimed(workspace, plan)
    workspace.start_attempt(stage.id, 1, {"process": OWNER})
    for name in ("close_attempt", "note_scheduler"):
        real = getattr(workspace, name)

        def write(*args: Any, real: Any = real) -> Any:
            if full:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")
            return real(*args)

        monkeypatch.setattr(workspace, name, write)
    disk_manager = ProbingKeeper(workspace)
    monkeypatch.setattr(
        disk_manager, "free_space", lambda *_: None if full else disk_manager.Nothing()
    )
    cluster = Cluster(liveness="dead", running=False, facts={"state": "FAILED"})
    campaign = campaign_of(workspace, plan, cluster, disk_manager=disk_manager)
    campaign.begin()
    for _ in range(5):
        campaign.step()
        assert campaign.views()["data"].state in ("running", "reattached", "paused")
    assert sum("cannot be recorded" in r.message for r in caplog.records) == 1
    full.clear()
    for _ in range(2):
        campaign.step()
    assert workspace.read_attempt(stage.id, 1).outcome.failure == "disk_full", "not killed"


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


def test_the_workers_own_outcome_counts_first(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last word arrives between the look and the closing."""
    plan = small_plan("data")
    stage = claimed(workspace, plan)
    workspace.start_attempt(stage.id, 1, {"process": str(ProcessId.of())})
    campaign = campaign_of(workspace, plan, Cluster(liveness="dead", running=False))
    real = workspace.close_attempt

    def close(*args: Any) -> bool:
        real(stage.id, 1, outcome_of("judge_outage", "the worker's own word"))
        return real(*args)

    monkeypatch.setattr(workspace, "close_attempt", close)
    campaign.begin()
    campaign.step()
    assert events(campaign, "closed") == []


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
