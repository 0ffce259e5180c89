"""Stalls: when a stage stands still, and which rank is the cause.

In: the signs of life of a running stage (progress reports, forward passes, collectives), and the
times that its phases have taken. Out: a :class:`Stall` once nothing has moved for longer than the
phase allows, and :func:`find_laggard`, which names the rank that the others wait for. Everything
here is pure: callers pass the time.

The limit of a phase is learned: three times the longest time without a sign of life in it (more
while it has been seen less than four times), at least its longest visit, and
``dispatch.hung_floor_s``. Until an attempt has seen a phase four times, earlier attempts and other
stages of its kind and model count, too, with their longest visits. Nothing is known of a
phase that was never completed, or that waits for a remote judge or an environment: there the limit
is ``dispatch.hung_after_s``, which is the most in any phase.

The clock advances at most a few seconds from one beat of the heartbeat to the next. So a suspended
job, an overloaded machine and a file system that does not answer stop the clock, too.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from refiner_core.contract.types import Progress
from refiner_core.training.pulse import is_usual

#: The multiple of the longest silence so far.
TIMES = 3.0
#: The multiple is this divided by the number of visits, while that is more.
_FIRST = 12.0
#: After so many visits, an attempt's own times are enough.
_ENOUGH = 4
#: The clock advances at most so much between two beats, seconds.
_BEAT_S = 6.0
#: Phases with a learned limit: those of trainings, with all long work in one of them.
_BEGINNINGS = ("starting ranks", "loading")
LEARNED = (*_BEGINNINGS, "train", "validate", "generate", "judge", "update", "save", "export")
SAVE = "save"
#: Reading and writing excuse a silence beyond its limit for at most so long, seconds.
SLOW_FILES_S = 3600.0
#: A rank that sends nothing for so long is gone, or stuck outside of Python.
SILENT_S = 12.0


class PhaseTimes(NamedTuple):
    """Completed visits of a phase, the longest time without a sign of life in one, and the longest
    visit."""

    visits: int
    longest_s: float
    length_s: float = 0.0

    def and_also(self, other: PhaseTimes) -> PhaseTimes:
        """Both together."""
        longest_s, length_s = max(self[1], other[1]), max(self[2], other[2])
        return PhaseTimes(self.visits + other.visits, longest_s, length_s)


class Stall(NamedTuple):
    """A stage that stands still: its phase, for how long, and the limit that was exceeded."""

    phase: str
    silent_s: float
    limit_s: float


def limit_of(known: PhaseTimes | None, cap_s: float, floor_s: float) -> float:
    """Limit of a phase without a sign of life, seconds."""
    if known is None or not known.visits:
        return cap_s
    silent_s = known.longest_s * max(TIMES, _FIRST / known.visits)
    return min(cap_s, floor_s + max(silent_s, known.length_s))


def merged(parts: Sequence[Mapping[str, PhaseTimes]]) -> dict[str, PhaseTimes]:
    """What several earlier attempts have shown together. They may have reported in another rhythm
    (other batches, another engine), so their whole visits count as silent."""
    found: dict[str, PhaseTimes] = {}
    for part in parts:
        for phase, times in part.items():
            whole = times._replace(longest_s=max(times.longest_s, times.length_s))
            found[phase] = found.get(phase, PhaseTimes(0, 0.0)).and_also(whole)
    return {p: t._replace(visits=min(_ENOUGH, t.visits)) for p, t in found.items()}


def times_of(beat: Mapping[str, Any], *, stalled: bool) -> dict[str, PhaseTimes]:
    """Times in an attempt's last heartbeat; ``stalled`` includes a stall that ended it, after which
    the same stage gets more patience."""
    phases = beat.get("phases") or {}
    found = {p: PhaseTimes(int(n), *map(float, s)) for p, (n, *s) in phases.items()}
    if stalled and (met := beat.get("stalled")):
        phase, lasted = str(met["phase"]), PhaseTimes(0, float(met["silent_s"]))
        found[phase] = found.get(phase, PhaseTimes(1, 0.0)).and_also(lasted)
    return found


@dataclass
class _Lane:
    """One thread that reports: its last report, and since when it has shown no sign of life."""

    phase: str
    report: Any
    since: float
    before: tuple[str, Any] | None = None  # around a save
    gap: float = 0.0
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.since


class StallClock:
    """Takes signs of life, and tells when there were none for too long. For several threads.

    Parameters
    ----------
    now
        The time, seconds.
    cap_s
        Limit of every phase of which nothing is known, and the most of any.
    floor_s
        Added to every learned limit.
    patient
        Phases whose limit is always ``cap_s``.
    """

    def __init__(
        self, now: float, cap_s: float, floor_s: float = 0.0, patient: Sequence[str] = ()
    ) -> None:
        self._cap_s, self._floor_s, self._patient = cap_s, floor_s, tuple(patient)
        self._earlier: dict[str, PhaseTimes] = {}
        #: Times of this attempt's phases.
        self.times: dict[str, PhaseTimes] = {}
        self._lanes: dict[int, _Lane] = {}
        self._pulse: object = None
        self._last_beat, self._lost_s = now, 0.0
        self._lock = threading.Lock()

    def learn(self, earlier: Mapping[str, PhaseTimes]) -> None:
        """Use what earlier attempts have shown."""
        self._earlier = dict(earlier)

    def report(self, lane: int, progress: Progress, now: float) -> None:
        """Take a progress report of a thread. A repeated one is no sign of life."""
        with self._lock:
            own, before = self._own(now), self._lanes[lane].phase if lane in self._lanes else ""
            begins = progress.phase in _BEGINNINGS
            for other, known in list(self._lanes.items()):
                if other == lane or before == progress.phase:
                    continue
                if begins:  # it ended with what came before
                    self._leave(self._lanes.pop(other), own)
                elif known.phase == before != SAVE:  # a helper of the phase that ends
                    self._lanes.pop(other)
            self._enter(lane, _named(progress), (progress.done, dict(progress.values)), own)

    def pulse(self, value: object, now: float) -> bool:
        """Take the counts of all processes that train; a change is a sign of life. True if there
        was one."""
        with self._lock:
            if value == self._pulse:
                return False
            self._pulse = value
            own = self._own(now)
            for lane in self._lanes.values():
                if lane.phase != SAVE:
                    lane.gap, lane.since = max(lane.gap, own - lane.since), own
            return True

    def saving(self, lane: int, now: float, *, ends: bool) -> None:
        """Note that a thread begins or ends to write a checkpoint."""
        with self._lock:
            own, known = self._own(now), self._lanes.get(lane)
            if not ends:
                before = None if known is None else (known.phase, known.report)
                if known is None or known.phase != SAVE:  # else it has reported that already
                    self._enter(lane, SAVE, ("writing",), own)
                self._lanes[lane].before = before
            elif known is not None:
                before = known.before
                if before is None:
                    self._leave(self._lanes.pop(lane), own)
                elif before[0] == SAVE:
                    known.gap, known.since = max(known.gap, own - known.since), own
                else:
                    self._enter(lane, *before, own)

    def beat(self, now: float) -> None:
        """Advance the clock."""
        with self._lock:
            self._lost_s += max(0.0, now - self._last_beat - _BEAT_S)
            self._last_beat = now

    def stall(self, now: float) -> Stall | None:
        """The stall, if every thread has shown no sign of life for longer than its limit. It
        may be excused."""
        with self._lock:
            own = self._own(now)
            silent = [(own - lane.since, lane.phase) for lane in self._lanes.values()]
            if not silent or any(s <= self.limit_s(phase) for s, phase in silent):
                return None
            longest_s, phase = max(silent)
            return Stall(phase, longest_s, self.limit_s(phase))

    @staticmethod
    def is_excused(stall: Stall, *, works_on_files: bool) -> bool:
        """Tell whether a stall is none: the processes read or write large files, which is silent
        and may take much longer than before (a cold cache, a busy file system)."""
        return works_on_files and stall.silent_s <= stall.limit_s + SLOW_FILES_S

    def limit_s(self, phase: str) -> float:
        """The limit of a phase now."""
        if phase not in LEARNED or phase in self._patient:
            return self._cap_s
        known, earlier = self.times.get(phase), self._earlier.get(phase)
        if known is not None and earlier is not None and known.visits < _ENOUGH:
            known = known.and_also(earlier)
        return limit_of(known or earlier, self._cap_s, self._floor_s)

    # ------------------------------------------------------------ parts

    def _own(self, now: float) -> float:
        """The time of this clock."""
        return now - self._lost_s - max(0.0, now - self._last_beat - _BEAT_S)

    def _enter(self, number: int, phase: str, report: Any, own: float) -> None:
        lane = self._lanes.get(number)
        if lane is None:
            self._lanes[number] = _Lane(phase, report, own)
        elif lane.phase != phase or lane.report[0] != report[0]:  # of another step
            self._leave(lane, own)
            self._lanes[number] = _Lane(phase, report, own)
        elif lane.report != report:
            lane.gap, lane.since, lane.report = max(lane.gap, own - lane.since), own, report

    def _leave(self, lane: _Lane, own: float) -> None:
        before = self.times.get(lane.phase, PhaseTimes(0, 0.0))
        visit = PhaseTimes(1, max(lane.gap, own - lane.since), own - lane.began)
        self.times[lane.phase] = before.and_also(visit)


def _named(progress: Progress) -> str:
    """The phase of a report. After the last step comes something else."""
    over = progress.phase == "train" and 0 < progress.total <= progress.done
    return "the end of the training" if over else progress.phase


# ---------------------------------------------------------------- which rank


@dataclass(frozen=True)
class RankState:
    """One rank when the stage stood still.

    ``visits`` counts the phases that it has begun, ``frames`` are its main thread's (file, line,
    function), outermost first. ``silent_s`` is the time since it last sent its counts;
    ``in_collective`` what its stack shows (None: unknown), ``place`` its innermost function.
    ``enqueued`` and ``kernel`` are its last NCCL
    collective; ``on_disk``: the kernel waits for a disk or a file system on its behalf.
    """

    rank: int
    host: str = ""
    step: int = 0
    phase: str = ""
    calls: int = 0
    inside: str = ""
    visits: int = 0
    recent: Sequence[str] = ()
    frames: Sequence[tuple[str, int, str]] = ()
    silent_s: float = 0.0
    here: bool = True
    in_collective: bool | None = None
    place: str = ""
    enqueued: int = 0
    kernel: str = ""
    on_disk: bool = False

    @property
    def waits(self) -> bool:
        """Tell whether it waits for other ranks."""
        return bool(self.inside) or bool(self.in_collective)


@dataclass(frozen=True)
class _Laggard:
    """Ranks that the others wait for, and why; no rank if all wait for each other."""

    ranks: tuple[int, ...]
    why: str
    waiting: tuple[int, ...] = field(default=())
    is_gone: bool = False  # with its node


def find_laggard(states: Sequence[RankState]) -> _Laggard:
    """Name the ranks that the others wait for, from the first rule that singles out some."""
    for rule in (_silent, _skipped, _behind, _outside, _kernels):
        found = rule(states)
        if found and len(found[0]) < len(states):
            ranks = tuple(s.rank for s in found[0])
            waiting = tuple(s.rank for s in states if s.rank not in ranks)
            gone = rule is _silent and not found[0][0].here
            return _Laggard(ranks, found[1], waiting, gone)
    if len(states) == 1:
        alone = states[0]
        return _Laggard((alone.rank,), f"is in {alone.place}" if alone.place else _doing(alone))
    inside = {s.inside or s.place for s in states}
    return _Laggard((), f"all ranks are in {' or '.join(sorted(filter(None, inside)))}")


def _doing(state: RankState) -> str:
    what = f"waits in {state.inside}" if state.inside else "is not in a collective"
    return f"{what}, in {state.place}" if state.place else what


_Found = tuple[list[RankState], str] | None


def _silent(states: Sequence[RankState]) -> _Found:
    """Ranks that send nothing: gone with their node, or stuck outside of Python."""
    gone = [s for s in states if s.silent_s > SILENT_S]
    if not gone:
        return None
    where = f" on {gone[0].host}" if gone[0].host else ""
    how = "its process is stuck outside of Python" if gone[0].here else "its node does not answer"
    return gone, f"has sent nothing for {gone[0].silent_s:.0f} s{where}: {how}"


def _skipped(states: Sequence[RankState]) -> _Found:
    """Ranks that are in another collective than the others: they have left one out."""
    top = max(s.calls for s in states)
    inside = [s for s in states if s.inside and top - s.calls <= 1]
    names = Counter(s.inside for s in inside)
    if len(inside) < len(states) or len(names) < 2:
        return None
    (name, most), *rest = names.most_common()
    if most > rest[0][1]:
        odd = [s for s in inside if s.inside != name]
    else:  # as many in one as in the other: who does what it never did after the same calls?
        odd = [s for s in inside if not is_usual(s.recent)]
        if not odd or len(odd) == len(inside):
            odd = _ahead(inside)
    if not odd or len(odd) == len(states):
        return None
    others = sorted({s.inside for s in states if s not in odd})
    left = f"it waits in {odd[0].inside}, the others in {' or '.join(others)}"
    return odd, f"has left out a collective: {left}"


def _ahead(states: Sequence[RankState]) -> list[RankState]:
    """Ranks that are further in the program than others: by phases begun, else by the line of the
    innermost function that they share."""
    most = max(s.visits for s in states)
    if any(s.visits < most for s in states):
        return [s for s in states if s.visits == most]
    lines = list(zip(*(s.frames for s in states), strict=False))
    for frames in lines:  # outermost first
        if len({(file, function) for file, _, function in frames}) > 1:
            return []
        last = max(line for _, line, _ in frames)
        if any(line < last for _, line, _ in frames):
            return [s for s, (_, line, _) in zip(states, frames, strict=True) if line == last]
    return []


def _behind(states: Sequence[RankState]) -> _Found:
    """Ranks that have made fewer calls."""
    least, most = min(s.calls for s in states), max(s.calls for s in states)
    if least == most:
        return None
    behind = [s for s in states if s.calls == least]
    ahead = next(s for s in states if s.calls == most)
    waits = f", for which others wait in {ahead.inside}" if ahead.inside else ""
    return behind, f"has not come to collective {most}{waits}; it {_doing(behind[0])}"


def _outside(states: Sequence[RankState]) -> _Found:
    """Ranks that do not wait while others do."""
    outside = [s for s in states if not s.waits]
    waiting = [s for s in states if s.waits]
    if not outside or not waiting:
        return None
    return outside, f"{_doing(outside[0])}, while others wait"


def _kernels(states: Sequence[RankState]) -> _Found:
    """Ranks that have enqueued fewer NCCL collectives, by NCCL's flight recorder."""
    counts = {s.enqueued for s in states}
    if len(counts) < 2:
        return None
    behind = [s for s in states if s.enqueued == min(counts)]
    ahead = max(states, key=lambda s: s.enqueued)
    return behind, f"has not enqueued NCCL collective {ahead.enqueued} ({ahead.kernel})"
