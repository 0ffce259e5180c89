"""How a run stands, from records alone: a row per stage, who works on it, what went wrong.

In: a workspace and a run. Out: a :class:`RunStatus`, for `refiner status`, scripts and Python.
Reads only, so it works on a full or read-only disk; imports neither torch nor Prefect; and never
waits for a scheduler longer than it is told to: what it did not answer in time is said to be so.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flows.running.hurried import DiskStatus, HurriedProbe, HurriedRouter
from flows.running.which import find_run as find_run
from flows.running.which import is_finished as is_finished
from flows.running.which import unfinished_runs as unfinished_runs
from infra.disk.probe import Prober
from infra.jobs.dispatch import Router, router_to_look
from infra.jobs.failures import CLASSES, budget_left
from infra.jobs.local import LocalDispatcher
from infra.jobs.protocol import AttemptRef
from infra.orchestrator.history import devices_of, run_events, run_incidents
from infra.orchestrator.observe import Observer, Patience
from infra.orchestrator.reconcile import NO_ROOM, Seen
from infra.orchestrator.timeline import Incident, first_line
from infra.store.orchestrators import Orchestrator, orchestrator_of
from infra.store.workspace import Workspace
from refiner_core.contract.config import DiskConfig, DispatchConfig
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.malformed import all_malformed
from refiner_core.contract.records import RunRecord, StageRecord, from_json
from refiner_core.contract.services import is_service

#: How long a look waits for the scheduler. A healthy one answers sooner; a dead one in a minute.
SCHEDULER_WAIT_S = 0.6
#: Which of a stage's values is its main one, where it has it; else the first.
_MAIN = ("reward", "rewards/mean", "loss", "format_valid")
_ENDED_FULL = "its worker has ended without a word: there was no room on the disk"


@dataclass(frozen=True)
class StageStatus:
    """One stage of a run.

    Attributes
    ----------
    state
        ``waiting``, ``queued``, ``running``, ``suspended``, ``paused``, ``hung``, ``killed``,
        ``interrupted``, ``cancelled``, ``failed``, ``blocked``, ``done``; of a server ``idle``,
        where it does not run because nobody needs it.
    reason
        Why it waits or how its last attempt ended.
    step, total, metric
        Progress of the newest attempt by its last heartbeat: of its phase, and its main value.
    eta_s
        Seconds until ``total``, by the rate of this attempt so far; None where nobody can say.
    seconds
        Of work of the newest attempt.
    last_failure
        How the newest attempt that failed did so.
    """

    name: str
    id: str
    state: str
    reason: str = ""
    job_id: str | None = None
    node: str = ""
    attempt: int = 0
    attempts: int = 0
    gpus: int = 0
    phase: str = ""
    step: int | None = None
    total: int | None = None
    metric: str = ""
    eta_s: float | None = None
    seconds: float | None = None
    last_failure: str = ""


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment.

    ``scheduler`` says what is missing because a scheduler did not answer; empty if nothing is.
    ``outage`` is what the orchestrator waits for that it can neither read nor ask just now.
    """

    run: str
    recipe: str
    command: tuple[str, ...]
    started_at: str
    finished: bool
    orchestrator: Orchestrator
    stages: tuple[StageStatus, ...]
    incidents: tuple[Incident, ...]
    disk: DiskStatus | None
    scheduler: str = ""
    cancel_asked: Mapping[str, Any] | None = None
    outage: str = ""


def orchestrator_text(who: Orchestrator, finished: bool) -> str:
    """Who works on a run or a sweep, in a line."""
    if who.standing == "running":
        return f"orchestrator: {who.where}, since {who.at[:19].replace('T', ' ')} UTC"
    if who.standing == "elsewhere":
        return f"orchestrator: {who.where}, by its own word; it cannot be looked at from here"
    if finished:
        return "finished"
    why = {"gone": f"{who.where} is gone", "ended": f"it ended with exit code {who.exit_code}"}
    return f"orchestrator: not running ({why.get(who.standing, 'never begun')})"


