"""Judgements in memory: what is new in the files, and sorted arrays of all that is known.

Records come one by one or as the bytes of a file: 32 bytes each, arrays sorted by the first half of
the key, of which a large one is followed by smaller ones (what was read later); those that have
grown alike are merged. Thousands of keys are looked up at once. What was put one by one waits in a
dictionary until it is worth an array.

:class:`Reader` gives sound records that were not given before, whoever has written them. How far
each segment was read is remembered by its name, so that only what has been added is read again; a
sealed one is not even looked at. What cannot be read (closed to this user, of a newer version,
damaged) is skipped, with one line in the log for each sort of trouble.
"""

from __future__ import annotations

import functools
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from infra.judgements.segments import (
    HEADER_BYTES,
    KEY_BYTES,
    RECORD_BYTES,
    SEALED,
    UnknownFormat,
    decode_header,
    encode_record,
    stem_of,
)
from refiner_core.contract.types import StoredJudgement

Array = npt.NDArray[Any]

_VALUES = (("low", "<u8"), ("score", "<f8"), ("prompt", "<u4"), ("completion", "<u4"))
#: One record as it stands in a file.
RECORD = np.dtype([("high", "<u8"), *_VALUES, ("crc", "<u4")])
_KEPT = np.dtype(list(_VALUES))
_CHECKED_BYTES = RECORD_BYTES - 4
_CHUNK = 1 << 16  # records whose CRC is computed at a time
_MOST_RECENT = 1 << 16  # that wait in the dictionary


class Decoded(NamedTuple):
    """Sound records, and how many bytes lead up to the end of the last of them."""

    records: Array
    sound_bytes: int


def decode(raw: bytes | memoryview) -> Decoded:
    """The sound records of a file's bytes (behind its header); others are left out."""
    whole = len(raw) // RECORD_BYTES
    records = np.frombuffer(raw, RECORD, whole)
    sound = checksums(records) == records["crc"]
    sound &= (records["score"] >= 0.0) & (records["score"] <= 1.0)
    places = np.flatnonzero(sound)
    last = int(places[-1]) + 1 if len(places) else 0
    return Decoded(records if len(places) == whole else records[places], last * RECORD_BYTES)


def distinct(records: Array) -> Array:
    """Records sorted, each key once: the first one."""
    records = records[records["high"].argsort(kind="stable")]
    first = np.ones(len(records), bool)
    first[1:] = records["high"][1:] != records["high"][:-1]
    first[1:] |= records["low"][1:] != records["low"][:-1]
    return records if first.all() else records[first]


class _Run(NamedTuple):
    """Records sorted by ``high``; ``kept`` is the rest of them."""

    high: Array
    kept: Array

    def find(self, high: Array, low: Array) -> Array:
        """Where keys stand; -1: nowhere."""
        found = np.full(len(high), -1, np.int64)
        open_ = np.arange(len(high))
        at = self.high.searchsorted(high)
        while len(open_):
            inside = at < len(self.high)
            open_, at = open_[inside], at[inside]
            alike = self.high[at] == high[open_]
            open_, at = open_[alike], at[alike]
            hit = self.kept["low"][at] == low[open_]
            found[open_[hit]] = at[hit]
            open_, at = open_[~hit], at[~hit] + 1
        return found

    def joined(self, other: _Run) -> _Run:
        """Both; nothing of one is in the other."""
        whole = len(self.high) + len(other.high)
        theirs = self.high.searchsorted(other.high) + np.arange(len(other.high))
        mine = np.ones(whole, bool)
        mine[theirs] = False
        high, kept = np.empty(whole, self.high.dtype), np.empty(whole, _KEPT)
        high[mine], high[theirs] = self.high, other.high
        kept[mine], kept[theirs] = self.kept, other.kept
        return _Run(high, kept)


