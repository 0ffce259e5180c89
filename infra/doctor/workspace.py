"""Area ``workspace``: the folders that a run writes to, tried rather than believed.

In: a workspace and its data root. Out: findings on permissions, format, kind of file system, what
it really does (renames, exclusive creation, links, …, in a scratch folder that is removed again),
the room that is left and who says so, and caches on the same quota.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from infra.disk.keeper import gib
from infra.disk.probe import UNLIMITED, Prober, Room, ToolFailed, run_tool
from infra.disk.usage import size_of
from infra.doctor.check import Check, Finding, Look, doubtful, fine, found, scratch_in
from infra.host.files import existing, mount_of
from infra.store import atomic
from infra.store.workspace import FORMAT, Workspace, refuse_doubtful

_HUNG = "refiner doctor workspace=/ANOTHER/DISK/runs"
#: Where quotas are the rule, and free figures of the file system know nothing of them.
_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "panfs", "wekafs", "fuse")
#: How trials end that found no room.
_FULL = ("(ENOSPC)", "(EDQUOT)")
#: Not for records of a run: gone with the machine, or slow and without what we need.
_FLEETING = ("tmpfs", "ramfs")

#: Without these no run can be trusted.
_NEEDED = {
    "atomic rename": "records are replaced in one step",
    "one winner": "of two orchestrators one may claim an attempt",
    "fsync": "a checkpoint must be on the disk before it counts",
}


def _folder(look: Look) -> list[Finding]:
    root = look.workspace
    room = Workspace.read_only(root)  # refuses a newer format, or no folder
    place = existing(root)
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        owner = place.stat()
        what = (
            f"{place} cannot be written to by user {os.geteuid()} (owner {owner.st_uid}, mode "
            f"{stat.filemode(owner.st_mode)})"
        )
        mend, why = f"{look.command('run')} workspace=DIR", "every record of a run is kept there"
        return [found(doubtful(look.recipe), what, mend, why)]
    if not room.layout.format_file.exists():
        where = "is made by the first run" if not root.exists() else "has no run yet"
        return [fine(f"{root} {where}; {place} can be written to")]
    refuse_doubtful(room.layout)
    runs = len(room.run_ids())
    good = fine(f"{root}: {runs} run{'s' * (runs != 1)}, format {FORMAT} is understood")
    mode, mask = root.stat().st_mode, _umask()
    if not mode & mask & stat.S_IWGRP:
        return [good]
    what = f"the group may write to {root}, and your umask {mask:03o} keeps it from what you make"
    why = "another user of the group could not go on with your runs"
    return [good, found("warning", what, "umask 002", why, name="group")]


def _umask() -> int:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(x for x in lines if x.startswith("Umask")).split()[1], 8)
    return 0


# ---------------------------------------------------------------- what the file system does


def _features(look: Look) -> Iterator[Finding]:
    for name, folder in look.folders.items():
        mount, prefix = mount_of(folder), "" if name == "workspace" else f"{name}: "
        where, itself = f"{mount.type} at {mount.point}", f"{prefix}file system"
        if not os.access(existing(folder), os.W_OK | os.X_OK):
            continue  # said by the check of the folder
        with scratch_in(folder) as scratch:
            began = time.monotonic()
            wrong = [(n, why) for n, tried in _TRIALS if (why := _tried(tried, scratch))]
            seconds = time.monotonic() - began
        if any(why.endswith(_FULL) for _, why in wrong):  # says nothing of what it can do
            what = (
                f"{where} is full: {wrong[0][1]}; what it can do is not known until there is room"
            )
            mend = f"refiner disk --reclaim workspace={look.workspace}"
            mend = mend if name == "workspace" else f"df -h {folder}"
            why = "records are written, and a run waits for room"
            yield found("broken", what, mend, why, name=itself)
            continue
        mend = f"{look.command('run')} {name}=/SCRATCH/{os.environ.get('USER', 'me')}/runs"
        for trial, said in wrong:
            state = doubtful(trial in _NEEDED)
            why = _NEEDED.get(trial, "works without it, but less well")
            yield found(state, f"{where}: {said}", mend, why, name=f"{prefix}{trial}")
        if not wrong:
            listed = ", ".join(n for n, _ in _TRIALS)
            yield fine(f"{where}: {listed} work ({seconds * 1000:.0f} ms)", name=itself)
        if mount.type in _FLEETING:
            what = f"{where} is memory: gone when the machine restarts"
            mend = f"{look.command('run')} {name}={Path.home() / 'runs'}"
            yield found("warning", what, mend, name=itself)


def _tried(trial: Callable[[Path], str], folder: Path) -> str:
    try:
        return trial(folder)
    except OSError as error:
        return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, '?')})"


def _rename(folder: Path) -> str:
    old, new = folder / "old", folder / "new"
    old.write_text("old")
    new.write_text("new")
    new.replace(old)
    if old.read_text() != "new" or new.exists():
        return "a rename onto a file leaves the old one"
    (folder / "d1").mkdir()
    (folder / "d1").rename(folder / "d2")
    return ""


def _create(folder: Path) -> str:
    wins = [atomic.create_bytes(folder / "claim", text) for text in (b"1", b"2")]
    return "" if wins == [True, False] else "of two writers not exactly one wins"


def _links(folder: Path) -> str:
    (folder / "file").write_text("x")
    os.link(folder / "file", folder / "link")
    return "" if (folder / "link").samefile(folder / "file") else "a hard link is another file"


def _fsync(folder: Path) -> str:
    with (folder / "synced").open("wb", buffering=0) as file:
        file.write(b"x" * 4096)
        os.fsync(file)
    atomic.sync_folder(folder)
    return ""


_TRIALS: Sequence[tuple[str, Callable[[Path], str]]] = (
    ("atomic rename", _rename),
    ("one winner", _create),
    ("fsync", _fsync),
    ("hard links", _links),
)


# ---------------------------------------------------------------- room


def _room(look: Look) -> Iterator[Finding]:
    for name, folder in look.folders.items():
        yield from _room_of(look, "" if name == "workspace" else f"{name}: ", folder)


def _room_of(look: Look, prefix: str, folder: Path) -> Iterator[Finding]:
    failed: dict[str, str] = {}

    def run(command: Sequence[str]) -> str:
        try:
            return run_tool(command)
        except ToolFailed as error:
            failed[command[0]] = str(error)
            raise

    mount, disk = mount_of(folder), look.config.disk
    room = Prober(folder, disk, measure=lambda: size_of(folder), run=run, mount=mount).look()
    what = _room_text(room) + "".join(f"; {why}" for why in failed.values())
    least = max(1 << 30, int(disk.margin_gb * 2**30))
    full = room.free_bytes < least or (room.free_inodes is not None and room.free_inodes < 1000)
    if full or room.share > disk.warn_share:
        state = doubtful(full and look.recipe and room.free_bytes < 1 << 20)
        mend = f"refiner disk --reclaim workspace={look.workspace}"
        yield found(state, what, mend, "a run pauses when the disk is full", name=f"{prefix}room")
    else:
        yield fine(what, name=f"{prefix}room")
    if not room.knows_quota and mount.type.startswith(_SHARED):
        yield found(
            "warning",
            f"nothing says what quota holds on {mount.type} at {mount.point}: free figures of the "
            "file system do not",
            f'{look.command("run")} disk.probe="command:PROGRAM" disk.pattern="REGEX"',
            "without it a run learns of its quota when a write fails",
            name=f"{prefix}quota",
        )
    if room.knows_quota and not mount.type.startswith(_FLEETING):
        yield from _caches(look, folder)


def _room_text(room: Room) -> str:
    free = "no limit" if room.free_bytes >= UNLIMITED else f"{gib(room.free_bytes)} free"
    limit = f" of {gib(room.limit_bytes)}" if room.limit_bytes else ""
    inodes = "" if room.free_inodes is None else f", {room.free_inodes:,} files"
    quota = "" if room.knows_quota else "; no quota is known there"
    note = f" ({room.note})" if room.note else ""
    return f"{free}{limit}{inodes}, says {room.source}{note}{quota}"


def _caches(look: Look, folder: Path) -> Iterator[Finding]:
    """Downloads and compilations that fill the same quota."""
    defaults = {"HF_HOME": "~/.cache/huggingface"}
    here = existing(folder).stat().st_dev
    for name in look.config.disk.watch_caches:
        text = os.environ.get(name, defaults.get(name, ""))
        if not text or not (place := Path(text).expanduser()).is_dir():
            continue
        if place.stat().st_dev == here:
            what = f"{place} fills the same quota as {folder}"
            mend = f"export {name}=/var/tmp/{os.environ.get('USER', 'me')}/{place.name}"
            why = "`refiner disk` shows it, and `--reclaim --caches` empties it"
            yield found("warning", what, mend, why, name=f"cache {name}")


CHECKS = (
    Check("workspace", "folder", _folder, 10, lambda x: x.recipe, _HUNG),
    Check("workspace", "file system", _features, 20, lambda x: x.recipe, _HUNG),
    Check("workspace", "room", _room, limit_s=45, hung=_HUNG),
)
