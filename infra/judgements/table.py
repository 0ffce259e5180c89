"""Judgements in memory: what is new in the files, and a sorted index of all that is known.

Records come one by one or as the bytes of a file. The index is one array, sorted by the first
half of the key, in which thousands of keys are looked up at once; what is few waits in a dictionary
until there is enough of it to be sorted in.

:class:`Reader` gives sound records that were not given before, whoever has written them. How far
each segment was read is remembered by its name, so that only what has been added is read again; a
sealed one is not even looked at. What cannot be read (closed to this user, of a newer version,
damaged) is skipped, with one line in the log for each sort of trouble.
"""

from __future__ import annotations

import functools
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
from infra.store.atomic import Complaints
from refiner_core.contract.types import StoredJudgement

Array = npt.NDArray[Any]

_KEY = (("high", "<u8"), ("low", "<u8"))
_ENTRY = np.dtype([*_KEY, ("score", "<f8"), ("prompt", "<u4"), ("completion", "<u4")])
_NAMES = list(_ENTRY.names or ())
#: One record as it stands in a file.
RECORD = np.dtype([*_ENTRY.descr, ("crc", "<u4")])
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


class Table:
    """All that is known. Not for several threads at once."""

    def __init__(self) -> None:
        self._index = np.empty(0, _ENTRY)
        self._high = np.empty(0, "<u8")
        self._pending: list[Array] = []
        self._recent: dict[bytes, StoredJudgement] = {}

    def __len__(self) -> int:
        self._merge()
        return len(self._high) + len(self._recent)

    def get(self, keys: Sequence[bytes]) -> list[StoredJudgement | None]:
        """Known judgements, in order."""
        self._merge()
        found = [self._recent.get(key) for key in keys]
        missing = [
            i for i, known in enumerate(found) if known is None and len(keys[i]) == KEY_BYTES
        ]
        halves = np.frombuffer(b"".join(keys[i] for i in missing), "<u8").reshape(-1, 2)
        high, low = np.ascontiguousarray(halves.T)
        open_, at = np.arange(len(missing)), self._high.searchsorted(high)
        while len(open_):
            inside = at < len(self._high)
            open_, at = open_[inside], at[inside]
            alike = self._high[at] == high[open_]
            open_, at = open_[alike], at[alike]
            hit = self._index["low"][at] == low[open_]
            known = self._index[at[hit]].tolist()
            for place, (_, _, *values) in zip(open_[hit].tolist(), known, strict=True):
                found[missing[place]] = StoredJudgement(*values)
            open_, at = open_[~hit], at[~hit] + 1
        return found

    def put(self, key: bytes, judgement: StoredJudgement) -> None:
        """Add one, or replace one that was put lately."""
        self._recent[key] = judgement
        if len(self._recent) >= _MOST_RECENT:
            self._pending.append(decode(encode_all(self._recent)).records[_NAMES].astype(_ENTRY))
            self._recent = {}

    def add(self, records: Array) -> None:
        """Add many; what is known already stays as it is."""
        if len(records) >= _MOST_RECENT:
            self._pending.append(records[_NAMES].astype(_ENTRY))
            return
        for key, (_, _, *values, _) in zip(_keys(records), records.tolist(), strict=True):
            if key not in self._recent:
                self.put(key, StoredJudgement(*values))

    def forget_old(self) -> None:
        """Keep only what was put lately."""
        self._index, self._high = self._index[:0].copy(), self._high[:0].copy()
        self._pending.clear()

    def _merge(self) -> None:
        if self._pending:
            self._pending.insert(0, self._index)
            self._index, self._high = self._index[:0].copy(), self._high[:0].copy()
            whole = [np.concatenate(self._pending)]
            self._pending.clear()  # before sorting: memory holds all of it once more, not twice
            self._index = distinct(whole.pop())
            self._high = np.ascontiguousarray(self._index["high"])


def _keys(records: Array) -> list[bytes]:
    raw = records.tobytes()
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), RECORD_BYTES)]


def encode_all(judgements: Mapping[bytes, StoredJudgement]) -> bytes:
    """Records, one behind the other."""
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


#: Read, checked and given together; small segments are given many at a time.
_CHUNK_BYTES = RECORD_BYTES << 18


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
        try:
            names = sorted(os.listdir(self._folder))  # noqa: PTH208
        except FileNotFoundError:
            names = []
        except OSError as error:
            self._complaints.say("folder", "stored judgements cannot be read: %s", error)
            return
        stems = {stem: name for name in names if (stem := stem_of(name)) is not None}
        waiting: list[Array] = []
        for stem, name in stems.items():
            if stem in self._finished or self._is_mine(stem):
                continue
            for records in self._of(self._folder / name, stem):
                waiting.append(records)
                if sum(map(len, waiting)) * RECORD_BYTES >= _CHUNK_BYTES:
                    yield np.concatenate(waiting)
                    waiting = []
        if waiting:
            yield np.concatenate(waiting)
        self._finished &= stems.keys()
        self._read_to = {stem: at for stem, at in self._read_to.items() if stem in stems}

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
        at, is_sealed = self._read_to.get(stem, 0), path.suffix == SEALED
        if not at or path.stat().st_size - at >= RECORD_BYTES:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if not at:
                    if size < HEADER_BYTES and not is_sealed:
                        return  # it has just been made
                    decode_header(file.read(HEADER_BYTES))
                    at = HEADER_BYTES
                while size - at >= RECORD_BYTES:
                    file.seek(at)
                    raw = file.read(min(_CHUNK_BYTES, size - at))
                    if len(raw) < RECORD_BYTES:
                        break
                    found = decode(raw)
                    # On NFS, the end of a file that grows may be seen as zeros at first: that end
                    # is read once more. A damaged place with sound records behind it is passed.
                    is_end = at + len(raw) + RECORD_BYTES > size
                    passed = found.sound_bytes
                    if is_sealed or not is_end:
                        passed = len(raw) - len(raw) % RECORD_BYTES
                    if damaged := passed // RECORD_BYTES - len(found.records):
                        text = "%d stored judgements in %s are damaged and skipped"
                        self._complaints.say("damage", text, damaged, path)
                    at += passed
                    yield found.records
                    if is_end:
                        break
            self._read_to[stem] = at
        if is_sealed:
            self._finished.add(stem)
