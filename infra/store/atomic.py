"""Atomic writes, and the detection of full disks.

A write goes to a temporary name in the same folder, is fsynced and renamed, and then the folder is
fsynced. Exclusive writes let exactly one of many writers win, by a hard link to a finished file: no
lock, so it works on NFS and Lustre. Temporary names start with a dot and ``TEMPORARY``; readers
ignore them. A finished folder replaces another by two renames (:func:`swap_in`).

A full disk is a state and not a crash: an exception, or a folder, is checked for ENOSPC or EDQUOT.
Writers report it differently (an ``OSError`` without a number, a ``RuntimeError`` or a library's
own class with only a text), so three things are checked: the chain of causes, the text, and a probe
write. A read-only file system (EROFS), as during a failover to another server, is such a state to a
worker, which can wait; for a user who names a folder it is an error in the name.
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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.host.files import again, names_in, walk
from refiner_core.contract.errors import NoSpaceError

log = logging.getLogger(__name__)

#: Prefix of all half-written files and folders.
TEMPORARY = ".tmp-"
_LINKS_UNSUPPORTED = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
_TRIES = 4
_HALF_WRITTEN_S = 0.05
_SYNC_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


class WarningLog:
    """Warnings, each kind logged once until it is over; repetitions only at debug level."""

    def __init__(self) -> None:
        self._said: set[object] = set()

    def warn(self, sort: object, text: str, *values: object, exc_info: bool = False) -> None:
        """Log a warning, at debug level if it was logged before."""
        level = logging.DEBUG if sort in self._said else logging.WARNING
        self._said.add(sort)
        log.log(level, text, *values, exc_info=exc_info)

    def over(self, sort: object) -> bool:
        """Allow the warning again; True if it had been logged."""
        said = sort in self._said
        self._said.discard(sort)
        return said


def temporary_name(target: Path) -> Path:
    """A unique name beside ``target``."""
    return target.with_name(f"{TEMPORARY}{target.name}-{os.getpid()}-{secrets.token_hex(4)}")


def write_bytes(path: Path, data: bytes, *, sync: bool = True, mode: int = 0o666) -> None:
    """Replace ``path`` by ``data`` in one step. After an error the old file is still there, or the
    new one if only making its name durable failed.

    ``sync=False`` omits fsync, for files that may be lost in a power cut (heartbeats) or are
    fsynced later (rollouts). ``mode`` 0o600: for this user alone.
    """
    temporary = temporary_name(path)
    try:
        _write_new(temporary, data, sync=sync, mode=mode)
        temporary.replace(path)
    except BaseException:
        remove_quietly(temporary)
        raise
    if sync:
        sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8) in one step."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    """Replace ``path`` by a JSON value in one step. NaN and infinity are refused."""
    write_bytes(path, _json_bytes(value), sync=sync)


def create_bytes(path: Path, data: bytes, mode: int = 0o666) -> bool:
    """Write ``path`` unless it exists. Of many callers exactly one gets True.

    After an error the file is not there, or is another writer's.
    """
    temporary = temporary_name(path)
    try:
        _write_new(temporary, data, mode=mode)
        try:
            os.link(temporary, path)
            won = True
        except FileExistsError:
            # A repeated NFS request reports "exists" for a link made by its first try. Comparing
            # the files is reliable; a count of links may come from the client's cache.
            won = again(temporary.samefile, path)
        except OSError as error:
            if error.errno not in _LINKS_UNSUPPORTED:
                raise
            won = _create_by_open(path, data, mode)
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

    A file that is not JSON is read again for a moment: without hard links, a writer may be in the
    middle of it.

    Raises
    ------
    ValueError
        The file is not JSON.
    OSError
        The file cannot be read.
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


def json_files(folder: Path) -> list[Path]:
    """Complete JSON files in a folder, by name; none if there is no folder."""
    return [folder / n for n in names_in(folder) if n.endswith(".json") and n[0] != "."]


def finite(value: Any) -> Any:
    """The JSON value with None (missing) for NaN and infinity."""
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
    """Make a folder's entries survive a power cut, where the file system supports it."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in _SYNC_UNSUPPORTED:
            raise


def settle_folder(path: Path) -> None:
    """Like :func:`sync_folder`, after a change that is already visible and cannot be undone:
    a failure is only logged."""
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
        again(os.lstat, path)  # on a read-only file system, unlink would fail anyway
        path.unlink(missing_ok=True)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        log.warning("could not remove %s: %s", path, error)


