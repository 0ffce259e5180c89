"""Files of judgements: their names, their header, their records. Imports nothing heavy.

A *segment* is a file that one process writes, once, from its beginning to its end::

    header   48 bytes   magic, version, bytes of a record, CRC-32 │ what was saved, CRC-32
    record   36 bytes   key (16), score (float64), prompt tokens, completion tokens, CRC-32
    record   …

``NAME.live`` may still grow, ``NAME.sealed`` does not any more. All numbers are little-endian. What
is after the last whole record, or has another CRC, is not there. The second part of the header is
the only thing that is ever written twice: how many judgements the writer was given from the store.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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

    def minus(self, other: Saved) -> Saved:
        """What has come since ``other``."""
        return Saved(*(a - b for a, b in zip(self, other, strict=True)))


NOTHING_SAVED = Saved()


class Segment(NamedTuple):
    """A segment as it lies there; ``changed_ns`` by the file server's clock."""

    path: Path
    size: int
    changed_ns: int
    owner: int

    @property
    def is_sealed(self) -> bool:
        """Whether nothing more will come."""
        return self.path.suffix == SEALED


class Summary(NamedTuple):
    """What a store holds: files, bytes, judgements (the same one may be there twice)."""

    files: int = 0
    bytes: int = 0
    judgements: int = 0
    saved: Saved = NOTHING_SAVED


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
    """What was saved, as a header says; nothing where that part is being written.

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
    """A segment's name, by which it is known also once it is sealed; None: it is none."""
    for suffix in (LIVE, SEALED):
        if name.endswith(suffix) and not name.startswith("."):
            return name.removesuffix(suffix)
    return None


def list_segments(folder: Path) -> list[Segment]:
    """All segments, oldest first; none where the folder is missing or closed to us."""
    found = []
    for entry in _entries(folder):
        if stem_of(entry.name) is None:
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:  # gone meanwhile
            continue
        found.append(Segment(Path(entry.path), status.st_size, status.st_mtime_ns, status.st_uid))
    return sorted(found, key=lambda s: (s.changed_ns, s.path.name))


def summarise(folder: Path) -> Summary:
    """What the store in a folder holds, from sizes and headers alone."""
    total = Summary()
    for segment in list_segments(folder):
        records = max(0, segment.size - HEADER_BYTES) // RECORD_BYTES
        saved = Saved()
        try:
            with segment.path.open("rb") as file:
                saved = decode_header(file.read(HEADER_BYTES))
        except (OSError, UnknownFormat) as error:
            log.debug("%s: %s", segment.path, error)
            records = 0
        total = Summary(
            total.files + 1,
            total.bytes + segment.size,
            total.judgements + records,
            total.saved.plus(saved),
        )
    return total


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return
