"""The trial that goes ahead, and how each trial stands, in one word.

In: trials of a plan, and what their stages have recorded. Out: a :class:`TrialWord`; a measure. The
first trial goes ahead alone until its training has shown what it takes: as soon as its last
training stage has done two real steps and one save, there is a
:class:`~sweeps.history.CanaryMeasure`. Where any trial has come that far before (an earlier call,
another seed), nobody needs to go ahead: what it measured is history.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from infra.store import atomic
from infra.store.checkpoints import MARKER
from infra.store.traces import MetricsLine, read_metrics
from infra.store.workspace import Workspace
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.types import StageView
from refiner_core.report.sweep.document import TrialState
from sweeps.history import CanaryMeasure
from sweeps.values import SweepPlan, Trial

log = logging.getLogger(__name__)
#: A trial that stands so is not worked on any more.
OVER: tuple[TrialState, ...] = ("done", "failed", "interrupted", "held")


@dataclass(frozen=True)
class TrialWord:
    """Standing of a trial: its state, why, and the exit code that this would mean for a run."""

    state: TrialState = "waiting"
    reason: str = ""
    run: str = ""
    exit_code: int = 0


def word_of_views(views: Mapping[str, StageView], run: str) -> TrialWord:
    """End of a trial, by its stages."""
    for state in ("failed", "interrupted"):
        if found := [v for v in views.values() if v.state == state]:
            # What ended so by itself comes before what it stopped.
            view = min(found, key=lambda v: v.message.startswith("needs "))
            said = f"{view.name}: {view.message}" if view.message else view.name
            return TrialWord(state, said, run, view.exit_code or 1)
    return TrialWord("done", run=run)


def word_of_error(error: Exception, run: str) -> TrialWord:
    """End of a trial that an error has ended."""
    if isinstance(error, RefinerError):
        state: TrialState = "interrupted" if error.resumable else "failed"
        return TrialWord(state, str(error), run, error.exit_code)
    log.exception("a trial ends with an error", exc_info=error)
    return TrialWord("failed", f"{type(error).__name__}: {error}", run, 70)


#: A step that the canary's training saves after, so that a save is measured early.
CANARY_STEPS = 2


_GIB = 2**30
#: The trial that goes ahead, and the stage that is measured: the last that it trains.
Canary = tuple[Trial, PlannedStage]


def find_canary(plan: SweepPlan, workspace: Workspace) -> Canary | None:
    """The first trial that has training to do; None where nothing is trained, or where a training
    stage like it has been measured in this sweep."""
    first: Canary | None = None
    looked: set[str] = set()
    for trial in plan.trials:
        stage = next((s for s in reversed(trial.plan.stages) if s.kind in TRAINED), None)
        if stage is None or stage.id in looked:
            continue
        first = first or (trial, stage)
        done = workspace.layout.stage(stage.id).result.exists()
        if done or measured_canary(workspace, stage) is not None:
            return None
        looked.add(stage.id)
    return first


def failed_by_its_arm(workspace: Workspace, stage: PlannedStage) -> bool:
    """True if a stage's training failed for what its arm is: a loss that is not finite is a
    result, and says nothing of the others."""
    record = workspace.read_record(stage.id)
    last = record.attempts[-1].outcome if record is not None and record.attempts else None
    return last is not None and last.failure in ("not_finite", "unhealthy")


def measured_canary(workspace: Workspace, stage: PlannedStage) -> CanaryMeasure | None:
    """Measure of the first steps of a training stage; None before there are two and a save.

    A stage of fewer steps has shown all it can when it is done. Another trainer's (``command``) is
    measured by its progress; when it saves is its own business.
    """
    numbers = workspace.layout.stage(stage.id).attempt_numbers()
    if not numbers:
        return None
    if stage.kind == "command":
        return _of_another_trainer(workspace, stage.id, numbers[-1])
    done = workspace.layout.stage(stage.id).result.exists()
    path = workspace.layout.attempt(stage.id, numbers[-1]).metrics
    lines = read_metrics(path) if path.exists() else []
    steps = len({line.step for line in lines})
    saves = workspace.layout.stage(stage.id).checkpoints.glob(f"step-*/{MARKER}")
    markers = filter(None, map(atomic.read_json, saves))
    save = min(markers, key=lambda m: int(m.get("step") or 0), default=dict[str, Any]())
    if not done and (steps < CANARY_STEPS or not save):
        return None
    seconds, save_s, start_s = _values(lines, "time/step_s"), save.get("seconds"), None
    first = seconds[: int(save.get("step") or 0)]
    if first and (elapsed_s := save.get("elapsed_s")) is not None:
        start_s = max(0.0, elapsed_s - sum(first) - (save_s or 0.0))
    # The most memory: of the GPU where there is one, else of the process.
    memory = (_values(lines, f"memory/{which}_peak_gib") for which in ("gpu", "host"))
    peak = next(filter(None, memory), None)
    return CanaryMeasure(
        *(stage.id, steps, _settled(seconds), save_s, start_s),
        tokens_per_second=_settled(_values(lines, "tokens_per_second")),
        peak_memory_bytes=round(max(peak) * _GIB) if peak else None,
        judge_calls_per_step=_mean(_values(lines, "judge/calls")),
    )


def _values(lines: list[MetricsLine], name: str) -> list[float]:
    return [v for line in lines if (v := line.metrics.get(name)) is not None]


def _settled(values: list[float]) -> float | None:
    """The mean without the first step, in which kernels are compiled and caches filled."""
    return _mean(values[1:] or values)


def _mean(values: list[float]) -> float | None:
    return mean(values) if values else None


def _of_another_trainer(workspace: Workspace, stage_id: str, number: int) -> CanaryMeasure | None:
    beat = workspace.read_heartbeat(stage_id, number) or {}
    steps = int((beat.get("progress") or {}).get("done") or 0)
    if workspace.layout.stage(stage_id).result.exists():
        return CanaryMeasure(stage_id, steps, None)
    if steps < CANARY_STEPS:
        return None
    passed = float(beat.get("moved_at_s") or 0.0)
    return CanaryMeasure(stage_id, steps, passed / steps if passed else None)
