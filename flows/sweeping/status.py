"""Status of a sweep and its trials, from records alone: rows per arm, totals, next commands.

In: a workspace and a sweep's name. Out: a :class:`TrialStanding` per trial, for reports and limits;
a :class:`SweepStatus`, as lines and as JSON, for `refiner status`, scripts and the end of `refiner
sweep`. Reads only, asks no scheduler, needs neither torch nor the recipe: it works from any shell,
on a full disk, and long after.

Finished trials follow from the stages' results. The reason why a trial is not finished (failed,
held, stopped) is in the event log of the sweep's orchestrator, one line per change.
"""

from __future__ import annotations

import shlex
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from flows.notifying.sender import unsent_lines
from flows.running.console import states_counted, states_text
from flows.running.status import cancel_lines, orchestrator_text, progress_of, progress_text
from flows.sweeping.budget import NOTHING, ResourceUsage, UsageReader
from infra.orchestrator.timeline import device_time, first_line, read_events, rough
from infra.store.layout import is_sweep, sweep_call
from infra.store.orchestrators import OrchestratorProcess, orchestrator_of
from infra.store.sweep_records import (
    read_sweep,
    sweep_names,
    sweep_versions,
    trial_run,
)
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.records import (
    RunRecord,
    SweepRecord,
    TrialRecord,
    picked,
    to_json,
    trial_of,
)
from refiner_core.contract.services import is_service
from refiner_core.report.printing import counted
from refiner_core.report.sweep.sweep_report import TrialState


def sweep_named(workspace: Workspace, word: str) -> str | None:
    """The sweep with that name (``NAME``, or ``sweep:NAME`` if a run has the same name)."""
    name = word.removeprefix(sweep_call("")) if is_sweep(word) else word
    if not name or "/" in name or name.startswith("."):
        return None
    return name if sweep_versions(workspace, name) else None


def newest_sweep(workspace: Workspace, newest: RunRecord | None) -> str | None:
    """The sweep last run in a workspace; None if a run of its own was later."""
    if newest is not None and (trial := trial_of(newest.provenance)) is not None:
        return trial[0] if sweep_versions(workspace, trial[0]) else None
    names = sweep_names(workspace)
    if not names:
        return None
    launched = {name: read_sweep(workspace, name).started_at for name in names}
    last = max(names, key=lambda name: launched[name])
    return last if newest is None or launched[last] > newest.started_at else None


#: Orchestrator's states of trials that stay valid after it has ended.
_ENDS = ("failed", "interrupted", "held")


@dataclass(frozen=True)
class TrialStanding:
    """One trial.

    Attributes
    ----------
    run
        Id of the trial's run; empty before it has begun.
    state, reason
        Its state, and the reason if there is one.
    stage, step, total, metric, eta_s
        The running stage, and its progress by the last heartbeat.
    stages_done, stages
        Counts, without servers.
    use
        Use of its own stages, without those of earlier trials.
    shared
        Names of the stages that are counted with an earlier trial.
    """

    arm: str
    seed: int
    run: str
    state: TrialState
    reason: str = ""
    stage: str = ""
    step: int | None = None
    total: int | None = None
    metric: str = ""
    eta_s: float | None = None
    stages_done: int = 0
    stages: int = 0
    use: ResourceUsage = NOTHING
    shared: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``ARM/seedN``."""
        return f"{self.arm}/seed{self.seed}"

    @property
    def progress(self) -> str:
        """``grpo 3/70, reward 0.41``; empty if nothing is running."""
        return self.stage and progress_text(self.stage, self.step, self.total, self.metric)


class SweepWatcher:
    """Reads the status of one sweep, once or repeatedly; what cannot change is read once, or taken
    from the orchestrator's file."""

    def __init__(self, workspace: Workspace, name: str) -> None:
        self.workspace, self.name = workspace, name
        self.use = UsageReader(workspace)

    def look(self) -> SweepStatus:
        """Former name of :meth:`observe`, for one release."""
        warnings.warn("look() is observe() now", DeprecationWarning, stacklevel=2)
        return self.observe()

    def observe(self) -> SweepStatus:
        """Current status of the sweep, by its newest version."""
        record, call = read_sweep(self.workspace, self.name), sweep_call(self.name)
        who = orchestrator_of(self.workspace, call)
        trials = tuple(self.standings(record))
        use = reduce(ResourceUsage.plus, (trial.use for trial in trials), NOTHING)
        asked = self.workspace.cancel_asked(call) if who.works else None
        return SweepStatus(record, trials, who, use, asked)

    def standings(self, sweep: SweepRecord) -> list[TrialStanding]:
        """Every trial of a version, in its order."""
        told = last_words(self.workspace, sweep.name)
        works = orchestrator_of(self.workspace, sweep_call(sweep.name)).works
        seen: set[str] = set()
        found = []
        for trial in sweep.trials:
            own = {n: i for n, i in trial.stages.items() if i not in seen}
            seen.update(own.values())
            state, reason = self._state(trial, told.get(trial.name), works)
            found.append(
                TrialStanding(
                    arm=trial.arm,
                    seed=trial.seed,
                    run=trial_run(self.workspace, sweep.name, trial.name) or "",
                    state=state,
                    reason=reason,
                    **(self._running(trial) if state == "running" else {}),
                    stages_done=sum(map(self.use.is_done, _working(trial))),
                    stages=len(_working(trial)),
                    use=self.use.total(own.values()),
                    shared=tuple(n for n in trial.stages if n not in own),
                )
            )
        return found

    def _state(
        self, trial: TrialRecord, told: Mapping[str, Any] | None, works: bool
    ) -> tuple[TrialState, str]:
        if all(map(self.use.is_done, _working(trial))):
            return "done", ""
        state = str((told or {}).get("state") or "waiting")
        if state in _ENDS:
            return state, str((told or {}).get("reason") or "")  # type: ignore[return-value]
        if state != "running":
            return "waiting", ""
        return ("running", "") if works else ("interrupted", "its orchestrator is gone")

    def _running(self, trial: TrialRecord) -> dict[str, Any]:
        """The running stage of a trial, and its progress."""
        for name, stage_id in trial.stages.items():
            if is_service(stage_id) or self.use.is_done(stage_id):
                continue
            numbers = self.workspace.layout.stage(stage_id).attempt_numbers()
            beat = numbers and self.workspace.read_heartbeat(stage_id, numbers[-1])
            if not beat:
                continue
            paths = self.workspace.layout.attempt(stage_id, numbers[-1])
            resumed = self.workspace.part(paths, "resumed")
            return {"stage": name, **progress_of(beat, resumed.get("step"))}
        return {}


