"""Files of judgements: their names, header and records, and the one that this process writes.

A *segment* is a file that one process writes, once, from its beginning to its end::

    header   48 bytes   magic, version, bytes of a record, CRC-32 │ what was saved, CRC-32
    record   36 bytes   key (16), score (float64), prompt tokens, completion tokens, CRC-32
    record   …

Files are named ``NAME.live``, or ``NAME.sealed`` by older versions. All numbers are little-endian.
What is after the last whole record, or has another CRC, is not there. The second part of the header
is the only thing that is ever written twice: how many judgements the writer was given from the
store.

A write that fails is taken back; where that fails too, the segment gets no further record. When the
store is full, the oldest segments go, whoever has written them: a writer whose file is gone begins
another one. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from infra.host.processes import host_name
from refiner_core.contract.types import StoredJudgement

log = logging.getLogger(__name__)

MAGIC, VERSION = b"rf-judge", 1
LIVE, SEALED = ".live", ".sealed"
KEY_BYTES = 16

_FORMAT = struct.Struct("<8sHHI")
_SAVED = struct.Struct("<QQQI4x")
_VALUES = struct.Struct("<16sdII")
_CRC = struct.Struct("<I")
SAVED_AT = _FORMAT.size
HEADER_BYTES = _FORMAT.size + _SAVED.size
RECORD_BYTES = _VALUES.size + _CRC.size
_MOST_TOKENS = 2**32 - 1
_STRANGE = re.compile(r"[^A-Za-z0-9.]+")


class Saved(NamedTuple):
    """Judgements that came from the store instead of a server, and the tokens they had cost."""

    judgements: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def plus(self, other: Saved) -> Saved:
        """Both together."""
        return Saved(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING_SAVED = Saved()


class UnknownFormat(ValueError):
    """A file is no segment, or one of a version that is not known here."""


def encode_header(saved: Saved = NOTHING_SAVED) -> bytes:
    """The first bytes of a segment."""
    head = _FORMAT.pack(MAGIC, VERSION, RECORD_BYTES, 0)[:-4]
    return head + _CRC.pack(zlib.crc32(head)) + encode_saved(saved)


def encode_saved(saved: Saved) -> bytes:
    """The part of the header that changes; it stands at ``SAVED_AT``."""
    numbers = struct.pack("<QQQ", *saved)
    return _SAVED.pack(*saved, zlib.crc32(numbers))


def decode_header(raw: bytes) -> Saved:
    """Read what was saved from a header; nothing where that part is being written.

    Raises
    ------
    UnknownFormat
        It is no header of this version.
    """
    if len(raw) < HEADER_BYTES:
        raise UnknownFormat(f"a header of {len(raw)} bytes instead of {HEADER_BYTES}")
    magic, version, record, crc = _FORMAT.unpack_from(raw)
    if magic != MAGIC or crc != zlib.crc32(raw[: _FORMAT.size - 4]):
        raise UnknownFormat("no file of judgements")
    if (version, record) != (VERSION, RECORD_BYTES):
        raise UnknownFormat(f"version {version} instead of {VERSION}")
    *numbers, crc = _SAVED.unpack_from(raw, SAVED_AT)
    whole = crc == zlib.crc32(raw[SAVED_AT : SAVED_AT + 24])
    return Saved(*numbers) if whole else Saved()


def encode_record(key: bytes, judgement: StoredJudgement) -> bytes:
    """One record.

    Raises
    ------
    ValueError
        The key has not 16 bytes, or the score is no number from 0 to 1.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    if not 0.0 <= judgement.score <= 1.0:
        raise ValueError(f"a judgement that is kept has a score from 0 to 1, not {judgement.score}")
    tokens = (judgement.prompt_tokens, judgement.completion_tokens)
    prompt, completion = (min(max(0, n), _MOST_TOKENS) for n in tokens)
    values = _VALUES.pack(key, judgement.score, prompt, completion)
    return values + _CRC.pack(zlib.crc32(values))


def name_part(text: str, longest: int = 60) -> str:
    """``text`` as part of a file's name."""
    return _STRANGE.sub("_", text)[:longest].strip("._") or "unknown"


def stem_of(name: str) -> str | None:
    """A segment's name; None: it is none."""
    for suffix in (LIVE, SEALED):
        if name.endswith(suffix) and not name.startswith("."):
            return name.removesuffix(suffix)
    return None


def list_segments(folder: Path) -> list[tuple[Path, int]]:
    """All segments with their sizes, oldest first by the file server's clock; none where the folder
    is missing or closed to us."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if stem_of(path.name) is not None:
                with contextlib.suppress(OSError):  # gone meanwhile
                    status = path.lstat()
                    found.append((status.st_mtime_ns, path, status.st_size))
    return [(path, size) for _, path, size in sorted(found)]


def summarise(folder: Path) -> dict[str, int]:
    """Contents of the store in a folder, from sizes and headers alone: files, bytes, judgements
    (the same one may be there twice), and what was saved by its writers."""
    files = list_segments(folder)
    records, saved = 0, NOTHING_SAVED
    for path, size in files:
        try:
            with path.open("rb") as file:
                saved = saved.plus(decode_header(file.read(HEADER_BYTES)))
            records += max(0, size - HEADER_BYTES) // RECORD_BYTES
        except (OSError, UnknownFormat) as error:
            log.debug("%s: %s", path, error)
    counts = {"bytes": sum(size for _, size in files), "files": len(files), "judgements": records}
    return counts | {f"saved_{name}": count for name, count in saved._asdict().items()}


class SegmentWriter:
    """Appends to segments of its own. Not for several threads at once.

    Parameters
    ----------
    folder
        Made when the first record is written.
    writer
        Who writes, for people who look at the names; host, process and a random part follow.
    largest_bytes
        A segment that has reached this size gets no further record.
    on_new
        Told the path of each new segment.
    """

    def __init__(
        self, folder: Path, writer: str, largest_bytes: int, on_new: Callable[[Path], None]
    ) -> None:
        self._folder, self._largest, self._on_new = folder, largest_bytes, on_new
        parts = (name_part(writer), name_part(host_name()), str(os.getpid()), secrets.token_hex(4))
        self._name = "-".join(parts)
        self._file: int | None = None
        self._path = folder
        self._size = 0
        self._synced = True
        self._noted = NOTHING_SAVED  # in this segment
        #: Names of all segments of this process.
        self.mine: set[str] = set()

    def append(self, records: bytes) -> None:
        """Write records, without waiting for the disk.

        Raises
        ------
        OSError
            They were not written; the file is as it was, or will not be used again.
        """
        self._make_ready()
        self._write(self._size, records)
        self._size += len(records)

    def note(self, saved: Saved) -> None:
        """Note what was saved besides what was noted before.

        Raises
        ------
        OSError
            It was not noted.
        """
        self._make_ready()
        here = self._noted.plus(saved)
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

        Never raises.
        """
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _make_ready(self) -> None:
        """See to it that there is a segment that may be written to."""
        if self._size >= self._largest or not self._path.exists():  # it was deleted to make room
            self.seal()
        if self._file is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._name}-{len(self.mine) + 1:04d}{LIVE}"
        # 0o666: the umask decides whether a group shares the workspace.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._path, self._size, self._noted = path, 0, NOTHING_SAVED
        self.mine.add(str(stem_of(path.name)))
        try:
            self._write(0, encode_header())
        except OSError:
            self.seal()
            with contextlib.suppress(OSError):
                path.unlink()
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
            try:  # cut off what was written in part, or leave the segment for good
                os.ftruncate(self._file, self._size)
            except OSError:
                self.seal()
            raise
