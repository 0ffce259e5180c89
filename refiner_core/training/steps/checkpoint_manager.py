"""Boundaries between two steps: save, stop, resume. Shared by SFT and GRPO.

In: a :class:`StageIO`, an engine and the stage's progress dictionary. Out: checkpoints, or
:class:`Interrupted` once the current step is saved.

A save has two parts. Training pauses while the state is copied to host memory; with ``async_save``
the rest (freeing space, writing, fsync, hashes, the marker, the rename) runs in a thread while
training continues. At most one save runs at a time: the next save, a stop, the stage's end and any
error wait for it. Its errors are raised at the next step boundary, and a step counts as saved only
when its checkpoint is complete. The copy is of one moment, so the result does not depend on timing.

With several ranks every rank has such a thread. The threads communicate on their own channel (a
separate process group, :meth:`refiner_core.training.ranks.Ranks.line`): their collectives never mix
with those of the training, a checkpoint is visible as soon as it is complete rather than at the
next step, and all of them know every decision (no space, an error of one rank). The main threads
learn from rank 0 that a save has ended, at the same boundary.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from refiner_core.contract.errors import (
    DamagedCheckpoint,
    Interrupted,
    NoSpaceError,
    WorkspaceError,
)
from refiner_core.contract.types import Progress, StageIO
from refiner_core.training.engines.protocol import Engine, StateSnapshot, write_synced
from refiner_core.training.ranks import RanksIO

log = logging.getLogger(__name__)

Attachments = Callable[[], Mapping[str, bytes]]

#: Points of a curve in a report; metrics keep all.
CURVE_POINTS = 100
#: Attempts at a save that does not fit on the disk.
SAVE_TRIES = 5


@dataclass
class CheckpointManager:
    """Step boundaries of one stage. ``step`` counts finished steps; 0 is the start. Saves every
    ``save_freq`` steps, after the last, and after ``first_save`` if given.

    A context manager: no save is running after its end, however it ended.
    """

    io: StageIO
    engine: Engine
    stage: str
    total_steps: int
    save_freq: int
    first_save: int | None = None
    async_save: bool = False
    #: A further step to save after.
    also: int | None = field(default=None, init=False)
    saved_step: int = field(default=0, init=False)
    restored: Path | None = field(default=None, init=False)
    #: The running save by its step; its result is the seconds that it took.
    _under_way: tuple[int, Future[float]] | None = field(default=None, init=False)
    _stall_s: float | None = field(default=None, init=False)
    _background_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        apart = self.async_save and isinstance(self.io, RanksIO)
        self._saving_io = self.io.line() if apart and isinstance(self.io, RanksIO) else self.io

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._wait()
            return
        step = None if self._under_way is None else self._under_way[0]
        try:
            self._wait()
        except Exception as second:
            log.exception("the checkpoint of step %s was not saved", step)
            error.add_note(f"The checkpoint of step {step} was not saved: {second}")

    # ------------------------------------------------------------ resuming

    def restore(self, data_hash: str) -> dict[str, Any] | None:
        """The progress of the newest checkpoint, with its state loaded; None without one.

        An unreadable checkpoint is skipped for the previous one.

        Raises
        ------
        WorkspaceError
            The checkpoint was made by another stage or on other data.
        """
        while (checkpoint := self.io.latest_checkpoint()) is not None:
            try:
                progress = self.engine.restore(checkpoint.path)
            except DamagedCheckpoint as error:
                self.io.pass_over(checkpoint, error.what)
                continue
            for key, expected in (("stage", self.stage), ("data_hash", data_hash)):
                if progress.get(key) != expected:
                    raise WorkspaceError(
                        f"{checkpoint.path} does not belong to this stage: its {key} is "
                        f"{progress.get(key)}",
                        expected=f"{key} {expected}",
                        fix="remove the checkpoint to start the stage again",
                    )
            self.saved_step, self.restored = checkpoint.step, checkpoint.path
            return progress
        return None

    def attachment(self, name: str) -> bytes | None:
        """A file that was saved with the restored state; None if there is none."""
        path = None if self.restored is None else self.restored / name
        return path.read_bytes() if path is not None and path.exists() else None

    # ------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        progress: Mapping[str, Any],
        attachments: Attachments = dict,
        *,
        beside: bool = False,
    ) -> None:
        """Checkpoint after ``step``, unless that exists already or nothing has happened yet. It is
        complete on return; with ``beside`` only the state is copied on return, and the rest happens
        in a thread during training.

        ``attachments`` gives further files of rank 0, by name: batches in flight between two steps.
        A disk that fills up during a save costs a wait, not the steps since the last checkpoint:
        they are still in memory, and are saved once there is space.

        Raises
        ------
        NoSpaceError
            There was no space for too long.
        """
        self._wait()
        if step <= self.saved_step:
            return
        self.io.progress(Progress(step, self.total_steps, "save"))
        began = time.monotonic()
        state = self.engine.snapshot({"stage": self.stage, **progress}), dict(attachments())
        if beside:
            thread = ThreadPoolExecutor(1, f"save of step {step}")
            saving = thread.submit(self._write, self._saving_io, step, *state)
            thread.shutdown(wait=False)
            self._under_way = (step, saving)
        else:
            self._write(self.io, step, *state)
            self.saved_step = step
        self._stalled(began)

    def _write(
        self, io: StageIO, step: int, snapshot: StateSnapshot, files: Mapping[str, bytes]
    ) -> float:
        """Write a state until it fits; every rank makes the same calls. Returns seconds."""
        began = time.monotonic()
        tries_left = SAVE_TRIES
        while True:
            try:
                with io.new_checkpoint(step) as folder:
                    snapshot.write(folder)
                    for name, data in files.items() if self.engine.ranks.rank == 0 else ():
                        write_synced(folder / name, data)
                return time.monotonic() - began
            except NoSpaceError as error:
                tries_left -= 1
                if not tries_left or not io.room_again(error):
                    raise

    def _wait(self) -> None:
        """Wait for the running save; raises its error."""
        if self._under_way is None:
            return
        (step, saving), self._under_way = self._under_way, None
        began = time.monotonic()
        try:
            self._background_s = saving.result()
        finally:
            self._stalled(began)
        self.saved_step = step

    def _look(self) -> None:
        """Notice that a save has ended; raises its error.

        The ranks' threads end together, so rank 0's answer holds for all.
        """
        if self._under_way is not None and self.engine.ranks.broadcast(self._under_way[1].done()):
            self._wait()

    def _stalled(self, began: float) -> None:
        self._stall_s = (self._stall_s or 0.0) + time.monotonic() - began

    def metrics(self) -> dict[str, float]:
        """Cost of saving since the last call, for the next logged step.

        ``time/save_s`` is how long training paused, ``time/save_background_s`` how long the last
        save ran in the background.
        """
        found = {"time/save_s": self._stall_s, "time/save_background_s": self._background_s}
        self._stall_s = self._background_s = None
        return {name: value for name, value in found.items() if value is not None}

    # ------------------------------------------------------------ between two steps

    def after(
        self,
        step: int,
        progress: Mapping[str, Any],
        values: Mapping[str, float],
        attachments: Attachments = dict,
    ) -> None:
        """Report progress; save if due; stop if requested.

        Raises
        ------
        Interrupted
            See :meth:`stop_if_requested`.
        """
        self.io.progress(Progress(step, self.total_steps, "train", values))
        self._look()
        self.stop_if_requested(step, progress, attachments)
        due = step % max(1, self.save_freq) == 0 or step in (self.first_save, self.also)
        last = step >= self.total_steps
        if due or last:
            self.save(step, progress, attachments, beside=self.async_save and not last)

    def stop_if_requested(
        self, step: int, progress: Mapping[str, Any], attachments: Attachments = dict
    ) -> None:
        """Save and stop, if requested and steps remain after ``step``.

        May be called whenever the state is that of the end of ``step``.

        Raises
        ------
        Interrupted
            Raised after the checkpoint is complete.
        """
        if step < self.total_steps and self.io.should_stop():
            self.save(step, progress, attachments)
            raise Interrupted(
                f"{self.stage} stopped on request after step {step} of {self.total_steps}",
                fix="run the same command again to resume from there",
            )


def curve(values: Sequence[float | None]) -> list[list[float]]:
    """At most about a hundred ``[step, value]`` points of a curve, including the last.

    ``values`` has one entry per step; None for a step without the number (no KL if all groups
    were dropped).
    """
    known = [[step, value] for step, value in enumerate(values, 1) if value is not None]
    stride = max(1, math.ceil(len(known) / CURVE_POINTS))
    points = known[::stride]
    if known and points[-1] != known[-1]:
        points.append(known[-1])
    return points


#: Called with a part of a step, the number of finished samples, and the total. The first call of a
#: part, with no samples, marks its start.
Tell = Callable[[str, int, int], None]

#: Names of the counts of a part.
_UNITS = {"generate": "samples_finished", "judge": "samples_judged"}
#: Part -> its name in the training of agents, and the name of its counts.
_OF_AGENTS = {
    "generate": ("generate", "turns_finished", "turns"),
    "judge": ("score", "samples_scored", "samples"),
}
_EVERY_S = 1.0


def progress_reporter(
    report: Callable[[str, Mapping[str, float]], None], *, turns: bool = False
) -> Tell:
    """Forward the start of a part of a step, then its progress, at most once a second.

    ``report(part, values)`` receives it. ``turns``: an agent's turns are generated.
    """
    last_s = 0.0

    def tell(part: str, done: int, total: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if total and now_s - last_s < _EVERY_S:
            return
        last_s = now_s
        units, of = _UNITS[part], "samples"
        if turns:
            part, units, of = _OF_AGENTS[part]
        report(part, {units: float(done), of: float(total)} if total else {})

    return tell


class StepTimer:
    """Wall-clock seconds of the parts of one step."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._parts: dict[str, float] = defaultdict(float)

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Add the block's duration to a part."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._parts[part] += time.perf_counter() - started

    def metrics(self, tokens: int, *, beside: float | None = None) -> dict[str, float]:
        """``time/PART_s``, ``time/step_s``, ``time/idle_s`` (the step without its parts) and the
        throughput. ``beside``: duration of sampling in a thread; ``time/wait_s`` is then the step's
        wait for it. A save during the sampling does not shorten its duration."""
        total = time.perf_counter() - self._started
        parts = {f"time/{part}_s": seconds for part, seconds in self._parts.items()}
        idle = max(0.0, total - sum(self._parts.values()))
        if beside is not None:
            parts["time/generate_s"] = parts.get("time/generate_s", 0.0) + beside
        out = {**parts, "time/idle_s": idle, "time/step_s": total}
        return {**out, "tokens_per_second": tokens / max(total, beside or 0.0)}
