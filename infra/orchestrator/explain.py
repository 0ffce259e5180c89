"""What a run would do, and why: read only.

In: a plan, or all those of a sweep, and a workspace (which need not exist). Out: per stage ``run``,
``skip`` or ``reattach`` with a reason, and in what a stage differs from the most similar one that
is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from infra.jobs.dispatch import Router, router_to_look
from infra.orchestrator.observe import Observer, Patience
from infra.store.workspace import Workspace
from refiner_core.contract.plan import Plan, PlannedStage
from refiner_core.contract.planned import stage_changes
from refiner_core.contract.records import StageRecord, StageSpec
from refiner_core.contract.services import is_service

PlannedAction = Literal["run", "skip", "reattach"]


class StageForecast(NamedTuple):
    """What a run would do about a stage."""

    stage: PlannedStage
    action: PlannedAction
    reason: str


def observe_actions(
    plan: Plan, workspace: Workspace, router: Router | None = None
) -> list[StageForecast]:
    """What a run of the plan would do now, stage by stage. Writes nothing."""
    found = observe_stages([plan], workspace, router)
    return [found[stage.id] for stage in plan.stages]


def observe_stages(
    plans: Sequence[Plan], workspace: Workspace, router: Router | None = None
) -> dict[str, StageForecast]:
    """What runs of several plans would do now, each stage once: by id. Writes nothing.

    Of many plans the reasons of stages that were never run do not say which recorded stage is the
    nearest: that takes a look at all of them for each.
    """
    settings = plans[0].config.dispatch
    patience = Patience(settings.heartbeat_timeout_s, settings.hung_after_s)
    observer = Observer(workspace, router or router_to_look(settings, workspace), patience)
    stages = {stage.id: stage for plan in plans for stage in plan.stages}
    there = set(workspace.stage_ids())
    records, observed = observer.look(i for i in stages if i in there)
    found: dict[str, StageForecast] = {}
    for stage in stages.values():
        record, seen = records.get(stage.id), observed.attempts.get(stage.id)
        if record is not None and record.result is not None:
            made = record.result.finished_at[:19].replace("T", " ")
            damage = workspace.output_damage(stage.id)
            but = f", but {damage}: delete {workspace.layout.stage(stage.id).control} to redo it"
            reason = f"done on {made} UTC{but if damage else ''}"
            found[stage.id] = StageForecast(stage, "skip", reason)
        elif record is not None and seen is not None and seen.sight in ("live", "hung"):
            job = record.attempts[-1].job_id or "not submitted yet"
            how = "runs" if seen.running else "queues"
            reason = f"attempt {seen.number} {how} (job {job})"
            found[stage.id] = StageForecast(stage, "reattach", reason)
        elif not is_service(stage.id):
            why = _why_run(stage, record, workspace, compare=len(plans) == 1)
            found[stage.id] = StageForecast(stage, "run", why)
    for service in (s for s in stages.values() if s.id not in found):
        found[service.id] = _service_forecast(service, _asking(service, plans, found))
    return found


def _asking(
    service: PlannedStage, plans: Sequence[Plan], found: Mapping[str, StageForecast]
) -> list[StageForecast]:
    """The stages that wait for a server, each once."""
    asking = {
        stage.id: found[stage.id]
        for plan in plans
        for stage in plan.stages
        if any(plan.by_name[name].id == service.id for name in stage.after)
    }
    return list(asking.values())


def _service_forecast(stage: PlannedStage, asking: list[StageForecast]) -> StageForecast:
    """A server runs while somebody asks it."""
    names = list(dict.fromkeys(f.stage.name for f in asking if f.action != "skip"))
    if not names:
        return StageForecast(stage, "skip", "nobody asks it: all that would is done")
    return StageForecast(
        stage, "run", f"serves {stage.identity['serve.model']} to {', '.join(names)}"
    )


def explain_difference(stage: PlannedStage, workspace: Workspace) -> list[str]:
    """In what a stage differs from the most similar recorded one of its kind, one line each:
    ``grpo.beta: 0.001 → 0.01``. Empty if it is recorded itself or there is none of its kind."""
    nearest: list[str] | None = None
    for stage_id in workspace.stage_ids():
        if stage_id == stage.id:
            return []
        if not stage_id.startswith(f"{stage.kind}-"):
            continue
        record = workspace.read_record(stage_id)
        if record is None or record.spec.model != stage.model:
            continue
        lines = differences(record.spec, stage)
        if nearest is None or len(lines) < len(nearest):
            nearest = lines
    return nearest or []


def _why_run(
    stage: PlannedStage, record: StageRecord | None, workspace: Workspace, *, compare: bool
) -> str:
    if record is not None and record.attempts:
        last = record.attempts[-1]
        how = last.outcome.failure if last.outcome is not None else "killed"
        return f"attempt {last.number} ended ({how}); goes on from its last checkpoint, if any"
    lines = explain_difference(stage, workspace) if compare else []
    if not lines:
        return "never run"
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    return f"changed: {lines[0]}{more}"


def differences(old: StageSpec, new: PlannedStage) -> list[str]:
    """In what a planned stage differs from a recorded one, one line each."""
    lines = []
    if old.stage_version != new.version:
        why = stage_changes(new.kind, new.version, since=old.stage_version)
        said = f" ({why})" if why else ""
        lines.append(f"stage version: {old.stage_version} → {new.version}{said}")
    lines += _changed("", old.identity, new.identity)
    lines += _changed("source ", old.sources, new.sources, short=True)
    lines += _changed("input ", old.input_fingerprints, new.input_fingerprints, short=True)
    return lines


def _changed(
    prefix: str, old: Mapping[str, Any], new: Mapping[str, Any], *, short: bool = False
) -> list[str]:
    def text(values: Mapping[str, Any], key: str) -> str:
        if key not in values:
            return "(default)"
        return str(values[key])[:12] if short else str(values[key])

    keys = dict.fromkeys([*old, *new])
    return [
        f"{prefix}{key}: {text(old, key)} → {text(new, key)}"
        for key in keys
        if old.get(key) != new.get(key)
    ]
