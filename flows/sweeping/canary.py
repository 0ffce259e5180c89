"""The first trial goes ahead alone until its training has shown what it takes.

In: a planned sweep and a workspace. Out: which trial that is, and, as soon as its last training
stage has done two real steps and one save, a :class:`~sweeps.history.CanaryMeasure`: seconds per
step and save, tokens per second, memory. Where any trial has come that far before (an earlier call,
another seed), nobody needs to go ahead: what it measured is history.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

from flows.sweeping.trials import CANARY_STEPS
from infra.store import atomic
from infra.store.checkpoints import MARKER
from infra.store.traces import MetricsLine, read_metrics
from infra.store.workspace import Workspace
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.plan import PlannedStage
from sweeps.history import CanaryMeasure
from sweeps.values import SweepPlan, Trial

_GIB = 2**30


@dataclass(frozen=True)
class Canary:
    """The trial that goes ahead, and the stage that is measured: the last that it trains."""

    trial: Trial
    stage: PlannedStage


def find_canary(plan: SweepPlan, workspace: Workspace) -> Canary | None:
    """The first trial that has training to do; None where nothing is trained, or where a training
    stage like it has been measured in this sweep."""
    first: Canary | None = None
    looked: set[str] = set()
    for trial in plan.trials:
        stage = last_training(trial)
        if stage is None:
            continue
        first = first or Canary(trial, stage)
        if stage.id not in looked and has_shown(workspace, stage):
            return None
        looked.add(stage.id)
    return first


def last_training(trial: Trial) -> PlannedStage | None:
    """The last stage of a trial that trains; None if none does."""
    return next((s for s in reversed(trial.plan.stages) if s.kind in TRAINED), None)


def has_shown(workspace: Workspace, stage: PlannedStage) -> bool:
    """Whether a stage is done, or has done two real steps and a save."""
    if workspace.layout.stage(stage.id).result.exists():
        return True
    return measured_canary(workspace, stage) is not None


def failed_by_its_arm(workspace: Workspace, canary: Canary) -> bool:
    """Whether the canary's training failed for what its arm is: a loss that is not finite is a
    result, and says nothing of the others."""
    record = workspace.read_record(canary.stage.id)
    last = record.attempts[-1] if record is not None and record.attempts else None
    return (
        last is not None
        and last.outcome is not None
        and last.outcome.failure in ("not_finite", "unhealthy")
    )


def measured_canary(workspace: Workspace, stage: PlannedStage) -> CanaryMeasure | None:
    """What the first steps of a training stage have shown; None before there are two and a save.

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
    save = _first_save(workspace, stage.id)
    if not done and (steps < CANARY_STEPS or save is None):
        return None
    seconds = _values(lines, "time/step_s")
    save_s, elapsed_s, saved_step = save or (None, None, 0)
    return CanaryMeasure(
        stage=stage.id,
        steps=steps,
        seconds_per_step=_settled(seconds),
        save_seconds=save_s,
        start_seconds=_start_s(elapsed_s, seconds[:saved_step], save_s),
        tokens_per_second=_settled(_values(lines, "tokens_per_second")),
        peak_memory_bytes=_peak(lines),
        judge_calls_per_step=_mean(_values(lines, "judge/calls")),
    )


def _first_save(
    workspace: Workspace, stage_id: str
) -> tuple[float | None, float | None, int] | None:
    """Seconds of the oldest save that is there, how long its attempt had run, and its step."""
    markers = map(
        atomic.read_json, workspace.layout.stage(stage_id).checkpoints.glob(f"step-*/{MARKER}")
    )
    first = min((m for m in markers if m), key=lambda m: int(m.get("step") or 0), default=None)
    if first is None:
        return None
    return first.get("seconds"), first.get("elapsed_s"), int(first.get("step") or 0)


def _start_s(elapsed_s: float | None, seconds: list[float], save_s: float | None) -> float | None:
    """From the job's start to its first step."""
    if elapsed_s is None or not seconds:
        return None
    return max(0.0, elapsed_s - sum(seconds) - (save_s or 0.0))


def _values(lines: list[MetricsLine], name: str) -> list[float]:
    return [v for line in lines if (v := line.metrics.get(name)) is not None]


def _settled(values: list[float]) -> float | None:
    """The mean without the first step, in which kernels are compiled and caches filled."""
    return _mean(values[1:] or values)


def _mean(values: list[float]) -> float | None:
    return mean(values) if values else None


def _peak(lines: list[MetricsLine]) -> int | None:
    """The most memory: of the GPU where there is one, else of the process."""
    for name in ("memory/gpu_peak_gib", "memory/host_peak_gib"):
        if values := _values(lines, name):
            return round(max(values) * _GIB)
    return None


def _of_another_trainer(workspace: Workspace, stage_id: str, number: int) -> CanaryMeasure | None:
    beat = workspace.read_heartbeat(stage_id, number) or {}
    steps = int((beat.get("progress") or {}).get("done") or 0)
    if workspace.layout.stage(stage_id).result.exists():
        return CanaryMeasure(stage_id, steps, None)
    if steps < CANARY_STEPS:
        return None
    passed = float(beat.get("moved_at_s") or 0.0)
    return CanaryMeasure(stage_id, steps, passed / steps if passed else None)
