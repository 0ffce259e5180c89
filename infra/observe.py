"""Looks at the world: which attempts live, which are gone, which hang.

In: a workspace and a dispatcher. Out: records and :class:`~infra.reconcile.Observed`, together, in
the right order (a record is read *after* its attempt was seen dead, so its last word is in it).

Liveness goes by process first. Where that cannot be asked (another host), it goes by whether the
heartbeat's *counter* moves, timed by this process's own clock: clocks are never compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from infra.disk.room import has_room
from infra.dispatch import Dispatcher
from infra.failures import classify_silent_end
from infra.processes import ProcessId
from infra.reconcile import Observed, Seen, Sight
from infra.workspace import Workspace
from refiner_core.contract.records import Attempt, StageRecord


class _Sign(NamedTuple):
    """The newest sign of life of an attempt, and when this process first saw it."""

    value: tuple[Any, ...]
    since: float


class Observer:
    """Remembers between looks only since when a sign of life has not changed."""

    def __init__(
        self,
        workspace: Workspace,
        dispatcher: Dispatcher,
        heartbeat_timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        room: Callable[[Path], bool] = has_room,
    ) -> None:
        self.workspace, self.dispatcher = workspace, dispatcher
        self.heartbeat_timeout_s, self._clock, self._room = heartbeat_timeout_s, clock, room
        self._signs: dict[tuple[str, int], _Sign] = {}
        self._done: dict[str, StageRecord] = {}  # a result never changes

    def look(self, stage_ids: Iterable[str]) -> tuple[dict[str, StageRecord], Observed]:
        """Records of the stages that have one, and what is seen of their newest attempts."""
        records: dict[str, StageRecord] = {}
        attempts: dict[str, Seen] = {}
        for stage_id in dict.fromkeys(stage_ids):
            record, seen = self._look_at(stage_id)
            if record is not None:
                records[stage_id] = record
            if seen is not None:
                attempts[stage_id] = seen
        short = any(r.attempts and _disk_full(r.attempts[-1]) for r in records.values())
        return records, Observed(attempts, room=not short or self._room(self.workspace.root))

    def _look_at(self, stage_id: str) -> tuple[StageRecord | None, Seen | None]:
        if stage_id in self._done:
            return self._done[stage_id], None
        record = self.workspace.read_record(stage_id)
        if record is not None and _open_attempt(record) is not None:
            attempt = record.attempts[-1]
            seen = self._see(stage_id, attempt)
            if seen.sight != "live":
                record = self.workspace.read_record(stage_id) or record
            if _open_attempt(record) == attempt.number:
                return record, seen
        if record is not None and record.result is not None:
            self._done[stage_id] = record
        return record, None

    def _see(self, stage_id: str, attempt: Attempt) -> Seen:
        paths = self.workspace.layout.attempt(stage_id, attempt.number)
        started = self.workspace.read_control(paths.started)
        owner = ProcessId.parse(attempt.owner)
        sight = self._sight(stage_id, attempt, owner, started)
        local = attempt.executor == "local" and owner.here
        if sight != "dead":
            return Seen(attempt.number, sight, local)
        printed = self.dispatcher.printed(stage_id, attempt.number)
        has_started = started is not None and not started.get("void")
        return Seen(attempt.number, sight, local, classify_silent_end(has_started, printed))

    def _sight(
        self, stage_id: str, attempt: Attempt, owner: ProcessId, started: dict[str, Any] | None
    ) -> Sight:
        if started is not None and started.get("void"):
            return "dead"
        sight = self.dispatcher.observe(stage_id, attempt.number)
        if sight == "dead":
            return "dead"
        submitted = attempt.job_id is not None or started is not None
        if sight == "unknown" and not submitted and owner.here and not owner.alive:
            return "dead"  # claimed, and its orchestrator died before it submitted
        return "hung" if self._silent_for_too_long(stage_id, attempt, started) else "live"

    def _silent_for_too_long(
        self, stage_id: str, attempt: Attempt, started: dict[str, Any] | None
    ) -> bool:
        beat = self.workspace.read_heartbeat(stage_id, attempt.number) or {}
        value = (attempt.job_id, started is not None, beat.get("counter"))
        key, now = (stage_id, attempt.number), self._clock()
        sign = self._signs.get(key)
        if sign is None or sign.value != value:
            self._signs[key] = _Sign(value, now)
            return False
        return now - sign.since > self.heartbeat_timeout_s


def _open_attempt(record: StageRecord | None) -> int | None:
    """The number of the newest attempt, if it has neither outcome nor result."""
    if record is None or record.result is not None or not record.attempts:
        return None
    last = record.attempts[-1]
    return last.number if last.outcome is None else None


def _disk_full(attempt: Attempt) -> bool:
    return attempt.outcome is not None and attempt.outcome.failure == "disk_full"
