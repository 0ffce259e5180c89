"""What is new in the files of judgements, whoever has written it.

In: a folder. Out: sound records that were not given before. How far each segment was read is
remembered by its name, so that only what has been added is read again; a sealed one is not even
looked at. What cannot be read (closed to this user, of a newer version, damaged) is skipped, with
one line in the log for each sort of trouble.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from infra.judgements.segments import (
    HEADER_BYTES,
    RECORD_BYTES,
    SEALED,
    UnknownFormat,
    decode_header,
    stem_of,
)
from infra.judgements.table import RECORD, Array, decode

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
