"""Resume checkpoints (complete or invisible, in order, never one too few), and their retention.

In: a folder that an engine fills. Out: ``checkpoints/step-00000010/`` with a marker
(``COMPLETE.json``: step, attempt, sizes and SHA-256 of its files, and its cost: seconds, bytes, and
how long its attempt had run). The engine writes into a temporary folder, which is fsynced,
hashed, marked, fenced (only the newest attempt may make it visible) and renamed. Readers ignore
folders without a marker or with files of another length; resuming also reads all contents
(markers of older versions have no hashes).

A checkpoint whose contents differ from what was saved is skipped for the one before it. It stays as
evidence, with its marker renamed to ``DAMAGED.json``, until its step is saved again or space is
short.

With ``keep`` >= 2, retention frees space *before* a save. The last complete checkpoint is never
deleted before its successor is complete; a successor written by another attempt, or touched since,
is read first. A save may happen in a thread of its own, one at a time.

A checkpoint that another stage waits for (``at_step``) is held: one small file per waiting stage
beside the training stage's record, ``holds/step-00000050-export-0123….json``, from before the
trainer starts until the waiting stage has its result. ``disk/pins/<stage id>.json`` protects a
whole stage from reclaiming; ``reclaimed.json`` beside a result names the output files that were
deleted on purpose, and their verified copy: it is written before anything is deleted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from infra.host.files import again, exists, files_within, make_folder, names_in, status_of
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.layout import Layout, StagePaths
from infra.store.records import now_text
from refiner_core.contract.errors import WorkspaceError
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import OutputFile, to_json

log = logging.getLogger(__name__)

MARKER = "COMPLETE.json"
#: Files that the export of a checkpoint reads; the others serve resuming.
EXPORTED = ("model.safetensors", "progress.json")
#: Name of the marker of a damaged checkpoint.
DAMAGED = "DAMAGED.json"
_NAME = re.compile(r"step-(\d+)")
_TEMPORARY = re.compile(re.escape(atomic.TEMPORARY) + r"step-\d+-a(\d+)")


class CompleteCheckpoint(NamedTuple):
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
        ``checkpoints/`` of the stage; created at the first save.
    attempt
        Number of the writing attempt.
    keep
        Complete checkpoints kept, at least 1.
    fence
        Called before each deletion, and right before a checkpoint becomes visible; raises if
        the attempt is stale.
    before_commit
        Called before the marker is written: makes files durable that must not be newer than it.
    held
        Steps that a stage waits for: they are kept beside ``keep`` others.
    reserve, watch
        Around each save: the first ensures that there is space (and raises ``NoSpaceError`` if
        there will be none), the second measures the time.
    elapsed
        Seconds that the attempt has run so far, for the marker (``elapsed_s``).

    Attributes
    ----------
    lost_bytes
        Size of the last half-written save that was removed; a whole one is larger.
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
        self._fence, self._before_commit, self._retained = fence, before_commit, held
        self._reserve, self._watch, self._elapsed = reserve, watch, elapsed
        self.lost_bytes = 0
        self._passed_over: set[Path] = set()
        #: Checkpoints whose hashes were verified, with their state at that time.
        self._whole: dict[Path, object] = {}

    # ------------------------------------------------------------ reading

    def complete(self) -> list[CompleteCheckpoint]:
        """All complete checkpoints, oldest step first (by number, not by name)."""
        return [c for c in map(self._read, self._folders()) if c is not None]

    def latest(self) -> CompleteCheckpoint | None:
        """The newest complete checkpoint, with all of its hashes verified, to resume from.

        Damaged newer ones are logged and skipped, now and later.

        Raises
        ------
        OSError
            There is none, or none can be read just now: no reason to start from the beginning.
        """
        folders, unread = self._folders(), None
        for folder in (f for f in reversed(folders) if f not in self._passed_over):
            try:
                found = _whole(folder, log.warning)
            except OSError as error:
                log.warning("checkpoint %s is skipped: %s", folder, error)
                unread = unread or error
                continue
            if found is None:
                continue
            if (damage := damage_of(found)) is None:
                self._whole[folder] = _state_of(folder)
                return found
            self._set_aside(found, damage)
            if not damage.lasting:
                unread = unread or OSError(errno.EIO, damage.description, str(folder))
        if unread is not None:
            raise unread
        if folders:
            log.warning("no checkpoint in %s is usable: the stage starts again", self.folder)
        return None

    def pass_over(self, step: int, why: str) -> None:
        """Mark the checkpoint of a step as damaged: its files are as saved, but the engine cannot
        read them."""
        found = self._read(self.folder / step_name(step))
        if found is not None:
            self._set_aside(found, CheckpointDamage(why, lasting=True))

    def _set_aside(self, checkpoint: CompleteCheckpoint, damage: CheckpointDamage) -> None:
        log.warning("checkpoint %s is damaged and skipped: %s", checkpoint.path, damage.description)
        self._passed_over.add(checkpoint.path)
        if not damage.lasting:
            return  # the next attempt may be able to read it
        try:
            (checkpoint.path / MARKER).rename(checkpoint.path / DAMAGED)
            atomic.settle_folder(checkpoint.path)
        except OSError as error:
            log.warning("the damage of %s cannot be recorded: %s", checkpoint.path, error)

    def _read(self, folder: Path) -> CompleteCheckpoint | None:
        """The checkpoint in ``folder`` unless this attempt has skipped it."""
        return None if folder in self._passed_over else read_checkpoint(folder)

    def _folders(self) -> list[Path]:
        found = [self.folder / name for name in names_in(self.folder) if _NAME.fullmatch(name)]
        return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))

    # ------------------------------------------------------------ writing

    @contextlib.contextmanager
    def new(self, step: int) -> Iterator[Path]:
        """A folder to write the checkpoint of ``step`` into; visible after the block.

        Raises
        ------
        NoSpaceError
            The checkpoint did not fit; nothing of it stays.
        """
        target = self.folder / step_name(step)
        temporary = self.folder / f"{atomic.TEMPORARY}{step_name(step)}-a{self.attempt}"
        try:
            # The guard is inside: it may probe for space, which the cleanup would free.
            with no_space_guard(self.folder, f"saving the checkpoint of step {step}", waits=True):
                self._fence()
                make_folder(self.folder)
                self._sweep(step)
                if self.keep >= 2:
                    self._retain(self.keep - 1, spare=target)
                with self._reserve(), self._watch():
                    began = time.monotonic()
                    temporary.mkdir()
                    yield temporary
                    self._commit(step, temporary, target, began)
        finally:
            try:  # an error of the cleanup never hides the first error
                if exists(temporary):
                    self.lost_bytes = tree_bytes(temporary)
                    atomic.remove_tree(temporary)
            except OSError as error:
                log.warning("could not remove %s: %s", temporary, error)
        self._retain(self.keep, spare=target)

    def _commit(self, step: int, temporary: Path, target: Path, began: float) -> None:
        atomic.sync_tree(temporary)
        self._before_commit()
        seconds = round(time.monotonic() - began, 3)
        hashed = hash_files(temporary)
        files = {file.path: file.bytes for file in hashed}
        cost = {"seconds": seconds, "bytes": sum(files.values())}
        if self._elapsed is not None:
            cost["elapsed_s"] = round(self._elapsed(), 3)
        hashes = {file.path: file.sha256 for file in hashed}
        marker = {"step": step, "attempt": self.attempt, "files": files, "sha256": hashes, **cost}
        atomic.write_json(temporary / MARKER, marker)
        self._fence()
        if exists(target):
            if self._read(target) is not None:
                # The same step of the same stage is the same state: the existing one stays, so
                # that there is always one.
                return
            atomic.remove_tree(target)
        state = _state_of(temporary)
        temporary.rename(target)
        self._passed_over.discard(target)
        self._whole[target] = state
        atomic.sync_folder(self.folder)

    def _retain(self, count: int, *, spare: Path) -> None:
        """Delete the oldest complete checkpoints down to ``count``, at least 1; never ``spare``,
        held ones, or later ones (not ours). The newest that stays must be undamaged."""
        before = int(spare.name.removeprefix("step-"))
        while True:
            held = self._retained()
            complete = [c for c in self.complete() if c.step < before and c.step not in held]
            saved = self._read(spare)
            stay = max(0, count - (saved is not None))
            gone = complete[: max(0, len(complete) - stay)]
            if not gone or self._is_whole(saved or complete[-1]):
                break
        for old in gone:
            if old.step in self._retained():  # requested in the meantime
                continue
            # Marker first: an interrupted deletion leaves nothing that looks complete.
            atomic.remove_quietly(old.path / MARKER)
            atomic.remove_tree(old.path)

    def _is_whole(self, checkpoint: CompleteCheckpoint) -> bool:
        """Tell whether a checkpoint can be resumed from; it is read unless it was read since its
        last change. A damaged one is set aside."""
        damage: CheckpointDamage | None
        try:
            now = _state_of(checkpoint.path)
            if self._whole.get(checkpoint.path) == now:
                return True
            damage = damage_of(checkpoint)
        except OSError as error:
            damage = CheckpointDamage(f"it cannot be read ({error})", lasting=False)
        if damage is None:
            self._whole[checkpoint.path] = now
            return True
        self._set_aside(checkpoint, damage)
        return False

    def _sweep(self, step: int) -> None:
        """Remove half-written or half-deleted folders of this or earlier attempts."""
        for name in names_in(self.folder):
            match = _TEMPORARY.fullmatch(name)
            if match and int(match.group(1)) <= self.attempt:
                atomic.remove_tree(self.folder / name)
        for path in self._folders():
            ours = int(path.name.removeprefix("step-")) <= step
            if ours and not any(exists(path / name) for name in (MARKER, DAMAGED)):
                atomic.remove_tree(path)


def read_checkpoint(folder: Path) -> CompleteCheckpoint | None:
    """The checkpoint in ``folder``; None if it is incomplete or cannot be read."""
    with contextlib.suppress(OSError):
        return _whole(folder)
    return None


def _whole(
    folder: Path, complain: Callable[[str], Any] = lambda _: None
) -> CompleteCheckpoint | None:
    try:
        marker = atomic.read_json(folder / MARKER)
        if marker is None:
            why = "was found damaged" if exists(folder / DAMAGED) else "was not finished"
            complain(f"checkpoint {folder} has no marker and is ignored: it {why}")
            return None
        for name, size in marker["files"].items():
            if damage := size_damage(folder / name, size):
                complain(f"checkpoint {folder} is ignored: {damage}")
                return None
        found_here = CompleteCheckpoint(int(marker["step"]), int(marker["attempt"]), folder)
        if _NAME.fullmatch(folder.name) and folder.name != step_name(found_here.step):
            complain(f"checkpoint {folder} is ignored: it is a copy of another step's")
            return None
        return found_here
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        complain(f"checkpoint {folder} is ignored: its marker cannot be read ({error})")
        return None


class CheckpointDamage(NamedTuple):
    """Damage to a checkpoint that looks complete. ``lasting``: it will never be readable; a read
    error may pass."""

    description: str
    lasting: bool


def damage_of(
    checkpoint: CompleteCheckpoint, names: Iterable[str] | None = None
) -> CheckpointDamage | None:
    """Difference between a complete checkpoint and what was saved; None if there is none, or it
    has no hashes.

    ``names`` are the relevant files; default: all.
    """
    try:
        marker = atomic.read_json(checkpoint.path / MARKER) or {}
        hashes = dict(marker.get("sha256", {}))
        wanted = sorted(hashes if names is None else hashes.keys() & set(names))
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            found = list(pool.map(hash_of, (checkpoint.path / name for name in wanted)))
    except (OSError, ValueError, TypeError) as error:
        return CheckpointDamage(f"it cannot be read ({error})", lasting=False)
    different = [n for n, digest in zip(wanted, found, strict=True) if digest != hashes[n]]
    if not different:
        return None
    return CheckpointDamage(
        f"the contents of {', '.join(different)} differ from what was saved", lasting=True
    )


def checkpoint_to_export(folder: Path, step: int) -> Path:
    """The checkpoint of a step of a training stage, its weights verified.

    Raises
    ------
    WorkspaceError
        It is missing or damaged.
    """
    found = read_checkpoint(folder / step_name(step))
    damage = None if found is None else damage_of(found, EXPORTED)
    if found is not None and damage is None:
        return found.path
    why = "" if damage is None else f" ({damage.description})"
    raise WorkspaceError(
        f"{folder} has no complete checkpoint of step {step}{why}, and this stage reads it",
        expected="a checkpoint that is kept until it is exported",
        fix="remove the step from what is published, or train again",
    )


def hash_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal; other threads run meanwhile."""

    def read() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return again(read)