def remove_tree(path: Path) -> None:
    """Delete a folder and its contents, or a file or link; failures are only logged."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(again(os.lstat, path).st_mode):
            shutil.rmtree(path, ignore_errors=True)
            if os.path.lexists(path):
                log.warning("could not remove all of %s", path)
            return
    remove_quietly(path)


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _write_new(path: Path, data: bytes, *, sync: bool = True, mode: int = 0o666) -> None:
    # 0o666 and not mkstemp's 0o600: the umask decides whether a group shares the workspace.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def _create_by_open(path: Path, data: bytes, mode: int) -> bool:
    """For file systems without hard links: exclusive, but a reader may see it half-written."""
    try:
        _write_new(path, data, mode=mode)
    except FileExistsError:
        return False
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return True


def swap_in(new: Path, target: Path) -> None:
    """Replace ``target`` by ``new``: it is missing for an instant, never half there. After an
    error it is where it was."""
    put_back(target)
    old = _aside(target)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        put_back(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
    sync_folder(target.parent)


def put_back(target: Path) -> None:
    """Undo the half of an exchange whose process was killed."""
    if not target.exists() and _aside(target).exists():
        _aside(target).rename(target)


def _aside(target: Path) -> Path:
    return target.with_name(f"{TEMPORARY}{target.name}-replaced")


#: Messages of libraries for a full disk or quota, and for a read-only disk. The quota's with its
#: whole name, since paid services say "quota exceeded" of their own; Rust libraries (such as
#: safetensors) give the number as "os error".
_TEXTS = {
    errno.EDQUOT: ("disk quota exceeded", "os error 122", "errno 122"),
    errno.EROFS: ("read-only file system", "os error 30"),
    errno.ENOSPC: ("no space left on device", "os error 28", "errno 28"),
}
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: torch and others report only a failed write; then a probe decides.
_WRITE_TROUBLE = (
    "pytorchstreamwriter failed",
    "inline_container",
    "failed writing",
    "write failed",
    "i/o error",
    "requested and 0 written",
)
PROBE_BYTES = 1 << 20
_FEW_INODES = 16


def _said(text: str) -> list[int]:
    lowered = text.lower()
    return [number for number, texts in _TEXTS.items() if any(t in lowered for t in texts)]


def _numbers_of(error: BaseException) -> list[int]:
    """Numbers (EDQUOT, EROFS, ENOSPC) in an error: its errno, else its words."""
    links = list(chain_of(error))
    numbers = [e.errno for e in links if isinstance(e, OSError) and e.errno in _TEXTS]
    return [n for n in numbers if n is not None] + _said("\n".join(map(str, links)))


def is_read_only(error: BaseException) -> bool:
    """Tell whether ``error`` comes from a read-only file system."""
    return errno.EROFS in _numbers_of(error)


def says_no_space(text: str) -> bool:
    """Tell whether a message reports a full disk or quota."""
    return not {*_said(text)}.isdisjoint(_FULL)


def is_no_space(error: BaseException, folder: Path | None = None) -> bool:
    """Tell whether ``error`` comes from a full disk or quota.

    ``folder`` is where the write went; it is probed only if the error is about writing but gives
    no reason.
    """
    links = list(chain_of(error))
    if any(isinstance(e, NoSpaceError) for e in links):
        return True
    if not {*_numbers_of(error)}.isdisjoint(_FULL):
        return True
    text = "\n".join(f"{type(link).__name__}: {link}" for link in links).lower()
    unsaid = any(isinstance(link, OSError) and link.errno is None for link in links)
    doubtful = unsaid or any(t in text for t in _WRITE_TROUBLE)
    return doubtful and folder is not None and not has_room(folder)


def has_room(folder: Path, size: int = PROBE_BYTES) -> bool:
    """Tell whether ``size`` bytes can be written into ``folder`` now, by writing them.

    Free-space figures ignore quotas, so they are not used. Errors other than a lack of space count
    as space: other code reports them.
    """
    return refusal(folder, size) is None


def refusal(folder: Path, size: int = PROBE_BYTES) -> int | None:
    """The number (ENOSPC, EDQUOT or EROFS) with which ``folder`` refuses ``size`` bytes; None if it
    accepts them."""
    probe = temporary_name(folder / "probe")
    try:
        # Not zeros: a compressing file system would hide them.
        _write_new(probe, os.urandom(size))
    except OSError as error:
        return error.errno if error.errno in _TEXTS else None
    finally:
        remove_quietly(probe)
    return None


def no_space_error(folder: Path, doing: str, error: BaseException | None = None) -> NoSpaceError:
    """The user's error if ``doing`` did not fit into ``folder``."""
    # If the writer gave no reason, a probe does.
    number = None
    if error is not None:
        numbers = _numbers_of(error)
        number = numbers[0] if numbers else refusal(folder)
    why = f" ({error})" if error is not None else ""
    what = f"No space left while {doing} in {folder}{why}"
    with contextlib.suppress(OSError):
        if out_of_inodes(folder):
            what += "; bytes may be free, but no inode: no more files can be created"
    expected = "free space on the disk, and in the quota of the user or group"
    fix = "free some space (or name another `workspace=`) and run the same command again"
    if number == errno.EROFS:
        what = f"The file system was read-only while {doing} in {folder}{why}"
        expected = "a writable file system"
        fix = "nothing while it fails over to another server; else mount it so that it is "
        fix += "writable, and run the same command again"
    found = NoSpaceError(what, expected=expected, fix=fix)
    found.errno = number
    return found


def out_of_inodes(folder: Path) -> bool:
    """Tell whether the file system of ``folder`` accepts hardly any more files, however small."""
    found = os.statvfs(folder)
    return found.f_files > 0 and found.f_favail < _FEW_INODES


@contextlib.contextmanager
def no_space_guard(folder: Path, doing: str, *, waits: bool = False) -> Iterator[None]:
    """Turns a writer's error about a full disk into :class:`NoSpaceError`; also about a read-only
    one if the writer can wait (``waits``)."""
    try:
        yield
    except NoSpaceError:
        raise
    except Exception as error:
        if is_no_space(error, folder) or (waits and is_read_only(error)):
            raise no_space_error(folder, doing, error) from error
        raise


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes, and the errors being handled when it came."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        link = queue.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        queue += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            queue += link.exceptions
