"""Reads from a workspace what earlier stages took, for the forecast of a sweep.

In: a workspace and a planned sweep. Out: a :class:`~sweeps.history.History` of finished stages of
the kinds and weights that the sweep has, newest runs first. It looks at so many runs and stages and
no more, so that a workspace with thousands of them is read in a second or two.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from infra.orchestrator.history import devices_of
from infra.store.workspace import Workspace
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.placement import STAGES
from refiner_core.contract.plan import PlannedStage
from refiner_core.contract.records import StageRecord
from refiner_core.contract.services import is_service
from sweeps.history import (
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
#: At most this share of an evaluation is taken for loading.
_MOST_LOADING = 0.8


class _Kind(NamedTuple):
    """What a sweep wants to know about: stages of a kind that start at these weights."""

    kind: str
    model: str


def read_history(workspace: Workspace, plan: SweepPlan) -> History:
    """What finished stages say about those of a sweep.

    Stages of the sweep itself count, too: what an earlier version of it did is the best witness.
    """
    stages = [s for s in plan.stages().values() if not is_service(s.id)]
    wanted = {_Kind(s.kind, s.sources.get("model", "")) for s in stages}
    found = tuple(_measured(workspace, wanted))
    files = ("rl_test.parquet", "rl_train.parquet")
    held_out, training = (_prompts(workspace, stages, file) for file in files)
    return History(_with_loading(found), held_out, training)


def done_stages(workspace: Workspace, plan: SweepPlan) -> AbstractSet[str]:
    """Ids of the stages of a sweep that are finished."""
    begun = plan.stages().keys() & set(workspace.stage_ids())
    return {stage_id for stage_id in begun if workspace.layout.stage(stage_id).result.exists()}


def finished_ids(workspace: Workspace, kinds: AbstractSet[str]) -> Iterator[str]:
    """Ids of finished stages of these kinds, those of the newest runs first."""
    seen: set[str] = set()
    for run_id in list(reversed(workspace.run_ids()))[:MOST_RUNS]:
        try:
            run = workspace.read_run(run_id)
        except RefinerError as error:  # another record may say as much
            log.debug("%s", error)
            continue
        for stage_id in run.stages.values():
            if stage_id in seen or stage_id.rpartition("-")[0] not in kinds:
                continue
            seen.add(stage_id)
            if workspace.layout.stage(stage_id).result.exists():
                yield stage_id


def _measured(workspace: Workspace, wanted: AbstractSet[_Kind]) -> Iterator[Measured]:
    read, of_a_shape = 0, dict[Shape, int]()
    for stage_id in finished_ids(workspace, {w.kind for w in wanted}):
        read += 1
        if read > MOST_STAGES:
            return
        try:
            record = workspace.read_record(stage_id)
            found = None if record is None else _stage(workspace, stage_id, record, wanted)
        except (RefinerError, KeyError, TypeError, ValueError) as error:
            log.debug("%s says nothing of its times: %s", stage_id, error)
            continue
        if found is None:
            continue
        of_a_shape[found.shape] = of_a_shape.get(found.shape, 0) + 1
        if of_a_shape[found.shape] <= ENOUGH_OF_A_SHAPE:
            yield found


def _stage(
    workspace: Workspace, stage_id: str, record: StageRecord, wanted: AbstractSet[_Kind]
) -> Measured | None:
    """One finished stage; None for one that the sweep has no use for."""
    spec, result = record.spec, record.result
    model = spec.sources.get("model", "")
    if result is None or _Kind(spec.kind, model) not in wanted or result.report.get("adopted"):
        return None
    paths = workspace.layout.attempt(stage_id, result.attempt)
    config = workspace.part(paths, "config")
    save_freq = int((config.get(spec.kind) or {}).get("save_freq") or 0)
    attempt = next((a for a in record.attempts if a.number == result.attempt), None)
    resumed = (attempt.resumed_from_step if attempt else None) or 0
    work = _done_work(spec.kind, spec.identity, result.report, save_freq)
    own_units = None if work.units is None else work.units - resumed
    unit_s = _step_s(paths.metrics, spec.kind, result.report)
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
        judge_calls=_judge_calls(result.report),
        judge=judge_of(spec.identity),
        steps_key=steps_key(spec.kind, spec.identity),
    )


def _done_work(
    kind: str, identity: Mapping[str, Any], report: Mapping[str, Any], save_freq: int
) -> Work:
    """What a finished stage has really done."""
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


def _step_s(metrics: Path, kind: str, report: Mapping[str, Any]) -> float | None:
    """Seconds of a step in the middle; None where no step was timed."""
    if kind not in STAGES:
        return None
    lines = _last_lines(metrics)
    times = [t for m in lines if (t := m.get("time/step_s")) is not None]
    if times:
        return median(times)
    rates = [r for m in lines if (r := m.get("tokens_per_second"))]
    steps, tokens = report.get("steps"), report.get("tokens")
    if not rates or not steps or not tokens:
        return None
    return float(tokens) / float(steps) / median(rates)


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


def _judge_calls(report: Mapping[str, Any]) -> int | None:
    usage = report.get("judge") or report.get("judge_usage")
    if not isinstance(usage, Mapping) or "calls" not in usage:
        return None
    return int(usage["calls"])


def _with_loading(stages: Sequence[Measured]) -> tuple[Measured, ...]:
    """Evaluations note only how long they took in all; what a trainer of the same weights took to
    begin is no time of samples there either."""
    loading: dict[tuple[str, int], list[float]] = {}
    for stage in stages:
        if stage.shape.kind in STAGES:
            loading.setdefault(stage.shape[1:3], []).append(stage.start_s)
    found = []
    for stage in stages:
        starts = loading.get(stage.shape[1:3])
        if (
            stage.shape.kind in ("sample", "evaluate")
            and starts
            and stage.work.units
            and stage.unit_s
        ):
            total = stage.unit_s * stage.work.units
            start_s = min(median(starts), _MOST_LOADING * total)
            unit_s = (total - start_s) / stage.work.units
            stage = replace(stage, start_s=start_s, unit_s=unit_s)
        found.append(stage)
    return tuple(found)


def _prompts(workspace: Workspace, stages: Iterable[PlannedStage], file: str) -> dict[str, int]:
    """Prompts in a file of the `data` stages that are done, by fingerprint."""
    found = {}
    for stage in stages:
        if stage.kind != "data":
            continue
        result = workspace.read_result(stage.id)
        files = result.report.get("files") if result is not None else None
        rows = ((files or {}).get(file) or {}).get("rows")
        if rows is not None:
            found[stage.fingerprint] = int(rows)
    return found
