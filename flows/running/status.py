"""Finds runs by name, and reads their status from records alone: a row per stage, the orchestrator.

In: a workspace, and the name from the command line, if any. Out: a :class:`RunRecord` (the newest
run is :func:`newest_runs`'s for every command), and a :class:`RunStatus` for `refiner status`,
scripts and Python. Reads only, so it works on a full or read-only disk; imports neither torch nor
Prefect; waits for a scheduler no longer than the given time, and then marks its answer as missing.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from infra.disk.probe import FreeSpace, Prober
from infra.jobs.dispatch import LocalDispatcher, Router, read_only_router
from infra.jobs.dispatcher import AttemptRef, JobStatus, OpenAttempt
from infra.jobs.failures import CLASSES, budget_left
from infra.orchestrator.observe import Observer
from infra.orchestrator.reconcile import NO_ROOM, AttemptStatus
from infra.orchestrator.timeline import Incident, devices_of, first_line, run_events, run_incidents
from infra.store.orchestrators import OrchestratorProcess, orchestrator_of
from infra.store.workspace import Workspace
from refiner_core.contract.config import DiskConfig, DispatchConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, no_such
from refiner_core.contract.fields import suggest
from refiner_core.contract.kinds import KINDS, TRAINED
from refiner_core.contract.records import RunRecord, StageRecord, all_malformed, from_json, picked
from refiner_core.contract.services import is_service

T = TypeVar("T")
#: Kinds of stages whose outputs are weights, or weights for others.
_OF_MODELS = (*TRAINED, "export", "publish")


def newest_runs(
    workspace: Workspace, among: Sequence[str] | None = None, *, models: bool = False
) -> Iterator[RunRecord]:
    """The calls that commands choose from when no run is named, newest first: those that have begun
    a stage of their own, and unfinished ones.

    A call that found everything done, or only waited for the stages of another, is left out; so is
    a night, which measures the models of others, unless its orchestrator is running.

    Parameters
    ----------
    among
        Ids of runs, oldest first (default: all).
    models
        Only calls that have begun to train, export or publish.
    """
    for run in workspace.runs(newest_first=True):
        if among is not None and run.run not in among:
            continue
        if "nightly" in run.provenance:
            counts = not models and orchestrator_of(workspace, run.run).works
        else:
            counts = not models and not is_finished(workspace, run.stages.values())
            counts = counts or any(
                has_started(workspace, run, stage_id)
                for name, stage_id in run.stages.items()
                if not is_service(stage_id) and (not models or name.partition("-")[0] in _OF_MODELS)
            )
        if counts:
            yield run


def has_started(workspace: Workspace, run: RunRecord, stage_id: str) -> bool:
    """True if the newest attempt at a stage was claimed after the run was called: by it, or by a
    later call. Both times are from orchestrators."""
    numbers = workspace.layout.stage(stage_id).attempt_numbers()
    attempt = workspace.read_attempt(stage_id, numbers[-1]) if numbers else None
    return attempt is not None and attempt.claimed_at >= run.started_at


def find_run(
    workspace: Workspace, wanted: str | None = None, *, stage: str = ""
) -> RunRecord | None:
    """Find a run by its id, by a unique part of an id, or by the name of its recipe
    (the newest run of it). Without a name: the newest of :func:`newest_runs`, with ``stage`` the
    newest that has such a stage, if any. A trial's run may be named by its place in the sweep,
    ``SWEEP:ARM/seed1``.

    Raises
    ------
    ConfigurationError
        There is none, or several; the message suggests the nearest name.
    """
    if wanted is not None and ":" in wanted:
        return _run_of_trial(workspace, wanted)
    known = workspace.run_ids()
    if wanted is None:
        recorded = workspace.runs(newest_first=True)
        ranked = itertools.chain(newest_runs(workspace), recorded)
        newest = next(ranked, None)
        if newest is None or not stage or stage in newest.stages:
            return newest
        return next((run for run in ranked if stage in run.stages), newest)
    hits = [wanted] if wanted in known else []
    if not hits and len(wanted) >= 4:
        hits = [r for r in known if r.startswith(wanted) or r.endswith(wanted)]
    if not hits:  # a recipe's name is its newest run
        hits = [r for r in known if "-".join(r.split("-")[2:-1]) == wanted]
        if (newest := next(newest_runs(workspace, hits), None)) is not None:
            return newest
        hits = hits[-1:] or [r for r in known if len(wanted) >= 4 and wanted in r]
    if len(hits) == 1:
        return workspace.read_run(hits[0])
    hint = suggest(wanted, [*known, *_swept(workspace)])
    what = f"{workspace.root} has no run {wanted!r}.{hint}"
    if hits:
        what = f"{wanted!r} may mean {len(hits)} runs of {workspace.root}."
    raise ConfigurationError(
        what,
        expected=f"one of: {', '.join((hits or known)[-5:]) or '(no run is recorded there)'}",
        fix="name one of these (`refiner runs` lists them; a trial is SWEEP:ARM/seedN), or "
        "another workspace=DIR; `refiner run RECIPE` begins a run",
    )


def required_run(
    workspace: Workspace, wanted: str | None, what: str, *, stage: str = "", or_begin: bool = True
) -> RunRecord:
    """As :func:`find_run`, but a run is required; ``what`` describes it in the error.

    Raises
    ------
    ConfigurationError
        There is none.
    """
    run = find_run(workspace, wanted, stage=stage)
    if run is None:
        raise ConfigurationError(
            f"No run is recorded in {workspace.root}.",
            expected=what,
            fix="name another workspace=DIR"
            + ", or begin one with `refiner run RECIPE`" * or_begin,
        )
    return run


def the_stage(run: RunRecord, name: str) -> str:
    """A stage's id.

    Raises
    ------
    ConfigurationError
        The run has no such stage; the message lists its stages.
    """
    if name not in run.stages:
        raise no_such(f"Run {run.run} has no stage", name, stage_names(run))
    return run.stages[name]


def stage_id_of(workspace: Workspace, stage: str, run: RunRecord | None) -> str:
    """A stage's id, from the id itself or from its name in a run.

    Raises
    ------
    ConfigurationError
        There is none of that name.
    """
    if stage in workspace.stage_ids():
        return stage
    return the_stage(run or required_run(workspace, None, f"a run with the stage {stage}"), stage)


def _swept(workspace: Workspace) -> Iterator[str]:
    """Names of sweeps, and of their trials."""
    from infra.store.sweep_records import read_sweep, sweep_names

    for name in sweep_names(workspace):
        yield name
        yield from (f"{name}:{trial.name}" for trial in read_sweep(workspace, name).trials)


def _run_of_trial(workspace: Workspace, wanted: str) -> RunRecord:
    """The run of ``SWEEP:ARM/seed1``."""
    from infra.store.sweep_records import read_sweep, trial_run

    name, _, trial = wanted.partition(":")
    sweep = read_sweep(workspace, name)
    known = [t.name for t in sweep.trials]
    run_id = trial_run(workspace, name, trial)
    if run_id is not None:
        return workspace.read_run(run_id)
    has = f"has no trial {trial!r}.{suggest(trial, known)}"
    raise ConfigurationError(
        f"Trial {trial} of sweep {name} has not begun."
        if trial in known
        else f"Sweep {name} {has}",
        expected=f"a trial that has a run, of: {', '.join(known[:5])}{', …' * (len(known) > 5)}",
        fix=f"name one of these (`refiner status {name}` shows them)",
    )


def unfinished_runs(workspace: Workspace) -> list[RunRecord]:
    """Runs with a stage that is not done, oldest first."""
    runs = workspace.runs()
    return [run for run in runs if not is_finished(workspace, run.stages.values())]


def is_finished(workspace: Workspace, stages: Iterable[str]) -> bool:
    """True if every stage of a run or a sweep is done, given their ids."""
    own = (i for i in stages if not is_service(i))  # services are never done
    return all(workspace.layout.stage(i).result.exists() for i in own)


@dataclass(frozen=True)
class DiskStatus:
    """Free space where the data lie, by the tightest quota, else by the file system.

    ``source`` names which.
    """

    folder: str
    free_bytes: int
    total_bytes: int
    source: str = ""


class _BackgroundQuery(Generic[T]):
    """Asks repeatedly in the background, and waits for an answer only for a limited time."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s, self._answer = wait_s, list[T]()
        self._thread: threading.Thread | None = None

    def ask(self, question: Callable[[], T]) -> T | None:
        """The answer, if it came in time; never asks twice at the same time."""
        if self._thread is None or not self._thread.is_alive():
            self._answer = answer = list[T]()
            self._thread = threading.Thread(target=lambda: answer.append(question()), daemon=True)
            self._thread.start()
        self._thread.join(self._wait_s)
        return self._answer[0] if self._answer else None


