"""The forecast of a sweep: gathered from a workspace, for people, for scripts and for records.

In: a planned sweep and a workspace. Out: a :class:`~sweeps.forecast.SweepForecast` with the disk's
part in it, lines of text, JSON. Imports nothing heavy and writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, replace
from typing import Any

from flows.disk import size_of_model
from flows.sweeping.history import done_stages, read_history
from flows.sweeping.reading import use_file
from flows.sweeping.use import UseReader
from infra.disk.forecast import Knowledge, forecast_disk
from infra.orchestrator.timeline import rough, size_text
from infra.store.workspace import Workspace
from sweeps.fitting import Passed, passed_limits
from sweeps.forecast import StageForecast, SweepForecast, forecast_sweep
from sweeps.history import CanaryMeasure, History
from sweeps.values import SweepPlan

FORECAST_VERSION = 1
#: Ids that are spelt out where no number is known.
_FEW = 3


def forecast_of(
    plan: SweepPlan,
    workspace: Workspace,
    canary: Sequence[CanaryMeasure] = (),
    history: History | None = None,
) -> SweepForecast:
    """What is left to do of a sweep in this workspace, and what it takes (by ``history``, where it
    has been read already)."""
    done = done_stages(workspace, plan)
    if len(done) == len(plan.stages()):
        return forecast_sweep(plan, History(), done)
    known = read_history(workspace, plan) if history is None else history
    forecast = forecast_sweep(plan, known, done, canary)
    return _with_disk(forecast, plan, workspace, done)


class _Known(Knowledge):
    """What is done has been looked up already."""

    def __init__(self, workspace: Workspace, done: AbstractSet[str]) -> None:
        super().__init__(workspace, size_of_model)
        self._finished = done

    def is_done(self, stage_id: str) -> bool:
        return stage_id in self._finished


def _with_disk(
    forecast: SweepForecast, plan: SweepPlan, workspace: Workspace, done: AbstractSet[str]
) -> SweepForecast:
    disk = forecast_disk([t.plan for t in plan.trials], _Known(workspace, done))
    if (most := plan.sweep.limits.concurrency) is not None:
        disk = replace(disk, parallel=min(disk.parallel, most))
    basis = f"not known of {len(disk.unknown)} stages" if disk.unknown else ""
    return replace(forecast, disk_bytes=disk.needed_bytes, disk_basis=basis)


# ---------------------------------------------------------------- for people


def forecast_lines(
    forecast: SweepForecast, passed: Sequence[Passed] = (), *, free_bytes: int | None = None
) -> list[str]:
    """What it takes, a line per kind of stage, then disk and limits."""
    if not forecast.stages:
        return ["Forecast: nothing is left to run."]
    lines = [_total_line(forecast)]
    rows = [_kind_row(group) for group in _by_kind_and_basis(forecast.stages)]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:5], widths, strict=True)]
        lines.append(f"  {'  '.join(cells)}  {row[5]}".rstrip())
    for measured in forecast.canary:
        lines.append(f"  canary: {canary_text(measured)}")
    if forecast.disk_bytes is not None:
        free = "" if free_bytes is None else f", {size_text(free_bytes)} free"
        note = f" ({forecast.disk_basis})" if forecast.disk_basis else ""
        lines.append(f"Disk: {size_text(forecast.disk_bytes)} at a time{free}{note}")
    lines += [f"Limit: {p.text}" for p in passed]
    return lines


def _total_line(forecast: SweepForecast) -> str:
    unknown = len(forecast.unknown)
    known = len(forecast.stages) - unknown
    if not known:
        return (
            f"Forecast: {len(forecast.stages)} stages to run; how long they take is not known: "
            "nothing like them has been measured in this workspace. The sweep's first steps will "
            "say."
        )
    parts = [f"{rough(forecast.seconds)} of work"]
    if any(s.shape.devices for s in forecast.stages):
        parts.append(f"{forecast.gpu_hours:.1f} GPU-hours")
    if forecast.judge_calls or forecast.unknown_calls:
        least = "at least " if forecast.unknown_calls else ""
        parts.append(f"{least}{forecast.judge_calls} judge calls")
    text = f"Forecast: {len(forecast.stages)} stages to run, {', '.join(parts)}"
    if unknown:
        text += f", and what {unknown} stages take that nothing is known of"
    if forecast.wall_seconds is not None:
        text += f"; about {rough(forecast.wall_seconds)} from begin to end"
    return f"{text} ({forecast.parallel})."


def canary_text(measured: CanaryMeasure) -> str:
    """``2 steps of grpo-0123: 31.0 s a step, 4.0 s a save, 12000 tokens/s, 61.2 GB``."""
    parts = []
    if measured.seconds_per_step is not None:
        parts.append(f"{measured.seconds_per_step:.2g} s a step")
    if measured.save_seconds is not None:
        parts.append(f"{measured.save_seconds:.2g} s a save")
    if measured.tokens_per_second is not None:
        parts.append(f"{measured.tokens_per_second:.0f} tokens/s")
    if measured.peak_memory_bytes is not None:
        parts.append(f"{size_text(measured.peak_memory_bytes)} of memory at most")
    return f"{measured.steps} steps of {measured.stage}: {', '.join(parts) or 'no numbers'}"


def _by_kind_and_basis(stages: Sequence[StageForecast]) -> list[list[StageForecast]]:
    groups: dict[tuple[str, str, str], list[StageForecast]] = {}
    for stage in stages:
        groups.setdefault((stage.kind, stage.basis, stage.calls_basis), []).append(stage)
    return list(groups.values())


def _kind_row(group: Sequence[StageForecast]) -> list[str]:
    seconds = [s.seconds for s in group]
    hours, calls = [s.gpu_hours for s in group], [s.judge_calls for s in group]
    known = sum(c or 0 for c in calls)
    basis = "; judge calls ".join(filter(None, [group[0].basis, group[0].calls_basis]))
    return [
        group[0].kind,
        f"{len(group)} x",
        rough(sum(s or 0.0 for s in seconds)) if None not in seconds else "?",
        f"{sum(h or 0.0 for h in hours):.1f} GPU-h" if any(hours) else "",
        "? calls" if None in calls else f"{known} calls" if known else "",
        basis,
    ]


# ---------------------------------------------------------------- for scripts and records


def forecast_json(
    forecast: SweepForecast, passed: Sequence[Passed] = (), *, trials: bool = True
) -> dict[str, Any]:
    """All of it but the single stages: what a sweep's record keeps, and ``--json`` shows.

    Parameters
    ----------
    trials
        With each trial's share; without, it stays small however many trials there are.
    """
    kinds = [
        {
            "kind": group[0].kind,
            "stages": len(group),
            "seconds": _sum([s.seconds for s in group]),
            "gpu_hours": _sum([s.gpu_hours for s in group]),
            "judge_calls": _sum([s.judge_calls for s in group]),
            "basis": group[0].basis,
            "calls_basis": group[0].calls_basis,
        }
        for group in _by_kind_and_basis(forecast.stages)
    ]
    found: dict[str, Any] = {
        "version": FORECAST_VERSION,
        "stages": len(forecast.stages),
        "seconds": forecast.seconds,
        "gpu_hours": forecast.gpu_hours,
        "judge_calls": forecast.judge_calls,
        "wall_seconds": forecast.wall_seconds,
        "parallel": forecast.parallel,
        "unknown": {
            "stages": len(forecast.unknown),
            "judge_calls": len(forecast.unknown_calls),
            "examples": list(forecast.unknown[:_FEW]),
        },
        "disk_bytes": forecast.disk_bytes,
        "disk_basis": forecast.disk_basis,
        "kinds": kinds,
        "canary": [asdict(c) for c in forecast.canary],
        "passed_limits": [{**asdict(p), "text": p.text} for p in passed],
    }
    if trials:
        found["trials"] = [asdict(t) for t in forecast.trials]
    return found


def _sum(values: Sequence[float | None]) -> float | None:
    """The sum; None where one is not known."""
    return None if None in values else sum(v for v in values if v is not None)


def used_before(plan: SweepPlan, workspace: Workspace) -> dict[str, float]:
    """What the stages of a sweep have taken before it is launched: a forecast is of what is left,
    and only both together can be held against what has been used in the end."""
    used = UseReader(workspace, use_file(workspace, plan.sweep.name)).total(plan.stages())
    return {"seconds": used.seconds, "gpu_hours": used.gpu_hours}


def passed_by(
    forecast: SweepForecast, plan: SweepPlan, workspace: Workspace | None = None
) -> tuple[Passed, ...]:
    """The limits of the sweep file that it would pass, with what its stages have used so far, where
    a workspace is given."""
    limits = plan.sweep.limits
    if workspace is None or (limits.gpu_hours is None and limits.judge_calls is None):
        return passed_limits(forecast, limits)
    used = UseReader(workspace).total(plan.stages())
    return passed_limits(
        forecast,
        limits,
        used_gpu_hours=used.gpu_hours,
        used_judge_calls=used.judge_calls or 0,
    )
