"""Whether another trial may begin: what is used, what is under way, and what it would add.

In: the limits of a sweep file, a forecast by stage, what stages have used. Out: a reason why a
trial is held; empty where it fits. Counted are all attempts at the sweep's stages, each stage once:
what is done by what it took, what is under way by its forecast (or what it took already, if that is
more), and of the trial in question what nobody has begun. What nothing is known of counts as
nothing, until it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flows.sweeping.use import UseReader
from infra.disk.usage import size_of
from infra.workspace import Workspace
from sweeps.forecast import StageForecast, SweepForecast
from sweeps.values import Limits, Trial

GIB = 2**30
#: Bytes that a trial would take beside what is there.
DiskOf = Callable[[Trial], int]


@dataclass
class Budget:
    """What may still be spent.

    Parameters
    ----------
    limits
        Of the sweep file.
    use
        Reads what stages have used.
    disk_of
        Says what a trial takes on the disk; asked only where that is limited.
    """

    limits: Limits
    use: UseReader
    disk_of: DiskOf
    _forecast: Mapping[str, StageForecast] = field(default_factory=dict)

    @property
    def limited(self) -> bool:
        """Whether anything is limited but the number of trials at a time."""
        limits = self.limits
        return any(v is not None for v in (limits.gpu_hours, limits.disk_gb, limits.judge_calls))

    def expect(self, forecast: SweepForecast) -> None:
        """What stages are expected to take from now on."""
        self._forecast = {s.stage: s for s in forecast.stages}

    def why_held(self, trial: Trial, begun: Iterable[str], live: Iterable[str]) -> str:
        """Why a trial may not begin now; empty where it may.

        Parameters
        ----------
        begun, live
            Ids of the sweep's stages that have been begun by now, and of those among them that
            somebody still works towards.
        """
        if not self.limited:
            return ""
        begun, live = set(begun), set(live)
        new = {s.id for s in trial.plan.stages if s.id not in begun}
        if self._adds_nothing(trial):
            return ""
        reasons = (
            self._hours(begun, live, new),
            self._calls(begun, live, new),
            self._disk(trial, begun),
        )
        return "; ".join(filter(None, reasons))

    def _adds_nothing(self, trial: Trial) -> bool:
        layout = self.use.workspace.layout
        return all(layout.stage(s.id).result.exists() for s in trial.plan.stages)

    def _hours(self, begun: set[str], live: set[str], new: set[str]) -> str:
        limit = self.limits.gpu_hours
        if limit is None:
            return ""
        used = sum(self.use.of(i).gpu_hours for i in begun)
        coming = sum(max(0.0, self._expected(i) - self.use.of(i).gpu_hours) for i in live)
        adds = sum(map(self._expected, new))
        return _passed("gpu_hours", "GPU-hours", limit, used, coming, adds)

    def _calls(self, begun: set[str], live: set[str], new: set[str]) -> str:
        limit = self.limits.judge_calls
        if limit is None:
            return ""
        used = sum(self.use.of(i).judge_calls or 0 for i in begun)
        coming = sum(
            max(0, self._expected_calls(i) - (self.use.of(i).judge_calls or 0)) for i in live
        )
        adds = sum(map(self._expected_calls, new))
        return _passed("judge_calls", "judge calls", limit, used, coming, adds)

    def _disk(self, trial: Trial, begun: set[str]) -> str:
        limit = self.limits.disk_gb
        if limit is None:
            return ""
        used = sum(_bytes_of(self.use.workspace, i) for i in begun) / GIB
        return _passed("disk_gb", "GiB", limit, used, 0.0, self.disk_of(trial) / GIB)

    def _expected(self, stage_id: str) -> float:
        found = self._forecast.get(stage_id)
        return 0.0 if found is None else found.gpu_hours or 0.0

    def _expected_calls(self, stage_id: str) -> int:
        found = self._forecast.get(stage_id)
        return 0 if found is None else found.judge_calls or 0


def _passed(name: str, unit: str, limit: float, used: float, coming: float, adds: float) -> str:
    """In words, where the limit is reached or would be passed."""
    if used < limit and used + coming + adds <= limit:
        return ""
    parts = [f"{_short(used)} used"]
    if coming:
        parts.append(f"{_short(coming)} to come of what runs")
    if adds:
        parts.append(f"{_short(adds)} forecast for it")
    return f"limits.{name} is {_short(limit)} {unit}: {', '.join(parts)}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _bytes_of(workspace: Workspace, stage_id: str) -> int:
    paths = workspace.layout.stage(stage_id)
    return size_of(paths.data).bytes
