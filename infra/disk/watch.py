"""Watches the room while something runs: warns, reclaims, and says when there is room again.

In: a :class:`~infra.disk.keeper.DiskKeeper` and what the next saves need. Out: events, each once
per crossing and not once per look. For the orchestrator and for jobs alike.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Literal, NamedTuple

from infra.disk.figures import Room
from infra.disk.keeper import DiskKeeper, gib

log = logging.getLogger(__name__)

EventKind = Literal[
    "warn",  # more than `disk.warn_share` is used
    "reclaimed",  # something was deleted to make room
    "short",  # the next saves do not fit, and nothing more may be deleted
    "room",  # they fit again
]


class DiskEvent(NamedTuple):
    """Something that a person, or an event log, wants to know."""

    kind: EventKind
    message: str
    room: Room
    bytes: int = 0  # reclaimed, or missing


class DiskWatch:
    """Looks every ``watch_s``.

    Parameters
    ----------
    keeper
        Knows the room, and the ``disk`` section.
    need
        Bytes that the next saves of what runs will need.
    on_event
        Takes events, from the watching thread.
    """

    def __init__(
        self, keeper: DiskKeeper, need: Callable[[], int], on_event: Callable[[DiskEvent], None]
    ) -> None:
        self.keeper, self._need, self._on_event = keeper, need, on_event
        self._warned = self._short = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk watch", daemon=True)

    def __enter__(self) -> DiskWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End. More than one call does no harm."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def look(self) -> None:
        """Look once, and act on it."""
        room = self.keeper.room(fresh=True)
        self._warn_once(room)
        need = self._need()
        if need <= 0:
            return
        missing = self.keeper.shortage(need)
        if missing and self.keeper.config.reclaim:
            done = self.keeper.reclaim(need)
            if done.items:
                text = f"{gib(done.bytes)} reclaimed ({len(done.items)} things)"
                self._tell("reclaimed", text, done.bytes)
            missing = self.keeper.shortage(need)
        if bool(missing) == self._short:
            return
        self._short = bool(missing)
        if missing:
            what = gib(missing)
            if room.inodes_are_scarcer:
                what = self.keeper.lacking(need)
            self._tell("short", f"{what} are missing for the next saves", missing)
        else:
            self._tell("room", f"there is room again: {self.keeper.status_line()}", 0)

    def _warn_once(self, room: Room) -> None:
        above = room.share >= self.keeper.config.warn_share
        if above and not self._warned:
            self._tell("warn", f"{room.share:.0%} used: {self.keeper.status_line()}", 0)
        self._warned = above

    def _tell(self, kind: EventKind, message: str, size: int) -> None:
        log.log(logging.INFO if kind == "room" else logging.WARNING, "disk: %s", message)
        self._on_event(DiskEvent(kind, message, self.keeper.room(), size))

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.look()
            except Exception:  # a watcher that dies would be missed only when it is too late
                log.exception("looking at the disk failed")
            self._ended.wait(self.keeper.config.watch_s)
