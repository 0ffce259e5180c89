"""What a run took: time, devices, money, judgements, and room on the disk.

In: a :class:`~flows.reporting.run.reading.RunReading` and its rows of stages. Out:
:class:`~refiner_core.report.run.document.Cost` and
:class:`~refiner_core.report.run.document.DiskUse`. Stages that were there before the run began
cost it nothing, nor does what earlier runs have tried at the others. What nobody has counted is
None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.reporting.run.reading import RunReading
from infra.disk.figures import Room
from infra.disk.keeper import DiskKeeper
from infra.disk.usage import KINDS, size_of, stock_of
from infra.orchestrator.timeline import Incident, StageHistory, incidents_of
from infra.store.traces import read_metrics
from refiner_core.contract.services import is_service
from refiner_core.report.printing import total
from refiner_core.report.run.document import Cost, DiskUse, StageRow

#: What a judge counts that a report sums up.
_OF_JUDGE = (
    *("asked", "calls", "stored", "shared", "failed", "retries"),
    *("prompt_tokens", "completion_tokens"),
)


def cost_of_run(reading: RunReading, rows: Sequence[StageRow]) -> Cost:
    """Sums over the stages that this run has worked on, from when it began: what an earlier run
    has tried in vain at one of them was that run's cost."""
    own = [row for row in rows if row.attempts and not row.skipped]
    shares = {row.name: _share(row, reading.run.started_at) for row in own}
    gpu_hours = total(_part(row.gpu_hours, shares[row.name]) for row in own)
    price = reading.config.publish.price_per_gpu_hour
    money = None if price is None or gpu_hours is None else price * gpu_hours
    return Cost(
        seconds=total(_part(row.seconds, shares[row.name]) for row in own),
        gpu_hours=gpu_hours,
        cpu_hours=total(_part(row.cpu_hours, shares[row.name]) for row in own),
        money=money,
        currency="" if money is None else reading.config.publish.currency,
        lost_seconds=sum(row.lost_seconds * _lost_share(reading, row.name) for row in own),
        lost_steps=sum(i.lost_steps or 0 for row in own for i in _incidents(reading, row.name)[1]),
        judge=_judge_use(reading),
    )


def _share(row: StageRow, began_at: str) -> float:
    """What of a stage's work was done since the run began."""
    seconds = sum(a.seconds or 0.0 for a in row.attempts)
    since = sum(a.seconds or 0.0 for a in row.attempts if a.began_at >= began_at)
    return since / seconds if seconds else 1.0


def _part(value: float | None, share: float) -> float | None:
    return None if value is None else value * share


def _incidents(reading: RunReading, name: str) -> tuple[list[Incident], list[Incident]]:
    """All incidents of a stage, and those since the run began."""
    found = reading.tried(f"What {name} has lost", incidents_of, [reading.histories[name]]) or []
    return found, [i for i in found if i.at >= reading.run.started_at]


def _lost_share(reading: RunReading, name: str) -> float:
    every, since = (sum(i.lost_seconds or 0.0 for i in some) for some in _incidents(reading, name))
    return since / every if every else 1.0


def _judge_use(reading: RunReading) -> dict[str, float]:
    """What judges were asked by all stages of this run together; empty where none kept count."""
    sums: dict[str, float] = {}
    for name in reading.own():
        history = reading.histories[name]
        counts = reading.tried(f"The judge's count of {name}", _counts, reading, history)
        for key, value in (counts or {}).items():
            sums[key] = sums.get(key, 0) + value
    return sums


def _counts(reading: RunReading, history: StageHistory) -> dict[str, float]:
    """By its report; of a training that goes on, by what it has logged so far."""
    result = history.record.result
    if result is not None:
        told: Mapping[str, Any] | None = result.report.get("judge") or result.report.get(
            "judge_usage"
        )
        return {k: told[k] for k in _OF_JUDGE if told and k in told}
    if history.record.spec.kind != "grpo" or not history.record.attempts:
        return {}
    newest = history.record.attempts[-1].number
    path = reading.workspace.layout.attempt(history.stage_id, newest).metrics
    lines = read_metrics(path, [f"judge/{key}" for key in _OF_JUDGE])
    sums: dict[str, float] = {}
    for key in _OF_JUDGE:
        logged = [line.metrics.get(f"judge/{key}") for line in lines]
        if known := [value for value in logged if value is not None]:
            sums[key] = sum(known)
    return sums


# ---------------------------------------------------------------- the disk


def disk_of_run(reading: RunReading) -> DiskUse:
    """What lies in the folders of the run's stages, and the room that is left."""
    used = reading.tried("What the run takes on the disk", _used, reading) or {}
    reclaimed = sum(
        int(e.get("bytes") or 0) for e in reading.events if e.get("event") == "reclaimed"
    )
    room = reading.tried("The room on the disk", _room, reading)
    if room is None:
        return DiskUse(used=used, reclaimed_bytes=reclaimed)
    return DiskUse(used, room.free_bytes, room.limit_bytes, room.source, reclaimed)


def _room(reading: RunReading) -> Room:
    return DiskKeeper(reading.workspace, reading.config.disk).room()


def _used(reading: RunReading) -> dict[str, int]:
    """Bytes by kind of file, of all stages that the run names, and of what it published here."""
    stages = [i for i in reading.run.stages.values() if not is_service(i)]
    sums: dict[str, int] = {}
    for item in stock_of(reading.workspace.layout, stages):
        sums[item.kind] = sums.get(item.kind, 0) + item.size.bytes
    targets = {
        str(result.report["target"])
        for name in reading.histories
        if (result := reading.result(name)) is not None and result.report.get("target")
    }
    here = [Path(t) for t in targets if Path(t).is_absolute() and Path(t).is_dir()]
    if here:
        sums["published"] = sums.get("published", 0) + sum(size_of(p).bytes for p in here)
    return {kind: sums[kind] for kind in KINDS if sums.get(kind)}
