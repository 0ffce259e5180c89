"""Records of one run, each read once, and a row per stage.

In: a workspace and a run. Out: a :class:`RunReading` (histories of its stages by name, its events,
its configuration), rows of stages with all their attempts, incidents, a state in words. Other reads
for the report go through :meth:`RunReading.tried`, so that a damaged file costs only its own part.
States are those of `refiner status`, but no scheduler is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from flows.running.status import RunStatus, RunWatcher, StageStatus, orchestrator_text, stage_names
from flows.sweeping.budget import ResourceUsage, UsageReader
from infra.disk.inventory import edges_of
from infra.host.secrets import masked
from infra.orchestrator.timeline import (
    StageHistory,
    first_line,
    incidents_of,
    last_step,
    run_events,
    stage_history,
)
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.records import Attempt, RunRecord, StageResult, from_json, picked
from refiner_core.contract.services import is_service
from refiner_core.report.printing import counted
from refiner_core.report.run.run_report import UNDER_WAY, Row, StageRow

T = TypeVar("T")
P = ParamSpec("P")
#: Errors from reading a damaged, half-deleted or foreign file.
UNREADABLE = (RefinerError, OSError, ValueError, KeyError, TypeError, AttributeError)


class RunReading:
    """Records of a run.

    Attributes
    ----------
    histories
        Stage name -> its record and heartbeats, in the order of work; only stages that have begun.
    unreadable
        Stage name -> reason why its records cannot be read.
    warnings
        Messages on unreadable records; grows while parts of the report are made.
    """

    def __init__(self, workspace: Workspace, run: RunRecord) -> None:
        self.workspace, self.run = workspace, run
        self.names = stage_names(run)
        self.warnings: list[str] = []
        self.unreadable: dict[str, str] = {}
        self.histories: dict[str, StageHistory] = {}
        for name in self.names:
            try:
                history = stage_history(workspace, run, name)
            except UNREADABLE as error:
                self.unreadable[name] = said(error)
                self.warnings.append(f"{name} is left out: {said(error)}")
                continue
            if history is not None:
                self.histories[name] = history

    def tried(self, what: str, read: Callable[P, T], *args: P.args, **more: P.kwargs) -> T | None:
        """Result of ``read``; on an error None and a warning."""
        try:
            return read(*args, **more)
        except UNREADABLE as error:
            self.warnings.append(f"{what} could not be read: {said(error)}")
            return None

    @cached_property
    def config(self) -> RecipeConfig:
        """The recipe; the default for records without one."""
        found = self.tried("The recipe of the run", from_json, RecipeConfig, self.run.config)
        return found or RecipeConfig()

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The event log of the run."""
        log = self.tried("The event log of the run", run_events, self.workspace, self.run.run)
        return log or []

    def result(self, name: str) -> StageResult | None:
        """Result of a stage; None if it is not done."""
        history = self.histories.get(name)
        return None if history is None else history.record.result

    def output(self, name: str) -> Path | None:
        """Folder of that result's files."""
        folder = self.workspace.layout.stage(self.run.stages[name]).data
        return None if (result := self.result(name)) is None else folder / result.output_dir

    def skipped(self, name: str) -> bool:
        """True for a stage that was done before the run began."""
        result = self.result(name)
        return result is not None and result.finished_at < self.run.started_at

    def own(self) -> Iterator[str]:
        """Stages that this run has worked on."""
        return (name for name in self.histories if not self.skipped(name))

    def of_kind(self, *kinds: str) -> Iterator[tuple[str, StageHistory]]:
        """Stages of these kinds that have begun, in the order of work."""
        for name, history in self.histories.items():
            if history.record.spec.kind in kinds:
                yield name, history

    def config_of(self, name: str) -> RecipeConfig:
        """Configuration of the newest attempt at a stage."""
        history = self.histories.get(name)
        if history is None or not history.record.attempts:
            return self.config
        number = history.record.attempts[-1].number
        newest = self.workspace.layout.attempt(history.stage_id, number)
        recorded = self.workspace.part(newest, "config")
        return from_json(RecipeConfig, recorded) if recorded else self.config


