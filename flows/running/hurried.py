"""Looks that wait only so long, for who shows how things stand: the rest goes on in the background.

In: jobs, a folder. Out: what was answered in time, and else the best that can be had at once.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from infra.disk.figures import Room
from infra.disk.probe import Prober
from infra.jobs.dispatch import Router
from infra.jobs.protocol import AttemptRef, JobSight, OpenAttempt


@dataclass(frozen=True)
class DiskStatus:
    """Room where the data lie: by the tightest quota, else as the file system says of itself.

    ``source`` is what says so.
    """

    folder: str
    free_bytes: int
    total_bytes: int
    source: str = ""


class HurriedRouter(Router):
    """Asks in the background and waits only so long; then local jobs are looked at alone, and the
    others are ``unknown``. ``late`` says so."""

    def __init__(self, router: Router, wait_s: float) -> None:
        super().__init__(router.dispatchers, router.executor_for)
        self._wait_s = wait_s
        self._asking: threading.Thread | None = None
        self._answer: dict[AttemptRef, JobSight] = {}
        self.late = ""

    def look(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobSight]:
        """All of them, or in time those that need no scheduler."""
        far = [a for a in attempts if a.attempt.executor != "local"]
        near = [a for a in attempts if a.attempt.executor == "local"]
        seen = super().look(near)
        if not far:
            self.late = ""
            return seen
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._ask, args=(far,), daemon=True)
            self._asking.start()
        self._asking.join(self._wait_s)
        late = self._asking.is_alive()
        self.late = f"the scheduler did not answer within {self._wait_s:g} s" if late else ""
        return {**{a.ref: self._answer.get(a.ref, JobSight("unknown")) for a in far}, **seen}

    def _ask(self, attempts: Sequence[OpenAttempt]) -> None:
        self._answer = super().look(attempts)


class HurriedProbe:
    """Asks tools for quotas in the background and waits only so long; then the file system's own
    figures must do."""

    def __init__(self, prober: Prober, wait_s: float) -> None:
        self._prober, self._wait_s = prober, wait_s
        self._asking: threading.Thread | None = None
        self._room: Room | None = None

    def look(self) -> DiskStatus | None:
        """The room that is left; None where there is no such folder."""
        folder = self._prober.folder
        try:
            use = shutil.disk_usage(folder)
        except OSError:
            return None
        if self._asking is None or not self._asking.is_alive():
            self._room = None
            self._asking = threading.Thread(target=self._ask, daemon=True)
            self._asking.start()
        self._asking.join(self._wait_s)
        room = self._room
        if room is None or room.limit_bytes is None:
            # Without what the file system keeps for its administrator, as in `refiner disk`.
            return DiskStatus(str(folder), use.free, use.used + use.free, "file system")
        return DiskStatus(str(folder), room.free_bytes, room.limit_bytes, room.source)

    def _ask(self) -> None:
        self._room = self._prober.look()
