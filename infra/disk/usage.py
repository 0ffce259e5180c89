"""Disk use of a workspace: by run, by stage and by kind, in bytes allocated and inodes.

In: a workspace. Out: one :class:`DiskItem` per thing that can be shown or deleted alone (a
checkpoint, an attempt's output, a code snapshot …). Files with several links count once. Links to
elsewhere are never followed, and files that vanish in the meantime are left out.

Caches on the same quota (``disk.watch_caches``) are found by environment variables or paths. They
are shown and never deleted: that is for their own tools.

Triton, Inductor, vLLM and CUDA compile for minutes, and keep the result in the home folder by
default, which has a quota and is slow on a cluster. Those that the user has not placed go into a
folder of this user alone on the job's node (:func:`use_node_caches`). All of them write under a
temporary name and rename, so jobs of one node share them. A cache holds code that is run: a folder
that another user has made, or could write to, is not used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from infra.host.files import again, names_in
from infra.process.watchdog import is_private
from infra.store import atomic
from infra.store.layout import AttemptPaths, Layout, StagePaths

log = logging.getLogger(__name__)

Kind = Literal[
    "checkpoints",  # to resume from
    "outputs",  # of stages for others: weights, prepared data, results
    "rollouts",
    "logs",  # metrics, logs, records of attempts
    "trackers",
    "temporary",  # half-written, of attempts that run or have died
    "code",  # snapshots
    "published",
    "judgements",  # stored answers of judges
    "records",  # the rest: of stages, runs and the workspace
    "caches",
]
KINDS: tuple[Kind, ...] = (
    *("checkpoints", "outputs", "rollouts", "logs", "trackers"),
    *("temporary", "code", "published", "judgements", "records", "caches"),
)
#: The only folder of another trainer (stage ``command``): its checkpoints, under its own names.
WORK = "work"
_BLOCK = 512  # of st_blocks, whatever the file system's block size
_STEP = re.compile(r"step-(\d+)")
_OF_ATTEMPT = re.compile(re.escape(atomic.TEMPORARY) + r"step-\d+-a(\d+)")


class DiskSize(NamedTuple):
    """Disk use of an item, and what deleting it alone would free (``gain``, bytes): a file with
    links elsewhere frees nothing."""

    bytes: int = 0
    inodes: int = 0
    gain: int = 0

    def plus(self, other: DiskSize) -> DiskSize:
        """The sum of both."""
        return DiskSize(*(a + b for a, b in zip(self, other, strict=True)))


class DiskItem(NamedTuple):
    """One thing on the disk."""

    path: Path
    kind: Kind
    size: DiskSize
    stage_id: str = ""
    attempt: int = 0
    step: int | None = None


#: Counted files with several links: device and inode.
Seen = set[tuple[int, int]]


def size_of(path: Path, seen: Seen | None = None) -> DiskSize:
    """Disk use of a file or folder, itself included; nothing if it is not there."""
    seen = set() if seen is None else seen
    try:
        status = again(path.lstat)
    except OSError:
        return DiskSize()
    total = _size(status, seen)
    stack = [str(path)] if stat.S_ISDIR(status.st_mode) else []
    while stack:
        with contextlib.suppress(OSError), again(os.scandir, stack.pop()) as entries:
            for entry in entries:  # vanished or unreadable files are left out
                with contextlib.suppress(FileNotFoundError):
                    total = total.plus(_size(entry.stat(follow_symlinks=False), seen))
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
    return total


def _size(status: os.stat_result, seen: Seen) -> DiskSize:
    used = status.st_blocks * _BLOCK
    if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
        key = (status.st_dev, status.st_ino)
        if key in seen:
            return DiskSize()
        seen.add(key)
        return DiskSize(used, 1, 0)
    return DiskSize(used, 1, used)


def measure(layout: Layout) -> DiskSize:
    """Total use of a workspace."""
    seen: Seen = set()
    total = size_of(layout.control, seen)
    if not layout.data.is_relative_to(layout.control):
        total = total.plus(size_of(layout.data, seen))
    return total


def take_inventory(layout: Layout) -> list[DiskItem]:
    """All items of a workspace; none if it is missing."""
    seen: Seen = set()
    found: list[DiskItem] = []
    for stage_id in sorted({p.name for p in _folders(layout.stages, layout.data / "stages")}):
        found += _of_stage(layout.stage(stage_id), stage_id, seen)
    found += [DiskItem(p, "code", size_of(p, seen)) for p in _folders(layout.code)]
    found += [DiskItem(p, "published", size_of(p, seen)) for p in _entries(layout.published)]
    found += [DiskItem(p, "judgements", size_of(p, seen)) for p in _by_age(layout.judgements)]
    skip = {layout.stages, layout.code, layout.published, layout.judgements}
    skip.add(layout.data / "stages")
    for path in _entries(layout.control, layout.data):
        if path not in skip:
            kind: Kind = "temporary" if _is_temporary(path) else "records"
            found.append(DiskItem(path, kind, size_of(path, seen)))
    return found


def inventory_of(layout: Layout, stage_ids: Iterable[str]) -> list[DiskItem]:
    """Items in the folders of some stages."""
    seen: Seen = set()
    return [i for name in stage_ids for i in _of_stage(layout.stage(name), name, seen)]


def _of_stage(stage: StagePaths, stage_id: str, seen: Seen) -> Iterator[DiskItem]:
    for path in _entries(stage.checkpoints):
        match, step = _OF_ATTEMPT.fullmatch(path.name), _STEP.fullmatch(path.name)
        kind: Kind = "temporary" if _is_temporary(path) else "checkpoints"
        attempt, number = int(match[1]) if match else 0, int(step[1]) if step else None
        yield DiskItem(path, kind, size_of(path, seen), stage_id, attempt, number)
    there = StagePaths(stage.data, stage.data).attempt_numbers()
    for attempt in sorted({*stage.attempt_numbers(), *there}):
        yield from _of_attempt(stage.attempt(attempt), stage_id, attempt, seen)
    for path in _entries(stage.control, stage.data):
        if path.name not in ("checkpoints", "attempts"):
            kind = "checkpoints" if path.name == WORK else "records"
            kind = "temporary" if _is_temporary(path) else kind
            yield DiskItem(path, kind, size_of(path, seen), stage_id)


def _of_attempt(paths: AttemptPaths, stage_id: str, number: int, seen: Seen) -> Iterator[DiskItem]:
    known: dict[Path, Kind] = {
        paths.output: "outputs",
        paths.rollouts: "rollouts",
        paths.tracker: "trackers",
    }
    for path in _entries(paths.control, paths.data):
        kind: Kind = "temporary" if _is_temporary(path) else known.get(path, "logs")
        yield DiskItem(path, kind, size_of(path, seen), stage_id, number)


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(atomic.TEMPORARY)


def _entries(*folders: Path) -> Iterator[Path]:
    """Entries of folders, each listed once; unreadable ones are empty."""
    for folder in dict.fromkeys(folders):
        with contextlib.suppress(OSError):
            yield from [folder / name for name in names_in(folder)]


def _by_age(folder: Path) -> list[Path]:
    """Entries of a folder, oldest first."""
    found = []
    for path in _entries(folder):
        with contextlib.suppress(OSError):  # vanished
            found.append((path.lstat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def _folders(*folders: Path) -> list[Path]:
    return [p for p in _entries(*folders) if p.is_dir() and not _is_temporary(p)]


class UsageRow(NamedTuple):
    """Disk use of one run (or of stages without one), of one kind."""

    run: str
    kind: Kind
    size: DiskSize


def by_run_and_kind(items: Sequence[DiskItem], runs: Mapping[str, Sequence[str]]) -> list[UsageRow]:
    """Sums of use. ``runs`` maps run ids, oldest first, to the ids of their stages; a stage of
    several runs counts for the newest of them, a stage of none under ``""``."""
    owner = {stage: run for run, stages in runs.items() for stage in stages}
    sums: dict[tuple[str, Kind], DiskSize] = {}
    for item in items:
        key = (owner.get(item.stage_id, "") if item.stage_id else "", item.kind)
        sums[key] = sums.get(key, DiskSize()).plus(item.size)
    order = [*reversed(list(runs)), ""]
    rows = [UsageRow(run, kind, size) for (run, kind), size in sums.items()]
    return sorted(rows, key=lambda r: (order.index(r.run), KINDS.index(r.kind)))


# ---------------------------------------------------------------- caches

#: Settings of caches of compiled code, and the folder of each.
COMPILE_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "CUDA_CACHE_PATH": "cuda",
}


def node_caches() -> Path:
    """Folder of this user's caches on this node."""
    return Path(tempfile.gettempdir()) / f"refiner-caches-{os.getuid()}"


def use_node_caches(settings: MutableMapping[str, str] = os.environ) -> None:
    """Place the caches of compiled code that have no place yet on this node's own disk."""
    parent = node_caches()
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        log.warning("compilers' caches stay in their usual places: %s", error)
        return
    if not is_private(str(parent)):
        log.warning("compilers' caches stay in their usual places: %s is not ours alone", parent)
        return
    for name, folder in COMPILE_CACHES.items():
        settings[name] = settings.get(name) or str(parent / folder)


def find_caches(names: Iterable[str]) -> list[DiskItem]:
    """Caches named by environment variables or paths, with their sizes; those of compilers are
    where jobs of this node put them."""
    jobs = {name: str(node_caches() / folder) for name, folder in COMPILE_CACHES.items()}
    given = (os.environ.get(name) or jobs.get(name) or name for name in names)
    folders = (Path(place).expanduser().absolute() for place in given)
    return [DiskItem(f, "caches", size_of(f)) for f in dict.fromkeys(folders) if f.is_dir()]
