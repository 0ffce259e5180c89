"""The workspace's store of judgements, as judges use it.

::

    put ─> memory ─> (at most 0.2 s) ─> a file of this process, in the workspace
    get <─ memory <─ (at most once a second) <─ files of all processes

In: keys and scored judgements. Out: known judgements of keys. A judgement is on its way to the disk
within 0.2 s, whatever happens to the process then; :meth:`WorkspaceStore.flush` waits for the disk.
A full disk or quota, or a folder closed to this user, is logged once: the store continues in memory
and retries. A writer that starts a segment keeps all of them within a size and a number: the oldest
are deleted.

In memory, the index is one array, sorted by key, in which thousands of keys are looked up at once;
small numbers of records wait in a dictionary until there are enough to be merged.

A reader returns valid records once, whoever wrote them. It remembers how far each segment was read,
so that only new records are read. Unreadable data (closed to this user, of a newer version,
damaged) are skipped and logged once per kind.

A *segment* is a file that one process writes once, from beginning to end::

    header   48 bytes   magic, version, bytes of a record, CRC-32; the rest is zeros
    record   36 bytes   key (16), score (float64), prompt tokens, completion tokens, CRC-32
    record   …

Files are named ``NAME.live``, or ``NAME.sealed`` by older versions, which also had counters in the
rest of the header. All numbers are little-endian. Data after the last whole record, and records
with a wrong CRC, are ignored. A failed write is undone; if that fails too, the segment gets no
further record. When the store is full, the oldest segments are deleted, whoever wrote them: a
writer whose file is gone starts another one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import secrets
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infra.host.files import names_in
from infra.host.processes import host_name
from infra.store.atomic import WarningLog
from refiner_core.contract.types import StoredJudgement

log = logging.getLogger(__name__)
Array = npt.NDArray[Any]

VERSION = 1
LIVE, SEALED = ".live", ".sealed"
KEY_BYTES = 16

_KEY, _VALUES = "S16", struct.Struct("<16sdII")
#: One record of a file.
RECORD = np.dtype(
    [("key", _KEY), ("score", "<f8"), ("prompt", "<u4"), ("completion", "<u4"), ("crc", "<u4")]
)
RECORD_BYTES = RECORD.itemsize
_FORMAT = struct.pack("<8sHH", b"rf-judge", VERSION, RECORD_BYTES)
HEADER = (_FORMAT + struct.pack("<I", zlib.crc32(_FORMAT))).ljust(48, b"\0")
HEADER_BYTES = len(HEADER)
_MOST_TOKENS = 2**32 - 1
_MOST_RECENT = 1 << 16  # in the dictionary
_MANY = 1 << 12  # this many at a time are merged together
#: Read, checked and returned together.
_CHUNK_BYTES = RECORD_BYTES << 18
#: Bytes of the header that identify a file.
_COMPARED = 16
#: Limit of the number of segments, however small they are.
MOST_SEGMENTS = 4096


def encode_record(key: bytes, judgement: StoredJudgement) -> bytes:
    """One record.

    Raises
    ------
    ValueError
        The key does not have 16 bytes, or the score is not a number from 0 to 1.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    if not 0.0 <= judgement.score <= 1.0:
        raise ValueError(f"a stored judgement has a score from 0 to 1, not {judgement.score}")
    tokens = (judgement.prompt_tokens, judgement.completion_tokens)
    prompt, completion = (min(max(0, n), _MOST_TOKENS) for n in tokens)
    values = _VALUES.pack(key, judgement.score, prompt, completion)
    return values + struct.pack("<I", zlib.crc32(values))


def is_segment(name: str) -> bool:
    """Tell whether a file of this name is a segment."""
    return name.endswith((LIVE, SEALED)) and not name.startswith(".")


