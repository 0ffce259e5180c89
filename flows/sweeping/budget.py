"""Resource use of stages so far, and the budget for further trials.

In: a workspace and ids of stages; the limits of a sweep file, a forecast by stage. Out: a
:class:`ResourceUsage` each (time, devices, queue, waste, judge calls), and sums of them; the reason
why a trial is held, empty if it fits. A finished stage never changes, so a reader reads it once,
and the orchestrator of a sweep stores the use of finished stages beside the sweep for other readers
(:meth:`UsageReader.keep`).

Counted are all attempts at the sweep's stages, each stage once: finished stages by their use,
running ones by their forecast (or their use so far, if that is more), and the unfinished stages of
the trial in question by their forecast. Unknown amounts count as zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any

from infra.orchestrator.timeline import StageHistory, devices_of, incidents_of, seconds_between
from infra.store.traces import read_metrics
from infra.store.workspace import Workspace
from refiner_core.contract.records import StageRecord
from refiner_core.contract.services import is_service
from sweeps.forecast import StageForecast, SweepForecast, amount
from sweeps.values import Limits, Trial

_HOUR_S = 3600.0


@dataclass(frozen=True)
class ResourceUsage:
    """Resources used by all attempts together.

    Attributes
    ----------
    seconds
        Running time of its jobs.
    gpu_hours, cpu_hours
        GPUs or cores of all nodes, times time.
    queue_seconds
        From submission to start of a scheduler's jobs, by its clock.
    lost_seconds, lost_steps
        Work that was repeated.
    incidents
        Attempts that ended before their work was done.
    judge_calls
        None if no judge counted its calls.
    """

    seconds: float = 0.0
    gpu_hours: float = 0.0
    cpu_hours: float = 0.0
    queue_seconds: float = 0.0
    lost_seconds: float = 0.0
    lost_steps: int = 0
    attempts: int = 0
    incidents: int = 0
    judge_calls: int | None = None

    def plus(self, other: ResourceUsage) -> ResourceUsage:
        """The sum."""
        return ResourceUsage(
            *(_sum(getattr(self, f.name), getattr(other, f.name)) for f in fields(ResourceUsage))
        )


def _sum(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return one + other


NOTHING = ResourceUsage()


def judge_calls_in(report: Mapping[str, Any]) -> int | None:
    """Judge calls in the report of a finished stage; None if it has no count."""
    usage = report.get("judge") or report.get("judge_usage")
    return int(usage["calls"]) if isinstance(usage, Mapping) and "calls" in usage else None


class UsageReader:
    """Reads the use of stages; remembers what cannot change."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._finished: set[str] = set()
        self._done: dict[str, ResourceUsage] = {}

    def is_done(self, stage_id: str) -> bool:
        """True if a stage is done."""
        if stage_id not in self._finished and self.workspace.layout.stage(stage_id).result.exists():
            self._finished.add(stage_id)
        return stage_id in self._finished

    def of(self, stage_id: str) -> ResourceUsage:
        """Use of one stage; zero before it has begun."""
        if stage_id in self._done:
            return self._done[stage_id]
        record = self.workspace.read_record(stage_id)
        if record is None or not record.attempts:
            return NOTHING
        use = self._of(stage_id, record)
        if record.result is not None:
            self._done[stage_id] = use
        return use

    def total(self, stage_ids: Iterable[str]) -> ResourceUsage:
        """Use of several stages, each counted once."""
        return reduce(ResourceUsage.plus, map(self.of, dict.fromkeys(stage_ids)), NOTHING)

    def _of(self, stage_id: str, record: StageRecord) -> ResourceUsage:
        history = StageHistory.read(self.workspace, record.spec.name, stage_id, record)
        seconds = sum(float(history.seconds(a) or 0.0) for a in record.attempts)
        gpus, cpus = self._devices(stage_id, record)
        incidents = incidents_of([history]) if len(record.attempts) > 1 else []
        waits = (
            seconds_between(a.claimed_at, a.started_at)
            for a in record.attempts
            if a.executor != "local"
        )
        return ResourceUsage(
            seconds=seconds,
            gpu_hours=seconds * gpus / _HOUR_S,
            cpu_hours=seconds * cpus / _HOUR_S,
            queue_seconds=sum(wait or 0.0 for wait in waits),
            lost_seconds=sum(i.lost_seconds or 0.0 for i in incidents),
            lost_steps=sum(i.lost_steps or 0 for i in incidents),
            attempts=len(record.attempts),
            incidents=sum(
                a.outcome is not None and a.outcome.failure != "none" for a in record.attempts
            ),
            judge_calls=self._judge_calls(stage_id, record),
        )

    def _devices(self, stage_id: str, record: StageRecord) -> tuple[int, int]:
        """GPUs and cores of all nodes, as requested by the newest attempt."""
        newest = self.workspace.layout.attempt(stage_id, record.attempts[-1].number)
        config, kind = self.workspace.part(newest, "config"), record.spec.kind
        return devices_of(config, kind), devices_of(config, kind, "cpus", 1)

    def _judge_calls(self, stage_id: str, record: StageRecord) -> int | None:
        if record.result is not None:
            return judge_calls_in(record.result.report)
        if record.spec.kind != "grpo":
            return None
        path = self.workspace.layout.attempt(stage_id, record.attempts[-1].number).metrics
        lines = read_metrics(path, ["judge/calls"])
        calls = [line.metrics.get("judge/calls") for line in lines]
        known = [int(n) for n in calls if n is not None]
        return sum(known) if known else None


