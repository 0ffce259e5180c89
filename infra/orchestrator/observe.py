"""Observes attempts: which run, are gone, or hang; and forecasts what a run would do now.

In: a workspace and a router of dispatchers. Out: records and
:class:`~infra.orchestrator.reconcile.Observation`, read in a consistent order (a record is read
*after* its attempt was seen dead, so its outcome is in it).

Whether a job lives is taken from process or scheduler. Whether it works is taken from its
heartbeat's *counter*, and more slowly its *progress*, timed by this process's own clock: clocks
are never compared.

Records do not vanish: an observation that finds less than the last one is an outage (``OSError``),
as is one that could not read.

:func:`observe_actions` only reads, from a workspace that need not exist: per stage ``run``,
``skip`` or ``reattach`` with a reason, and its difference from the most similar recorded stage.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple

from infra.host.processes import ProcessId
from infra.jobs.dispatch import Router, read_only_router
from infra.jobs.dispatcher import AttemptRef, JobStatus, Liveness, OpenAttempt
from infra.jobs.failures import classify_silent_end, outcome_of
from infra.orchestrator.reconcile import AttemptStatus, Observation
from infra.orchestrator.waiting import CollectedErrors
from infra.store.orchestrators import LOST_AFTER_S
from infra.store.workspace import Workspace
from refiner_core.contract.config import DispatchConfig
from refiner_core.contract.errors import WorkspaceError
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage, stage_changes
from refiner_core.contract.records import StageRecord, StageSpec
from refiner_core.contract.services import is_service

#: A worker ends a stage that stands still, and names the cause. It comes first by so many seconds.
_WORKER_S = 60.0


class Observer:
    """Keeps between observations only since when a sign of life has not changed.

    ``settings`` limit how long a worker may be silent.
    """

    def __init__(
        self,
        workspace: Workspace,
        router: Router,
        settings: DispatchConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.workspace, self.router = workspace, router
        self._settings, self._clock = settings, clock
        #: The newest sign of life of an attempt, and when this process first saw it.
        self._signs: dict[tuple[AttemptRef, str], tuple[tuple[Any, ...], float]] = {}
        self._done: dict[str, StageRecord] = {}  # a result never changes
        self._last: dict[str, StageRecord] = {}
        self._ready: set[tuple[str, int]] = set()
        self.open: dict[str, OpenAttempt] = {}
        self.statuses: dict[AttemptRef, JobStatus] = {}

    def observe(
        self, stage_ids: Iterable[str], trouble: CollectedErrors[str] | None = None
    ) -> tuple[dict[str, StageRecord], Observation]:
        """Records of the stages that have one, and the state of their newest attempts.

        Values for a stage that ``trouble`` names afterwards are not valid.

        Raises
        ------
        OSError, WorkspaceError
            A stage could not be observed, and there is no ``trouble`` to collect the error.
        """
        errors = CollectedErrors[str]() if trouble is None else trouble
        records: dict[str, StageRecord] = {}
        self.open = {}
        for stage_id in dict.fromkeys(stage_ids):
            with errors.at(stage_id):
                record = self._done.get(stage_id) or self._read(stage_id)
                if record is not None:
                    records[stage_id] = record
                    if (found := self.open_attempt(stage_id, record)) is not None:
                        self.open[stage_id] = found
        self.statuses = {}
        for executor in dict.fromkeys(a.attempt.executor for a in self.open.values()):
            attempts = [a for a in self.open.values() if a.attempt.executor == executor]
            with errors.at(*(a.ref.stage_id for a in attempts)):
                self.statuses |= self.router.observe(attempts)
        seen: dict[str, AttemptStatus] = {}
        for stage_id, attempt in self.open.items():
            if attempt.ref not in self.statuses:
                continue
            with errors.at(stage_id):
                status = self._see(attempt, self.statuses[attempt.ref])
                if status.liveness != "live":
                    records[stage_id] = self._read(stage_id) or records[stage_id]
                record = records[stage_id]
                if record.state == "claimed" and record.attempts[-1].number == attempt.ref.number:
                    seen[stage_id] = status
        for stage_id, record in records.items():
            if record.result is not None and stage_id not in errors:
                self._done[stage_id] = record
            for attempt_ in record.attempts if is_service(stage_id) else ():
                ref = AttemptRef(stage_id, attempt_.number)
                with errors.at(stage_id):
                    if ref in self._ready or self.workspace.layout.attempt(*ref).endpoint.exists():
                        self._ready.add(ref)
        if trouble is None:
            errors.raise_first()
        return records, Observation(seen, ready=frozenset(self._ready))

    def forget(self, stage_ids: Collection[str]) -> None:
        """Forget stages that are no longer needed."""
        for stage_id in stage_ids:
            self._done.pop(stage_id, None)
            self._last.pop(stage_id, None)
        self._signs = {k: s for k, s in self._signs.items() if k[0].stage_id not in stage_ids}

    def _read(self, stage_id: str) -> StageRecord | None:
        """The record of a stage, which only grows."""
        record, before = self.workspace.read_record(stage_id), self._last.get(stage_id)
        lacks = before is not None and (record is None or _lacks(record, before))
        if lacks and not self.workspace.has_damaged(stage_id):
            folder = self.workspace.layout.stage(stage_id).control
            raise _vanished(folder)
        if record is not None:
            self._last[stage_id] = record
        return record

    def open_attempt(self, stage_id: str, record: StageRecord) -> OpenAttempt | None:
        """The newest attempt, if it has neither outcome nor result."""
        if record.state != "claimed":
            return None
        last = record.attempts[-1]
        path = self.workspace.layout.attempt(stage_id, last.number).started
        started = self.workspace.read_or_set_aside(path)
        if started is None and last.started_at is not None:
            raise _vanished(path)
        return OpenAttempt(AttemptRef(stage_id, last.number), last, started)

    def _see(self, attempt: OpenAttempt, job: JobStatus) -> AttemptStatus:
        number, started = attempt.ref.number, attempt.started
        both = job.state and job.reason
        note = f"{job.state} ({job.reason})" if both else job.state or job.reason
        if started is not None and not attempt.begun:
            return AttemptStatus(number, "dead", job.local, job.end, note)
        status = self._status_of(attempt, job)
        end = job.end
        if status == "dead" and end is None and self._is_mine(attempt) and started is None:
            end = outcome_of("system_outage", "claimed, but its job could not be submitted")
        if status == "dead" and end is None:
            end = classify_silent_end(started is not None, "")
        return AttemptStatus(number, status, job.local, end, note, job.held, job.running)

    def _status_of(self, attempt: OpenAttempt, job: JobStatus) -> Liveness:
        owner = ProcessId.parse(attempt.attempt.owner)
        submitted = attempt.attempt.job_id is not None or attempt.started is not None
        if not submitted and owner.here:
            mine = self._is_mine(attempt)  # and this process does not submit while it observes
            if owner.alive and not mine and job.liveness in ("unknown", "dead"):
                return "live"  # it is being submitted
            if job.liveness == "unknown" and attempt.attempt.executor == "local":
                return "dead"  # claimed; its claimer died or failed before submitting it
        if job.liveness == "dead":
            # A worker that has started may be alive, whatever the scheduler reports of its job.
            silent = (
                self._silent_s(attempt) if job.lost and attempt.started is not None else (inf, inf)
            )
            return "unknown" if silent is None or silent[0] < LOST_AFTER_S else "dead"
        if job.liveness == "unknown" and attempt.attempt.executor != "local":
            return "unknown"  # it may queue; a scheduler that does not answer cannot end it either
        if job.liveness == "live" and not job.running:
            self._forget(attempt.ref)  # queued or suspended: it owes no sign of life
            return "live"
        heart, progress = self._silent_s(attempt) or (0.0, 0.0)
        limits = self._settings
        late = progress > limits.hung_after_s + _WORKER_S
        hangs = heart > limits.heartbeat_timeout_s or late
        return "hung" if hangs else "live"

    def _forget(self, ref: AttemptRef) -> None:
        for name in ("heart", "progress"):
            self._signs.pop((ref, name), None)

    def _is_mine(self, attempt: OpenAttempt) -> bool:
        return attempt.attempt.owner == str(ProcessId.of())

    def _silent_s(self, attempt: OpenAttempt) -> tuple[float, float] | None:
        """Seconds without heartbeat, and without progress; None if that cannot be read."""
        ref = attempt.ref
        try:
            beat = self.workspace.read_control(self.workspace.layout.attempt(*ref).heartbeat) or {}
        except WorkspaceError as error:
            if error.errno is not None:
                return None
            beat = {}
        begun = (attempt.attempt.job_id, attempt.started is not None)
        heart = self._unchanged_s(ref, "heart", (*begun, beat.get("counter")))
        return heart, self._unchanged_s(ref, "progress", (*begun, beat.get("told")))

    def _unchanged_s(self, ref: AttemptRef, name: str, value: tuple[Any, ...]) -> float:
        """Seconds for which this process has seen a sign of life unchanged."""
        now = self._clock()
        before, since = self._signs.get((ref, name), (None, now))
        if before != value:
            since = now
        self._signs[ref, name] = (value, since)
        return now - since


def _vanished(path: Path) -> WorkspaceError:
    error = WorkspaceError(
        f"Part of {path} that was there a moment ago is missing",
        expected="a mounted file system, and records that are not deleted while they are in use",
        fix="check that `ls` shows the folder; to delete it, end the run first and begin it again",
    )
    error.errno = errno.ENOENT
    return error


def _lacks(record: StageRecord, before: StageRecord) -> bool:
    """Tell whether something is missing that was recorded before."""
    if len(record.attempts) < len(before.attempts) or (before.result and not record.result):
        return True
    return any(
        getattr(new, name) is None and getattr(old, name) is not None
        for new, old in zip(record.attempts, before.attempts, strict=False)
        for name in ("job_id", "started_at", "outcome")
    )


PlannedAction = Literal["run", "skip", "reattach"]


class ActionForecast(NamedTuple):
    """Forecast of a run's action on a stage."""

    stage: PlannedStage
    action: PlannedAction
    reason: str


