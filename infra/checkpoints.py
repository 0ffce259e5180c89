"""Resume checkpoints: complete or invisible, in order, and never one too few.

In: a folder that an engine fills. Out: ``checkpoints/step-00000010/`` with a marker
(``COMPLETE.json``: step, attempt, sizes of its files, and what it cost: seconds, bytes, and for how
long its attempt had run). The engine writes into a temporary folder; that is fsynced, marked,
fenced (an attempt that is no longer the newest may not make it visible) and renamed. Readers ignore
what has no marker or whose files are not as long as the marker says.

Retention makes room *before* a save from ``keep`` = 2 up; the last complete checkpoint is never
deleted before its successor is complete.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from infra import atomic
from infra.disk.room import no_space_guard
from refiner_core.contract.types import SavedCheckpoint

log = logging.getLogger(__name__)

MARKER = "COMPLETE.json"
_NAME = re.compile(r"step-(\d+)")
_TEMPORARY = re.compile(re.escape(atomic.TEMPORARY) + r"step-\d+-a(\d+)")


class Complete(NamedTuple):
    """A complete checkpoint and the attempt that made it."""

    step: int
    attempt: int
    path: Path


def step_name(step: int) -> str:
    """Folder or file name of a step; sorts like the number for a long time."""
    return f"step-{step:08d}"


class CheckpointStore:
    """The checkpoints of one stage, as one attempt sees them.

    Parameters
    ----------
    folder
        ``checkpoints/`` of the stage; made at the first save.
    attempt
        Number of the attempt that writes.
    keep
        Complete checkpoints kept, at least 1.
    fence
        Called before anything is deleted, and right before a checkpoint becomes visible; raises if
        the attempt is stale.
    before_commit
        Called before the marker is written: makes durable what must not be newer than it.
    held
        Steps that somebody waits for: they are kept beside ``keep`` others.
    reserve, watch
        Around each save: sees to it that there is room (and raises ``NoSpaceError`` if there will
        be none), and hears how long it takes.
    elapsed
        Seconds that the attempt has run so far, for the marker (``elapsed_s``).

    Attributes
    ----------
    lost_bytes
        Size of the last half-written save that had to be removed: a whole one is larger.
    """

    def __init__(
        self,
        folder: Path,
        attempt: int,
        keep: int = 2,
        *,
        fence: Callable[[], None] = lambda: None,
        before_commit: Callable[[], None] = lambda: None,
        held: Callable[[], frozenset[int]] = frozenset,
        reserve: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        watch: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        elapsed: Callable[[], float] | None = None,
    ) -> None:
        self.folder, self.attempt, self.keep = folder, attempt, max(1, keep)
        self._fence, self._before_commit, self._held = fence, before_commit, held
        self._reserve, self._watch, self._elapsed = reserve, watch, elapsed
        self.lost_bytes = 0

    # ------------------------------------------------------------ reading

    def complete(self) -> list[Complete]:
        """All complete checkpoints, oldest step first (by number, not by name)."""
        return [c for c in map(read_checkpoint, self._folders()) if c is not None]

    def latest(self) -> Complete | None:
        """The newest complete one; damaged newer ones are named in the log and passed over."""
        for folder in reversed(self._folders()):
            found = read_checkpoint(folder, log.warning)
            if found is not None:
                return found
        return None

    def _folders(self) -> list[Path]:
        try:
            found = [p for p in self.folder.iterdir() if _NAME.fullmatch(p.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))

    # ------------------------------------------------------------ writing

    @contextlib.contextmanager
    def new(self, step: int) -> Iterator[Path]:
        """A folder to write the checkpoint of ``step`` into; visible after the block.

        Raises
        ------
        NoSpaceError
            It did not fit; nothing of it stays.
        """
        target = self.folder / step_name(step)
        temporary = self.folder / f"{atomic.TEMPORARY}{step_name(step)}-a{self.attempt}"
        try:
            # The guard is inside: it may probe for room, which cleaning up would give back.
            with no_space_guard(self.folder, f"saving the checkpoint of step {step}"):
                self._fence()
                self.folder.mkdir(parents=True, exist_ok=True)
                self._sweep(step)
                if self.keep >= 2:
                    self._retain(self.keep - 1, spare=target)
                with self._reserve(), self._watch():
                    began = time.monotonic()
                    temporary.mkdir()
                    yield temporary
                    self._commit(step, temporary, target, began)
        finally:
            if temporary.exists():
                self.lost_bytes = tree_bytes(temporary)
                atomic.remove_tree(temporary)
        self._retain(self.keep, spare=target)

    def _commit(self, step: int, temporary: Path, target: Path, began: float) -> None:
        atomic.sync_tree(temporary)
        self._before_commit()
        files = {
            p.relative_to(temporary).as_posix(): p.stat().st_size
            for p in sorted(temporary.rglob("*"))
            if p.is_file()
        }
        cost = {"seconds": round(time.monotonic() - began, 3), "bytes": sum(files.values())}
        if self._elapsed is not None:
            cost["elapsed_s"] = round(self._elapsed(), 3)
        marker = {"step": step, "attempt": self.attempt, "files": files, **cost}
        atomic.write_json(temporary / MARKER, marker)
        self._fence()
        if target.exists():
            if read_checkpoint(target) is not None:
                # The same step of the same stage is the same state: the one that is there stays,
                # so that at no moment there is none.
                return
            atomic.remove_tree(target)
        temporary.rename(target)
        atomic.sync_folder(self.folder)

    def _retain(self, count: int, *, spare: Path) -> None:
        """Delete the oldest complete ones down to ``count``, at least 1; never ``spare`` or what is
        held, and nothing after it, which is not ours."""
        before = int(spare.name.removeprefix("step-"))
        held = self._held()
        complete = [c for c in self.complete() if c.step < before and c.step not in held]
        count -= read_checkpoint(spare) is not None
        for old in complete[: max(0, len(complete) - max(0, count))]:
            if old.step in self._held():  # somebody has asked for it in the meantime
                continue
            # Marker first: a deletion that is cut short leaves no complete-looking remains.
            atomic.remove_quietly(old.path / MARKER)
            atomic.remove_tree(old.path)

    def _sweep(self, step: int) -> None:
        """Remove what older attempts, or this one, left half-written or half-deleted."""
        for path in self.folder.iterdir():
            match = _TEMPORARY.fullmatch(path.name)
            if match and int(match.group(1)) <= self.attempt:
                atomic.remove_tree(path)
        for path in self._folders():
            if int(path.name.removeprefix("step-")) < step and not (path / MARKER).exists():
                atomic.remove_tree(path)


def read_checkpoint(
    folder: Path, complain: Callable[[str], Any] = lambda _: None
) -> Complete | None:
    """The checkpoint in ``folder``; None if it is not complete (``complain`` hears why)."""
    try:
        marker = atomic.read_json(folder / MARKER)
        if marker is None:
            complain(f"checkpoint {folder} has no marker and is ignored: it was not finished")
            return None
        for name, size in marker["files"].items():
            path = folder / name
            found = path.stat().st_size if path.exists() else None
            if found != size:
                complain(f"checkpoint {folder} is ignored: {name} has {found} bytes, not {size}")
                return None
        return Complete(int(marker["step"]), int(marker["attempt"]), folder)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        complain(f"checkpoint {folder} is ignored: its marker cannot be read ({error})")
        return None


def tree_bytes(folder: Path) -> int:
    """Bytes in the files below ``folder``."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def saved(checkpoint: Complete) -> SavedCheckpoint:
    """As the science sees it."""
    return SavedCheckpoint(checkpoint.step, checkpoint.path)