@dataclass
class Budget:
    """Budget of a sweep.

    Parameters
    ----------
    limits
        Limits of the sweep file.
    use
        Reads the use of stages.
    """

    limits: Limits
    use: UsageReader
    _forecast: Mapping[str, StageForecast] = field(default_factory=dict)

    def expect(self, forecast: SweepForecast) -> None:
        """Use this forecast from now on."""
        self._forecast = {s.stage: s for s in forecast.stages}

    def why_waiting(self, trial: Trial, begun: Iterable[str], live: Sequence[Trial]) -> str:
        """Reason why a trial may not begin now; empty if it may.

        Parameters
        ----------
        begun
            Ids of the sweep's stages that have begun.
        live
            The running trials.
        """
        if self.limits.gpu_hours is None and self.limits.judge_calls is None:
            return ""
        mine = self._left(trial)
        if all(map(is_service, mine)):
            return ""
        coming = {i for other in live for i in self._left(other)}
        counted = (("gpu_hours", "GPU-hours"), ("judge_calls", "judge calls"))
        reasons = (self._passed(*each, begun, coming, mine - coming) for each in counted)
        return "; ".join(filter(None, reasons))

    def _left(self, trial: Trial) -> set[str]:
        """Ids of a trial's stages that are not done."""
        return {s.id for s in trial.plan.stages if not self.use.is_done(s.id)}

    def _passed(
        self, name: str, unit: str, begun: Iterable[str], live: set[str], new: set[str]
    ) -> str:
        """Message if the limit is reached or would be exceeded, else empty."""
        limit = getattr(self.limits, name)

        def taken(stage_id: str) -> float:
            return getattr(self.use.of(stage_id), name) or 0

        def left(stage_id: str) -> float:
            expected = getattr(self._forecast.get(stage_id), name, None)
            return max(0, (expected or 0) - taken(stage_id))

        if limit is None:
            return ""
        used, coming, adds = sum(map(taken, begun)), sum(map(left, live)), sum(map(left, new))
        if used < limit and used + coming + adds <= limit:
            return ""
        parts = [f"{amount(coming)} to come from running stages"] if coming else []
        parts = [f"{amount(used)} used", *parts, *[f"{amount(adds)} forecast for it"] * bool(adds)]
        return f"limits.{name} is {amount(limit)} {unit}: {', '.join(parts)}"