class BackgroundRouter(Router):
    """Asks in the background for a limited time; then only local jobs are checked, and the others
    are ``unknown``. ``late`` has the reason."""

    def __init__(self, router: Router, wait_s: float) -> None:
        super().__init__(router.dispatchers, router.executor_for)
        self._wait_s, self._hurry = wait_s, _BackgroundQuery[dict[AttemptRef, JobStatus]](wait_s)
        self.late = ""

    def observe(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobStatus]:
        """State of all attempts; on timeout, of those that need no scheduler."""
        observe = super().observe
        far = [a for a in attempts if a.attempt.executor != "local"]
        seen = observe([a for a in attempts if a.attempt.executor == "local"])
        answer = self._hurry.ask(lambda: observe(far)) if far else {}
        late = f"the scheduler did not answer within {self._wait_s:g} s"
        self.late = late if answer is None else ""
        return {**{a.ref: (answer or {}).get(a.ref, JobStatus("unknown")) for a in far}, **seen}


def _disk_status(prober: Prober, hurry: _BackgroundQuery[FreeSpace]) -> DiskStatus | None:
    """Free space; the file system's own figures if quotas are not answered in time. None if the
    folder does not exist."""
    folder = prober.folder
    try:
        use = shutil.disk_usage(folder)
    except OSError:
        return None
    ws = hurry.ask(prober.observe)
    if ws is None or ws.limit_bytes is None:
        # Without the blocks reserved for the administrator, as in `refiner disk`.
        return DiskStatus(str(folder), use.free, use.used + use.free, "file system")
    return DiskStatus(str(folder), ws.free_bytes, ws.limit_bytes, ws.source)