def hash_files(folder: Path) -> tuple[OutputFile, ...]:
    """Every file below ``folder`` with size and SHA-256, sorted by path; each is read once."""
    found = []
    for path, status in files_within(folder).items():
        name = path.relative_to(folder).as_posix()
        found.append(OutputFile(name, status.st_size, hash_of(path)))
    return tuple(found)


def size_damage(path: Path, size: int) -> str | None:
    """Message if a file is gone or of another size; else None."""
    found = status_of(path)
    if found is None:
        return f"{path} is gone"
    return None if found.st_size == size else f"{path} has {found.st_size} bytes instead of {size}"


def _state_of(folder: Path) -> object:
    """Value that changes whenever a file below ``folder`` is written."""
    found = files_within(folder)
    return [(str(p.relative_to(folder)), s.st_size, s.st_mtime_ns) for p, s in found.items()]


def tree_bytes(folder: Path) -> int:
    """Total size of the files below ``folder``."""
    return sum(status.st_size for status in files_within(folder).values())


#: Step and waiting stage, in the name of a hold.
HOLD_NAME = re.compile(r"step-(\d+)-(.+)\.json")


def retained_steps(stage: StagePaths) -> frozenset[int]:
    """Steps of a training stage whose checkpoints a stage waits for."""
    found = map(HOLD_NAME.fullmatch, names_in(stage.holds))
    return frozenset(int(match.group(1)) for match in found if match)


