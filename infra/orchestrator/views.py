"""How a stage looks to people, from what was decided about it and what is recorded of it.

In: an action of the reconciler, the stage's record, its heartbeat. Out: a :class:`StageView`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from infra.orchestrator.actions import (
    Action,
    Block,
    CloseAttempt,
    Done,
    Fail,
    Launch,
    Pause,
    Release,
    Rest,
    Wait,
)
from infra.orchestrator.reconcile import PAUSES
from infra.orchestrator.timeline import first_line
from infra.store.workspace import Workspace
from refiner_core.contract.malformed import all_malformed
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import StageRecord, from_json
from refiner_core.contract.types import Progress
from refiner_core.contract.views import StageView, ViewState


class _State(NamedTuple):
    state: ViewState
    message: str = ""
    exit_code: int = 0


def view_of(
    action: Action,
    record: StageRecord | None,
    workspace: Workspace,
    *,
    owner: str,
    ended_before: int = 0,
    done_before: bool = False,
) -> StageView:
    """The view of one stage.

    ``owner`` is the call that asks; ``ended_before`` the newest attempt that had ended when it
    began, whose time does not count; ``done_before`` whether it was done by then.
    """
    stage = action.stage
    last = record.attempts[-1] if record is not None and record.attempts else None
    if isinstance(action, Rest):
        done_before = last is None or last.number <= ended_before
    now = _state_of(action, record, owner, done_before)
    shown = last.number if last is not None else 0
    if record is not None and record.result is not None:
        shown = record.result.attempt
    job_id = (
        next((a.job_id for a in record.attempts if a.number == shown), None) if record else None
    )
    report = record.result.report if record is not None and record.result is not None else {}
    doubt = all_malformed(report) if now.state in ("done", "skipped") else ""
    return StageView(
        name=stage.name,
        kind=stage.kind,
        fingerprint=stage.fingerprint,
        state=now.state,
        attempt=shown,
        job_id=job_id,
        progress=_progress(workspace, stage.id, shown),
        seconds=_seconds(workspace, stage.id, record, ended_before),
        message=f"warning: {doubt}" if doubt else now.message,
        log=str(workspace.layout.attempt(stage.id, shown).log) if shown else "",
        exit_code=now.exit_code,
        report=report,
    )


def views_in_outage(
    plan: Plan, views: Mapping[str, StageView], reason: str, *, leaves: bool
) -> dict[str, StageView]:
    """The last views (none: all wait) while no round can be made, for ``reason``.

    What it names, else what was under way, is paused; on leaving, all that is not over is left.
    """
    shown = dict(views) or {
        s.name: StageView(s.name, s.kind, s.fingerprint, "waiting") for s in plan.stages
    }
    open_ = [v for v in shown.values() if not v.terminal]
    named = [v for v in open_ if plan.by_name[v.name].id in reason]
    under_way = [v for v in open_ if v.state != "waiting"] or open_[:1]
    for view in open_ if leaves else named or under_way:
        message = f"{PAUSES} system outage, until it is over: {reason}"
        shown[view.name] = replace(view, state="paused", message=message)
        if leaves:
            message = f"left, though how it is could not be seen: {reason}"
            shown[view.name] = replace(view, state="interrupted", message=message, exit_code=6)
    return shown


def _state_of(action: Action, record: StageRecord | None, owner: str, done_before: bool) -> _State:
    if isinstance(action, Done):
        result = None if record is None else record.result
        remark = "" if result is None else str(result.report.get("remark", ""))
        return _State("skipped" if done_before else "done", remark)
    if isinstance(action, Rest):
        message = "nobody needs it now; it ends by itself" if action.live else ""
        return _State("skipped" if done_before else "done", message)
    if isinstance(action, Fail):
        return _State(action.state, action.outcome.message, action.outcome.exit_code or 1)
    if isinstance(action, Block):
        return _State(action.state, f"needs {action.by}", 6 if action.state == "interrupted" else 1)
    if isinstance(action, Pause) or (isinstance(action, Wait) and action.short):
        return _State("paused", action.reason)
    if isinstance(action, Release):
        return _State("queued", action.reason)
    if isinstance(action, Wait) and (action.attempt == 0 or action.queued):
        return _State("queued" if action.queued else "waiting", action.reason)
    if isinstance(action, Launch):
        last = record.attempts[-1].outcome if record is not None and record.attempts else None
        after = f" again: {first_line(last.message)}" if last is not None and last.message else ""
        return _State("waiting", f"is being submitted{after}")
    if isinstance(action, CloseAttempt) and action.outcome.failure == "disk_full":
        return _State("paused", action.outcome.message)  # its outcome is not written yet
    running = record is not None and record.attempts and record.attempts[-1].owner == owner
    message = action.outcome.message if isinstance(action, CloseAttempt) else ""
    if isinstance(action, Wait) and action.unseen:
        message = action.reason
    return _State("running" if running else "reattached", message)


def _progress(workspace: Workspace, stage_id: str, number: int) -> Progress | None:
    beat: Mapping[str, Any] = (number and workspace.read_heartbeat(stage_id, number)) or {}
    found = beat.get("progress")
    return None if found is None else from_json(Progress, found)


def _seconds(
    workspace: Workspace, stage_id: str, record: StageRecord | None, ended_before: int
) -> float:
    """Of work by the attempts of this call, by each worker's own clock."""
    total = 0.0
    for attempt in record.attempts if record is not None else ():
        if attempt.number <= ended_before:
            continue
        seconds = attempt.seconds
        if seconds is None:
            beat = workspace.read_heartbeat(stage_id, attempt.number) or {}
            seconds = beat.get("seconds")
        total += float(seconds or 0.0)
    return total
