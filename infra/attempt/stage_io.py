"""The writes of a running stage besides its output: log, heartbeat, metrics, rollouts, checkpoints.

In: calls of the :class:`~refiner_core.contract.types.StageIO` protocol. Out: per attempt one
``metrics.jsonl`` (a line per logged step) and one Parquet file of rollouts per step; per stage the
checkpoints. An attempt that resumes from the checkpoint of step *k* copies the lines and links the
rollouts up to *k* from the attempt that made it, so the newest attempt's files are always complete,
with no step twice and none missing.

Log a step *before* its checkpoint is saved: everything logged is fsynced before the marker. One
other thread may save a checkpoint while this one logs: lines logged meanwhile become durable with
it or later.

The heartbeat is ``heartbeat.json``, written every few seconds, and at once when the phase changes
or a save begins:

    counter            moves while the process lives
    told               moves with each report of the stage, and while it saves
    moved_at_s         when its report last changed, by ``seconds``
    saving, save_s     whether a checkpoint is being written; seconds of the longest save
    phases             by phase: completed visits, the longest silence in one, the longest one
    stalled            the stall that ended the attempt, if one did
    seconds            since the worker began

Observers check whether the counters move; the times are for people. A failed write of the heartbeat
is one warning, never an error.

Libraries log whole addresses (a signed one is a credential for an hour) and, at debug level, whole
answers; people share logs. So every line of ``log.txt``, with its traceback, is masked as it is
written: values of this process's own secrets, and everything that looks like one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from infra.attempt.rank_watch import RankWatch
from infra.attempt.stalls import Stall, StallClock
from infra.host.files import again, make_folder
from infra.host.secrets import mask_keys_of, masked
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.checkpoints import CheckpointStore, CompleteCheckpoint, hold_steps, step_name
from infra.store.layout import StagePaths
from infra.store.traces import encode_rollouts, list_rollouts, read_metrics
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import NoSpaceError
from refiner_core.contract.records import to_json
from refiner_core.contract.types import Progress, SavedCheckpoint

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: Loggers of bytes on the wire and single requests, which are of no use to readers of a log.
_WIRES = ("httpcore2", "httpx2", "httpcore", "httpx", "urllib3", "filelock")


def set_up_logging(config: RecipeConfig) -> None:
    """Have this process log to standard error, masked, from ``config.log_level`` on."""
    mask_keys_of(config)
    handler = logging.StreamHandler()
    handler.setFormatter(MaskingFormatter(_FORMAT))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    for name in _WIRES:
        logging.getLogger(name).setLevel(logging.WARNING)


def redirect_output(path: Path) -> None:
    """Redirect all output of this process and its children to the end of a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