def said(error: Exception) -> str:
    """Text of an error, in one line."""
    text = error.what if isinstance(error, RefinerError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]


RunState = Literal["running", "done", "failed", "stopped"]
#: Number of earlier calls searched for the maker of a skipped stage.
_MOST_RUNS = 200
#: States of stages whose newest attempt is not running, even without a recorded end.
_GONE = ("killed", "hung", "interrupted", "failed", "cancelled")
#: Maximum length of an incident's or a state's text.
_WORD = 240


def look(reading: RunReading) -> RunStatus | None:
    """`refiner status` of the readable stages; None on an error."""
    readable = {n: i for n, i in reading.run.stages.items() if n not in reading.unreadable}
    run = replace(reading.run, stages=readable)
    return reading.tried(
        "The state of the run", lambda: RunWatcher(reading.workspace, run, ask=False).observe()
    )


def stage_rows(reading: RunReading, status: RunStatus | None) -> tuple[StageRow, ...]:
    """Every stage, in the order of work."""
    known = {} if status is None else {s.name: s for s in status.stages}
    reader = UsageReader(reading.workspace)
    makers = _makers(reading)
    ids = {i: n for n, i in reading.run.stages.items()}
    edges = reading.tried("The dependencies of the stages", edges_of, reading.run) or {}
    rows = []
    for name in reading.names:
        row = replace(
            _row(reading, name, known.get(name)),
            inputs=tuple(dict.fromkeys(ids[i] for i in edges.get(name, ()) if i in ids)),
            made_by=makers.get(name, ""),
        )
        history = reading.histories.get(name)
        if history is not None and history.record.attempts:
            use = reading.tried(f"The resource use of {name}", reader.of, reading.run.stages[name])
            row = row if use is None else _with_use(row, use, history)
        rows.append(row)
    return tuple(rows)


def _row(reading: RunReading, name: str, status: StageStatus | None) -> StageRow:
    stage_id = reading.run.stages[name]
    kind, _, fingerprint = stage_id.rpartition("-")
    history = reading.histories.get(name)
    row = StageRow(name=name, kind=kind, id=stage_id, fingerprint=fingerprint, state="waiting")
    if name in reading.unreadable:
        return replace(row, state="unreadable", reason=masked(reading.unreadable[name]))
    if history is None:
        known = {} if status is None else picked(status, "state", "reason")
        return replace(row, **known | {"reason": masked(known.get("reason", ""))})
    spec, result = history.record.spec, history.record.result
    state = history.record.state if status is None else status.state
    step, total = _progress(status)
    newest = history.record.attempts[-1:]
    return replace(
        row,
        kind=spec.kind,
        fingerprint=spec.fingerprint,
        state=state,
        reason=masked(first_line(status.reason, _WORD)) if status is not None else "",
        skipped=reading.skipped(name),
        step=step,
        total=total,
        attempts=tuple(
            _attempt(reading, history, a, state if (a,) == newest else "interrupted")
            for a in history.record.attempts
        ),
        output=str(reading.output(name) or ""),
        output_bytes=None if result is None else sum(file.bytes for file in result.files),
    )


def _progress(status: StageStatus | None) -> tuple[int | None, int | None]:
    """Step and total; none for a finished stage, whose last heartbeat is older than its end."""
    if status is None or (status.state == "done" and (status.step or 0) < (status.total or 0)):
        return None, None
    return status.step, status.total


def _with_use(row: StageRow, use: ResourceUsage, history: StageHistory) -> StageRow:
    queued = any(a.executor != "local" and a.started_at for a in history.record.attempts)
    used = picked(use, "seconds", "lost_seconds", "gpu_hours", "cpu_hours")
    return replace(row, **used, queue_seconds=use.queue_seconds if queued else None)


