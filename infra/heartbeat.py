"""The worker's sign of life.

In: :class:`Progress` from the stage. Out: ``heartbeat.json`` every few seconds, and at once when
the phase changes. Observers look at whether ``counter`` moves; the times in it are for people. A
heartbeat that cannot be written is one warning, never an error.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

from infra import atomic
from refiner_core.contract.records import to_json
from refiner_core.contract.types import Progress

log = logging.getLogger(__name__)

INTERVAL_S = 2.0


class Heartbeat:
    """Writes from a thread of its own, so that a long step is no silence."""

    def __init__(self, path: Path, began: float, interval_s: float = INTERVAL_S) -> None:
        self._path, self._began, self._interval_s = path, began, interval_s
        self._counter = 0
        self._progress: Progress | None = None
        self._told = 0
        self._warned = False
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first one, and go on."""
        self._write()
        self._thread.start()

    def tell(self, progress: Progress) -> None:
        """Take the stage's progress. Cheap: the thread writes it."""
        new_phase = self._progress is None or progress.phase != self._progress.phase
        self._progress, self._told = progress, self._told + 1
        if new_phase:
            self._wake.set()

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

    def _write(self) -> None:
        self._counter += 1
        value: dict[str, Any] = {
            "counter": self._counter,
            "told": self._told,
            "seconds": round(time.monotonic() - self._began, 3),
            "progress": atomic.finite(to_json(self._progress)),
        }
        try:
            atomic.write_json(self._path, value, sync=False)
        except (OSError, ValueError, TypeError) as error:
            if not self._warned:
                log.warning("the heartbeat cannot be written: %s", error)
            self._warned = True
