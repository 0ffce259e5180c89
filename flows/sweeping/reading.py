"""How the trials of a sweep stand, and what each has taken, from records alone.

In: a workspace and a :class:`SweepRecord`. Out: a :class:`TrialStanding` per trial, for status,
reports and limits. Reads only, asks no scheduler, needs neither torch nor the recipe: it works from
any shell, on a full disk, and long after.

What is done follows from the stages' results. Why a trial is not (failed, held, stopped) was told
by the sweep's orchestrator in its event log, one line for each change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.running.status import eta_s, metric_text
from flows.sweeping.use import NOTHING, Use, UseReader
from infra.orchestrator.history import read_events
from infra.store.layout import sweep_call
from infra.store.orchestrators import orchestrator_of
from infra.store.sweep_records import sweep_folder, trial_run
from infra.store.workspace import Workspace
from refiner_core.contract.services import is_service
from refiner_core.contract.sweep_records import SweepRecord, TrialRecord
from refiner_core.report.sweep.document import TrialState

#: What an orchestrator last said of trials counts only while it works, but for these.
_ENDS = ("failed", "interrupted", "held")


@dataclass(frozen=True)
class TrialStanding:
    """One trial.

    Attributes
    ----------
    run
        Id of the run that works, or has worked, on it; empty before it has begun.
    state, reason
        How it stands, and why where that needs saying.
    stage, step, total, metric, eta_s
        The stage that runs, and its progress by the last heartbeat.
    stages_done, stages
        Counts; servers are none of them.
    use
        Of its own stages: those that no trial before it has, too.
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
    use: Use = NOTHING
    shared: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``ARM/seedN``."""
        return f"{self.arm}/seed{self.seed}"

    @property
    def progress(self) -> str:
        """``grpo 3/70, reward 0.41``; empty where nothing runs."""
        if not self.stage:
            return ""
        count = f"{self.step}/{self.total}" if self.total else str(self.step or "")
        return ", ".join(filter(None, [f"{self.stage} {count}".strip(), self.metric]))


class SweepReader:
    """Looks at a sweep, once or again and again; what cannot change is read once, or not at all
    where the name of the ``sweep`` says where somebody has left it."""

    def __init__(self, workspace: Workspace, sweep: str = "") -> None:
        self.workspace = workspace
        self.use = UseReader(workspace, use_file(workspace, sweep) if sweep else None)
        self._done: set[str] = set()

    def standings(self, sweep: SweepRecord, *, with_use: bool = True) -> list[TrialStanding]:
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
                    stages_done=sum(self.done(i) for i in _working(trial)),
                    stages=len(_working(trial)),
                    use=self.use.total(own.values()) if with_use else NOTHING,
                    shared=tuple(n for n in trial.stages if n not in own),
                )
            )
        return found

    def done(self, stage_id: str) -> bool:
        """Whether a stage is done."""
        if stage_id not in self._done and self.workspace.layout.stage(stage_id).result.exists():
            self._done.add(stage_id)
        return stage_id in self._done

    def _state(
        self, trial: TrialRecord, told: Mapping[str, Any] | None, works: bool
    ) -> tuple[TrialState, str]:
        if all(self.done(i) for i in _working(trial)):
            return "done", ""
        state = str((told or {}).get("state") or "waiting")
        reason = str((told or {}).get("reason") or "")
        if state in _ENDS:
            return state, reason  # type: ignore[return-value]
        if state == "running" and works:
            return "running", ""
        return (
            ("interrupted", "its orchestrator is gone") if state == "running" else ("waiting", "")
        )

    def _running(self, trial: TrialRecord) -> dict[str, Any]:
        """Which stage of a trial is at work, and how far it is."""
        for name, stage_id in trial.stages.items():
            if is_service(stage_id) or self.done(stage_id):
                continue
            numbers = self.workspace.layout.stage(stage_id).attempt_numbers()
            beat = numbers and self.workspace.read_heartbeat(stage_id, numbers[-1])
            if not beat:
                continue
            progress = beat.get("progress") or {}
            paths = self.workspace.layout.attempt(stage_id, numbers[-1])
            resumed = self.workspace.part(paths, "resumed")
            return {
                "stage": name,
                "step": progress.get("done"),
                "total": progress.get("total") or None,
                "metric": metric_text(progress.get("values") or {}),
                "eta_s": eta_s(beat, resumed.get("step")),
            }
        return {}


def use_file(workspace: Workspace, sweep: str) -> Path:
    """Where a sweep's orchestrator leaves what done stages have used."""
    return sweep_folder(workspace, sweep) / "use.json"


def last_words(workspace: Workspace, sweep: str) -> dict[str, Mapping[str, Any]]:
    """Trial -> what the sweep's orchestrators last said of it (``state``, ``reason``, ``run``)."""
    events = read_events(workspace.layout.run(sweep_call(sweep)).events)
    return {str(e["trial"]): e for e in events if e.get("event") == "trial"}


def _working(trial: TrialRecord) -> list[str]:
    return [i for i in trial.stages.values() if not is_service(i)]
