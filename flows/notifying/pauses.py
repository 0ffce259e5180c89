"""When a pause begins to be worth a word, and when it is over. Pure.

In: again and again, which stages stand still and why, and how far those have come that try again.
Out: :class:`Change` values: a pause is told once, however often its stages try in vain, and its end
when one of them has come further than before. Pauses of one cause are one, whatever their stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class Sight(NamedTuple):
    """One stage as it is now.

    ``cause`` says that it stands still, and ``reason`` so in words; ``done`` is its progress, and
    ``over`` that it is done; ``ended`` that nothing more will happen to it in this call.
    """

    cause: str = ""
    reason: str = ""
    done: int = 0
    over: bool = False
    ended: bool = False


class Change(NamedTuple):
    """A pause that has lasted, or one that is over."""

    kind: Literal["paused", "resumed"]
    cause: str
    stages: tuple[str, ...]
    reason: str
    seconds: float
    number: int


@dataclass
class _Pause:
    since: float
    number: int
    marks: dict[str, int | None] = field(default_factory=dict)  # stage -> how far it had come
    told: bool = False
    moved: bool = False
    reason: str = ""


class Pauses:
    """The pauses of a call.

    Parameters
    ----------
    moment_s
        A pause that is over within so many seconds is not told of.
    told
        Cause -> stages of pauses that an earlier process has told of, and that are not over.
    """

    def __init__(self, moment_s: float, told: Mapping[str, Iterable[str]] | None = None) -> None:
        self._moment_s = moment_s
        self._count = 0
        self._open: dict[str, _Pause] = {}
        for cause, stages in (told or {}).items():
            self._open[cause] = _Pause(0.0, 0, dict.fromkeys(stages), told=True)

    def look(self, sights: Mapping[str, Sight], now: float, *, quiet: bool = False) -> list[Change]:
        """What is news; ``now`` in seconds since the call began. ``quiet``: no pause is, yet."""
        for stage, sight in sights.items():
            if sight.cause:
                self._stands_still(stage, sight, now)
        news = (self._news(cause, sights, now, quiet) for cause in list(self._open))
        return [change for change in news if change is not None]

    def _stands_still(self, stage: str, sight: Sight, now: float) -> None:
        pause = self._open.get(sight.cause)
        if pause is None:
            self._count += 1
            pause = self._open[sight.cause] = _Pause(now, self._count)
        pause.marks[stage] = max(sight.done, pause.marks.get(stage) or 0)
        pause.reason = sight.reason

    def _news(
        self, cause: str, sights: Mapping[str, Sight], now: float, quiet: bool
    ) -> Change | None:
        pause = self._open[cause]
        stages = tuple(pause.marks)
        for stage, mark in list(pause.marks.items()):
            sight = sights.get(stage, Sight(ended=True))
            further = mark is not None and sight.done > mark and not sight.ended
            if not sight.cause and (sight.over or further):
                pause.moved = True
                del pause.marks[stage]
            elif sight.ended:
                del pause.marks[stage]
            elif mark is None:  # an earlier process has told of it, not how far it had come
                pause.marks[stage] = sight.done
        seconds = now - pause.since
        if not pause.marks:
            del self._open[cause]
            if pause.told and pause.moved:
                return Change("resumed", cause, stages, "", seconds, pause.number)
            return None
        stands = any(sights.get(s, Sight()).cause == cause for s in pause.marks)
        if not (pause.told or quiet) and stands and seconds >= self._moment_s:
            pause.told = True
            return Change("paused", cause, tuple(pause.marks), pause.reason, seconds, pause.number)
        return None
