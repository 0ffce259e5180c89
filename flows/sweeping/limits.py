"""Whether another trial may begin: what is used, what is under way, and what it would add.

In: the limits of a sweep file, a forecast by stage, what stages have used. Out: a reason why a
trial is held; empty where it fits. Counted are all attempts at the sweep's stages, each stage once:
what is done by what it took, what is under way by its forecast (or what it took already, if that is
more), and so what is left to do of the trial in question. What nothing is known of counts as
nothing, until it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flows.sweeping.use import UseReader
from infra.disk.usage import size_of
from refiner_core.contract.services import is_service
from sweeps.forecast import StageForecast, SweepForecast
from sweeps.values import Limits, Trial

GIB = 2**30
#: Bytes that what is not done of trials takes, all together.
DiskOf = Callable[[Sequence[Trial]], int]
#: So long the size of what is done is taken for what it was: it only shrinks, and there is much.
_SIZE_HOLDS_S = 60.0


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
        Says what trials take on the disk; asked only where that is limited.
    clock
        Seconds, monotonic.
    """

    limits: Limits
    use: UseReader
    disk_of: DiskOf
    clock: Callable[[], float] = time.monotonic
    _forecast: Mapping[str, StageForecast] = field(default_factory=dict)
    _sizes: dict[str, tuple[float, int]] = field(default_factory=dict)

    @property
    def limited(self) -> bool:
        """Whether anything is limited but the number of trials at a time."""
        limits = self.limits
        return any(v is not None for v in (limits.gpu_hours, limits.disk_gb, limits.judge_calls))

    def expect(self, forecast: SweepForecast) -> None:
        """What stages are expected to take from now on."""
        self._forecast = {s.stage: s for s in forecast.stages}

    def why_held(self, trial: Trial, begun: Iterable[str], live: Sequence[Trial]) -> str:
        """Why a trial may not begin now; empty where it may.

        Parameters
        ----------
        begun
            Ids of the sweep's stages that have been begun by now.
        live
            The trials that are at work.
        """
        if not self.limited:
            return ""
        mine = self._left(trial)
        if all(map(is_service, mine)):
            return ""
        begun = set(begun)
        coming = {i for other in live for i in self._left(other)}
        reasons = (
            self._hours(begun, coming, mine - coming),
            self._calls(begun, coming, mine - coming),
            self._disk(trial, begun, live, coming),
        )
        return "; ".join(filter(None, reasons))

    def _left(self, trial: Trial) -> set[str]:
        """Ids of a trial's stages that are not done."""
        return {s.id for s in trial.plan.stages if not self.use.is_done(s.id)}

    def _hours(self, begun: set[str], live: set[str], new: set[str]) -> str:
        limit = self.limits.gpu_hours
        if limit is None:
            return ""

        def left(stage_id: str) -> float:
            return max(0.0, self._expected(stage_id) - self.use.of(stage_id).gpu_hours)

        used = sum(self.use.of(i).gpu_hours for i in begun)
        coming, adds = sum(map(left, live)), sum(map(left, new))
        return _passed("gpu_hours", "GPU-hours", limit, used, coming, adds)

    def _calls(self, begun: set[str], live: set[str], new: set[str]) -> str:
        limit = self.limits.judge_calls
        if limit is None:
            return ""

        def left(stage_id: str) -> int:
            return max(0, self._expected_calls(stage_id) - (self.use.of(stage_id).judge_calls or 0))

        used = sum(self.use.of(i).judge_calls or 0 for i in begun)
        coming, adds = sum(map(left, live)), sum(map(left, new))
        return _passed("judge_calls", "judge calls", limit, used, coming, adds)

    def _disk(self, trial: Trial, begun: set[str], live: Sequence[Trial], working: set[str]) -> str:
        limit = self.limits.disk_gb
        if limit is None:
            return ""
        sizes = {i: self._size(i) for i in begun}
        without = self.disk_of(live) if live else 0
        adds = max(0, self.disk_of([*live, trial]) - without)
        coming = max(0, without - sum(sizes.get(i, 0) for i in working))
        used = sum(sizes.values())
        return _passed("disk_gb", "GiB", limit, used / GIB, coming / GIB, adds / GIB)

    def _size(self, stage_id: str) -> int:
        """Bytes of a stage on the disk."""
        known, now = self._sizes.get(stage_id), self.clock()
        if known is not None and now - known[0] < _SIZE_HOLDS_S:
            return known[1]
        size = size_of(self.use.workspace.layout.stage(stage_id).data).bytes
        if self.use.is_done(stage_id):
            self._sizes[stage_id] = (now, size)
        return size

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
