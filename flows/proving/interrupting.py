"""Hits a running worker at chosen points: SIGKILL to its process group, or a request to stop.

In: a stage's folder while it runs, and points. Out: the :class:`Interruption` values that came
about, as they really were: step and phase are those of the last sign of life before the hit. Works
from outside, by what a worker leaves on the disk, as a scheduler or a failing node would.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from flows.proving.planning import Point
from infra.host.processes import ProcessId
from infra.store import atomic
from infra.store.layout import AttemptPaths
from infra.store.workspace import Workspace
from refiner_core.contract.proofs import Interruption

_FAR_S, _NEAR_S = 0.02, 0.001
#: More than a line of metrics has.
_TAIL_BYTES = 1 << 16
#: A save in progress: step and attempt.
_SAVE = re.compile(re.escape(atomic.TEMPORARY) + r"step-(\d+)-a(\d+)")


class Sight(NamedTuple):
    """What a worker says of itself: the step that it is in (from 1), and the phase."""

    attempt: int
    step: int
    phase: str
    worker: ProcessId


class Interrupter(threading.Thread):
    """Waits for each point in turn and hits the worker there, once per attempt.

    A phase that is over before it is seen is made up for: the worker is hit as soon after it as can
    be. Ends when all points have come, when the stage is done, or with :meth:`leave`.
    """

    def __init__(
        self,
        workspace: Workspace,
        stage_id: str,
        points: Sequence[Point],
        on_hit: Callable[[Interruption], None] = lambda _: None,
    ) -> None:
        super().__init__(name="interrupter", daemon=True)
        self._workspace, self._stage_id, self._points = workspace, stage_id, points
        self._on_hit = on_hit
        self._kind = stage_id.partition("-")[0]
        self._paths = workspace.layout.stage(stage_id)
        self._left = threading.Event()
        self._lasted: dict[str, float] = {}  # phase -> seconds, as last seen
        self._seen: tuple[int, int, str] | None = None
        self._since = 0.0
        self.made: list[Interruption] = []
        self.error: BaseException | None = None

    def leave(self) -> None:
        """Hit nothing any more."""
        self._left.set()

    def run(self) -> None:
        """All points."""
        try:
            for point in self._points:
                found = self._hit(point)
                if found is None:
                    return
                self.made.append(found)
                self._on_hit(found)
        except BaseException as error:  # raised again by who waits for it
            self.error = error

    def finished(self) -> list[Interruption]:
        """What came about; after the run.

        Raises
        ------
        Exception
            Whatever ended the thread.
        """
        self.leave()
        self.join()
        if self.error is not None:
            raise self.error
        return self.made

    # ------------------------------------------------------------ one point

    def _hit(self, point: Point) -> Interruption | None:
        """None: the stage was done before."""
        after = self.made[-1].attempt if self.made else 0
        while not self._left.is_set() and not self._paths.result.exists():
            sight = self._look()
            near = sight is not None and sight.step >= point.step - 1
            if sight is not None and sight.attempt > after and self._is_there(sight, point):
                time.sleep(point.delay * self._rest_of(sight))
                if (found := self._strike(point, sight)) is not None:
                    return found
                after = sight.attempt  # it was over just before
            time.sleep(_NEAR_S if near else _FAR_S)
        return None

    def _strike(self, point: Point, sight: Sight) -> Interruption | None:
        if not sight.worker.alive:
            return None
        if point.how == "stop":
            last = self._look() or sight
            sight.worker.terminate()
        else:
            sight.worker.kill_group()
            if not sight.worker.wait_gone(30.0):
                return None
            last = self._look() or sight  # its last word
        if last.attempt != sight.attempt or self._paths.result.exists():
            return None
        return Interruption(last.step, last.phase, point.how, sight.attempt)

    @staticmethod
    def _is_there(sight: Sight, point: Point) -> bool:
        if sight.step > point.step:
            return True
        return (sight.step, sight.phase) == (point.step, point.phase)

    def _rest_of(self, sight: Sight) -> float:
        """How long the phase may go on, by how long it took the last time."""
        return max(0.0, self._lasted.get(sight.phase, 0.0) - (time.monotonic() - self._since))

    def _look(self) -> Sight | None:
        numbers = self._paths.attempt_numbers()
        if not numbers:
            return None
        paths = self._paths.attempt(numbers[-1])
        started = _read(paths.started)
        if not started.get("process"):
            return None
        found = self._save_of(numbers[-1]) or self._told(paths)
        if found is None:
            return None
        self._note(numbers[-1], *found)
        return Sight(numbers[-1], *found, ProcessId.parse(str(started["process"])))

    def _save_of(self, attempt: int) -> tuple[int, str] | None:
        """The save that an attempt is at, or was at when it died."""
        if not self._paths.checkpoints.is_dir():
            return None
        for path in self._paths.checkpoints.iterdir():
            match = _SAVE.fullmatch(path.name)
            if match and int(match.group(2)) == attempt:
                return int(match.group(1)), "save"
        return None

    def _told(self, paths: AttemptPaths) -> tuple[int, str] | None:
        """GRPO tells each of its phases at once. SFT has but one, and logs each step."""
        if self._kind == "sft":
            step = last_logged(paths.metrics)
            return None if step is None else (step + 1, "update")
        progress = _read(paths.heartbeat).get("progress") or {}
        if not progress:
            return None
        phase = str(progress["phase"])
        return int(progress["done"]) + 1, "between steps" if phase == "train" else phase

    def _note(self, *seen: Any) -> None:
        now = time.monotonic()
        if seen != self._seen:
            if self._seen is not None and self._seen[0] == seen[0]:
                self._lasted[self._seen[2]] = now - self._since
            self._seen, self._since = seen, now


def as_they_were(
    workspace: Workspace, stage_id: str, made: Sequence[Interruption]
) -> list[Interruption]:
    """The interruptions of a finished stage, with the checkpoints that attempts went on from. A
    request to stop that came with the last step has stopped nothing, and is none."""
    record = workspace.read_record(stage_id)
    if record is None or record.result is None:
        return []
    steps = {a.number: a.resumed_from_step for a in record.attempts}
    return [
        replace(i, resumed_from_step=steps.get(i.attempt + 1))
        for i in made
        if i.attempt != record.result.attempt
    ]


def last_logged(metrics: Path) -> int | None:
    """The step of the last whole line of a ``metrics.jsonl``; None where there is none yet."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    return int(json.loads(lines[-1])["step"]) if lines else None


def _read(path: Any) -> dict[str, Any]:
    """A small file that somebody else replaces; nothing if it is not there."""
    value = atomic.read_json(path)
    return value if isinstance(value, dict) else {}
