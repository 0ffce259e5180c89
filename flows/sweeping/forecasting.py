"""The forecast of a sweep: gathered from a workspace, for people, for scripts and for records.

In: a planned sweep and a workspace. Out: a :class:`~sweeps.history.History` of finished stages of
the kinds and weights that the sweep has, newest runs first; by it a
:class:`~sweeps.forecast.SweepForecast` with the disk's part in it, lines of text, JSON. It looks at
so many runs and stages and no more, so that a workspace with thousands of them is read in a second
or two. Imports nothing heavy and writes nothing.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from flows.sweeping.budget import UseReader, judge_calls_in
from flows.sweeping.status import use_file
from infra.disk.forecast import Knowledge, forecast_disk, size_of_model
from infra.orchestrator.timeline import devices_of, rough
from infra.store.workspace import Workspace
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.placement import STAGES
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import StageRecord
from refiner_core.contract.services import is_service
from refiner_core.report.printing import size, table_lines
from sweeps.forecast import Passed, StageForecast, SweepForecast, forecast_sweep, passed_limits
from sweeps.history import (
    CanaryMeasure,
    History,
    Measured,
    Shape,
    Work,
    judge_of,
    shape_of,
    steps_key,
    work_of,
)
from sweeps.values import SweepPlan

log = logging.getLogger(__name__)

#: Runs that are looked at, stages that are read, and stages of one shape that suffice.
MOST_RUNS, MOST_STAGES, ENOUGH_OF_A_SHAPE = 200, 300, 9
#: Of a metrics file only the end is read, bytes.
_TAIL_BYTES = 256 << 10


def read_history(workspace: Workspace, plan: SweepPlan) -> History:
    """History of finished stages that are like those of a sweep.

    Stages of the sweep itself count, too: what an earlier version of it did is the best witness.
    """
    stages = [s for s in plan.stages().values() if not is_service(s.id)]
    wanted = {(s.kind, s.sources.get("model", "")) for s in stages}
    found = tuple(_measured(workspace, wanted))
    files = ("rl_test.parquet", "rl_train.parquet")
    held_out, training = (_prompts(workspace, stages, file) for file in files)
    return History(found, held_out, training)


def done_stages(workspace: Workspace, plan: SweepPlan) -> AbstractSet[str]:
    """Ids of the stages of a sweep that are finished."""
    begun = plan.stages().keys() & set(workspace.stage_ids())
    return {stage_id for stage_id in begun if workspace.layout.stage(stage_id).result.exists()}


def _finished_ids(workspace: Workspace, kinds: AbstractSet[str]) -> Iterator[str]:
    """Ids of finished stages of these kinds, those of the newest runs first."""
    seen: set[str] = set()
    for run in islice(workspace.runs(newest_first=True), MOST_RUNS):
        new = [i for i in run.stages.values() if i not in seen and i.rpartition("-")[0] in kinds]
        seen.update(new)
        yield from (i for i in new if workspace.layout.stage(i).result.exists())


def _measured(workspace: Workspace, wanted: AbstractSet[tuple[str, str]]) -> Iterator[Measured]:
    of_a_shape = Counter[Shape]()
    for stage_id in islice(_finished_ids(workspace, {kind for kind, _ in wanted}), MOST_STAGES):
        try:
            record = workspace.read_record(stage_id)
            found = None if record is None else _stage(workspace, stage_id, record, wanted)
        except (RefinerError, KeyError, TypeError, ValueError) as error:
            log.debug("%s says nothing of its times: %s", stage_id, error)
            continue
        if found is not None and of_a_shape[found.shape] < ENOUGH_OF_A_SHAPE:
            of_a_shape[found.shape] += 1
            yield found


def _stage(
    workspace: Workspace,
    stage_id: str,
    record: StageRecord,
    wanted: AbstractSet[tuple[str, str]],
) -> Measured | None:
    """One finished stage; None for one that the sweep has no use for."""
    spec, result = record.spec, record.result
    model = spec.sources.get("model", "")
    if result is None or (spec.kind, model) not in wanted or result.report.get("adopted"):
        return None
    paths = workspace.layout.attempt(stage_id, result.attempt)
    config = workspace.part(paths, "config")
    save_freq = int((config.get(spec.kind) or {}).get("save_freq") or 0)
    attempt = next((a for a in record.attempts if a.number == result.attempt), None)
    resumed = (attempt.resumed_from_step if attempt else None) or 0
    work = _done_work(spec.kind, spec.identity, result.report, save_freq)
    own_units = None if work.units is None else work.units - resumed
    unit_s = _step_s(paths.metrics) if spec.kind in STAGES else None
    save_s = workspace.longest_save_s(stage_id) or None
    start_s = 0.0
    if unit_s is None:
        unit_s = result.seconds / own_units if own_units else None
    elif own_units is not None:
        saves = -(-own_units // save_freq) if save_freq else 0
        start_s = max(0.0, result.seconds - own_units * unit_s - saves * (save_s or 0.0))
    return Measured(
        stage=stage_id,
        shape=shape_of(spec.kind, spec.identity, model, devices_of(config, spec.kind)),
        work=work,
        data=spec.input_fingerprints.get("data", ""),
        unit_s=unit_s,
        save_s=save_s,
        start_s=start_s,
        judge_calls=judge_calls_in(result.report),
        judge=judge_of(spec.identity),
        steps_key=steps_key(spec.kind, spec.identity),
    )


def _done_work(
    kind: str, identity: Mapping[str, Any], report: Mapping[str, Any], save_freq: int
) -> Work:
    """Work that a finished stage has really done."""
    prompts = None
    if kind == "evaluate":
        counts = [int(p["num_prompts"]) for p in (report.get("protocols") or {}).values()]
        prompts = max(counts, default=None)
    elif kind == "sample":
        prompts = int(report["prompts"]["total"])
    work = work_of(kind, identity, prompts=prompts, save_freq=save_freq)
    steps = report.get("steps")
    if kind in STAGES and steps:
        work = work._replace(units=int(steps))
    return work


def _step_s(metrics: Path) -> float | None:
    """Seconds of a step in the middle; None where no step was timed."""
    times = [t for m in _last_lines(metrics) if (t := m.get("time/step_s")) is not None]
    return median(times) if times else None


def _last_lines(path: Path) -> list[dict[str, float | None]]:
    """Metrics of the last steps; none where there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size - _TAIL_BYTES)
            file.seek(start)
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines()[1 if start else 0 :]:
        try:
            found.append(dict(json.loads(line)["metrics"]))
        except (ValueError, KeyError, TypeError):  # cut off in the middle
            continue
    return found


