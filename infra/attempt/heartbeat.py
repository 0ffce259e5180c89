"""The worker's sign of life.

In: :class:`Progress` from the stage, the beginnings and ends of saves. Out: ``heartbeat.json``
every few seconds, and at once when the phase changes or a save begins:

    counter            moves while the process lives
    told               moves while the stage says anything, or saves
    moved, moved_at_s  how often what it says was new, and when it last was, by ``seconds``
    saving, save_s     whether a checkpoint is being written; seconds that the longest one took
    seconds            since the worker began

Observers look at whether the counters move; the times are for people. A heartbeat that cannot be
written is one warning, never an error.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from infra.store import atomic
from refiner_core.contract.records import to_json
from refiner_core.contract.types import Progress

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
_CALL = "what each heartbeat looks for could not be looked for; it is at the next one"


class Heartbeat:
    """Writes from a thread of its own, so that a long step is no silence."""

    def __init__(
        self,
        path: Path,
        began: float,
        interval_s: float = INTERVAL_S,
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._path, self._began, self._interval_s = path, began, interval_s
        self._on_beat = on_beat
        self._counter = 0
        self.progress: Progress | None = None
        self._told = self._moved = 0
        self._moved_at_s = 0.0
        self._saving = False
        self._save_s: float | None = None
        self._warned = self._call_failed = False
        #: Why the newest one could not be written; None if it could.
        self.refused: Exception | None = None
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first one, and go on."""
        self._write()
        self._thread.start()

    def tell(self, progress: Progress) -> None:
        """Take the stage's progress. Cheap: the thread writes it."""
        before, self.progress = self.progress, progress
        self._told += 1
        if before is None or (before.phase, before.done) != (progress.phase, progress.done):
            self._moved += 1
            self._moved_at_s = self._seconds()
        if before is None or before.phase != progress.phase:
            self._wake.set()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around the save of a checkpoint; one that comes to its end is measured."""
        began = time.monotonic()
        self._saving, self._told = True, self._told + 1
        self._wake.set()
        try:
            yield
            self._save_s = max(self._save_s or 0.0, time.monotonic() - began)
        finally:
            self._saving, self._told = False, self._told + 1

    def stop(self) -> None:
        """Write the last one, and end. More than one call does no harm."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._write()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._wake.wait(self._interval_s)
            self._wake.clear()
            if not self._ended.is_set():
                self._write()
                self._call()

    def _call(self) -> None:
        try:
            self._on_beat()
        except Exception:  # a heart that stops has a healthy stage killed as hung
            log.log(logging.DEBUG if self._call_failed else logging.WARNING, _CALL, exc_info=True)
            self._call_failed = True

    def _seconds(self) -> float:
        return round(time.monotonic() - self._began, 3)

    def _write(self) -> None:
        self._counter += 1
        value: dict[str, Any] = {
            "counter": self._counter,
            "told": self._told,
            "moved": self._moved,
            "moved_at_s": self._moved_at_s,
            "saving": self._saving,
            "save_s": None if self._save_s is None else round(self._save_s, 3),
            "seconds": self._seconds(),
            "progress": atomic.finite(to_json(self.progress)),
        }
        try:
            atomic.write_json(self._path, value, sync=False)
            self.refused = None
        except (OSError, ValueError, TypeError) as error:
            self.refused = error
            if not self._warned:
                log.warning("the heartbeat cannot be written: %s", error)
            self._warned = True
