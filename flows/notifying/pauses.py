"""When a pause is worth a word. Pure.

In: again and again, which stages stand still and why, and how far those have come that try again.
Out: :class:`Pause` values: a pause is told once, however often its stages try in vain. Pauses of
one cause are one, whatever their stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Sight(NamedTuple):
    """One stage as it is now: ``cause`` says that it stands still, ``reason`` so in words; ``done``
    is its progress, and ``ended`` that nothing more will happen to it in this call."""

    cause: str = ""
    reason: str = ""
    done: int = 0
    ended: bool = False


@dataclass
class Pause:
    """Stages that stand still for one cause, and how far each had come."""

    cause: str
    since: float
    marks: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    told: bool = False


class Pauses:
    """The pauses of a call; one that is over within ``moment_s`` is not told of."""

    def __init__(self, moment_s: float) -> None:
        self._moment_s = moment_s
        self._open: dict[str, Pause] = {}

    def look(self, sights: Mapping[str, Sight], now: float, *, quiet: bool = False) -> list[Pause]:
        """What is news; ``now`` in seconds. ``quiet``: no pause is, yet."""
        for stage, sight in sights.items():
            if sight.cause:
                pause = self._open.setdefault(sight.cause, Pause(sight.cause, now))
                pause.marks[stage] = max(sight.done, pause.marks.get(stage, 0))
                pause.reason = sight.reason
        news = [p for p in list(self._open.values()) if self._is_news(p, sights, now) and not quiet]
        for pause in news:
            pause.told = True
        return news

    def _is_news(self, pause: Pause, sights: Mapping[str, Sight], now: float) -> bool:
        for stage, mark in list(pause.marks.items()):
            sight = sights.get(stage, Sight(ended=True))
            if sight.ended or (not sight.cause and sight.done > mark):
                del pause.marks[stage]
        if not pause.marks:
            del self._open[pause.cause]
        stands = any(sights[stage].cause == pause.cause for stage in pause.marks)
        return stands and not pause.told and now - pause.since >= self._moment_s
