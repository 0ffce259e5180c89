"""Which stages lack room, and making it: the orchestrator's side of a full disk.

In: records, and a keeper of the disk. Out: the stages (by id) that have to wait, with a reason for
people, and those that have waited as long as they may. Looks cost something, so each stage is asked
about only every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from infra.jobs.failures import outcome_of, without_progress
from infra.jobs.protocol import AttemptRef
from infra.orchestrator.actions import CloseAttempt
from infra.orchestrator.reconcile import SILENT
from infra.store.room import has_room, out_of_inodes
from infra.store.workspace import Workspace
from refiner_core.contract.config import DiskConfig
from refiner_core.contract.errors import NoSpaceError
from refiner_core.contract.records import Outcome, StageRecord

_RECHECK_S = 5.0
#: What a stage needs that has never saved anything: its control files and a log.
SMALL_BYTES = 1 << 20
#: What a call needs to begin: its record, and a copy of the code.
BEGINNING_BYTES = 4 << 20
T = TypeVar("T")


class Keeper(Protocol):
    """What is asked of the disk; :class:`infra.disk.keeper.DiskKeeper` is the real one."""

    def need_of(self, stage_id: str) -> int:
        """Bytes that the stage's next save will need."""
        ...

    def make_room(self, need_bytes: int, ref: AttemptRef | None = None) -> Any | None:
        """Reclaim what the policy allows, if need be; None when it still does not fit, else a
        value with ``bytes`` and ``items`` of what was reclaimed."""
        ...

    def lacking(self, need_bytes: int, ref: AttemptRef | None = None) -> str:
        """What a write of ``need_bytes`` waits for, for people: bytes, or inodes."""
        ...


class ProbingKeeper:
    """Knows only whether a write goes through; reclaims nothing."""

    @dataclass(frozen=True)
    class Nothing:
        """Nothing was reclaimed."""

        bytes: int = 0
        items: tuple[str, ...] = ()

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def need_of(self, stage_id: str) -> int:
        """A small file's worth."""
        return SMALL_BYTES

    def make_room(self, need_bytes: int, ref: AttemptRef | None = None) -> Nothing | None:
        """Whether ``need_bytes`` can be written, by writing them."""
        layout = self._workspace.layout
        fits = has_room(layout.control, SMALL_BYTES) and has_room(layout.data, need_bytes)
        return self.Nothing() if fits else None

    def lacking(self, need_bytes: int, ref: AttemptRef | None = None) -> str:
        """Bytes: a write that fails says no more."""
        return f"{need_bytes / 2**20:,.1f} MiB"


@dataclass
class _Waiting:
    """A stage that lacks room: since when, when it was last asked about, and what was said."""

    since: float
    looked_at: float
    reason: str