#: Name of the holds of a stage's own monitor.
MONITOR_HOLD = "monitor"


def hold_steps(stage: StagePaths, steps: Collection[int]) -> None:
    """Hold the checkpoints of these steps for the monitor of their stage, and release others."""
    wanted = {f"{step_name(step)}-{MONITOR_HOLD}.json" for step in steps}
    with no_space_guard(stage.holds, "keeping a checkpoint", waits=True):
        make_folder(stage.holds)
        for name in sorted(wanted):
            atomic.create_json(stage.holds / name, {"for": MONITOR_HOLD})
    for name in names_in(stage.holds):
        if name.endswith(f"-{MONITOR_HOLD}.json") and name not in wanted:
            atomic.remove_quietly(stage.holds / name)


class RetainedCheckpoints:
    """The holds of one plan, updated as stages finish."""

    def __init__(self, plan: Plan, layout: Layout) -> None:
        self._plan, self._layout = plan, layout
        self._settled: set[Path] = set()

    def keep(self, done: Collection[str]) -> None:
        """Hold the checkpoints that stages of the plan wait for, except stages in ``done`` (stage
        ids), and release the others. The next call retries what a full disk prevented."""
        for stage, source, step in self._waited_for():
            path = self._layout.stage(source).holds / f"{step_name(step)}-{stage.id}.json"
            if stage.id in done:
                atomic.remove_quietly(path)
                self._settled.discard(path)
            elif path not in self._settled:
                try:
                    make_folder(path.parent)
                    atomic.create_json(path, {"for": stage.id, "name": stage.name})
                    self._settled.add(path)
                except OSError as error:
                    log.warning("%s could not be written yet: %s", path, error)

    def there(self, done: Collection[str]) -> frozenset[tuple[str, int]]:
        """Complete checkpoints that stages still wait for: (stage id, step)."""
        found = set()
        for stage, source, step in self._waited_for():
            if stage.id not in done:
                # A stage may fail without it, so read errors are raised.
                folder = self._layout.stage(source).checkpoints / step_name(step)
                if _whole(folder) is not None:
                    found.add((source, step))
        return frozenset(found)

    def _waited_for(self) -> Iterator[tuple[PlannedStage, str, int]]:
        """Stages that read a checkpoint, with the id of its stage and its step."""
        for stage in self._plan.stages:
            for role, step in stage.at_step.items():
                yield stage, self._plan.by_name[stage.inputs[role]].id, step


