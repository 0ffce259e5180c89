"""Keeping the store small: the oldest segments go, many small ones become one.

In: a folder, a limit, and the segment that the caller has just begun. Out: a folder within its
limit. Only segments that nobody writes any more are touched: sealed ones, and those that were left
alone for an hour by the file server's own clock (that of the segment just begun). Several may do
this at once: a segment is removed only when another one that holds all of it is on the disk, so
that the worst that happens is that a judgement is there twice.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from infra.judgements.reading import Complaints
from infra.judgements.segments import (
    HEADER_BYTES,
    SEALED,
    Saved,
    Segment,
    UnknownFormat,
    decode_header,
    encode_header,
    list_segments,
)
from infra.judgements.table import Array, decode, distinct
from infra.judgements.writing import LONGEST_PAUSE_S
from infra.store import atomic

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
        if segment.path == new or not _is_finished(segment, now_ns):
            continue
        if total > most_bytes and _removed(segment.path):
            total -= segment.size
        else:
            stay.append(segment)
    return stay


def _is_finished(segment: Segment, now_ns: int) -> bool:
    return segment.is_sealed or now_ns - segment.changed_ns > _LEFT_ALONE_NS


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
        if _size(segment.path) == segment.size:
            _removed(segment.path)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _remove_remains(folder: Path, now_ns: int) -> None:
    """Of those who were killed while they merged."""
    for path in folder.glob(f"{atomic.TEMPORARY}*"):
        try:
            old = now_ns - path.stat().st_mtime_ns > _LEFT_ALONE_NS
        except FileNotFoundError:
            continue
        if old:
            _removed(path)
