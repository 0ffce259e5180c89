"""Forecast of a sweep, from the records of a workspace, for people, scripts and records.

In: a planned sweep and a workspace. Out: a :class:`~sweeps.forecast.History` of finished stages
with the kinds and weights of the sweep, newest runs first; from it a
:class:`~sweeps.forecast.SweepForecast` with disk use, as lines of text and JSON. The number of runs
and stages read is limited, so that a workspace with thousands of them takes a second or two.
Imports nothing heavy and writes nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from flows.durations import FORECAST_KINDS, stage_time
from flows.sweeping.budget import NOTHING, UsageReader, judge_calls_in
from infra.disk.forecast import forecast_disk
from infra.jobs.dispatcher import tail_of
from infra.orchestrator.timeline import devices_of, rough
from infra.store.workspace import Workspace
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.placement import STAGES
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import RunRecord, StageRecord, picked
from refiner_core.contract.services import is_service
from refiner_core.report.printing import counted, size, table_lines
from sweeps.forecast import (
    AssumedCost,
    CanaryMeasure,
    ExceededLimit,
    History,
    StageForecast,
    StageMeasure,
    SweepForecast,
    Work,
    forecast_sweep,
    passed_limits,
    shape_of,
    work_of,
)
from sweeps.values import SweepPlan

log = logging.getLogger(__name__)

#: Maximum numbers of runs and of stages read.
MOST_RUNS, MOST_STAGES = 200, 300
#: Bytes read from the end of a metrics file.
_TAIL_BYTES = 256 << 10


def read_history(workspace: Workspace, plan: SweepPlan) -> History:
    """History of finished stages that are similar to those of a sweep.

    Includes stages of the sweep itself: an earlier version of it is the best evidence.
    """
    stages = [s for s in plan.stages().values() if not is_service(s.id)]
    wanted = {(s.kind, s.sources.get("model", "")) for s in stages}
    return History(tuple(_measured(workspace, wanted)), _prompts(workspace, stages))


def done_stages(workspace: Workspace, plan: SweepPlan) -> AbstractSet[str]:
    """Ids of the stages of a sweep that are finished."""
    begun = plan.stages().keys() & set(workspace.stage_ids())
    return {stage_id for stage_id in begun if workspace.layout.stage(stage_id).result.exists()}


def finished_stages(
    workspace: Workspace, kinds: AbstractSet[str]
) -> Iterator[tuple[RunRecord, str]]:
    """Ids of finished stages of these kinds, each with its newest run, the newest first."""
    seen: set[str] = set()
    for run in islice(workspace.runs(newest_first=True), MOST_RUNS):
        new = [i for i in run.stages.values() if i not in seen and i.rpartition("-")[0] in kinds]
        seen.update(new)
        yield from ((run, i) for i in new if workspace.layout.stage(i).result.exists())


def _measured(workspace: Workspace, wanted: AbstractSet[tuple[str, str]]) -> Iterator[StageMeasure]:
    found = finished_stages(workspace, {kind for kind, _ in wanted})
    for _, stage_id in islice(found, MOST_STAGES):
        try:
            record = workspace.read_record(stage_id)
            measured = None if record is None else _stage(workspace, stage_id, record, wanted)
        except (RefinerError, KeyError, TypeError, ValueError) as error:
            log.debug("%s has no usable times: %s", stage_id, error)
            continue
        if measured is not None:
            yield measured


def _stage(
    workspace: Workspace, stage_id: str, record: StageRecord, wanted: AbstractSet[tuple[str, str]]
) -> StageMeasure | None:
    """One finished stage; None if the sweep has no use for it."""
    spec, result = record.spec, record.result
    model = spec.sources.get("model", "")
    if result is None or (spec.kind, model) not in wanted or result.report.get("adopted"):
        return None
    paths = workspace.layout.attempt(stage_id, result.attempt)
    config = workspace.part(paths, "config")
    attempt = next((a for a in record.attempts if a.number == result.attempt), None)
    resumed = (attempt.resumed_from_step if attempt else None) or 0
    work = _done_work(spec.kind, spec.identity, result.report)
    own_units = None if work.units is None else work.units - resumed
    unit_s = _step_s(paths.metrics) if spec.kind in STAGES else None
    if unit_s is None and own_units:
        unit_s = result.seconds / own_units
    return StageMeasure(
        shape=shape_of(spec.kind, spec.identity, model, devices_of(config, spec.kind)),
        work=work,
        data=spec.input_fingerprints.get("data", ""),
        unit_s=unit_s,
        start_s=max(0.0, result.seconds - (own_units or 0) * unit_s) if unit_s else 0.0,
        judge_calls=judge_calls_in(result.report),
        identity=spec.identity,
    )


def _done_work(kind: str, identity: Mapping[str, Any], report: Mapping[str, Any]) -> Work:
    """Work that a finished stage has done."""
    prompts = None
    if kind == "evaluate":
        counts = [int(p["num_prompts"]) for p in (report.get("protocols") or {}).values()]
        prompts = max(counts, default=None)
    elif kind == "sample":
        prompts = int(report["prompts"]["total"])
    work = work_of(kind, identity, prompts=prompts)
    steps = report.get("steps")
    if kind in STAGES and steps:
        work = work._replace(units=int(steps))
    return work


def _step_s(metrics: Path) -> float | None:
    """Median duration of the last steps, seconds; None if no step was timed."""
    times = []
    for line in tail_of([metrics], _TAIL_BYTES).splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # cut off in the middle
            times.append(float(json.loads(line)["metrics"]["time/step_s"]))
    return median(times) if times else None


def _prompts(workspace: Workspace, stages: Iterable[PlannedStage]) -> dict[str, tuple[int, int]]:
    """Held-out and training prompts of the `data` stages that are done, by fingerprint."""
    found = {}
    for stage in stages:
        result = workspace.read_result(stage.id) if stage.kind == "data" else None
        files = (result.report.get("files") if result is not None else None) or {}
        named = [files.get(f"rl_{part}.parquet") or {} for part in ("test", "train")]
        if any("rows" in one for one in named):
            test, train = (int(one.get("rows") or 0) for one in named)
            found[stage.fingerprint] = test, train
    return found


FORECAST_VERSION = 1
#: Quantities that are summed for stages, kinds, and the sweep.
_SUMMED = ("seconds", "gpu_hours", "judge_calls")
#: Ids that are spelled out if their numbers are unknown.
_FEW = 3


def forecast_of(
    plan: SweepPlan,
    workspace: Workspace,
    canary: Sequence[CanaryMeasure] = (),
    history: History | None = None,
) -> SweepForecast:
    """Forecast of the unfinished stages of a sweep (from ``history``, if it was already read)."""
    done = done_stages(workspace, plan)
    if len(done) == len(plan.stages()):
        return forecast_sweep(plan, History(), done)
    known = read_history(workspace, plan) if history is None else history
    disk = forecast_disk([t.plan for t in plan.trials], workspace)
    if (most := plan.sweep.limits.concurrency) is not None:
        disk = replace(disk, parallel=min(disk.parallel, most))
    basis = f"unknown for {len(disk.unknown)} stages" if disk.unknown else ""
    forecast = forecast_sweep(plan, known, done, canary, partial(assumed_cost, workspace))
    return replace(forecast, disk_bytes=disk.needed_bytes, disk_basis=basis)


def assumed_cost(workspace: Workspace, stage: PlannedStage, plan: Plan) -> AssumedCost:
    """The likely cost of a stage by the assumptions of ``refiner plan``, if it has a figure for the
    whole stage."""
    found = stage_time(stage, plan, workspace) if stage.kind in FORECAST_KINDS else None
    if found is None or found.per != "stage" or found.seconds is None:
        return AssumedCost(None, None, "")
    fast, likely, slow = found.seconds
    basis = f"assumed: {found.device}, {rough(fast)} to {rough(slow)} each"
    return AssumedCost(likely, found.judge_calls, basis)


# ---------------------------------------------------------------- for people


def forecast_lines(
    forecast: SweepForecast, passed: Sequence[ExceededLimit] = (), *, free_bytes: int | None = None
) -> list[str]:
    """Forecast in lines, one per kind of stage, then disk and limits."""
    if not forecast.stages:
        return ["Forecast: nothing is left to run."]
    rows = map(_kind_row, _kinds(forecast.stages))
    lines = [_total_line(forecast), *table_lines(rows, indent="  ")]
    lines += [f"  canary: {canary_text(measured)}" for measured in forecast.canary]
    if forecast.disk_bytes is not None:
        free = "" if free_bytes is None else f", {size(free_bytes)} free"
        note = f" ({forecast.disk_basis})" if forecast.disk_basis else ""
        lines.append(f"Disk: {size(forecast.disk_bytes)} at a time{free}{note}")
    lines += [f"Limit: {p.text}" for p in passed]
    return lines


def _total_line(forecast: SweepForecast) -> str:
    count, unknown = len(forecast.stages), len(forecast.unknown())
    if unknown == count:
        return (
            f"Forecast: {count} stages to run; their duration is unknown: nothing similar "
            "was measured in this workspace. The sweep's first steps will show."
        )
    parts = [f"Forecast: {count} stages to run", f"{rough(forecast.total('seconds'))} of work"]
    if any(s.shape.devices for s in forecast.stages):
        parts.append(f"{forecast.total('gpu_hours'):.1f} GPU-hours")
    calls, more = forecast.total("judge_calls"), forecast.unknown("judge_calls")
    if calls or more:
        parts.append(f"{'at least ' if more else ''}{calls} judge calls")
    if unknown:
        parts.append(f"plus {unknown} stages of unknown cost")
    text, wall = ", ".join(parts), forecast.wall_seconds
    text += "" if wall is None else f"; about {rough(wall)} from begin to end"
    return f"{text} ({forecast.parallel})."


def canary_text(measured: CanaryMeasure) -> str:
    """``2 steps of grpo-0123: 31 s a step, 4 s a save``."""
    shown = {"step": measured.seconds_per_step, "save": measured.save_seconds}
    parts = [f"{value:.2g} s a {name}" for name, value in shown.items() if value is not None]
    return f"{measured.steps} steps of {measured.stage}: {', '.join(parts) or 'no numbers'}"


def _kinds(stages: Sequence[StageForecast]) -> list[dict[str, Any]]:
    """Sums over the stages of a kind with the same basis; None if one has no number."""
    groups: dict[tuple[str, str, str], list[StageForecast]] = {}
    for stage in stages:
        groups.setdefault((stage.kind, stage.basis, stage.calls_basis), []).append(stage)
    found = []
    for (kind, basis, calls_basis), group in groups.items():
        each = {name: [getattr(s, name) for s in group] for name in _SUMMED}
        sums = {name: None if None in values else sum(values) for name, values in each.items()}
        row = {"kind": kind, "stages": len(group), **sums}
        found.append({**row, "basis": basis, "calls_basis": calls_basis})
    return found


def _kind_row(kind: Mapping[str, Any]) -> list[str]:
    seconds, hours, calls = (kind[name] for name in _SUMMED)
    return [
        kind["kind"],
        counted(kind["stages"], "stage"),
        "?" if seconds is None else f"{rough(seconds)} in all",
        f"{hours:.1f} GPU-h" if hours else "",
        "? calls" if calls is None else f"{calls} calls" if calls else "",
        "; judge calls ".join(filter(None, [kind["basis"], kind["calls_basis"]])),
    ]


# ---------------------------------------------------------------- for scripts and records


def forecast_json(forecast: SweepForecast, passed: Sequence[ExceededLimit] = ()) -> dict[str, Any]:
    """The forecast without single stages, for a sweep's record and ``--json``."""
    unknown = forecast.unknown()
    return {
        **{"version": FORECAST_VERSION, "stages": len(forecast.stages)},
        **{name: forecast.total(name) for name in _SUMMED},
        **picked(forecast, "wall_seconds", "parallel", "disk_bytes", "disk_basis"),
        "unknown": {
            "stages": len(unknown),
            "judge_calls": len(forecast.unknown("judge_calls")),
            "examples": unknown[:_FEW],
        },
        "kinds": _kinds(forecast.stages),
        "canary": [asdict(c) for c in forecast.canary],
        "passed_limits": [{**asdict(p), "text": p.text} for p in passed],
    }


def passed_by(
    forecast: SweepForecast, plan: SweepPlan, workspace: Workspace
) -> tuple[ExceededLimit, ...]:
    """Limits of the sweep file that it would exceed, given the use of its stages so far."""
    limits, used = plan.sweep.limits, NOTHING
    if limits.gpu_hours is not None or limits.judge_calls is not None:
        used = UsageReader(workspace).total(plan.stages())
    return tuple(passed_limits(forecast, limits, picked(used, "gpu_hours", "judge_calls")))