def observe_actions(plan: Plan, workspace: Workspace) -> list[ActionForecast]:
    """Forecast a run of the plan, stage by stage; read only."""
    found = observe_stages([plan], workspace)
    return [found[stage.id] for stage in plan.stages]


def observe_stages(plans: Sequence[Plan], workspace: Workspace) -> dict[str, ActionForecast]:
    """Forecast runs of several plans, each stage once, by id; read only.

    With many plans, the reason of a stage that never ran does not name the nearest recorded stage:
    that would take a comparison with all of them for each.
    """
    settings = plans[0].config.dispatch
    observer = Observer(workspace, read_only_router(settings, workspace), settings)
    stages = {stage.id: stage for plan in plans for stage in plan.stages}
    there = set(workspace.stage_ids())
    records, observed = observer.observe(i for i in stages if i in there)
    found: dict[str, ActionForecast] = {}
    for stage in stages.values():
        record, seen = records.get(stage.id), observed.attempts.get(stage.id)
        if record is not None and record.result is not None:
            made = record.result.finished_at[:19].replace("T", " ")
            damage = workspace.output_damage(stage.id)
            but = f", but {damage}: delete {workspace.layout.stage(stage.id).control} to redo it"
            reason = f"done on {made} UTC{but if damage else ''}"
            found[stage.id] = ActionForecast(stage, "skip", reason)
        elif record is not None and seen is not None and seen.liveness in ("live", "hung"):
            job = record.attempts[-1].job_id or "not submitted yet"
            how = "runs" if seen.running else "queues"
            reason = f"attempt {seen.number} {how} (job {job})"
            found[stage.id] = ActionForecast(stage, "reattach", reason)
        elif not is_service(stage.id):
            why = _why_run(stage, record, workspace, compare=len(plans) == 1)
            found[stage.id] = ActionForecast(stage, "run", why)
    for service in [s for s in stages.values() if s.id not in found]:
        # A server runs while a stage uses it.
        asking = (
            found[stage.id]
            for plan in plans
            for stage in plan.stages
            if any(plan.by_name[name].id == service.id for name in stage.after)
        )
        names = dict.fromkeys(f.stage.name for f in asking if f.action != "skip")
        action: PlannedAction = "run" if names else "skip"
        reason = f"serves {service.identity['serve.model']} to {', '.join(names)}"
        reason = reason if names else "not needed: all stages that use it are done"
        found[service.id] = ActionForecast(service, action, reason)
    return found