def _attempt(reading: RunReading, history: StageHistory, attempt: Attempt, state: str) -> Row:
    """Row of an attempt; ``state`` of the stage describes an attempt without an outcome."""
    outcome = attempt.outcome
    seconds = attempt.seconds
    if seconds is None:
        seconds = history.beats.get(attempt.number, {}).get("seconds")
    gone = state if state in _GONE else UNDER_WAY
    ended: str = gone if outcome is None else outcome.failure
    result = history.record.result
    if (outcome is None or outcome.failure == "none") and result is not None:
        ended = "done" if attempt.number == result.attempt else ended
    return {
        "number": attempt.number,
        "began_at": attempt.started_at or attempt.claimed_at,
        "ended_at": attempt.ended_at or "",
        "seconds": None if seconds is None else round(float(seconds), 1),
        "outcome": ended,
        "text": "" if outcome is None else masked(first_line(outcome.message, _WORD)),
        "node": attempt.node,
        "job_id": attempt.job_id or "",
        "log": str(reading.workspace.layout.attempt(history.stage_id, attempt.number).log),
        "reached_step": last_step(history, attempt),
    }


# ---------------------------------------------------------------- makers of skipped stages


def _makers(reading: RunReading) -> dict[str, str]:
    """Stage name -> the run that made it, for stages done before this run: the last run that has it
    and had begun by then."""
    claimed = {
        name: attempt.claimed_at
        for name, history in reading.histories.items()
        if (result := reading.result(name)) is not None and reading.skipped(name)
        for attempt in history.record.attempts
        if attempt.number == result.attempt
    }
    found: dict[str, str] = {}
    for run_id in reading.workspace.run_ids()[-_MOST_RUNS:] if claimed else ():
        run = reading.tried(f"Run {run_id}", reading.workspace.read_run, run_id)
        stages = () if run is None else run.stages.values()
        for name, at in claimed.items():
            if run is not None and reading.run.stages[name] in stages and run.started_at <= at:
                found[name] = run_id
    return found


# ---------------------------------------------------------------- the run


def incident_lines(reading: RunReading) -> tuple[Row, ...]:
    """Incidents of the stages that this run has worked on, oldest first."""
    histories = [reading.histories[name] for name in reading.own()]
    found = reading.tried("The incidents of the run", incidents_of, histories, reading.events)
    return tuple(
        {"at": i.at, "stage": i.stage, "text": masked(i.text), "resolved": i.resolved}
        for i in found or ()
    )


def standing_of(status: RunStatus | None, rows: Sequence[StageRow]) -> tuple[RunState, str]:
    """State of the run, and a sentence about it."""
    working = [r for r in rows if not is_service(r.id)]
    done = [r for r in working if r.state == "done"]
    so_far = f"{len(done)} of {counted(len(working), 'stage')} done"
    if status is not None and status.orchestrator.works:
        busy = ", ".join(
            f"{r.name} {r.state}" + (f" at {r.step} of {r.total}" if r.total and r.step else "")
            for r in working
            if r.state in ("running", "queued", "suspended", "paused")
        )
        return "running", f"{so_far}: {busy}." if busy else f"{so_far}."
    if len(done) == len(working):
        text = f"{counted(len(done), 'stage')} done"
        if skipped := sum(r.skipped for r in done):
            which = "all" if skipped == len(done) else str(skipped)
            text += f", {which} of them before this run began"
        return "done", f"{text}."
    failed = [r for r in working if r.state in ("failed", "unreadable")]
    if failed:
        # A row's reason is cut to the width of a table; the message of its attempt is longer.
        told = [a["text"] for a in failed[0].attempts if a["text"]]
        said = told[-1] if told else failed[0].reason
        names = ", ".join(r.name for r in failed)
        text = f"{names} failed: {said}" if said else f"{names} failed"
        return "failed", text if text.endswith((".", "…")) else f"{text}."
    who = "" if status is None else f"; {orchestrator_text(status.orchestrator, finished=False)}"
    return "stopped", f"{so_far}; no orchestrator is running{who}."


def last_event(reading: RunReading, rows: Sequence[StageRow]) -> str:
    """Time of the last recorded event of the run."""
    times = [a["ended_at"] for r in rows if not r.skipped for a in r.attempts]
    times += [str(event.get("at") or "") for event in reading.events[-1:]]
    return max(filter(None, times), default="")
