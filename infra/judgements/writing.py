"""The one file of judgements that this process writes.

In: encoded records. Out: segments, one at a time, that nobody else writes. A write that fails is
taken back; where that fails too, the segment gets no further record. A segment that was not written
to for ten minutes gets none any more either, so that others may take it for finished after an hour
without ever being wrong.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from infra.host.processes import host_name
from infra.judgements.segments import (
    HEADER_BYTES,
    LIVE,
    RECORD_BYTES,
    SAVED_AT,
    SEALED,
    Saved,
    encode_header,
    encode_saved,
    name_part,
    stem_of,
)

#: A segment that its writer has left alone for so long is not written to again (seconds).
LONGEST_PAUSE_S = 600.0


class SegmentWriter:
    """Appends to segments of its own. Not for several threads at once.

    Parameters
    ----------
    folder
        Made when the first record is written.
    writer
        Who writes, for people who look at the names; host, process and a random part follow.
    largest_bytes
        Of one segment.
    on_new
        Told the path of each new segment.
    """

    def __init__(
        self, folder: Path, writer: str, largest_bytes: int, on_new: Callable[[Path], None]
    ) -> None:
        self._folder, self._largest, self._on_new = folder, largest_bytes, on_new
        parts = (name_part(writer), name_part(host_name()), str(os.getpid()), secrets.token_hex(4))
        self._name, self._count = "-".join(parts), 0
        self._file: int | None = None
        self._path = folder
        self._size = 0
        self._wrote_at = 0.0
        self._synced = True
        # Of the judgements that the store has saved: noted in this segment, and in those before.
        self._noted = self._noted_before = Saved()
        #: Names of all segments of this process.
        self.mine: set[str] = set()

    def append(self, records: bytes) -> None:
        """Write records, without waiting for the disk.

        Raises
        ------
        OSError
            They were not written; the file is as it was, or will not be used again.
        """
        at = 0
        while at < len(records):
            if self._file is not None and not self._can_go_on():
                self.seal()
            if self._file is None:
                self._open()
            room = max(1, (self._largest - self._size) // RECORD_BYTES) * RECORD_BYTES
            part = records[at : at + room]
            self._write(self._size, part)
            self._size += len(part)
            at += len(part)

    def note(self, saved: Saved) -> None:
        """Note what was saved since this writer was made.

        Raises
        ------
        OSError
            It was not noted.
        """
        if saved == self._noted_before.plus(self._noted):
            return
        if self._file is not None and not self._can_go_on():
            self.seal()
        here = saved.minus(self._noted_before)
        if self._file is None:
            self._open()
        self._write(SAVED_AT, encode_saved(here))
        self._noted = here

    def sync(self) -> None:
        """Have the disk take everything.

        Raises
        ------
        OSError
            What was written last may be lost in a power cut.
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
        """Nothing more comes into this segment.

        Never raises: a segment that keeps its name is only looked at more often.
        """
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._file = None
        with contextlib.suppress(OSError):
            self._path.rename(self._path.with_suffix(SEALED))
        self._noted_before, self._noted = self._noted_before.plus(self._noted), Saved()

    def _can_go_on(self) -> bool:
        if self._size + RECORD_BYTES > self._largest:
            return False
        if time.monotonic() - self._wrote_at > LONGEST_PAUSE_S:
            return False
        return self._path.exists()  # others may have deleted it to make room

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._count += 1
        path = self._folder / f"{self._name}-{self._count:04d}{LIVE}"
        # 0o666: the umask decides whether a group shares the workspace.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._path, self._size = path, 0
        self.mine.add(str(stem_of(path.name)))
        try:
            self._write(0, encode_header())
        except OSError:
            self._discard()
            raise
        self._size = HEADER_BYTES
        self._on_new(path)

    def _write(self, at: int, data: bytes) -> None:
        assert self._file is not None
        self._synced = False
        try:
            os.lseek(self._file, at, os.SEEK_SET)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            self._take_back()
            raise
        self._wrote_at = time.monotonic()

    def _take_back(self) -> None:
        """Cut off what was written in part; if that is refused, leave the segment for good."""
        assert self._file is not None
        try:
            os.ftruncate(self._file, self._size)
        except OSError:
            self.seal()

    def _discard(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._file = None
        with contextlib.suppress(OSError):
            self._path.unlink()