def list_segments(folder: Path) -> list[tuple[Path, int]]:
    """All segments with their sizes, oldest first by the file server's clock; none if the folder
    is missing or unreadable."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if is_segment(path.name):
                with contextlib.suppress(OSError):  # deleted
                    status = path.lstat()
                    found.append((status.st_mtime_ns, path, status.st_size))
    return [(path, size) for _, path, size in sorted(found)]


def summarise(folder: Path) -> dict[str, int]:
    """Contents of the store in a folder, from sizes alone: bytes, files and judgements (with
    duplicates)."""
    sizes = [size for _, size in list_segments(folder)]
    records = sum(max(0, size - HEADER_BYTES) // RECORD_BYTES for size in sizes)
    return {"bytes": sum(sizes), "files": len(sizes), "judgements": records}


class _SegmentWriter:
    """Appends to segments of its own. Not thread-safe.

    Parameters
    ----------
    folder
        Created with the first record.
    writer
        Readable part of the names; host, process and a random part follow.
    largest_bytes
        A segment of this size gets no further record.
    on_new
        Called with the path of each new segment.
    """

    def __init__(
        self, folder: Path, writer: str, largest_bytes: int, on_new: Callable[[Path], None]
    ) -> None:
        self._folder, self._largest, self._on_new = folder, largest_bytes, on_new
        parts = (re.sub(r"[^A-Za-z0-9.]+", "_", text)[:60] for text in (writer, host_name()))
        self._name = "-".join((*parts, str(os.getpid()), secrets.token_hex(4))).lstrip(".")
        self._file: int | None = None
        self._path, self._size, self._synced = folder, 0, True
        #: Names of all segments of this process.
        self.mine: set[str] = set()

    def append(self, records: bytes) -> None:
        """Write records, without waiting for the disk.

        Raises
        ------
        OSError
            They were not written; the file is unchanged, or will not be used again.
        """
        if self._size >= self._largest or not self._path.exists():  # deleted to free space
            self.seal()
        if self._file is None:
            self._begin()
        self._write(records)

    def sync(self) -> None:
        """Sync all records to the disk.

        Raises
        ------
        OSError
            The last records may be lost in a power cut.
        """
        if self._file is None or self._synced:
            return
        try:
            os.fsync(self._file)
        except OSError:
            self.seal()
            raise
        self._synced = True

    def seal(self) -> None:
        """End this segment. Never raises."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._name}-{len(self.mine) + 1:04d}{LIVE}"
        # 0o666: the umask decides whether a group shares the workspace.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._path, self._size = path, 0
        self.mine.add(path.name)
        try:
            self._write(HEADER)
        except OSError:
            self.seal()
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        self._on_new(path)

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        self._synced = False
        try:
            os.lseek(self._file, self._size, os.SEEK_SET)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            try:  # cut off the partial record, or abandon the segment
                os.ftruncate(self._file, self._size)
            except OSError:
                self.seal()
            raise
        self._size += len(data)


def decode(raw: bytes) -> tuple[Array, int]:
    """The valid records of a file's bytes (behind its header), and the number of bytes up to the
    end of the last of them; invalid records are left out."""
    whole, view = len(raw) // RECORD_BYTES, memoryview(raw)
    records = np.frombuffer(raw, RECORD, whole)
    starts = range(0, whole * RECORD_BYTES, RECORD_BYTES)
    crcs = (zlib.crc32(view[at : at + RECORD_BYTES - 4]) for at in starts)
    sound = np.fromiter(crcs, np.uint32, whole) == records["crc"]
    sound &= (records["score"] >= 0.0) & (records["score"] <= 1.0)
    places = np.flatnonzero(sound)
    return records[places], (int(places[-1]) + 1) * RECORD_BYTES if len(places) else 0


class JudgementIndex:
    """The index of known judgements. Not thread-safe."""

    def __init__(self) -> None:
        self._keys, self._known = np.empty(0, _KEY), np.empty(0, RECORD)
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
            known = self._known[at[hits]].tolist()
            for place, (_, *values, _) in zip(hits.tolist(), known, strict=True):
                found[missing[place]] = StoredJudgement(*values)
        return found

    def put(self, key: bytes, judgement: StoredJudgement) -> None:
        """Add one, or replace a recent one."""
        self._recent[key] = judgement
        if len(self._recent) >= _MOST_RECENT:
            raw = b"".join(itertools.starmap(encode_record, self._recent.items()))
            self._pending.append(np.frombuffer(raw, RECORD))
            self._recent = {}

    def add(self, records: Array) -> None:
        """Add many; known ones stay unchanged."""
        if len(records) >= _MANY:
            self._pending.append(records)
            return
        for key, *values, _ in records.tolist():
            key = key.ljust(KEY_BYTES, b"\0")  # numpy drops trailing zeros
            if key not in self._recent:
                self.put(key, StoredJudgement(*values))

    def _merge(self) -> None:
        if self._pending:
            records, self._pending = np.concatenate([self._known, *self._pending]), []
            self._keys, first = np.unique(records["key"], return_index=True)
            self._known = records[first]