class Watcher:
    """Looks at one run, once or again and again.

    Parameters
    ----------
    workspace, run
        What to look at.
    wait_s
        How long a look may wait for the scheduler, seconds.
    ask
        Whether a scheduler is asked at all; else its jobs are what records say of them.
    """

    def __init__(
        self,
        workspace: Workspace,
        run: RunRecord,
        wait_s: float = SCHEDULER_WAIT_S,
        *,
        ask: bool = True,
    ) -> None:
        self.workspace, self.run = workspace, run
        settings = from_json(DispatchConfig, run.config.get("dispatch") or {})
        self._retries = settings.retries
        patience = Patience(settings.heartbeat_timeout_s, settings.hung_after_s)
        router = router_to_look(settings, workspace) if ask else _records_alone(workspace)
        self._router = HurriedRouter(router, wait_s)
        self._observer = Observer(workspace, self._router, patience)
        config = from_json(DiskConfig, run.config.get("disk") or {})
        self._room = HurriedProbe(Prober(workspace.layout.data, config), wait_s)

    def look(self) -> RunStatus:
        """How the run stands now."""
        workspace, run = self.workspace, self.run
        records, observed = self._observer.look(run.stages.values())
        who = orchestrator_of(workspace, run.run)
        events = run_events(workspace, run.run) if who.works else []
        told = _last_words(events)
        rows = []
        for name in stage_names(run):
            stage_id = run.stages[name]
            record = records.get(stage_id)
            row = StageStatus(name, stage_id, "waiting", gpus=devices_of(run.config, _kind(name)))
            row = _with_attempts(row, record, workspace)
            state, reason = self._state(stage_id, record, observed.attempts.get(stage_id))
            if state in ("waiting", "interrupted", "failed", "idle") and name in told:
                state, reason = told[name]
            eta = row.eta_s if state == "running" else None
            rows.append(replace(row, state=state, reason=reason, eta_s=eta))
        return RunStatus(
            run=run.run,
            recipe=run.recipe,
            command=run.command,
            started_at=run.started_at,
            finished=all(row.state == "done" for row in rows if not is_service(row.id)),
            orchestrator=who,
            stages=tuple(rows),
            incidents=tuple(run_incidents(workspace, run)),
            disk=self._room.look(),
            scheduler=self._router.late,
            cancel_asked=workspace.cancel_asked(run.run) if who.works else None,
            outage=_outage(events),
        )

    def _state(
        self, stage_id: str, record: StageRecord | None, seen: Seen | None
    ) -> tuple[str, str]:
        if record is None or not record.attempts:
            return ("idle" if is_service(stage_id) else "waiting"), ""
        if record.result is not None:
            doubt = all_malformed(record.result.report)
            return "done", f"warning: {doubt}" if doubt else ""
        last = record.attempts[-1]
        if seen is None:
            outcome = last.outcome
            if outcome is None:
                return "interrupted", ""
            if outcome.decision == "finish":
                return "idle", first_line(outcome.message)
            state = "failed" if outcome.decision == "stop" else "interrupted"
            if state == "interrupted" and not budget_left(record.attempts, self._retries):
                state = CLASSES[outcome.failure].exhausted
            if outcome.failure == "cancelled":
                state = "cancelled"
            return state, first_line(outcome.message)
        if seen.running and seen.sight != "unknown" and last.has_room is False:
            return "paused", NO_ROOM if seen.sight == "live" else _ENDED_FULL
        if seen.sight in ("dead", "hung"):
            return {"dead": "killed", "hung": "hung"}[seen.sight], seen.note
        unknown = self._observer.sights.get(AttemptRef(stage_id, seen.number))
        if unknown is not None and unknown.sight == "unknown" and last.started_at is None:
            return "queued", self._router.late and "the scheduler did not answer in time"
        if seen.running:
            return "running", "" if seen.note.startswith("RUNNING") else seen.note
        return ("suspended" if seen.note.startswith("SUSPENDED") else "queued"), seen.note