class Table:
    """All that is known. Not for several threads at once."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._recent: dict[bytes, StoredJudgement] = {}

    def __len__(self) -> int:
        return sum(len(r.high) for r in self._runs) + len(self._recent)

    def get(self, keys: Sequence[bytes]) -> list[StoredJudgement | None]:
        """What is known, in order."""
        found = [self._recent.get(key) for key in keys]
        missing = [
            i for i, known in enumerate(found) if known is None and len(keys[i]) == KEY_BYTES
        ]
        if not missing or not self._runs:
            return found
        halves = np.frombuffer(b"".join(keys[i] for i in missing), "<u8").reshape(-1, 2)
        high, low = (np.ascontiguousarray(halves[:, i]) for i in (0, 1))
        for run in self._runs:
            at = run.find(high, low)
            places = np.flatnonzero(at >= 0)
            for place, (_, *values) in zip(
                places.tolist(), run.kept[at[places]].tolist(), strict=True
            ):
                found[missing[place]] = StoredJudgement(*values)
        return found

    def put(self, key: bytes, judgement: StoredJudgement) -> None:
        """Add one, or replace one that was put lately."""
        self._recent[key] = judgement
        if len(self._recent) >= _MOST_RECENT:
            self._fold()

    def add(self, records: Array) -> None:
        """Add many; what is known already stays as it is."""
        records = distinct(records)
        for run in self._runs:
            records = records[run.find(records["high"], records["low"]) < 0]
        if not len(records):
            return
        kept = np.empty(len(records), _KEPT)
        for name in _KEPT.names or ():
            kept[name] = records[name]
        self._runs.append(_Run(np.ascontiguousarray(records["high"]), kept))
        while len(self._runs) > 1 and 2 * len(self._runs[-1].high) >= len(self._runs[-2].high):
            last = self._runs.pop()
            self._runs.append(self._runs.pop().joined(last))

    def forget_old(self) -> None:
        """Keep only what was put lately."""
        self._runs.clear()

    def _fold(self) -> None:
        recent, self._recent = self._recent, {}
        self.add(decode(encode_all(recent)).records)


def encode_all(judgements: Mapping[bytes, StoredJudgement]) -> bytes:
    """Records one behind the other."""
    return b"".join(encode_record(key, value) for key, value in judgements.items())


def checksums(records: Array) -> Array:
    """CRC-32 of the first 32 bytes of each record.

    A CRC of a fixed length is, but for a constant, the exclusive or of what each byte alone adds.
    """
    nothing, parts = _crc_parts()
    rows = records.view(np.uint8).reshape(-1, RECORD_BYTES)
    found = np.full(len(rows), nothing, np.uint32)
    for start in range(0, len(rows), _CHUNK):
        columns = np.ascontiguousarray(rows[start : start + _CHUNK, :_CHECKED_BYTES].T)
        total = found[start : start + _CHUNK]
        for place in range(_CHECKED_BYTES):
            total ^= parts[place][columns[place]]
    return found


@functools.cache
def _crc_parts() -> tuple[int, Array]:
    """CRC of zeros alone, and what each value of each byte changes in it: (32, 256)."""
    nothing = zlib.crc32(bytes(_CHECKED_BYTES))
    parts = np.zeros((_CHECKED_BYTES, 256), np.uint32)
    for place in range(_CHECKED_BYTES):
        for bit in range(8):
            data = bytearray(_CHECKED_BYTES)
            data[place] = 1 << bit
            lower = parts[place, : 1 << bit]
            parts[place, 1 << bit : 2 << bit] = lower ^ (zlib.crc32(data) ^ nothing)
    return nothing, parts


assert RECORD.itemsize == RECORD_BYTES


log = logging.getLogger(__name__)

#: Read, checked and given together; small segments are given many at a time.
_CHUNK_BYTES = RECORD_BYTES << 18


class Complaints:
    """Says each sort of trouble once, until it is over."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, sort: str, text: str, *values: object) -> None:
        """A warning, if it was not said before."""
        level = logging.DEBUG if sort in self._said else logging.WARNING
        self._said.add(sort)
        log.log(level, text, *values)

    def over(self, sort: str) -> bool:
        """Whether it had been said; from now on it may be said again."""
        said = sort in self._said
        self._said.discard(sort)
        return said


class Reader:
    """Reads a folder of segments; ``is_mine`` names those that need not be read.

    Not for several threads at once.
    """

    def __init__(
        self,
        folder: Path,
        is_mine: Callable[[str], bool] = lambda _: False,
        complaints: Complaints | None = None,
    ) -> None:
        self._folder, self._is_mine = folder, is_mine
        self._complaints = complaints or Complaints()
        self._read_to: dict[str, int] = {}
        self._finished: set[str] = set()

    def fresh(self) -> Iterator[Array]:
        """Records that have come since the last time, in batches."""
        waiting: list[Array] = []
        here = set()
        for name, stem in self._names():
            here.add(stem)
            if stem in self._finished or self._is_mine(stem):
                continue
            for records in self._of(self._folder / name, stem):
                waiting.append(records)
                if sum(map(len, waiting)) * RECORD_BYTES >= _CHUNK_BYTES:
                    yield _together(waiting)
                    waiting = []
        if waiting:
            yield _together(waiting)
        self._finished &= here
        self._read_to = {stem: at for stem, at in self._read_to.items() if stem in here}

    def _names(self) -> list[tuple[str, str]]:
        try:
            names = sorted(os.listdir(self._folder))  # noqa: PTH208
        except FileNotFoundError:
            return []
        except OSError as error:
            self._complaints.say("folder", "stored judgements cannot be read: %s", error)
            return []
        return [(name, stem) for name in names if (stem := stem_of(name)) is not None]

    def _of(self, path: Path, stem: str) -> Iterator[Array]:
        try:
            yield from self._added(path, stem)
        except FileNotFoundError:
            return  # sealed, merged or removed meanwhile
        except UnknownFormat as error:
            self._finished.add(stem)
            self._complaints.say("format", "%s is not used: it is %s", path, error)
        except OSError as error:
            self._complaints.say(f"read {error.errno}", "stored judgements are skipped: %s", error)

    def _added(self, path: Path, stem: str) -> Iterator[Array]:
        at = self._read_to.get(stem, 0)
        is_sealed = path.suffix == SEALED
        if at and path.stat().st_size - at < RECORD_BYTES:
            if is_sealed:
                self._finished.add(stem)
            return
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if not at:
                if size < HEADER_BYTES and not is_sealed:
                    return  # it has just been made
                decode_header(file.read(HEADER_BYTES))
                at = HEADER_BYTES
            file.seek(at)
            while size - at >= RECORD_BYTES:
                raw = file.read(min(_CHUNK_BYTES, size - at))
                if len(raw) < RECORD_BYTES:
                    break
                found = decode(raw)
                # On NFS, the end of a file that grows may be seen as zeros at first: that end is
                # read once more. A damaged place with sound records behind it is passed over.
                is_end = at + len(raw) + RECORD_BYTES > size
                keep_end = is_end and not is_sealed
                passed = found.sound_bytes if keep_end else len(raw) - len(raw) % RECORD_BYTES
                self._note_damage(path, passed // RECORD_BYTES - len(found.records))
                at += passed
                file.seek(at)
                yield found.records
                if is_end:
                    break
        self._read_to[stem] = at
        if is_sealed:
            self._finished.add(stem)

    def _note_damage(self, path: Path, damaged: int) -> None:
        if damaged:
            self._complaints.say(
                "damage", "%d stored judgements in %s are damaged and skipped", damaged, path
            )


def _together(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts).astype(RECORD, copy=False)