class _Reader:
    """Reads the files of a folder except ``mine``. Not thread-safe."""

    def __init__(self, folder: Path, mine: Set[str], complaints: WarningLog) -> None:
        self._folder, self._mine, self._complaints = folder, mine, complaints
        self._read_to: dict[str, int] = {}

    def fresh(self) -> Iterator[Array]:
        """New records since the last call, in batches."""
        try:
            names = [name for name in names_in(self._folder) if is_segment(name)]
        except OSError as error:
            self._complaints.warn("folder", "stored judgements cannot be read: %s", error)
            return
        for name in names:
            try:
                if name not in self._mine:
                    yield from self._added(self._folder / name)
            except FileNotFoundError:
                continue  # deleted
            except OSError as error:
                text = "stored judgements are skipped: %s"
                self._complaints.warn(f"read {error.errno}", text, error)
        self._read_to = {name: at for name, at in self._read_to.items() if name in names}

    def _added(self, path: Path) -> Iterator[Array]:
        at = self._read_to.get(path.name, 0)
        if at and path.stat().st_size - at < RECORD_BYTES:
            return
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if not at:
                if size < HEADER_BYTES:
                    return  # just created
                at = HEADER_BYTES
                if file.read(HEADER_BYTES)[:_COMPARED] != HEADER[:_COMPARED]:
                    at = sys.maxsize
                    text = "%s is not used: it is not a file of judgements of version %d"
                    self._complaints.warn("format", text, path, VERSION)
            while size - at >= RECORD_BYTES:
                file.seek(at)
                raw = file.read(min(_CHUNK_BYTES, size - at))
                found, passed = decode(raw)
                # On NFS, the end of a growing file may look like zeros at first: that end is read
                # again. A damaged place with valid records behind it is skipped.
                is_end = at + len(raw) + RECORD_BYTES > size
                if not is_end:
                    passed = len(raw) - len(raw) % RECORD_BYTES
                if damaged := passed // RECORD_BYTES - len(found):
                    text = "%d stored judgements in %s are damaged and skipped"
                    self._complaints.warn("damage", text, damaged, path)
                at += passed
                yield found
                if is_end or not passed:
                    break
        self._read_to[path.name] = at


def keep_small(new: Path, limit_bytes: int, complaints: WarningLog) -> None:
    """Remove the oldest segments until the folder of ``new``, which was just started, is within its
    limits. Never raises: failures are logged once."""
    segments = list_segments(new.parent)
    total, count = sum(size for _, size in segments), len(segments)
    for path, size in segments:
        if total <= limit_bytes and count <= MOST_SEGMENTS:
            return
        try:
            if path != new:
                path.unlink(missing_ok=True)
                total, count = total - size, count - 1
        except OSError as error:  # another user's file, in a protected folder
            complaints.warn("upkeep", "the store of judgements cannot be kept small: %s", error)


_LONGEST_WAIT_S = 0.2
_LOOK_EVERY_S = 1.0
_TRY_AGAIN_S = 30.0
_SMALLEST_SEGMENT, _LARGEST_SEGMENT = 64 << 10, 64 << 20
_SEGMENTS_IN_LIMIT = 8
#: Most bytes that wait for a failing disk; later judgements stay in memory only.
_MOST_WAITING = RECORD_BYTES * 10**6


class WorkspaceStore:
    """Implements :class:`~refiner_core.contract.types.JudgementStore` on files. Thread-safe; use it
    as a context manager, or :meth:`close` it.

    Parameters
    ----------
    folder
        ``judgements/`` of the workspace; created with the first judgement.
    writer
        Readable part of the file names (stage and attempt).
    limit_bytes
        Largest size of all files together; the oldest are deleted.
    """

    def __init__(self, folder: Path, *, writer: str, limit_bytes: int) -> None:
        segment = limit_bytes // _SEGMENTS_IN_LIMIT
        segment = min(max(segment, _SMALLEST_SEGMENT), _LARGEST_SEGMENT)
        self._folder, self._complaints = folder, WarningLog()

        def on_new(path: Path) -> None:
            keep_small(path, limit_bytes - segment, self._complaints)

        self._writer = _SegmentWriter(folder, writer, segment, on_new)
        self._reader = _Reader(folder, self._writer.mine, self._complaints)
        self._table, self._waiting = JudgementIndex(), bytearray()
        self._looked_at = self._try_again_at = -1e9
        self._thread: threading.Thread | None = None
        # Always taken in this order. Only the last one is held during fast operations alone.
        self._looking, self._writing = threading.RLock(), threading.RLock()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def __enter__(self) -> WorkspaceStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ the protocol

    def get(self, keys: Sequence[bytes]) -> list[StoredJudgement | None]:
        """Known judgements, in order; including those of others, with a delay of about a second."""
        self._look()
        with self._lock:
            return self._table.get(keys)

    def put(self, key: bytes, judgement: StoredJudgement) -> None:
        """Store one. Cheap; disk errors are never raised.

        Raises
        ------
        ValueError
            The key does not have 16 bytes, or the score is not a number from 0 to 1.
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
        """Sync all judgements to the disk; failures are logged."""
        with self._writing:
            if not self._write(now=True):
                return
            try:
                self._writer.sync()
            except OSError as error:
                self._trouble(error)

    def close(self) -> None:
        """Flush, and write no more. Repetition is harmless."""
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
        """Write waiting records; ``now``: even soon after a failure. False: they still wait."""
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
        self._complaints.warn(
            "write",
            "judgements are stored in memory only for now, and would be repeated after a crash: "
            "%s cannot be written to (%s)",
            self._folder,
            error,
        )

    # ------------------------------------------------------------ reading

    def _look(self) -> None:
        """Read new records of the files, at most once a second."""
        with self._looking:
            if time.monotonic() - self._looked_at < _LOOK_EVERY_S:
                return
            for records in self._reader.fresh():
                with self._lock:
                    self._table.add(records)
            self._looked_at = time.monotonic()