#: Wait for the scheduler, seconds. A healthy one answers sooner; a dead one after a minute.
SCHEDULER_WAIT_S = 0.6
#: Main value of each kind of stage, if it has it; else the first value.
_MAIN = ("reward", "rewards/mean", "loss", "format_valid")
_ENDED_FULL = "its worker has ended without a message: the disk was full"


@dataclass(frozen=True)
class StageStatus:
    """One stage of a run.

    Attributes
    ----------
    state
        ``waiting``, ``queued``, ``running``, ``suspended``, ``paused``, ``hung``, ``killed``,
        ``interrupted``, ``cancelled``, ``failed``, ``blocked``, ``done``; of a server ``idle``,
        if it does not run because nothing needs it.
    reason
        Why it waits, or how its last attempt ended.
    step, total, metric
        Progress of the newest attempt by its last heartbeat: within its phase; its main value.
    eta_s
        Seconds until ``total``, at the rate of this attempt so far; None if unknown.
    seconds
        Duration of the newest attempt.
    last_failure
        Failure of the newest failed attempt.
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

    ``scheduler`` says what is missing because a scheduler did not answer, else empty. ``outage`` is
    what the orchestrator is waiting for because it can be neither read nor asked.
    """

    run: str
    recipe: str
    command: tuple[str, ...]
    started_at: str
    finished: bool
    orchestrator: OrchestratorProcess
    stages: tuple[StageStatus, ...]
    incidents: tuple[Incident, ...]
    disk: DiskStatus | None
    scheduler: str = ""
    cancel_asked: Mapping[str, Any] | None = None
    outage: str = ""


def orchestrator_text(who: OrchestratorProcess, finished: bool) -> str:
    """Line on the orchestrator of a run or a sweep."""
    if who.standing == "running":
        return f"orchestrator: {who.where}, since {who.at[:19].replace('T', ' ')} UTC"
    if who.standing == "elsewhere":
        return f"orchestrator: {who.where}, by its own record; it cannot be checked from here"
    if finished:
        return "finished"
    why = {"gone": f"{who.where} is gone", "ended": f"it ended with exit code {who.exit_code}"}
    return f"orchestrator: not running ({why.get(who.standing, 'never begun')})"


