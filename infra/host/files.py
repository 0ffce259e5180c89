"""Files and file systems: reads with retries, and the mount of a folder.

A network file system fails to answer now and then, or denies for a moment a file that another node
has just created; asked again, it answers. Such a moment must have no consequence: no run ends for
it, and nothing is recorded. An error that persists is raised unchanged, and never counts as a
missing file.

The mount of a folder is read from the kernel's tables (:class:`Mount`); its project (quota), its
btrfs subvolume, and syncing a file system are system calls. No program is run.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import fcntl
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import psutil

P = ParamSpec("P")
T = TypeVar("T")

#: Passing errors: the server's, not the file's.
PASSING = frozenset(
    {
        *(errno.ESTALE, errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.EREMOTEIO),
        *(errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN),
    }
)
#: Pauses before the second, third and last try. Two nodes may replace a file one after the other.
_PAUSES_S = (0.0, 0.05, 0.3)

_FSGETXATTR = 0x801C581F  # struct fsxattr: flags, extent size, extents, project id, …
_BTRFS_INO_LOOKUP = 0xD0009412
_BTRFS_FIRST_FREE = 256


def again(read: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    """Result of a read that changes nothing and may be repeated.

    A missing or forbidden file is believed at the second try; other passing errors are waited out
    for a moment.

    Raises
    ------
    OSError
        The error persists.
    """
    said: set[int | None] = set()
    for pause_s in (*_PAUSES_S, None):
        try:
            return read(*args, **more)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            if error.errno in said or pause_s is None:
                raise
            said.add(error.errno)
            _refresh(error.filename)
        except OSError as error:
            if error.errno not in PASSING or pause_s is None:
                raise
            time.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def status_of(path: Path) -> os.stat_result | None:
    """Result of ``stat``; None if the file is missing."""
    try:
        return again(path.stat)
    except (FileNotFoundError, NotADirectoryError):
        return None


def exists(path: Path) -> bool:
    """True if it exists. Unlike ``Path.exists``, errors are raised in every version of Python."""
    return status_of(path) is not None


def opens(path: Path) -> bool:
    """True if a file exists on its server: if another node has just deleted it, NFS may report it
    for another minute, but not when it is opened."""
    try:
        again(path.open, "rb").close()
    except FileNotFoundError:
        return False
    return True


def is_folder(path: Path) -> bool:
    """True if it exists and is a folder."""
    found = status_of(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def names_in(folder: Path) -> list[str]:
    """Names of a folder's entries, sorted; none if it is missing."""
    try:
        return sorted(again(os.listdir, folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def walk(folder: Path) -> list[tuple[Path, list[str]]]:
    """A folder and all folders below it, each with the names of its files; links to folders are not
    followed. A folder that cannot be listed is an error, where ``rglob`` and ``os.walk`` would skip
    its contents."""

    def refuse(error: OSError) -> None:
        raise error

    found = again(lambda: list(os.walk(folder, onerror=refuse)))
    return [(Path(root), names) for root, _, names in found]


def files_within(folder: Path) -> dict[Path, os.stat_result]:
    """Every file below a folder, sorted, with its status; none if the folder is missing."""
    if not is_folder(folder):
        return {}
    paths = sorted(root / name for root, names in walk(folder) for name in names)
    found = {path: status_of(path) for path in paths}
    return {path: s for path, s in found.items() if s is not None and stat.S_ISREG(s.st_mode)}


def make_folder(folder: Path) -> None:
    """Create a folder and its parents unless they exist."""
    try:
        again(folder.mkdir, parents=True, exist_ok=True)
    except FileExistsError:  # it exists, but was reported as not a folder
        again(folder.mkdir, parents=True, exist_ok=True)


def link(source: Path, target: Path) -> bool:
    """Make a hard link; False if that is impossible (another file system, another user's file, a
    link in its place)."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EEXIST):
            raise
        return False
    if target.is_symlink():
        target.unlink()
        return False
    return True


def _refresh(filename: str | bytes | None) -> None:
    """Have a network file system ask its server again, by opening the folder."""
    if isinstance(filename, str | os.PathLike):
        with contextlib.suppress(OSError):
            os.close(os.open(Path(filename).parent, os.O_RDONLY))


class Mount(NamedTuple):
    """One mounted file system: its point, type (``ext4``, ``nfs4``, ``lustre`` …) and source."""

    point: Path
    type: str
    source: str


def existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    path = path.expanduser().absolute()
    while not exists(path) and path != path.parent:
        path = path.parent
    return path


def mount_of(path: Path) -> Mount:
    """The mount of ``path``, by the kernel's own table."""
    target, best = existing(path).resolve(), Mount(Path("/"), "unknown", "")
    for found in psutil.disk_partitions(all=True):
        point = Path(found.mountpoint)
        if target.is_relative_to(point) and len(point.parts) >= len(best.point.parts):
            best = Mount(point, found.fstype, found.device)
    return best


def project_id(folder: Path) -> int:
    """The project (quota) of new files in ``folder`` (as `lsattr -pd` shows); 0: none, or not
    supported."""
    with contextlib.suppress(OSError), _opened(folder) as descriptor:
        answer = fcntl.ioctl(descriptor, _FSGETXATTR, bytes(28))
        return int(struct.unpack_from("=IIII", answer)[3])
    return 0


def btrfs_subvolume(folder: Path) -> int | None:
    """Id of the btrfs subvolume of ``folder``; None if it is not btrfs."""
    # Written in place: the request is longer than ioctl's limit for a constant.
    request = bytearray(struct.pack("=QQ4080x", 0, _BTRFS_FIRST_FREE))
    with contextlib.suppress(OSError), _opened(folder) as descriptor:
        fcntl.ioctl(descriptor, _BTRFS_INO_LOOKUP, request, True)
        return int(struct.unpack_from("=Q", request)[0])
    return None


def sync_file_system(folder: Path) -> None:
    """Write out delayed data, so that deleted space is free again.

    btrfs returns quota only then; elsewhere it is harmless.
    """
    call = getattr(ctypes.CDLL(ctypes.util.find_library("c")), "syncfs", None)
    with contextlib.suppress(OSError), _opened(folder) as descriptor:
        if call is not None and call(descriptor) == 0:
            return
    os.sync()


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(existing(folder), os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