@dataclass
class Rooms:
    """Remembers only since when a stage has waited.

    Parameters
    ----------
    workspace, keeper, config
        Where, what knows of room, and how long to wait.
    clock
        Seconds, monotonic.
    note
        Takes events: ``short``, ``reclaimed``, ``room``.
    """

    workspace: Workspace
    keeper: Keeper
    config: DiskConfig
    clock: Callable[[], float]
    note: Callable[[Mapping[str, Any]], None]
    #: Stages for which a small control file could not be written just now.
    blocked: dict[str, str] = field(default_factory=dict)
    #: Ends of attempts that could not be written down.
    unwritten: dict[AttemptRef, Outcome] = field(default_factory=dict)
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _any: bool | None = None
    _served: dict[str, int] = field(default_factory=dict)

    def short(self, records: Mapping[str, StageRecord]) -> dict[str, str]:
        """Stages that have to wait now, and why."""
        self._any = None
        found: dict[str, str] = {}
        for stage_id, number in self._in_question(records).items():
            if reason := self._look(stage_id, number, self._need(stage_id, records)):
                found[stage_id] = reason
        for stage_id in [i for i in self._waiting if i not in found]:
            del self._waiting[stage_id]
        return found

    def minded(self, action: CloseAttempt) -> CloseAttempt:
        """With the disk in mind: a worker on a full one may not even be able to leave a word, and
        then that is why. What was found of an end when it could not be written down counts later,
        too, when there is room again and the scheduler has forgotten the job."""
        ref = AttemptRef(action.stage.id, action.attempt)
        outcome = self.unwritten.get(ref, action.outcome)
        if ref in self.unwritten or outcome.failure not in SILENT:
            return replace(action, outcome=outcome)
        if self._any is None:  # once a round: a thousand jobs may end together
            self._any = self.keeper.make_room(SMALL_BYTES) is not None
        if self._any:
            return action
        message = f"{outcome.message}; the disk took no writes, not even its last word"
        return replace(action, outcome=outcome_of("disk_full", message))

    def gave_up(self) -> frozenset[str]:
        """Stages that have waited for ``disk.wait_min``."""
        now, limit_s = self.clock(), self.config.wait_min * 60
        return frozenset(i for i, w in self._waiting.items() if now - w.since >= limit_s)

    def _in_question(self, records: Mapping[str, StageRecord]) -> dict[str, int]:
        """Stages whose newest attempt ended for want of room, and has not been served since."""
        found = dict.fromkeys(self.blocked, 0)
        for stage_id, record in records.items():
            if record.result is not None or not record.attempts:
                continue
            last = record.attempts[-1]
            if last.outcome is None or last.outcome.failure != "disk_full":
                continue
            if self._served.get(stage_id) != last.number:
                found[stage_id] = last.number
        return found

    def _need(self, stage_id: str, records: Mapping[str, StageRecord]) -> int:
        """Bytes that must be free before the stage is tried again.

        What was written in vain is only the least that was needed, so each failure in a row asks
        for twice as much more; up to twice of it, for a disk that others fill again and again is
        no sign that the next save is larger.
        """
        if stage_id in self.blocked or stage_id not in records:
            return SMALL_BYTES
        attempts = records[stage_id].attempts
        in_vain = (attempts[-1].outcome.need_bytes if attempts[-1].outcome else None) or 0
        times = without_progress(attempts, "disk_full")
        margin = in_vain // 4 * (1 << min(2, max(0, times - 1)))
        return max(self.keeper.need_of(stage_id), in_vain + margin, SMALL_BYTES)

    def _look(self, stage_id: str, number: int, need: int) -> str:
        """Why it has to wait; empty if there is room now."""
        now, waiting = self.clock(), self._waiting.get(stage_id)
        pause_s = min(_RECHECK_S, self.config.watch_s)
        if waiting is not None and now - waiting.looked_at < pause_s:
            return waiting.reason
        ref = AttemptRef(stage_id, number) if number else None
        made = self.keeper.make_room(need, ref)
        if made is None:
            layout = self.workspace.layout
            reason = f"waits for room: {self.keeper.lacking(need, ref)} are needed in {layout.data}"
            for folder in (layout.control, layout.data):
                if out_of_inodes(folder):
                    reason = f"waits for room: no inode is free for another file in {folder}"
            if waiting is None:
                self.note({"event": "short", "stage_id": stage_id, "need_bytes": need})
            since = now if waiting is None else waiting.since
            self._waiting[stage_id] = _Waiting(since, now, reason)
            return reason
        if made.bytes:
            items = list(made.items)
            self.note(
                {"event": "reclaimed", "stage_id": stage_id, "bytes": made.bytes, "items": items}
            )
        if waiting is not None:
            waited_s = round(now - waiting.since, 1)
            self.note({"event": "room", "stage_id": stage_id, "waited_s": waited_s})
        self.blocked.pop(stage_id, None)
        if number:
            self._served[stage_id] = number
        return ""


def when_there_is_room(
    action: Callable[[], T],
    keeper: Keeper,
    config: DiskConfig,
    say: Callable[[str], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """What ``action`` returns, as soon as the disk takes its small files.

    Room is made as the policy allows, then waited for: an orchestrator that is started on a full
    disk would otherwise leave jobs alone that are about to pause.

    Raises
    ------
    NoSpaceError
        There was none for ``disk.wait_min``.
    """
    deadline, said = clock() + config.wait_min * 60, False
    while True:
        try:
            return action()
        except NoSpaceError as error:
            made = keeper.make_room(BEGINNING_BYTES)
            if made is not None and made.bytes:
                say(f"{made.bytes / 2**20:,.1f} MiB were reclaimed to begin.")
                continue
            if clock() >= deadline:
                raise
            if not said:
                say(f"{error.what}. Waiting for room; Ctrl-C leaves, and nothing is lost.")
            said = True
            sleep(_RECHECK_S)