def _prompts(workspace: Workspace, stages: Iterable[PlannedStage], file: str) -> dict[str, int]:
    """Prompts in a file of the `data` stages that are done, by fingerprint."""
    found = {}
    for stage in stages:
        result = workspace.read_result(stage.id) if stage.kind == "data" else None
        files = (result.report.get("files") if result is not None else None) or {}
        if (rows := (files.get(file) or {}).get("rows")) is not None:
            found[stage.fingerprint] = int(rows)
    return found


FORECAST_VERSION = 1
#: What is summed up for stages, kinds of them, and the whole.
_SUMMED = ("seconds", "gpu_hours", "judge_calls")
#: Ids that are spelt out where no number is known.
_FEW = 3


def forecast_of(
    plan: SweepPlan,
    workspace: Workspace,
    canary: Sequence[CanaryMeasure] = (),
    history: History | None = None,
) -> SweepForecast:
    """Forecast of what is left to do of a sweep in this workspace (by ``history``, where it
    has been read already)."""
    done = done_stages(workspace, plan)
    if len(done) == len(plan.stages()):
        return forecast_sweep(plan, History(), done)
    known = read_history(workspace, plan) if history is None else history
    forecast = forecast_sweep(plan, known, done, canary)
    return _with_disk(forecast, plan, workspace)


def _with_disk(forecast: SweepForecast, plan: SweepPlan, workspace: Workspace) -> SweepForecast:
    disk = forecast_disk([t.plan for t in plan.trials], Knowledge(workspace, size_of_model))
    if (most := plan.sweep.limits.concurrency) is not None:
        disk = replace(disk, parallel=min(disk.parallel, most))
    basis = f"not known of {len(disk.unknown)} stages" if disk.unknown else ""
    return replace(forecast, disk_bytes=disk.needed_bytes, disk_basis=basis)


# ---------------------------------------------------------------- for people


def forecast_lines(
    forecast: SweepForecast, passed: Sequence[Passed] = (), *, free_bytes: int | None = None
) -> list[str]:
    """Forecast in lines, one per kind of stage, then disk and limits."""
    if not forecast.stages:
        return ["Forecast: nothing is left to run."]
    rows = [_kind_row(group) for group in _by_kind_and_basis(forecast.stages)]
    lines = [_total_line(forecast), *table_lines(rows, indent="  ")]
    lines += [f"  canary: {canary_text(measured)}" for measured in forecast.canary]
    if forecast.disk_bytes is not None:
        free = "" if free_bytes is None else f", {size(free_bytes)} free"
        note = f" ({forecast.disk_basis})" if forecast.disk_basis else ""
        lines.append(f"Disk: {size(forecast.disk_bytes)} at a time{free}{note}")
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
        parts.append(f"{size(measured.peak_memory_bytes)} of memory at most")
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
            **{"kind": group[0].kind, "stages": len(group)},
            **{k: _sum([getattr(s, k) for s in group]) for k in _SUMMED},
            **{"basis": group[0].basis, "calls_basis": group[0].calls_basis},
        }
        for group in _by_kind_and_basis(forecast.stages)
    ]
    shown = (*_SUMMED, "wall_seconds", "parallel", "disk_bytes", "disk_basis")
    found: dict[str, Any] = {
        **{"version": FORECAST_VERSION, "stages": len(forecast.stages)},
        **{name: getattr(forecast, name) for name in shown},
        "unknown": {
            "stages": len(forecast.unknown),
            "judge_calls": len(forecast.unknown_calls),
            "examples": list(forecast.unknown[:_FEW]),
        },
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
    """Use of the stages of a sweep before it is launched: a forecast is of what is left,
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
