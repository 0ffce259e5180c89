"""Where a folder lies: file system, device, project id. Reads the kernel's tables, runs nothing.

In: a path. Out: a :class:`Mount`. Also what only system calls say: the project that a folder is
accounted to, the btrfs subvolume, and forcing a file system to write out what it holds back.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from infra.host.reading import exists

_FSGETXATTR = 0x801C581F  # struct fsxattr: flags, extent size, extents, project id, …
_BTRFS_INO_LOOKUP = 0xD0009412
_BTRFS_FIRST_FREE = 256
_MOUNTINFO = Path("/proc/self/mountinfo")


class Mount(NamedTuple):
    """One mounted file system: where, its type (``ext4``, ``nfs4``, ``lustre`` …), its source."""

    point: Path
    type: str
    source: str


def existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    path = path.expanduser().absolute()
    while not exists(path) and path != path.parent:
        path = path.parent
    return path


def mount_of(path: Path, table: str | None = None) -> Mount:
    """The mount that ``path`` lies on, by the kernel's own table (``table``: that text)."""
    text = _read(_MOUNTINFO) if table is None else table
    target = existing(path).resolve() if table is None else path
    best = Mount(Path("/"), "unknown", "")
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        before, after = left.split(" "), right.split(" ")
        if len(before) < 5 or len(after) < 2:
            continue
        point = Path(_unescaped(before[4]))
        if target.is_relative_to(point) and len(point.parts) >= len(best.point.parts):
            best = Mount(point, after[0], _unescaped(after[1]))
    return best


def project_id(folder: Path) -> int:
    """The project that new files in ``folder`` are accounted to (as `lsattr -pd` shows); 0: none,
    or a file system that knows none."""
    with _opened(folder) as descriptor:
        if descriptor is None:
            return 0
        try:
            answer = fcntl.ioctl(descriptor, _FSGETXATTR, bytes(28))
        except OSError:
            return 0
        return int(struct.unpack_from("=IIII", answer)[3])


def btrfs_subvolume(folder: Path) -> int | None:
    """Id of the btrfs subvolume that holds ``folder``; None where it is no btrfs."""
    with _opened(folder) as descriptor:
        if descriptor is None:
            return None
        try:
            # Written in place: the request is longer than what ioctl takes as a constant.
            request = bytearray(struct.pack("=QQ4080x", 0, _BTRFS_FIRST_FREE))
            fcntl.ioctl(descriptor, _BTRFS_INO_LOOKUP, request, True)
        except OSError:
            return None
        return int(struct.unpack_from("=Q", request)[0])


def sync_file_system(folder: Path) -> None:
    """Write out what the file system holds back, so that what was deleted is free again.

    btrfs gives quota back only then; elsewhere it does no harm.
    """
    library = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    call = getattr(library, "syncfs", None)
    with _opened(folder) as descriptor:
        if descriptor is None or call is None or call(descriptor) != 0:
            os.sync()


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int | None]:
    try:
        descriptor = os.open(existing(folder), os.O_RDONLY)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _unescaped(text: str) -> str:
    """The kernel writes blanks and backslashes of a path as octal numbers."""
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text