def last_words(workspace: Workspace, sweep: str) -> dict[str, Mapping[str, Any]]:
    """Trial -> the orchestrators' last record of it (``state``, ``reason``, ``run``)."""
    events = read_events(workspace.layout.run(sweep_call(sweep)).events)
    return {str(e["trial"]): e for e in events if e.get("event") == "trial"}


def _working(trial: TrialRecord) -> list[str]:
    return [i for i in trial.stages.values() if not is_service(i)]


STATUS_VERSION = 1
#: Maximum number of seed columns on a terminal.
_MOST_SEEDS = 6
#: Maximum number of troubled trials listed one by one.
_SHOWN = 8


@dataclass(frozen=True)
class SweepStatus:
    """A sweep at one moment.

    ``use`` covers all its stages, each once; ``held`` is the reason why no more trials begin.
    """

    record: SweepRecord
    trials: tuple[TrialStanding, ...]
    orchestrator: OrchestratorProcess
    use: ResourceUsage
    cancel_asked: Mapping[str, Any] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Trials by state."""
        return states_counted(t.state for t in self.trials)

    @property
    def finished(self) -> bool:
        """True if every trial is done."""
        return all(t.state == "done" for t in self.trials)


def status_of_sweep(sweep: str, workspace: str | Path = RecipeConfig.workspace) -> SweepStatus:
    """Status of a sweep. Writes nothing.

    Parameters
    ----------
    sweep
        Its name.
    workspace
        The folder that has its records.

    Returns
    -------
    SweepStatus
        Trials, totals, orchestrator. As a dataframe: :func:`flows.api.trials_frame`.

    Raises
    ------
    ConfigurationError
        There is no such sweep; the message names the nearest.
    """
    return watch_sweep(sweep, workspace).observe()


def watch_sweep(sweep: str, workspace: str | Path = RecipeConfig.workspace) -> SweepWatcher:
    """Watch a sweep: each ``observe()`` returns a :class:`SweepStatus`.

    Parameters
    ----------
    sweep, workspace
        As of :func:`flows.api.status_of_sweep`.

    Returns
    -------
    SweepWatcher
        Remembers what cannot change.

    Raises
    ------
    ConfigurationError
        There is no such sweep; the message names the nearest.
    """
    ws = Workspace.read_only(workspace)
    read_sweep(ws, sweep)
    return SweepWatcher(ws, sweep)


# ---------------------------------------------------------------- for people


def table_of(status: SweepStatus) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a row per arm, a cell per seed; counts by state if there are many seeds."""
    seeds = list(status.record.seeds)
    by = {(t.arm, t.seed): t for t in status.trials}
    arms = [arm.name for arm in status.record.arms]
    if len(seeds) > _MOST_SEEDS:
        found = {a: states_counted(t.state for t in status.trials if t.arm == a) for a in arms}
        rows = [[arm, states_text(counts)] for arm, counts in found.items()]
        return ["arm", f"{len(seeds)} seeds"], rows
    header = ["arm", *(f"seed {seed}" for seed in seeds)]
    rows = [[arm, *(_cell(by.get((arm, seed))) for seed in seeds)] for arm in arms]
    return header, rows


