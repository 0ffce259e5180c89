"""The workspace's store of judgements, as judges use it.

::

    put ─> memory ─> (at most 0.2 s) ─> a file of this process, in the workspace
    get <─ memory <─ (at most once a second) <─ files of all processes

In: keys and scored judgements. Out: what is known of keys. A judgement that was put is on its way
to the disk within 0.2 s, whatever becomes of the process then; :meth:`WorkspaceStore.flush` waits
for the disk. A full disk or quota, or a folder that is closed to this user, is one line in the log:
the store goes on in memory and tries again. Whoever begins a segment sees to it that all of them
stay within a size and a number: the oldest go.

In memory, the index is one array, sorted by key, in which thousands of keys are looked up at once;
what is few waits in a dictionary until there is enough of it to be sorted in.

A reader gives sound records that were not given before, whoever has written them. How far each
segment was read is remembered by its name, so that only what has been added is read again. What
cannot be read (closed to this user, of a newer version, damaged) is skipped, with one line in the
log for each sort of trouble.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infra.host.files import names_in
from infra.judgements.segments import (
    HEADER,
    HEADER_BYTES,
    KEY_BYTES,
    RECORD_BYTES,
    VERSION,
    SegmentWriter,
    encode_record,
    is_segment,
    list_segments,
)
from infra.store.atomic import Complaints
from refiner_core.contract.types import StoredJudgement

log = logging.getLogger(__name__)
Array = npt.NDArray[Any]

_KEY, _VALUES = "S16", [("score", "<f8"), ("prompt", "<u4"), ("completion", "<u4")]
#: One record as it stands in a file.
RECORD = np.dtype([("key", _KEY), *_VALUES, ("crc", "<u4")])
_ENTRY = [name for name, _ in _VALUES]
assert RECORD.itemsize == RECORD_BYTES
_MOST_RECENT = 1 << 16  # that wait in the dictionary
_MANY = 1 << 12  # that come together are sorted in together
#: Read, checked and given together.
_CHUNK_BYTES = RECORD_BYTES << 18
#: Bytes of the header that say what a file is.
_COMPARED = 16
#: More segments than these are not kept, however small they are.
MOST_SEGMENTS = 4096


def decode(raw: bytes) -> tuple[Array, int]:
    """The sound records of a file's bytes (behind its header), and how many bytes lead up to the
    end of the last of them; others are left out."""
    whole, view = len(raw) // RECORD_BYTES, memoryview(raw)
    records = np.frombuffer(raw, RECORD, whole)
    starts = range(0, whole * RECORD_BYTES, RECORD_BYTES)
    crcs = (zlib.crc32(view[at : at + RECORD_BYTES - 4]) for at in starts)
    sound = np.fromiter(crcs, np.uint32, whole) == records["crc"]
    sound &= (records["score"] >= 0.0) & (records["score"] <= 1.0)
    places = np.flatnonzero(sound)
    return records[places], (int(places[-1]) + 1) * RECORD_BYTES if len(places) else 0


class Table:
    """All that is known. Not for several threads at once."""

    def __init__(self) -> None:
        self._keys, self._values = np.empty(0, _KEY), np.empty(0, _VALUES)
        self._pending: list[Array] = []
        self._recent: dict[bytes, StoredJudgement] = {}

    def get(self, keys: Sequence[bytes]) -> list[StoredJudgement | None]:
        """Known judgements, in order."""
        self._merge()
        found = [self._recent.get(key) for key in keys]
        missing = [i for i, known in enumerate(found) if known is None]
        if missing and len(self._keys):
            wanted = np.array([keys[i] for i in missing], _KEY)
            at = np.minimum(self._keys.searchsorted(wanted), len(self._keys) - 1)
            hits = np.flatnonzero(self._keys[at] == wanted)
            for place, values in zip(hits.tolist(), self._values[at[hits]].tolist(), strict=True):
                found[missing[place]] = StoredJudgement(*values)
        return found

    def put(self, key: bytes, judgement: StoredJudgement) -> None:
        """Add one, or replace one that was put lately."""
        self._recent[key] = judgement
        if len(self._recent) >= _MOST_RECENT:
            raw = b"".join(itertools.starmap(encode_record, self._recent.items()))
            self._pending.append(np.frombuffer(raw, RECORD))
            self._recent = {}

    def add(self, records: Array) -> None:
        """Add many; what is known already stays as it is."""
        if len(records) >= _MANY:
            self._pending.append(records)
            return
        for key, *values, _ in records.tolist():
            key = key.ljust(KEY_BYTES, b"\0")  # numpy drops zeros at the end of a text
            if key not in self._recent:
                self.put(key, StoredJudgement(*values))

    def _merge(self) -> None:
        if self._pending:
            parts, self._pending = self._pending, []
            keys = np.concatenate([self._keys, *(part["key"] for part in parts)])
            values = np.concatenate(
                [self._values, *(part[_ENTRY].astype(_VALUES) for part in parts)]
            )
            order = keys.argsort(kind="stable")
            keys = keys[order]
            first = np.ones(len(keys), bool)
            first[1:] = keys[1:] != keys[:-1]
            self._keys, self._values = keys[first], values[order[first]]


class _Reader:
    """Reads the files of a folder but for ``mine``. Not for several threads at once."""

    def __init__(self, folder: Path, mine: Set[str], complaints: Complaints) -> None:
        self._folder, self._mine, self._complaints = folder, mine, complaints
        self._read_to: dict[str, int] = {}

    def fresh(self) -> Iterator[Array]:
        """Records that have come since the last time, in batches."""
        try:
            names = [name for name in names_in(self._folder) if is_segment(name)]
        except OSError as error:
            self._complaints.say("folder", "stored judgements cannot be read: %s", error)
            return
        for name in names:
            try:
                if name not in self._mine:
                    yield from self._added(self._folder / name)
            except FileNotFoundError:
                continue  # removed meanwhile
            except OSError as error:
                text = "stored judgements are skipped: %s"
                self._complaints.say(f"read {error.errno}", text, error)
        self._read_to = {name: at for name, at in self._read_to.items() if name in names}

    def _added(self, path: Path) -> Iterator[Array]:
        at = self._read_to.get(path.name, 0)
        if at and path.stat().st_size - at < RECORD_BYTES:
            return
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if not at:
                if size < HEADER_BYTES:
                    return  # it has just been made
                at = HEADER_BYTES
                if file.read(HEADER_BYTES)[:_COMPARED] != HEADER[:_COMPARED]:
                    at = sys.maxsize
                    text = "%s is not used: it is no file of judgements of version %d"
                    self._complaints.say("format", text, path, VERSION)
            while size - at >= RECORD_BYTES:
                file.seek(at)
                raw = file.read(min(_CHUNK_BYTES, size - at))
                found, passed = decode(raw)
                # On NFS, the end of a file that grows may be seen as zeros at first: that end
                # is read once more. A damaged place with sound records behind it is passed.
                is_end = at + len(raw) + RECORD_BYTES > size
                if not is_end:
                    passed = len(raw) - len(raw) % RECORD_BYTES
                if damaged := passed // RECORD_BYTES - len(found):
                    text = "%d stored judgements in %s are damaged and skipped"
                    self._complaints.say("damage", text, damaged, path)
                at += passed
                yield found
                if is_end or not passed:
                    break
        self._read_to[path.name] = at


def keep_small(new: Path, limit_bytes: int, complaints: Complaints) -> None:
    """Remove the oldest segments until the folder of ``new``, which was just begun, is within its
    limits. Never raises: what cannot be done is said in the log, once."""
    segments = list_segments(new.parent)
    total, count = sum(size for _, size in segments), len(segments)
    for path, size in segments:
        if total <= limit_bytes and count <= MOST_SEGMENTS:
            return
        try:
            if path != new:
                path.unlink(missing_ok=True)
                total, count = total - size, count - 1
        except OSError as error:  # another user's, in a folder that protects it
            complaints.say("upkeep", "the store of judgements cannot be kept small: %s", error)


_LONGEST_WAIT_S = 0.2
_LOOK_EVERY_S = 1.0
_TRY_AGAIN_S = 30.0
_SMALLEST_SEGMENT, _LARGEST_SEGMENT = 64 << 10, 64 << 20
_SEGMENTS_IN_LIMIT = 8
#: Most bytes that wait for a disk that takes none; what comes after them stays in memory only.
_MOST_WAITING = RECORD_BYTES * 10**6


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
        segment = min(max(segment, _SMALLEST_SEGMENT), _LARGEST_SEGMENT)
        self._folder, self._complaints = folder, Complaints()

        def on_new(path: Path) -> None:
            keep_small(path, limit_bytes - segment, self._complaints)

        self._writer = SegmentWriter(folder, writer, segment, on_new)
        self._reader = _Reader(folder, self._writer.mine, self._complaints)
        self._table, self._waiting = Table(), bytearray()
        self._looked_at = self._try_again_at = -1e9
        self._thread: threading.Thread | None = None
        # Always taken in this order. Only the last one is held while nothing slow happens.
        self._looking, self._writing = threading.RLock(), threading.RLock()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def __enter__(self) -> WorkspaceStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ the protocol

    def get(self, keys: Sequence[bytes]) -> list[StoredJudgement | None]:
        """Known judgements, in order; also what others have put, about a second after they did."""
        self._look()
        with self._lock:
            return self._table.get(keys)

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
            if self._ended.is_set() or len(self._waiting) >= _MOST_WAITING:
                return
            self._waiting += record
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="judgements", daemon=True)
                self._thread.start()

    def flush(self) -> None:
        """Have the disk take what was put so far; what it refuses is said in the log."""
        with self._writing:
            if not self._write(now=True):
                return
            try:
                self._writer.sync()
            except OSError as error:
                self._trouble(error)

    def close(self) -> None:
        """Flush, and write no more. More than one call does no harm."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with self._writing:
            self.flush()
            self._writer.seal()

    # ------------------------------------------------------------ writing

    def _work(self) -> None:
        while not self._ended.wait(_LONGEST_WAIT_S):
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
            for records in self._reader.fresh():
                with self._lock:
                    self._table.add(records)
            self._looked_at = time.monotonic()