class RunWatcher:
    """Reads the status of one run, once or repeatedly.

    Parameters
    ----------
    workspace, run
        The run.
    wait_s
        How long a look may wait for the scheduler, seconds.
    ask
        Ask schedulers; else their jobs have the state of the records.
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
        near = {"local": LocalDispatcher(workspace)}
        alone = Router(near, lambda _: "local", missing="no scheduler was asked")
        router = read_only_router(settings, workspace) if ask else alone
        self._router = BackgroundRouter(router, wait_s)
        self._observer = Observer(workspace, self._router, settings)
        config = from_json(DiskConfig, run.config.get("disk") or {})
        self._space = Prober(workspace.layout.data, config), _BackgroundQuery[FreeSpace](wait_s)

    def look(self) -> RunStatus:
        """Former name of :meth:`observe`, for one release."""
        warnings.warn("look() is observe() now", DeprecationWarning, stacklevel=2)
        return self.observe()

    def observe(self) -> RunStatus:
        """Current status of the run."""
        workspace, run = self.workspace, self.run
        who = orchestrator_of(workspace, run.run)
        events = run_events(workspace, run.run) if who.works else []
        rows = self.stages(events)
        return RunStatus(
            *(run.run, run.recipe, run.command, run.started_at),
            finished=all(row.state == "done" for row in rows if not is_service(row.id)),
            orchestrator=who,
            stages=rows,
            incidents=tuple(run_incidents(workspace, run)),
            disk=_disk_status(*self._space),
            scheduler=self._router.late,
            cancel_asked=workspace.cancel_asked(run.run) if who.works else None,
            outage=_outage(events),
        )

    def stages(self, events: Sequence[Mapping[str, Any]] = ()) -> tuple[StageStatus, ...]:
        """Current status of each stage; ``events`` are those of a running orchestrator."""
        run, told = self.run, _last_words(events)
        records, observed = self._observer.observe(run.stages.values())
        rows = []
        for name in stage_names(run):
            stage_id = run.stages[name]
            record = records.get(stage_id)
            state, reason = self._state(stage_id, record, observed.attempts.get(stage_id))
            if state in ("waiting", "interrupted", "failed", "idle") and name in told:
                state, reason = told[name]
            if state == "done" and record is not None and record.result is not None:
                reason = reason or str(record.result.report.get("remark") or "")
            gpus = devices_of(run.config, name.partition("-")[0])
            more = self._by_attempts(stage_id, record) if record and record.attempts else {}
            row = StageStatus(name, stage_id, state, reason, gpus=gpus, **more)
            rows.append(row if state == "running" else replace(row, eta_s=None))
        return tuple(rows)

    def _state(
        self, stage_id: str, record: StageRecord | None, seen: AttemptStatus | None
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
            own = {"cancelled": "cancelled", "monitor_pause": "paused"}
            state = own.get(outcome.failure, state)
            return state, first_line(outcome.message)
        if seen.running and seen.liveness != "unknown" and last.has_room is False:
            return "paused", NO_ROOM if seen.liveness == "live" else _ENDED_FULL
        if seen.liveness in ("dead", "hung"):
            return {"dead": "killed", "hung": "hung"}[seen.liveness], seen.note
        unknown = self._observer.statuses.get(AttemptRef(stage_id, seen.number))
        if unknown is not None and unknown.liveness == "unknown" and last.started_at is None:
            return "queued", self._router.late and "the scheduler did not answer in time"
        if seen.running:
            return "running", "" if seen.note.startswith("RUNNING") else seen.note
        return ("suspended" if seen.note.startswith("SUSPENDED") else "queued"), seen.note

    def _by_attempts(self, stage_id: str, record: StageRecord) -> dict[str, Any]:
        """Job, node, progress and last failure, from the newest attempts."""
        last, result = record.attempts[-1], record.result
        if result is not None:
            last = next((a for a in record.attempts if a.number == result.attempt), last)
        beat = self.workspace.read_heartbeat(stage_id, last.number) or {}
        seconds = result.seconds if result else last.seconds or beat.get("seconds")
        failed = [(a.number, a.outcome) for a in record.attempts if a.outcome]
        failure = ""
        for number, outcome in failed:
            if outcome.failure != "none":
                step = f" at step {outcome.step}" if outcome.step else ""
                step += "" if outcome.rank is None else f" in rank {outcome.rank}"
                said = f": {first_line(outcome.message, 160)}" if outcome.message else ""
                failure = f"attempt {number}: {outcome.failure}{step}{said}"
        return {
            **picked(last, "job_id", "node"),
            **{"attempt": last.number, "attempts": len(record.attempts), "last_failure": failure},
            "phase": str((beat.get("progress") or {}).get("phase") or ""),
            **progress_of(beat, last.resumed_from_step),
            "seconds": None if seconds is None else round(float(seconds), 1),
        }


def status_of_run(
    run_id: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    wait_s: float = SCHEDULER_WAIT_S,
) -> RunStatus | None:
    """Status of a run. Writes nothing.

    Parameters
    ----------
    run_id
        Run id (default: the newest).
    workspace
        The folder that has its records.
    wait_s
        Maximum wait for a scheduler, seconds.

    Returns
    -------
    RunStatus or None
        Stages, incidents, disk, orchestrator; None if no run is recorded. As a dataframe:
        :func:`flows.api.stages_frame`.

    Raises
    ------
    ConfigurationError
        There is no such run; the message names the nearest.
    """
    ws = Workspace.read_only(workspace)
    if find_run(ws, run_id) is None:
        return None
    return watch_run(run_id, workspace, wait_s=wait_s).observe()


def watch_run(
    run_id: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    wait_s: float = SCHEDULER_WAIT_S,
) -> RunWatcher:
    """Watch a run: each ``observe()`` returns a :class:`RunStatus`.

    Parameters
    ----------
    run_id, workspace, wait_s
        As of :func:`flows.api.status_of_run`.

    Returns
    -------
    RunWatcher
        Each look asks schedulers, and reads the records again.

    Raises
    ------
    ConfigurationError
        There is no such run, or none at all; the message names the nearest.
    """
    ws = Workspace.read_only(workspace)
    return RunWatcher(ws, required_run(ws, run_id, "a run to look at"), wait_s)


# ---------------------------------------------------------------- rows


def progress_of(beat: Mapping[str, Any], resumed_from: int | None) -> dict[str, Any]:
    """Progress of a stage by a heartbeat, as in :class:`StageStatus` and trials."""
    progress = beat.get("progress") or {}
    return {
        "step": progress.get("done"),
        "total": progress.get("total") or None,
        "metric": metric_text(progress.get("values") or {}),
        "eta_s": eta_s(beat, resumed_from),
    }


def progress_text(what: str, step: int | None, total: int | None, metric: str) -> str:
    """``grpo 3/70, reward 0.41``."""
    count = f"{step}/{total}" if total else str(step or "")
    return ", ".join(filter(None, [f"{what} {count}".strip(), metric]))


def cancel_lines(asked: Mapping[str, Any] | None) -> list[str]:
    """Line that names who requested the end of a call, if anyone did."""
    return [f"is being cancelled, as {asked.get('by', 'somebody')} requested"] if asked else []


def eta_s(beat: Mapping[str, Any], resumed_from: int | None) -> float | None:
    """Seconds until the total of a heartbeat's progress, at the rate of its attempt so far."""
    progress = beat.get("progress") or {}
    done, total = int(progress.get("done") or 0), int(progress.get("total") or 0)
    began, passed = resumed_from or 0, float(beat.get("moved_at_s") or beat.get("seconds") or 0.0)
    if total <= 0 or done <= began or passed <= 0:
        return None
    return round(max(0, total - done) * passed / (done - began), 1)