def _cell(trial: TrialStanding | None) -> str:
    if trial is None:
        return ""
    if trial.state != "running":
        return trial.state
    left = "" if trial.eta_s is None else f", {rough(trial.eta_s)} left"
    return (trial.progress or "running") + left


def status_lines(status: SweepStatus, workspace: Workspace) -> Iterator[str]:
    """Lines beside the table: totals, errors, orchestrator, next commands."""
    yield f"{len(status.trials)} trials: {states_text(status.counts)}; {_used(status)}"
    yield from _wrong(status)
    page = workspace.layout.reports / status.record.name / "report.html"
    if page.exists():
        yield f"Page: {page}"
    yield from unsent_lines(workspace, sweep_call(status.record.name))
    yield from cancel_lines(status.cancel_asked)
    yield orchestrator_text(status.orchestrator, status.finished)
    if commands := next_commands(status, workspace):
        yield "Next:"
        yield from (f"  {command}" for command in commands)


def _used(status: SweepStatus) -> str:
    """Time used, time lost, incidents."""
    use, limit = status.use, status.record.limits.get("gpu_hours")
    hours = f"{use.gpu_hours:,.1f} GPU-hours"
    parts = [f"{hours if use.gpu_hours else device_time(use.seconds, 'CPU')} used"]
    if use.gpu_hours and limit is not None:
        parts[0] += f" (limit {limit:g})"
    if use.judge_calls:
        parts.append(f"{use.judge_calls:,} judge calls")
    if use.incidents:
        lost = f", {rough(use.lost_seconds)} repeated" if use.lost_seconds >= 0.5 else ""
        parts.append(f"{counted(use.incidents, 'incident')}{lost}")
    return ", ".join(parts)


def _wrong(status: SweepStatus) -> Iterator[str]:
    bad = [t for t in status.trials if t.state in ("failed", "interrupted")]
    for trial in bad[:_SHOWN]:
        why = first_line(trial.reason, 160) or "no reason recorded"
        yield f"{trial.state}: {trial.name}: {why}"
    if len(bad) > _SHOWN:
        yield f"and {len(bad) - _SHOWN} more"
    reasons = Counter(t.reason for t in status.trials if t.state == "held")
    for reason, count in reasons.items():
        yield f"held: {counted(count, 'trial')}: {reason}"


def next_commands(status: SweepStatus, workspace: Workspace) -> list[str]:
    """Useful next commands, most useful first."""
    name, where = status.record.name, f"workspace={workspace.root}"
    commands = []
    if status.orchestrator.works:
        commands.append(["refiner", "status", name, "-w", where])
        commands.append(["refiner", "report", name, "--watch", where])
        commands.append(["refiner", "cancel", name, where])
        return [shlex.join(c) for c in commands]
    failed = next((t for t in status.trials if t.state == "failed" and t.run), None)
    if failed is not None:
        commands.append(["refiner", "status", failed.run, where])
    if not status.finished:
        commands.append(_onward(status, where))
    if any(t.state == "done" for t in status.trials):
        commands.append(["refiner", "report", name, where])
    return [shlex.join(c) for c in commands]


def _onward(status: SweepStatus, where: str) -> list[str]:
    """Command that continues the sweep; if a limit holds it, with its file, in which the limit can
    be raised."""
    told = status.record.provenance
    if all(t.state != "held" for t in status.trials) or not told.get("origin"):
        return ["refiner", "resume", status.record.name, where]
    given = [str(text) for text in told.get("overrides") or ()]
    given = [text for text in given if not text.startswith("workspace=")]
    return ["refiner", "sweep", str(told["origin"]), where, *given]


# ---------------------------------------------------------------- for scripts


def status_json(status: SweepStatus) -> dict[str, Any]:
    """The complete status as JSON."""
    record = status.record
    return {
        **{"version": STATUS_VERSION, "sweep": record.name},
        **picked(record, "number", "recipe", "baseline", "seeds", "started_at"),
        "arms": [arm.name for arm in record.arms],
        "orchestrator": {"works": status.orchestrator.works, **to_json(status.orchestrator)},
        **picked(status, "finished", "cancel_asked", "counts", "use"),
        **picked(record, "limits", "forecast"),
        "trials": [{"trial": t.name, **to_json(t), "progress": t.progress} for t in status.trials],
    }
