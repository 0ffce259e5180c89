"""Small plans and open workspaces for tests of `infra`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.jobs.dispatch import LocalDispatcher, Router
from infra.jobs.dispatcher import WorkerCommand
from infra.orchestrator.members import Member, MemberSource
from infra.orchestrator.orchestrator import Orchestrator
from infra.store.workspace import StageClaim, Workspace
from refiner_core.contract.config import DiskConfig, DispatchConfig, RecipeConfig, TrackingConfig
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import RunRecord
from tests.support.probing import ProbingKeeper

SOURCES = {"data.sft": "rows-1", "data.rl": "rows-2", "model": "weights-1"}
OWNER = "elsewhere:1:1.00"
FAKE_WORKER = Path(__file__).with_name("fake_worker.py")


def small_config(*stages: str, disk: DiskConfig | None = None, **dispatch: object) -> RecipeConfig:
    """A recipe without a tracker and with quick polls."""
    return replace(
        RecipeConfig(recipe="small"),
        stages=stages or ("data", "sft"),
        tracking=TrackingConfig(wandb="disabled"),
        disk=disk or DiskConfig(watch_s=0.2, hold_s=0.5),
        dispatch=replace(DispatchConfig(poll_s=0.05, grace_s=20.0), **dispatch),
    )


def small_plan(*stages: str, disk: DiskConfig | None = None, **dispatch: object) -> Plan:
    """``data → sft`` unless other stages are named."""
    return make_plan(small_config(*stages, disk=disk, **dispatch), SOURCES)


def claim(workspace: Workspace, plan: Plan, name: str, after: int = 0) -> PlannedStage:
    """Claim the next attempt at a stage, as an orchestrator on another host."""
    stage = plan.by_name[name]
    inputs = {role: plan.by_name[n].id for role, n in stage.inputs.items()}
    attempt = workspace.claim_attempt(stage, plan.config, inputs, StageClaim(OWNER, "local", after))
    assert attempt is not None
    return stage


def run_record(workspace: Workspace, plan: Plan) -> RunRecord:
    """A call on the plan, with the code as it is imported."""
    return RunRecord(
        version=1,
        run=workspace.new_run_id(plan.recipe),
        recipe=plan.recipe,
        overrides=(),
        command=("refiner", "run", plan.recipe),
        config={},
        stages={s.name: s.id for s in plan.stages},
        code="",
        started_at="2026-11-21T00:00:00+00:00",
    )


def fake_router(workspace: Workspace, *module: str) -> Router:
    """Real jobs that run the fake worker (or another module)."""
    worker = WorkerCommand(workspace.root, module or (str(FAKE_WORKER),))
    return Router({"local": LocalDispatcher(workspace, worker)}, lambda _: "local")


def orchestrator_on(
    plan: Plan, workspace: Workspace, router: Router, *, run: RunRecord, **more: Any
) -> Orchestrator:
    """What works on a single run."""
    source = MemberSource([Member(plan, run, workspace)])
    more.setdefault("disk_manager", ProbingKeeper(workspace))
    return Orchestrator(source, workspace, router, plan.config, **more)