def _records_alone(workspace: Workspace) -> Router:
    near = {"local": LocalDispatcher(workspace)}
    return Router(near, lambda _: "local", missing="no scheduler was asked")


# ---------------------------------------------------------------- rows


def _with_attempts(
    row: StageStatus, record: StageRecord | None, workspace: Workspace
) -> StageStatus:
    """Job, node, progress and last failure, by the newest attempt."""
    if record is None or not record.attempts:
        return row
    last = record.attempts[-1]
    if record.result is not None:
        last = next((a for a in record.attempts if a.number == record.result.attempt), last)
    beat = workspace.read_heartbeat(row.id, last.number) or {}
    progress = beat.get("progress") or {}
    step, total = progress.get("done"), progress.get("total") or None
    seconds = record.result.seconds if record.result else last.seconds or beat.get("seconds")
    failed = [a for a in record.attempts if a.outcome and a.outcome.failure != "none"]
    over = record.result is not None or last.outcome is not None
    return replace(
        row,
        job_id=last.job_id,
        node=last.node,
        attempt=last.number,
        attempts=len(record.attempts),
        phase=str(progress.get("phase") or ""),
        step=step,
        total=total,
        metric=metric_text(progress.get("values") or {}),
        eta_s=None if over else eta_s(beat, last.resumed_from_step),
        seconds=None if seconds is None else round(float(seconds), 1),
        last_failure=_failure(failed[-1]) if failed else "",
    )


def eta_s(beat: Mapping[str, Any], resumed_from: int | None) -> float | None:
    """Seconds until the total of a heartbeat's progress, by this attempt's own rate so far."""
    progress = beat.get("progress") or {}
    done, total = int(progress.get("done") or 0), int(progress.get("total") or 0)
    began, passed = resumed_from or 0, float(beat.get("moved_at_s") or beat.get("seconds") or 0.0)
    if total <= 0 or done <= began or passed <= 0:
        return None
    return round(max(0, total - done) * passed / (done - began), 1)


def _failure(attempt: Any) -> str:
    outcome = attempt.outcome
    step = f" at step {outcome.step}" if outcome.step else ""
    said = f": {first_line(outcome.message, 80)}" if outcome.message else ""
    return f"attempt {attempt.number}: {outcome.failure}{step}{said}"


def metric_text(values: Mapping[str, Any]) -> str:
    """The main value of a heartbeat's progress, such as ``reward 0.41``."""
    name = next((n for n in _MAIN if n in values), next(iter(values), None))
    return "" if name is None or values[name] is None else f"{name} {float(values[name]):.4g}"


def _last_words(events: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """What the orchestrator last said of stages that have no live job: it knows why they wait."""
    words = {}
    for event in events:
        if event.get("event") == "stage":
            state = str(event.get("state"))
            words[str(event["stage"])] = (state, str(event.get("message") or ""))
    waiting = ("waiting", "paused", "blocked", "failed", "interrupted")
    return {name: word for name, word in words.items() if word[0] in waiting}


def _outage(events: Sequence[Mapping[str, Any]]) -> str:
    """Why the orchestrator makes no rounds; empty if it does, or another one has begun since."""
    reason = ""
    for event in events:
        if event.get("event") == "outage":
            reason = str(event.get("reason"))
        elif event.get("event") in ("back", "stage") and event.get("state") != "paused":
            reason = ""
    return reason


def stage_names(run: RunRecord) -> list[str]:
    """Stages of a run, each after those that it may need; records list them by name."""
    return sorted(run.stages, key=lambda name: _order(run.stages[name]))


def _order(stage_id: str) -> int:
    """Position of a stage's kind in a plan; stage ids begin with the kind."""
    kind = stage_id.rpartition("-")[0]
    return KINDS[kind].order if kind in KINDS else sys.maxsize


def _kind(name: str) -> str:
    return name.partition("-")[0]