class MaskingFormatter(logging.Formatter):
    """Formats as usual, and masks secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """The line with its traceback."""
        return masked(super().format(record))


log = logging.getLogger(__name__)

INTERVAL_S = 2.0
_CALL = "the checks after a heartbeat failed; they are repeated after the next one"


class Heartbeat:
    """Writes from a thread of its own, so that a long step does not look silent."""

    def __init__(
        self,
        path: Path,
        began: float,
        on_beat: Callable[[], None] = lambda: None,
        clock: StallClock | None = None,
    ) -> None:
        self._path, self._began = path, began
        self._on_beat = on_beat
        self._clock = clock or StallClock(began, float("inf"))
        #: The stall that ends the attempt.
        self.stalled: Stall | None = None
        self._counter = 0
        self.progress: Progress | None = None
        self._told = 0
        self._moved_at_s = 0.0
        self._saving = False
        self._save_s: float | None = None
        self._complaints = atomic.WarningLog()
        #: Error of the newest write; None if it succeeded.
        self.refused: Exception | None = None
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first one, and start the thread."""
        self._write()
        self._thread.start()

    def tell(self, progress: Progress) -> None:
        """Take the stage's progress. Cheap: the thread writes it."""
        self._clock.report(threading.get_ident(), progress, time.monotonic())
        before, self.progress = self.progress, progress
        self._told += 1
        if before is None or (before.phase, before.done) != (progress.phase, progress.done):
            self._moved_at_s = self._seconds()
        if before is None or before.phase != progress.phase:
            self._wake.set()

    def pulse(self, counts: object) -> None:
        """Take the counts of the processes that train."""
        self._told += self._clock.pulse(counts, time.monotonic())

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around the save of a checkpoint; a completed save is timed."""
        began = time.monotonic()
        self._saving, self._told = True, self._told + 1
        self._clock.saving(threading.get_ident(), began, ends=False)
        self._wake.set()
        try:
            yield
            self._save_s = max(self._save_s or 0.0, time.monotonic() - began)
        finally:
            self._saving, self._told = False, self._told + 1
            self._clock.saving(threading.get_ident(), time.monotonic(), ends=True)

    def stop(self) -> None:
        """Write the last one, and end. Repetition is harmless."""
        if not self._ended.is_set():
            self._ended.set()
            self._wake.set()
            if self._thread.is_alive() and self._thread is not threading.current_thread():
                self._thread.join()
            self._write()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            if self._ended.is_set():
                return
            self._write()
            try:
                self._on_beat()
            except Exception:  # without a heartbeat, a healthy stage is killed as hung
                self._complaints.warn("beat", _CALL, exc_info=True)

    def _seconds(self) -> float:
        return round(time.monotonic() - self._began, 3)

    def _write(self) -> None:
        self._counter += 1
        value: dict[str, Any] = {
            "counter": self._counter,
            "told": self._told,
            "moved_at_s": self._moved_at_s,
            "saving": self._saving,
            "save_s": None if self._save_s is None else round(self._save_s, 3),
            "seconds": self._seconds(),
            "progress": atomic.finite(to_json(self.progress)),
            "phases": {p: [round(n, 2) for n in t] for p, t in self._clock.times.copy().items()},
        }
        if self.stalled is not None:
            value["stalled"] = self.stalled._asdict()
        self._clock.beat(time.monotonic())
        try:
            atomic.write_json(self._path, value, sync=False)
            self.refused = None
        except (OSError, ValueError, TypeError) as error:
            self.refused = error
            self._complaints.warn("write", "the heartbeat cannot be written: %s", error)


#: Metrics of a step that the log shows, if present.
_IN_LOG = (
    *("loss/train_avg", "loss/validation", "scores", "loss/total_avg", "objective/kl3_avg"),
    *("val/stop_rate", "learning_rate", "tokens_per_second"),
)


class AttemptIO:
    """The StageIO of one attempt.

    Parameters
    ----------
    stage, attempt
        Paths of the stage, and the number of this attempt.
    checkpoints
        The stage's store; its ``before_commit`` must be :meth:`flush` of this object.
    on_progress, stop_requested_by
        Receives progress; tells whether a stop was requested.
    also_log
        Receives each step's metrics, too, such as a tracker. It never raises.
    wait_for_space
        Waits a while on a full disk; True if there is space.
    """

    def __init__(
        self,
        stage: StagePaths,
        attempt: int,
        checkpoints: CheckpointStore,
        *,
        on_progress: Callable[[Progress], None] = lambda _: None,
        stop_requested: Callable[[], bool] = lambda: False,
        also_log: Callable[[int, Mapping[str, float]], None] = lambda _step, _metrics: None,
        wait_for_space: Callable[[], bool] = lambda: False,
    ) -> None:
        self.stage, self.paths = stage, stage.attempt(attempt)
        self.checkpoints = checkpoints
        #: Creates a folder to write the checkpoint of a step into.
        self.new_checkpoint = checkpoints.new
        self._also_log = also_log
        #: Reports the stage's progress.
        self.progress = on_progress
        #: Tells whether to save at the next step boundary and raise ``Interrupted``.
        self.should_stop = stop_requested
        self._wait_for_space = wait_for_space
        #: Counts of the processes that train.
        self.ranks = RankWatch()
        self._metrics: FileIO | None = None
        self._last_step: int | None = None
        self._asked_for_checkpoint = False
        #: Step of the checkpoint that the attempt resumed from.
        self.resumed_step: int | None = None
        self._unsynced: list[Path] = []
        self._lock = threading.Lock()  # for the open file and the list
        self._taken_over = False

    # ------------------------------------------------------------ metrics and rollouts

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step's numbers; a step may have several lines, but steps never go back."""
        if self._last_step is not None and step < self._last_step:
            raise ValueError(f"metrics of step {step} after those of step {self._last_step}")
        self._last_step = step
        numbers = {name: float(value) for name, value in metrics.items()}
        line = json.dumps(atomic.finite({"step": step, "metrics": numbers}))
        self._retained(lambda: self._append(line.encode() + b"\n"))
        # Selected metrics for people; all are in ``metrics.jsonl``.
        shown = {name: metrics[name] for name in _IN_LOG if name in metrics} or metrics
        text = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
        log.info("step %d: %s", step, text)
        self._also_log(step, metrics)

    def save_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Store a step's rollouts in a file of its own."""
        path = self.paths.rollouts / f"{step_name(step)}.parquet"
        data = encode_rollouts(rows)

        def write() -> None:
            with no_space_guard(self.paths.data, "writing rollouts", waits=True):
                make_folder(path.parent)
                atomic.write_bytes(path, data, sync=False)

        self._retained(write)
        with self._lock:
            self._unsynced.append(path)

    def _append(self, line: bytes) -> None:
        """Append a line of metrics, whole or not at all."""
        with no_space_guard(self.paths.data, "writing metrics", waits=True), self._lock:
            if self._metrics is None:
                make_folder(self.paths.data)
                self._metrics = self.paths.metrics.open("ab", buffering=0)
            size = os.fstat(self._metrics.fileno()).st_size
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[self._metrics.write(rest) :]
            except OSError:
                os.ftruncate(self._metrics.fileno(), size)
                raise

    def _retained(self, write: Callable[[], None]) -> None:
        """Write; on a full disk wait for space and retry, rather than lose the steps in memory."""
        while True:
            try:
                return write()
            except NoSpaceError as error:
                if not self.room_again(error):
                    raise

    def room_again(self, error: NoSpaceError) -> bool:
        """Wait a while for space after a write that did not fit. True: try it again."""
        number = "" if error.errno is None else f" [errno {error.errno}]"
        log.warning("%s%s; waiting for space", error.what, number)
        began = time.monotonic()
        found = self._wait_for_space()
        if found:  # repeated: the log may be on the disk that was full
            waited_s = time.monotonic() - began
            log.warning("%s%s; continuing after %.1f s without space", error.what, number, waited_s)
        return found

    def flush(self) -> None:
        """Make all logged lines durable. From any thread; logging does not wait."""
        with self._lock:
            metrics = None if self._metrics is None else os.dup(self._metrics.fileno())
            unsynced = list(self._unsynced)
        try:
            if metrics is not None:
                os.fsync(metrics)
            for path in unsynced:
                atomic.sync_file(path)
            if unsynced:
                atomic.sync_folder(self.paths.rollouts)
        finally:
            if metrics is not None:
                os.close(metrics)
        with self._lock:
            self._unsynced = [path for path in self._unsynced if path not in unsynced]

    def close(self) -> None:
        """Flush, and close the files."""
        self.flush()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    # ------------------------------------------------------------ checkpoints

    def latest_checkpoint(self) -> SavedCheckpoint | None:
        """The newest complete checkpoint. The first call of an attempt also copies the logged lines
        up to its step, so call it before anything is logged."""
        found = self.checkpoints.latest()
        if found is not None and not self._asked_for_checkpoint and self._last_step is None:
            self.go_on_from(found)
        self._asked_for_checkpoint = True
        return None if found is None else SavedCheckpoint(found.step, found.path)

    def pass_over(self, checkpoint: SavedCheckpoint, why: str) -> None:
        """Mark the newest checkpoint as damaged: from now on the one before it is the newest. Call
        it before anything is logged."""
        self.checkpoints.pass_over(checkpoint.step, why)
        if self._taken_over:  # up to a step that is too late
            atomic.remove_quietly(self.paths.metrics)
            atomic.remove_tree(self.paths.rollouts)
        self._note_resumed(None)
        self.resumed_step, self._last_step, self._taken_over = None, None, False
        self._unsynced.clear()
        self._asked_for_checkpoint = False

    def keep_checkpoints(self, steps: Sequence[int]) -> list[SavedCheckpoint]:
        """See :meth:`refiner_core.contract.types.StageIO.keep_checkpoints`."""
        hold_steps(self.stage, steps)
        found = [c for c in self.checkpoints.complete() if c.step in steps]
        return [SavedCheckpoint(c.step, c.path) for c in found]

    def go_on_from(self, found: CompleteCheckpoint) -> None:
        """Resume from a checkpoint, also from one that is not in the store (another trainer's):
        records it and copies what ``found.attempt`` has logged up to its step. Call it before
        anything is logged."""
        self._asked_for_checkpoint = True
        before = self.stage.attempt(found.attempt)
        with no_space_guard(self.paths.data, "resuming", waits=True):
            make_folder(self.paths.data)
            if before.data != self.paths.data:
                lines = [m for m in read_metrics(before.metrics) if m.step <= found.step]
                text = "".join(json.dumps(m._asdict()) + "\n" for m in lines)
                atomic.write_text(self.paths.metrics, text)
                self._link_rollouts(before.rollouts, found.step)
                self._last_step = lines[-1].step if lines else None
                self._taken_over = True
        self._note_resumed({"step": found.step, "from_attempt": found.attempt})
        self.resumed_step = found.step
        log.info("resuming from the checkpoint of step %d", found.step)

    def _note_resumed(self, found: Mapping[str, int] | None) -> None:
        """Record which checkpoint the attempt resumes from (None: none after all)."""
        with no_space_guard(self.paths.control, "resuming", waits=True):
            started = atomic.read_json(self.paths.started) or {}
            make_folder(self.paths.control)
            atomic.write_json(self.paths.started, {**started, "resumed": found})

    def _link_rollouts(self, source: Path, last_step: int) -> None:
        for path in list_rollouts(source):
            if int(path.stem.removeprefix("step-")) > last_step:
                continue
            make_folder(self.paths.rollouts)
            target = self.paths.rollouts / path.name
            try:
                os.link(path, target)
            except OSError:
                again(shutil.copyfile, path, target)
                self._unsynced.append(target)
