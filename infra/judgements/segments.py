"""Files of judgements: their names, header and records, and the writer of this process.

A *segment* is a file that one process writes once, from beginning to end::

    header   48 bytes   magic, version, bytes of a record, CRC-32; the rest is zeros
    record   36 bytes   key (16), score (float64), prompt tokens, completion tokens, CRC-32
    record   …

Files are named ``NAME.live``, or ``NAME.sealed`` by older versions, which also had counters in the
rest of the header. All numbers are little-endian. Data after the last whole record, and records
with a wrong CRC, are ignored.

A failed write is undone; if that fails too, the segment gets no further record. When the store is
full, the oldest segments are deleted, whoever wrote them: a writer whose file is gone starts
another one. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from infra.host.processes import host_name
from refiner_core.contract.types import StoredJudgement

VERSION = 1
LIVE, SEALED = ".live", ".sealed"
KEY_BYTES = 16

_VALUES = struct.Struct("<16sdII")
RECORD_BYTES = _VALUES.size + 4
_FORMAT = struct.pack("<8sHH", b"rf-judge", VERSION, RECORD_BYTES)
HEADER = (_FORMAT + struct.pack("<I", zlib.crc32(_FORMAT))).ljust(48, b"\0")
HEADER_BYTES = len(HEADER)
_MOST_TOKENS = 2**32 - 1


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


class SegmentWriter:
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