def metric_text(values: Mapping[str, Any]) -> str:
    """The main value of a heartbeat's progress, such as ``reward 0.41``."""
    name = next((n for n in _MAIN if n in values), next(iter(values), None))
    return "" if name is None or values[name] is None else f"{name} {float(values[name]):.4g}"


def _last_words(events: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Last messages of the orchestrator on stages without a live job: why they wait."""
    said = {
        str(e["stage"]): (str(e.get("state")), str(e.get("message") or ""))
        for e in events
        if e.get("event") == "stage"
    }
    waiting = ("waiting", "paused", "blocked", "failed", "interrupted")
    return {name: word for name, word in said.items() if word[0] in waiting}


def _outage(events: Sequence[Mapping[str, Any]]) -> str:
    """Reason why the orchestrator makes no rounds; empty if it does, or if a later one began."""
    reason = ""
    for event in events:
        if event.get("event") == "outage":
            reason = str(event.get("reason"))
        elif event.get("event") in ("back", "stage") and event.get("state") != "paused":
            reason = ""
    return reason


def stage_names(run: RunRecord) -> list[str]:
    """Stages of a run, each after its possible inputs; records list them by name."""

    def order(name: str) -> int:
        kind = run.stages[name].rpartition("-")[0]  # stage ids begin with the kind
        return KINDS[kind].order if kind in KINDS else sys.maxsize

    return sorted(run.stages, key=order)
