"""Folders that really are full: a btrfs quota (EDQUOT), a small tmpfs or ext4 (ENOSPC, bytes or
inodes).

    with quota_folder(tmp_path / "q", 64) as disk:
        disk.folder …          # writes beyond 64 MiB end with errno 122, for root too
        disk.set_limit(128)

Each needs root and skips (or fails, where it is promised) without what it needs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.require import require

_SPARE_MIB = 256  # btrfs wants an image that is larger than the quota


class QuotaFolder(NamedTuple):
    """A subvolume with a quota; ``top`` is the whole file system."""

    folder: Path
    top: Path

    def set_limit(self, mib: int | None) -> None:
        """Change the quota while it is in use; None: no limit."""
        limit = "none" if mib is None else f"{mib}M"
        _run("btrfs", "qgroup", "limit", limit, str(self.top / "v"))

    def set_read_only(self, value: bool) -> None:
        """Refuse new files, renames and deletions (EROFS), as a file system does that fails over.
        A mount cannot be made read-only while files are open for writing; what is open here can
        still be written."""
        _run("btrfs", "property", "set", str(self.top / "v"), "ro", "true" if value else "false")


@contextlib.contextmanager
def quota_folder(folder: Path, mib: int) -> Iterator[QuotaFolder]:
    """A folder with a real quota of ``mib`` MiB; its free figures know nothing of it."""
    top = folder.with_name(f"{folder.name}.top")
    folder.mkdir(parents=True, exist_ok=True)
    mkfs = ("mkfs.btrfs", "-q", "-m", "single", "-d", "single")
    with _mounted(top, mib + _SPARE_MIB, mkfs, "loop,nodatasum"):
        _run("btrfs", "quota", "enable", str(top))
        _run("btrfs", "subvolume", "create", str(top / "v"))
        _run("btrfs", "quota", "rescan", "-w", str(top), check=False)
        _run("mount", "--bind", str(top / "v"), str(folder))
        disk = QuotaFolder(folder, top)
        disk.set_limit(mib)
        try:
            yield disk
        finally:
            _unmount(folder)


@contextlib.contextmanager
def _mounted(folder: Path, mib: int, mkfs: tuple[str, ...], options: str) -> Iterator[None]:
    """An image of ``mib`` MiB with a file system of its own at ``folder``."""
    tools = os.geteuid() == 0 and shutil.which(mkfs[0])
    require("quota", bool(tools), f"needs root and {mkfs[0]}")
    folder.mkdir(parents=True, exist_ok=True)
    image = folder.with_name(f"{folder.name}.img")
    with image.open("wb") as file:
        file.truncate(mib << 20)
    try:
        _run(*mkfs, str(image))
        mounted = _run("mount", "-o", options, str(image), str(folder), check=False)
        require("quota", not mounted.returncode, f"no loop mount: {mounted.stderr}")
        try:
            yield
        finally:
            _unmount(folder)
    finally:
        image.unlink()


@contextlib.contextmanager
def small_tmpfs(folder: Path, *, mib: int = 16, inodes: int | None = None) -> Iterator[Path]:
    """A folder with so much room, or for so many files and folders."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={mib}m" + (f",nr_inodes={inodes}" if inodes else "")
    mounted = _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder), check=False)
    require("quota", not mounted.returncode, "needs root, to mount a small tmpfs")
    try:
        yield folder
    finally:
        _unmount(folder)


def fill(path: Path, leave: int = 0) -> None:
    """Write ``path`` until nothing fits but ``leave`` bytes."""
    spare = path.with_name(f"{path.name}.spare")
    spare.write_bytes(os.urandom(leave))  # at a limit, btrfs refuses to shorten a file
    written = 0
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                written += file.write(os.urandom(1 << 16))
                if written % (1 << 22) == 0:
                    os.fsync(file.fileno())
        except OSError as error:
            if error.errno not in (errno.EDQUOT, errno.ENOSPC):
                raise
    spare.unlink()
    os.sync()


def _unmount(folder: Path) -> None:
    deadline = time.monotonic() + 10
    while _run("umount", str(folder), check=False).returncode:
        if time.monotonic() > deadline:
            _run("umount", "-l", str(folder))
            return
        time.sleep(0.1)


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=check, capture_output=True, text=True)
