"""Waiting: for disk space, and for systems that do not answer.

Outages: while a file system, a scheduler or a service does not answer, the next round or attempt
comes after pauses that double. One event records the beginning of an outage of rounds, and one its
end, however long it lasts. An unanswered query decides nothing; other errors are raised.

Space: the stages (by id) that lack it wait, each with a reason for people; some have reached the
limit of waiting. Checks cost time, so each stage is checked only every few seconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from infra.disk.manager import DiskManager
from infra.jobs.dispatcher import AttemptRef
from infra.jobs.failures import CLASSES, is_outage, outcome_of, without_progress
from infra.orchestrator.reconcile import SILENT, CloseAttempt
from infra.orchestrator.timeline import first_line
from infra.store.atomic import out_of_inodes
from infra.store.workspace import Workspace
from refiner_core.contract.config import DiskConfig
from refiner_core.contract.errors import NoSpaceError
from refiner_core.contract.records import AttemptOutcome, FailureClass, StageRecord

#: The longest pause between two rounds, and between two attempts, seconds. The scheduler or the
#: file system comes back for all at once, so rounds are more frequent.
_LONGEST_S = 30.0
_LONGEST_BETWEEN_S: dict[FailureClass, float] = {"system_outage": 300.0}
_ELSE_S = 900.0
_TRIES, _BETWEEN_S = 5, 0.2
T = TypeVar("T")
K = TypeVar("K")


@dataclass
class Outage:
    """The outage of the rounds, if there is one now.

    Parameters
    ----------
    poll_s
        The first pause, seconds.
    clock, note
        Seconds (monotonic), and where events go.
    """

    poll_s: float
    clock: Callable[[], float]
    note: Callable[[Mapping[str, Any]], None]
    reason: str = ""
    since: float = 0.0
    _rounds: int = 0
    _due: float = 0.0

    @property
    def pause_s(self) -> float:
        """Seconds until the next round is due; 0 without an outage."""
        return max(0.0, self._due - self.clock()) if self._rounds else 0.0

    def met(self, error: Exception) -> None:
        """Note a round that failed with ``error``; raise it if it is no outage."""
        if not is_outage(error):
            raise error
        now = self.clock()
        if not self._rounds:
            self.since, self.reason = now, first_line(str(error), 300)
            self.note({"event": "outage", "reason": self.reason})
        self._due = now + min(self.poll_s * 2**self._rounds, _LONGEST_S)
        self._rounds = min(self._rounds + 1, 16)

    def is_over(self) -> None:
        """Note a round that succeeded."""
        if self._rounds:
            waited_s = round(self.clock() - self.since, 1)
            self.note({"event": "back", "reason": self.reason, "waited_s": waited_s})
        self.reason, self._rounds = "", 0


def not_before(
    records: Mapping[str, StageRecord],
    ended_before: Mapping[str, int],
    ready_at: dict[AttemptRef, float],
    first_s: float,
    now: float,
) -> dict[str, float]:
    """Stage id -> when it may continue, for last attempts that ended in a class that time may fix.
    Attempts up to ``ended_before`` are another call's. ``ready_at`` carries the times from round
    to round.
    """
    found: dict[str, float] = {}
    for stage_id, record in records.items():
        last = record.attempts[-1] if record.attempts else None
        if record.result is not None or last is None or last.outcome is None:
            continue
        failure, remedy = last.outcome.failure, CLASSES[last.outcome.failure].remedy
        count = without_progress(record.attempts, failure)
        # Space has been freed: only a second failure in a row is unusual.
        count -= remedy == "free space, then resume"
        pauses = remedy in ("pause, then resume", "free space, then resume") and count > 0
        if pauses and last.number > ended_before.get(stage_id, 0):
            longest_s = _LONGEST_BETWEEN_S.get(failure, _ELSE_S)
            due = now + min(first_s * 2 ** min(count - 1, 16), longest_s)
            found[stage_id] = ready_at.setdefault(AttemptRef(stage_id, last.number), due)
    return found


class CollectedErrors(dict[K, Exception]):
    """Errors by their source: each of several actions is tried, whatever fails elsewhere."""

    @contextlib.contextmanager
    def at(self, *keys: K) -> Iterator[None]:
        """Collect an error of the block under these keys; the first one counts."""
        try:
            yield
        except Exception as error:
            for key in keys:
                self.setdefault(key, error)

    def raise_first(self) -> None:
        """Raise the first error, if there is any."""
        for error in self.values():
            raise error


def with_patience(action: Callable[[], T]) -> T:
    """Result of ``action``, retried for a second: for calls before the first round."""
    for _ in range(_TRIES - 1):
        try:
            return action()
        except OSError as error:
            if not is_outage(error) or getattr(error, "resumable", False):
                raise
        time.sleep(_BETWEEN_S)
    return action()


_RECHECK_S = 5.0
#: Need of a stage that has never saved: its control files and a log.
SMALL_BYTES = 1 << 20
#: Need of a call at its start: its record, and a copy of the code.
BEGINNING_BYTES = 4 << 20


@dataclass
class SpaceWaits:
    """Tracks the stages that wait for space; remembers only since when.

    Parameters
    ----------
    workspace, disk_manager, config
        The workspace, the source of free space, and the limits of waiting.
    clock
        Seconds, monotonic.
    note
        Receives events: ``short``, ``reclaimed``, ``room``.
    """

    workspace: Workspace
    disk_manager: DiskManager
    config: DiskConfig
    clock: Callable[[], float]
    note: Callable[[Mapping[str, Any]], None]
    #: Stages with a small control file that could not be written just now.
    blocked: dict[str, str] = field(default_factory=dict)
    #: Outcomes of attempts that could not be written.
    unwritten: dict[AttemptRef, AttemptOutcome] = field(default_factory=dict)
    #: Stages that lack space: since when, time of the last check, and its reason.
    _waiting: dict[str, tuple[float, float, str]] = field(default_factory=dict)
    _any: bool | None = None
    _served: dict[str, int] = field(default_factory=dict)

    def short(self, records: Mapping[str, StageRecord]) -> dict[str, str]:
        """Stages that have to wait now, with reasons."""
        self._any = None
        found: dict[str, str] = {}
        for stage_id, number in self._in_question(records).items():
            if reason := self._look(stage_id, number, self._need(stage_id, records)):
                found[stage_id] = reason
        for stage_id in [i for i in self._waiting if i not in found]:
            del self._waiting[stage_id]
        return found

    def minded(self, action: CloseAttempt) -> CloseAttempt:
        """The action with the disk considered: a worker on a full disk may not be able to record
        its outcome, so that is why it is missing. An outcome that could not be written down still
        counts once there is space and the scheduler has forgotten the job."""
        ref = AttemptRef(action.stage.id, action.attempt)
        outcome = self.unwritten.get(ref, action.outcome)
        if ref in self.unwritten or outcome.failure not in SILENT:
            return replace(action, outcome=outcome)
        if self._any is None:  # once a round: a thousand jobs may end together
            self._any = self.disk_manager.free_space(SMALL_BYTES) is not None
        if self._any:
            return action
        message = f"{outcome.message}; the disk took no writes, not even of its outcome"
        return replace(action, outcome=outcome_of("disk_full", message))

    def gave_up(self) -> frozenset[str]:
        """Stages that have waited for ``disk.wait_min``."""
        now, limit_s = self.clock(), self.config.wait_min * 60
        return frozenset(i for i, w in self._waiting.items() if now - w[0] >= limit_s)

    def _in_question(self, records: Mapping[str, StageRecord]) -> dict[str, int]:
        """Stages whose newest attempt ended for lack of space and has had none since."""
        found = dict.fromkeys(self.blocked, 0)
        for stage_id, record in records.items():
            for last in record.attempts[-1:] if record.result is None else ():
                full = last.outcome is not None and last.outcome.failure == "disk_full"
                if full and self._served.get(stage_id) != last.number:
                    found[stage_id] = last.number
        return found

    def _need(self, stage_id: str, records: Mapping[str, StageRecord]) -> int:
        """Bytes that must be free before the stage is tried again.

        The size of a failed write is only a lower bound: a margin of a quarter is added, doubled by
        each failure in a row. It ends at the size itself, for a disk that others keep filling does
        not mean that the next save is larger.
        """
        if stage_id in self.blocked or stage_id not in records:
            return SMALL_BYTES
        attempts = records[stage_id].attempts
        in_vain = (attempts[-1].outcome.need_bytes if attempts[-1].outcome else None) or 0
        times = without_progress(attempts, "disk_full")
        margin = in_vain // 4 * (1 << min(2, max(0, times - 1)))
        return max(self.disk_manager.need_of(stage_id), in_vain + margin, SMALL_BYTES)

    def _look(self, stage_id: str, number: int, need: int) -> str:
        """Reason why it has to wait; empty if there is space now."""
        now, waiting = self.clock(), self._waiting.get(stage_id)
        if waiting is not None and now - waiting[1] < min(_RECHECK_S, self.config.watch_s):
            return waiting[2]
        ref = AttemptRef(stage_id, number) if number else None
        made = self.disk_manager.free_space(need, ref)
        if made is None:
            layout = self.workspace.layout
            lacking = self.disk_manager.lacking(need, ref)
            reason = f"waits for space: {lacking} are needed in {layout.data}"
            for folder in (layout.control, layout.data):
                if out_of_inodes(folder):
                    reason = f"waits for space: no inode is free for another file in {folder}"
            if waiting is None:
                self.note({"event": "short", "stage_id": stage_id, "need_bytes": need})
            self._waiting[stage_id] = (waiting[0] if waiting else now, now, reason)
            return reason
        if made.bytes:
            items = list(made.items)
            self.note(
                {"event": "reclaimed", "stage_id": stage_id, "bytes": made.bytes, "items": items}
            )
        if waiting is not None:
            waited_s = round(now - waiting[0], 1)
            self.note({"event": "room", "stage_id": stage_id, "waited_s": waited_s})
        self.blocked.pop(stage_id, None)
        if number:
            self._served[stage_id] = number
        return ""


def retry_with_space(
    action: Callable[[], T],
    disk_manager: DiskManager,
    config: DiskConfig,
    warn: Callable[[str], None],
) -> T:
    """Result of ``action``, as soon as its small files fit on the disk.

    Space is freed as the policy allows, then waited for: without an orchestrator, jobs that are
    about to pause would be on their own.

    Raises
    ------
    NoSpaceError
        There was no space for ``disk.wait_min``.
    """
    deadline, said = time.monotonic() + config.wait_min * 60, False
    while True:
        try:
            return action()
        except NoSpaceError as error:
            made = disk_manager.free_space(BEGINNING_BYTES)
            if made is not None and made.bytes:
                warn(f"{made.bytes / 2**20:,.1f} MiB were reclaimed for the start.")
                continue
            if time.monotonic() >= deadline:
                raise
            if not said:
                warn(f"{error.what}. Waiting for disk space; Ctrl-C leaves, and nothing is lost.")
            said = True
            time.sleep(_RECHECK_S)
