"""The workspace's store of judgements, as judges use it.

::

    put ─> memory ─> (at most 0.2 s, or 256 records) ─> a file of this process, in the workspace
    get <─ memory <─ (at most once a second) <─ files of all processes

In: keys and scored judgements. Out: what is known of keys. A judgement that was put is on its way
to the disk within 0.2 s, whatever becomes of the process then; :meth:`WorkspaceStore.flush` waits
for the disk. A full disk or quota, or a folder that is closed to this user, is one line in the log:
the store goes on in memory and tries again.

It is kept within its limit: the oldest segments go, many small ones become one. Only segments that
nobody writes any more are touched: sealed ones, and those that were left alone for an hour by the
file server's own clock (that of the segment just begun). Several may do this at once: a segment is
removed only when another one that holds all of it is on the disk, so that the worst that happens is
that a judgement is there twice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from infra.judgements.segments import (
    HEADER_BYTES,
    LONGEST_PAUSE_S,
    RECORD_BYTES,
    SEALED,
    Saved,
    Segment,
    SegmentWriter,
    UnknownFormat,
    decode_header,
    encode_header,
    encode_record,
    list_segments,
)
from infra.judgements.table import Array, Reader, Table, decode, distinct
from infra.store import atomic
from infra.store.atomic import Complaints
from refiner_core.contract.types import StoredJudgement

log = logging.getLogger(__name__)

#: More finished segments than these are merged.
MOST_SEGMENTS = 64
_LEFT_ALONE_NS = 3600 * 10**9
assert LONGEST_PAUSE_S * 10**9 * 2 < _LEFT_ALONE_NS


def keep_small(
    new: Path, limit_bytes: int, segment_bytes: int, complaints: Complaints | None = None
) -> None:
    """Bring the folder of ``new``, a segment that was just begun, within its limit. Never raises:
    what cannot be done is said in the log, once."""
    complaints = complaints or Complaints()
    try:
        now_ns = new.stat().st_mtime_ns
        finished = _make_room(new, now_ns, limit_bytes - segment_bytes)
        if len(finished) > MOST_SEGMENTS:
            small = [s for s in finished if s.size * 2 < segment_bytes and s.owner == os.geteuid()]
            for group in _groups(small, segment_bytes):
                _merge(group)
        _remove_remains(new.parent, now_ns)
    except OSError as error:
        complaints.say("upkeep", "the store of judgements cannot be tidied: %s", error)


def _make_room(new: Path, now_ns: int, most_bytes: int) -> list[Segment]:
    """Remove the oldest finished segments until ``most_bytes`` are left; the finished ones that
    stay."""
    segments = list_segments(new.parent)
    total = sum(s.size for s in segments)
    stay = []
    for segment in segments:
        left_alone = now_ns - segment.changed_ns > _LEFT_ALONE_NS
        if segment.path == new or not (segment.is_sealed or left_alone):
            continue
        if total > most_bytes and _removed(segment.path):
            total -= segment.size
        else:
            stay.append(segment)
    return stay


def _removed(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # another user's, in a folder that protects it
        log.debug("%s stays: %s", path, error)
        return False
    return True


def _groups(segments: Iterable[Segment], most_bytes: int) -> Iterator[list[Segment]]:
    """Segments that together make one, oldest first."""
    group: list[Segment] = []
    for segment in segments:
        if sum(s.size for s in group) + segment.size > most_bytes:
            yield group
            group = []
        group.append(segment)
    yield group


def _merge(group: list[Segment]) -> None:
    """Write one segment that holds all of a group, and then remove the group."""
    parts: list[Array] = []
    read: list[Segment] = []
    saved = Saved()
    for segment in group:
        try:
            raw = segment.path.read_bytes()
            saved = saved.plus(decode_header(raw))
        except (OSError, UnknownFormat) as error:
            log.debug("%s is not merged: %s", segment.path, error)
            continue
        parts.append(decode(memoryview(raw)[HEADER_BYTES:]).records)
        read.append(segment._replace(size=len(raw)))
    if len(read) < 2:
        return
    newest = read[-1]
    target = newest.path.with_name(f"merged-{secrets.token_hex(8)}{SEALED}")
    data = encode_header(saved) + distinct(np.concatenate(parts)).tobytes()
    atomic.write_bytes(target, data)
    os.utime(target, ns=(newest.changed_ns, newest.changed_ns))  # as old as what is in it
    for segment in read:
        with contextlib.suppress(FileNotFoundError):
            if segment.path.stat().st_size == segment.size:
                _removed(segment.path)


def _remove_remains(folder: Path, now_ns: int) -> None:
    """Of those who were killed while they merged."""
    for path in folder.glob(f"{atomic.TEMPORARY}*"):
        with contextlib.suppress(FileNotFoundError):
            if now_ns - path.stat().st_mtime_ns > _LEFT_ALONE_NS:
                _removed(path)


_BATCH, _LONGEST_WAIT_S = 256, 0.2
_LOOK_EVERY_S = 1.0
_TRY_AGAIN_S = 30.0
_SMALLEST_SEGMENT, _LARGEST_SEGMENT = 64 << 10, 64 << 20
_SEGMENTS_IN_LIMIT = 8
#: Most bytes that wait for a disk that takes none; what comes after them stays in memory only.
_MOST_WAITING = RECORD_BYTES * 10**6
#: Memory may hold twice what the disk may, and a little.
_SPARE_RECORDS = 1 << 20


class WorkspaceStore:
    """Implements :class:`~refiner_core.contract.types.JudgementStore` on files. Any thread may use
    it; use it as a context manager, or :meth:`close` it.

    Parameters
    ----------
    folder
        ``judgements/`` of the workspace; made when the first judgement is put.
    writer
        Who it is, in the names of files (stage and attempt).
    limit_bytes
        Largest size of all files together; the oldest go.
    """

    def __init__(self, folder: Path, *, writer: str, limit_bytes: int) -> None:
        segment = limit_bytes // _SEGMENTS_IN_LIMIT
        self._folder, self._limit = folder, limit_bytes
        self._segment = min(max(segment, _SMALLEST_SEGMENT), _LARGEST_SEGMENT)
        self._complaints = Complaints()

        def on_new(path: Path) -> None:
            keep_small(path, limit_bytes, self._segment, self._complaints)

        self._writer = SegmentWriter(folder, writer, self._segment, on_new)
        self._reader = self._new_reader()
        self._table, self._waiting = Table(), bytearray()
        self._saved = Saved()
        self._looked_at = self._try_again_at = -1e9
        self._closed = False
        self._thread: threading.Thread | None = None
        # Always taken in this order. Only the last one is held while nothing slow happens.
        self._looking, self._writing = threading.RLock(), threading.RLock()
        self._lock = threading.Lock()
        self._some, self._enough = threading.Event(), threading.Event()

    def __enter__(self) -> WorkspaceStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ the protocol

    def get(self, keys: Sequence[bytes]) -> list[StoredJudgement | None]:
        """Known judgements, in order; also what others have put, about a second after they did."""
        self._look()
        with self._lock:
            found = self._table.get(keys)
            known = [f for f in found if f is not None]
            prompt = sum(k.prompt_tokens for k in known)
            completion = sum(k.completion_tokens for k in known)
            self._saved = self._saved.plus(Saved(len(known), prompt, completion))
        return found

    def put(self, key: bytes, judgement: StoredJudgement) -> None:
        """Keep one. Cheap, and never fails for the disk's sake.

        Raises
        ------
        ValueError
            The key has not 16 bytes, or the score is no number from 0 to 1.
        """
        record = encode_record(key, judgement)
        with self._lock:
            self._table.put(key, judgement)
            if self._closed or len(self._waiting) >= _MOST_WAITING:
                return
            self._waiting += record
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="judgements", daemon=True)
                self._thread.start()
        self._some.set()
        if len(self._waiting) >= _BATCH * RECORD_BYTES:
            self._enough.set()

    def flush(self) -> None:
        """Have the disk take what was put so far; what it refuses is said in the log."""
        with self._writing:
            if not self._write(now=True):
                return
            with self._lock:
                saved = self._saved
            try:
                self._writer.note(saved)
            except OSError as error:  # who only reads need not be able to write
                log.debug("what the store has saved is not noted: %s", error)
            try:
                self._writer.sync()
            except OSError as error:
                self._trouble(error)

    def close(self) -> None:
        """Flush, and write no more. More than one call does no harm."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if was_closed:
            return
        self._some.set()
        self._enough.set()
        if self._thread is not None:
            self._thread.join()
        with self._writing:
            self.flush()
            self._writer.seal()

    # ------------------------------------------------------------ writing

    def _work(self) -> None:
        while not self._closed:
            self._some.wait()
            self._enough.wait(_LONGEST_WAIT_S)
            self._some.clear()
            self._enough.clear()
            self._write()

    def _write(self, *, now: bool = False) -> bool:
        """Write what waits; ``now``: also soon after a failure. False: it still waits."""
        with self._writing:
            if not now and time.monotonic() < self._try_again_at:
                return False
            with self._lock:
                records = bytes(self._waiting)
            if not records:
                return True
            try:
                self._writer.append(records)
            except OSError as error:
                self._trouble(error)
                return False
            with self._lock:
                del self._waiting[: len(records)]
            if self._complaints.over("write"):
                log.info("judgements are stored in %s again", self._folder)
            return True

    def _trouble(self, error: OSError) -> None:
        self._try_again_at = time.monotonic() + _TRY_AGAIN_S
        self._complaints.say(
            "write",
            "judgements are kept in memory only for now, and would be asked again after a crash: "
            "%s cannot be written to (%s)",
            self._folder,
            error,
        )

    # ------------------------------------------------------------ reading

    def _look(self) -> None:
        """Take in what is new in the files, at most every second."""
        with self._looking:
            if time.monotonic() - self._looked_at < _LOOK_EVERY_S:
                return
            if len(self._table) > 2 * self._limit // RECORD_BYTES + _SPARE_RECORDS:
                self._begin_anew()
            for records in self._reader.fresh():
                with self._lock:
                    self._table.add(records)
            self._looked_at = time.monotonic()

    def _begin_anew(self) -> None:
        """Forget what is not on the disk any more, by reading what is."""
        with self._writing:
            if not self._write(now=True):
                return
            self._writer.seal()
            self._writer.mine.clear()
        with self._lock:
            self._table.forget_old()
        self._reader = self._new_reader()

    def _new_reader(self) -> Reader:
        return Reader(self._folder, self._writer.mine.__contains__, self._complaints)
