"""Checkpoints in somebody else's layout: found by pattern, ordered by number, whole or not.

In: a folder that another trainer writes into, and a :class:`CheckpointRule`. Out: its checkpoints,
oldest step first, each with what is wrong with it. Nothing here writes, but for the one small file
by which ``quiet:SECONDS`` asks the file server for the time.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from infra.foreign import weights
from infra.host.mounts import sync_file_system
from infra.store import atomic
from refiner_core.contract.config import CommandConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointRule:
    """How a trainer's checkpoints look; see :class:`~refiner_core.contract.config.CommandConfig`.

    ``step_pattern`` has one group, the step in the name. ``complete`` is ``weights``, ``file:NAME``
    or ``quiet:SECONDS``.
    """

    pattern: str
    step_pattern: str
    complete: str = "weights"

    @classmethod
    def of(cls, config: CommandConfig) -> CheckpointRule:
        """The rule of a recipe."""
        return cls(config.checkpoints, config.step_pattern, config.complete)


class ForeignCheckpoint(NamedTuple):
    """One checkpoint; ``damage`` is empty where it is complete.

    ``certain`` tells files that are broken from a sign of completeness that is only missing.
    """

    step: int
    path: Path
    damage: str = ""
    certain: bool = False


def find_checkpoints(folder: Path, rule: CheckpointRule) -> list[ForeignCheckpoint]:
    """All checkpoints below ``folder``, oldest step first (by number, not by name)."""
    found = []
    for path in folder.glob(rule.pattern) if folder.is_dir() else ():
        match = re.search(rule.step_pattern, path.name)
        if match is None or path.name.startswith(atomic.TEMPORARY):
            continue
        number = next((g for g in match.groups() if g), "")
        if number.isdigit():
            found.append(_checked(int(number), path, rule.complete))
    return sorted(found, key=lambda c: (c.step, c.path.name))


def newest_complete(found: list[ForeignCheckpoint]) -> ForeignCheckpoint | None:
    """The newest complete one; newer ones that are passed over are named in the log."""
    for checkpoint in reversed(found):
        if not checkpoint.damage:
            return checkpoint
        log.warning("checkpoint %s is passed over: %s", checkpoint.path, checkpoint.damage)
    return None


def remove_unfinished(found: list[ForeignCheckpoint]) -> int:
    """Delete what no trainer can go on from; returns how many. Call it while none writes.

    These are the ones with broken files, and the newest one if it lacks its sign of completeness: a
    trainer dies in the middle of one save. Older ones without a sign stay, in case that the rule is
    at fault and not they.
    """
    newest = found[-1] if found else None
    gone = [c for c in found if c.damage and (c.certain or c is newest)]
    for checkpoint in gone:
        log.warning("deleting unfinished checkpoint %s: %s", checkpoint.path, checkpoint.damage)
        atomic.remove_tree(checkpoint.path)
    if gone:  # some file systems give room back with the next commit only
        sync_file_system(gone[0].path.parent)
    return len(gone)


def remove_older(found: list[ForeignCheckpoint], keep: int) -> int:
    """Delete the oldest complete checkpoints down to ``keep`` (at least 1); returns how many."""
    complete = [c for c in found if not c.damage]
    gone = complete[: max(0, len(complete) - max(1, keep))]
    for checkpoint in gone:
        log.warning("deleting checkpoint %s to make room", checkpoint.path)
        atomic.remove_tree(checkpoint.path)
    if gone:
        sync_file_system(gone[0].path.parent)
    return len(gone)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    files = weights.files_below(path) if path.is_dir() else iter((path,))
    return sum(_size(f) for f in files)


def signature(folder: Path) -> tuple[int, int, int]:
    """Number, size and newest change of all files below ``folder``: differs once one is written."""
    count = total = newest = 0
    for file in weights.files_below(folder):
        try:
            found = file.stat()
        except OSError:
            continue
        count, total = count + 1, total + found.st_size
        newest = max(newest, found.st_mtime_ns)
    return count, total, newest


def _checked(step: int, path: Path, complete: str) -> ForeignCheckpoint:
    rule, _, value = complete.partition(":")
    wrong = weights.damage(path, need_weights=rule == "weights")
    if wrong:
        return ForeignCheckpoint(step, path, wrong, certain=wrong[:8] != "there is")
    if rule == "file":
        sign = path / value
        if not sign.is_file() or sign.stat().st_size == 0:
            return ForeignCheckpoint(step, path, f"{value} is not there")
    if rule == "quiet" and (age := _age_s(path)) < float(value):
        return ForeignCheckpoint(step, path, f"changed {age:.0f} s ago, less than {value} s")
    return ForeignCheckpoint(step, path)


def _age_s(path: Path) -> float:
    """Seconds since the last change, by the clock of whoever keeps the files: a node's own clock
    may differ from it."""
    files = [path, *weights.files_below(path)] if path.is_dir() else [path]
    newest = max((f.stat().st_mtime for f in files if f.exists()), default=0.0)
    probe = atomic.temporary_name(path.parent / "clock")
    try:
        probe.touch()
        return probe.stat().st_mtime - newest
    except OSError as error:
        log.warning("the age of %s cannot be told: %s", path, error)
        return 0.0
    finally:
        atomic.remove_quietly(probe)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
