"""Areas ``python``, ``machine`` and ``workspace``: the interpreter and its packages, cores, memory,
limits; and the folders that a run writes to, tried rather than believed.

In: what refiner's own metadata asks for (no package is imported); a workspace and its data root.
Out: findings on versions, permissions, format, kind of file system, what it really does (renames,
links, …, in a scratch folder that is removed again), the room that is left and who says so, and
caches on the same quota.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata as metadata
import os
import platform
import resource
import shlex
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from infra.disk.forecast import size_of_model
from infra.disk.keeper import gib
from infra.disk.probe import UNLIMITED, Prober, Room, ToolFailed, run_tool
from infra.disk.usage import size_of
from infra.doctor.check import Check, Finding, Look, doubtful, fine, found, scratch_in
from infra.host.files import existing, mount_of
from infra.store import atomic
from infra.store.workspace import FORMAT, Workspace, refuse_doubtful
from refiner_core.contract.config import RecipeConfig

#: Files and connections that a worker has open besides its calls of a judge.
_OWN_FILES = 256
_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def _cores(look: Look) -> Finding:
    cores = len(os.sched_getaffinity(0))
    threads = look.config.model.cpu_threads
    asked = max((s.resources.cpus for s in look.here(look.stages)), default=0)
    set_ = {n: os.environ[n] for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if n in os.environ}
    told = "".join(f", {name}={value} (jobs set their own)" for name, value in set_.items())
    if threads > cores:
        what = f"{cores} cores, and model.cpu_threads={threads} would share them{told}"
        return found("warning", what, f"{look.command('run')} model.cpu_threads={cores}")
    if asked > cores:
        what = f"{cores} cores, and a stage that runs here asks for {asked}: it will be slower"
        return found("warning", what + told)
    return fine(f"{cores} cores for this process{told}")


def _memory(look: Look) -> Finding:
    memory, limit = psutil.virtual_memory(), _cgroup_limit()
    total = min(memory.total, limit or memory.total)
    bound = f", limited to {gib(limit)} by a cgroup" if total < memory.total else ""
    asked = max((s.resources.memory_gb for s in look.here(look.stages)), default=0) << 30
    what = f"{gib(memory.total)}, {gib(min(memory.available, total))} available{bound}"
    if asked <= total:
        return fine(what)
    what += f"; a stage that runs here asks for {gib(asked)}"
    why = "the plan's `memory` says what is needed, stage by stage"
    return found("warning", what, f"{look.command('plan')} --json", why)


def _cgroup_limit() -> int:
    """Bytes that this process's control group may take; 0: no limit that can be read."""
    for name in _CGROUP_LIMITS:
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return 0


def _open_files(look: Look) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    calls = look.config.judge.concurrency if look.config.judge.kind == "openai" else 0
    least = max(1024, calls + _OWN_FILES)
    what = f"{soft} at a time (ulimit -n)"
    if soft >= least or soft == resource.RLIM_INFINITY:
        return fine(what)
    mend = f"ulimit -n {least}"
    if hard != resource.RLIM_INFINITY and hard < least:
        mend = f"echo '* hard nofile {least}' | sudo tee -a /etc/security/limits.conf"
    why = f"{calls} calls of the judge at a time" if calls else "data, logs and pipes of jobs"
    return found("warning", f"{what}, and {least} are better", mend, why)


def _shared_memory(look: Look) -> Finding | None:
    folder = Path(look.config.grpo.rollout_server.weights_dir)
    name, why = str(folder), "weights go to rollout servers through it"
    if not look.rollout_servers:
        if not folder.is_dir():
            return None
        return fine(f"{gib(shutil.disk_usage(folder).free)} free (memory as a folder)", name=name)
    state = doubtful(look.serves_here)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        mend = f"{look.command('run')} grpo.rollout_server.weights_dir=/tmp"
        return found(state, "not a folder that can be written to", mend, why, name=name)
    room, wanted = shutil.disk_usage(folder).free, weight_bytes(look.config)
    what = f"{gib(room)} free, the policy's weights take {gib(wanted)}"
    if room >= wanted:
        return fine(what, name=name)
    mend = f"sudo mount -o remount,size={2 * wanted >> 30}G {folder}"
    return found(state, what, mend, why, name=name)


def weight_bytes(config: RecipeConfig) -> int:
    """Bytes that the model's weights take in its own type; 0 where its size is not known."""
    return (size_of_model(config).parameters or 0) * _WEIGHT_BYTES[config.model.dtype]


def _interpreter(look: Look) -> Finding:
    asked = metadata.metadata("refiner")["Requires-Python"] or ""
    version = platform.python_version()
    what = f"Python {version} at {sys.executable}"
    if SpecifierSet(asked).contains(version, prereleases=True):
        return fine(what)
    mend = "python3.12 -m venv .venv && .venv/bin/python -m pip install ."
    return found("broken", f"{what}, and refiner asks {asked}", mend)


def _packages(look: Look) -> list[Finding]:
    wanted = [r for r in _requirements() if r.marker is None or r.marker.evaluate({"extra": ""})]
    wrong: list[Finding] = []
    for requirement in wanted:
        name, there = requirement.name, installed(requirement.name)
        if there is None or not requirement.specifier.contains(there, prereleases=True):
            is_ = "is not installed" if there is None else f"is {there}"
            asked = f"{name}{requirement.specifier}"
            what = f"{name} {is_}, and refiner asks for {asked}"
            wrong.append(found("broken", what, install(asked), name=name))
    named = ("torch", "transformers", "prefect", "submitit", "wandb", "huggingface-hub")
    versions = ", ".join(f"{name} {installed(name)}" for name in named)
    return wrong or [fine(f"all {len(wanted)} as asked for: {versions}")]


def _requirements() -> list[Requirement]:
    return [Requirement(text) for text in metadata.requires("refiner") or ()]


def asked_for(name: str) -> str:
    """A requirement of refiner's own, as pip takes it: ``torch>=2.13,<2.15``."""
    return next((f"{r.name}{r.specifier}" for r in _requirements() if r.name == name), name)


def installed(name: str) -> str | None:
    """The version of an installed distribution; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def install(*asked: str) -> str:
    """The command that installs these into the environment of this process."""
    return shlex.join([sys.executable, "-m", "pip", "install", *asked])


# ---------------------------------------------------------------- the workspace


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
    Check("python", "interpreter", _interpreter, needed=lambda _: True),
    Check("python", "packages", _packages, needed=lambda _: True),
    Check("machine", "cores", _cores),
    Check("machine", "memory", _memory),
    Check("machine", "open files", _open_files),
    Check("machine", "memory as a folder", _shared_memory, needed=lambda x: x.rollout_servers),
    Check("workspace", "folder", _folder, 10, lambda x: x.recipe, _HUNG),
    Check("workspace", "file system", _features, 20, lambda x: x.recipe, _HUNG),
    Check("workspace", "room", _room, limit_s=45, hung=_HUNG),
)