def explain_difference(stage: PlannedStage, workspace: Workspace) -> list[str]:
    """Differences from the most similar recorded stage of its kind, one line each:
    ``grpo.beta: 0.001 → 0.01``. Empty if it is recorded itself or none of its kind is."""
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
        return f"attempt {last.number} ended ({how}); resumes from its last checkpoint, if any"
    lines = explain_difference(stage, workspace) if compare else []
    if not lines:
        return "never run"
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    return f"changed: {lines[0]}{more}"


def differences(old: StageSpec, new: PlannedStage) -> list[str]:
    """Differences between a planned stage and a recorded one, one line each."""
    lines = []
    if old.stage_version != new.version:
        why = stage_changes(new.kind, new.version, since=old.stage_version)
        said = f" ({why})" if why else ""
        lines.append(f"stage version: {old.stage_version} → {new.version}{said}")
    sides: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any], int | None], ...] = (
        ("", old.identity, new.identity, None),
        ("source ", old.sources, new.sources, 12),
        ("input ", old.input_fingerprints, new.input_fingerprints, 12),
    )
    for prefix, before, after, longest in sides:
        for key in dict.fromkeys([*before, *after]):
            if before.get(key) != after.get(key):
                was, now = (str(v.get(key, "(default)"))[:longest] for v in (before, after))
                lines.append(f"{prefix}{key}: {was} → {now}")
    return lines