RECLAIMED = "reclaimed.json"


def pin(layout: Layout, stage_id: str) -> bool:
    """Protect all of a stage's files; False if it was pinned before."""
    folder = layout.disk / "pins"
    folder.mkdir(parents=True, exist_ok=True)
    return atomic.create_json(folder / f"{stage_id}.json", {"stage_id": stage_id, "at": now_text()})


def unpin(layout: Layout, stage_id: str) -> bool:
    """End the protection of a stage; False if it was not pinned."""
    path = layout.disk / "pins" / f"{stage_id}.json"
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def pins(layout: Layout) -> frozenset[str]:
    """Ids of pinned stages."""
    return frozenset(p.stem for p in atomic.json_files(layout.disk / "pins"))


def write_reclaimed(
    stage: StagePaths, files: Sequence[OutputFile], *, why: str, copy: str, way_back: str
) -> None:
    """Record which output files are about to be deleted on purpose, why, where their copy is, and
    the command that restores them."""
    said = {"why": why, "copy": copy, "way_back": way_back, "files": to_json(list(files))}
    atomic.write_json(stage.control / RECLAIMED, {"version": 1, "at": now_text(), **said})


def read_reclaimed(stage: StagePaths) -> Mapping[str, Any] | None:
    """Record of a stage's reclaimed output; None if it never was.

    Raises
    ------
    ValueError
        The record is not JSON.
    """
    value: Mapping[str, Any] | None = atomic.read_json(stage.control / RECLAIMED)
    return value


def reclaimed_text(stage: StagePaths) -> str | None:
    """Text for people: when and why output files were deleted, and how to restore them."""
    value = read_reclaimed(stage)
    if value is None:
        return None
    day = str(value["at"])[:10]
    text = f"it was reclaimed on {day} ({value['why']}); its copy is {value['copy']}"
    way_back = value.get("way_back")  # records of older versions have none
    return f"{text}; to restore it: `{way_back}`" if way_back else text
