"""A folder takes another's place in one step.

In: a finished folder and the name that it is to have. Out: the name holds the new one; at no time
half of it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import shutil
from pathlib import Path

from infra.store import atomic

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def swap_in(new: Path, target: Path) -> None:
    """Put ``new`` in the place of ``target``; what was there is under ``new``'s name afterwards, or
    gone. After an error it is where it was."""
    put_back(target)
    if not target.exists() or not any(target.iterdir()):
        new.rename(target)
    elif not _exchange(new, target):
        # A file system that cannot exchange two names (NFS): gone for an instant, never half.
        old = _aside(target)
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        try:
            new.rename(target)
        except BaseException:
            put_back(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    atomic.sync_folder(target.parent)


def put_back(target: Path) -> None:
    """Undo the half of an exchange after which its process was killed."""
    if not target.exists() and _aside(target).exists():
        _aside(target).rename(target)


def _aside(target: Path) -> Path:
    return target.with_name(f"{atomic.TEMPORARY}{target.name}-replaced")


def _exchange(one: Path, other: Path) -> bool:
    """Linux's ``renameat2`` with RENAME_EXCHANGE; False where there is none."""
    library = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    rename = getattr(library, "renameat2", None)
    if rename is None:
        return False
    names = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if rename(*names) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))
