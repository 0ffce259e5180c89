"""Files that are either there completely or not at all.

In: bytes, text or JSON values. Out: files that a reader on any node sees whole. A write goes to a
temporary name in the same folder, is fsynced and renamed, and then the folder is fsynced. Exclusive
writes let exactly one of many writers win, by a hard link to a finished file: no lock, so it works
on NFS and Lustre. Temporary names start with a dot and ``TEMPORARY``; readers ignore them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import secrets
import shutil
import stat
import sys
import time
from pathlib import Path
from typing import Any

from infra.host.reading import again, walk

log = logging.getLogger(__name__)

#: Every half-written file or folder of ours starts with this.
TEMPORARY = ".tmp-"
LINKS_UNSUPPORTED = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
_TRIES = 4
_HALF_WRITTEN_S = 0.05
_SYNC_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


def temporary_name(target: Path) -> Path:
    """A name beside ``target`` that nobody else uses."""
    return target.with_name(f"{TEMPORARY}{target.name}-{os.getpid()}-{secrets.token_hex(4)}")


def write_bytes(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Replace ``path`` by ``data`` in one step; on an error the old file is still there, or the new
    one, if all that failed was to make its name durable.

    ``sync=False`` leaves out fsync, for what may be lost in a power cut (heartbeats) or is fsynced
    later (rollouts).
    """
    temporary = temporary_name(path)
    try:
        _write_new(temporary, data, sync=sync)
        temporary.replace(path)
    except BaseException:
        remove_quietly(temporary)
        raise
    if sync:
        sync_folder(path.parent)


def write_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Replace ``path`` by ``text`` (UTF-8) in one step."""
    write_bytes(path, text.encode(), sync=sync)


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    """Replace ``path`` by a JSON value in one step. NaN and infinity are refused."""
    write_bytes(path, _json_bytes(value), sync=sync)


def create_bytes(path: Path, data: bytes) -> bool:
    """Write ``path`` unless it exists. Of many callers exactly one gets True.

    An error means that the file is not there, or is somebody else's.
    """
    temporary = temporary_name(path)
    try:
        _write_new(temporary, data, sync=True)
        try:
            os.link(temporary, path)
            won = True
        except FileExistsError:
            # A repeated NFS request reports "exists" for a link that its first try has made. Which
            # file it is tells that for sure; a count of links may be one that the client remembers.
            won = again(temporary.samefile, path)
        except OSError as error:
            if error.errno not in LINKS_UNSUPPORTED:
                raise
            won = _create_by_open(path, data)
    finally:
        remove_quietly(temporary)
    if won:
        settle_folder(path.parent)
    return won


def create_json(path: Path, value: Any) -> bool:
    """Write a JSON value to ``path`` unless it exists; True for the one caller that did."""
    return create_bytes(path, _json_bytes(value))


def read_json(path: Path) -> Any | None:
    """The JSON value in ``path``; None if there is no such file.

    A file that is no JSON is read again for a moment: where there are no hard links, somebody may
    just be writing it.

    Raises
    ------
    ValueError
        The file is not JSON.
    OSError
        It cannot be read.
    """
    for left in reversed(range(_TRIES)):
        try:
            return json.loads(again(path.read_text, encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            if not left:
                raise
            time.sleep(_HALF_WRITTEN_S)
    return None


def finite(value: Any) -> Any:
    """The JSON value with None (missing) for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync_file(path: Path) -> None:
    """Make a file's content survive a power cut."""
    descriptor = again(os.open, path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make a folder's entries survive a power cut, where the file system knows how."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in _SYNC_UNSUPPORTED:
            raise


def settle_folder(path: Path) -> None:
    """Like :func:`sync_folder`, after something that everybody can see by now: that it may not
    survive a power cut is a warning, for it cannot be taken back."""
    try:
        sync_folder(path)
    except OSError as error:
        log.warning("%s could not be made durable: %s", path, error)


def sync_tree(folder: Path) -> None:
    """Fsync every file and folder below ``folder``, and itself."""
    for root, names in walk(folder):
        for name in names:
            sync_file(root / name)
        sync_folder(root)


def remove_quietly(path: Path) -> None:
    """Delete a temporary file; a failure is only logged, so that it never hides the first error."""
    try:
        again(os.lstat, path)  # of a file system that is read-only, unlink would complain anyway
        path.unlink(missing_ok=True)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        log.warning("could not remove %s: %s", path, error)


def remove_tree(path: Path) -> None:
    """Delete a folder with all that is in it, or a file or link; what resists is only logged."""
    try:
        is_tree = stat.S_ISDIR(again(os.lstat, path).st_mode)
    except OSError:
        is_tree = False
    if not is_tree:
        remove_quietly(path)
        return

    def complain(_function: Any, name: str, error: BaseException) -> None:
        if not isinstance(error, FileNotFoundError):
            log.warning("could not remove %s: %s", name, error)

    if sys.version_info >= (3, 12):
        shutil.rmtree(path, onexc=complain)
    else:
        shutil.rmtree(path, onerror=lambda function, name, e: complain(function, name, e[1]))


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _write_new(path: Path, data: bytes, *, sync: bool) -> None:
    # 0o666 and not mkstemp's 0o600: the umask decides whether a group shares the workspace.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def _create_by_open(path: Path, data: bytes) -> bool:
    """For file systems without hard links: exclusive, but a reader may see it half-written."""
    try:
        _write_new(path, data, sync=True)
    except FileExistsError:
        return False
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return True
