"""Judgements in memory: sorted arrays, in which thousands of keys are looked up at once.

In: records, one by one or as the bytes of a file. Out: what is known of keys. 32 bytes a record:
arrays sorted by the first half of the key, of which a large one is followed by smaller ones (what
was read later); those that have grown alike are merged. What was put one by one waits in a
dictionary until it is worth an array.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from infra.judgements.segments import KEY_BYTES, RECORD_BYTES, encode_record
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
