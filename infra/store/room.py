"""Room on the disk: recognise that there is none, as a state of the world and not as a crash.

In: an exception, or a folder. Out: whether it means ENOSPC or EDQUOT, and a
:class:`~refiner_core.contract.errors.NoSpaceError` that says what to do. Writers disagree about
how they say it (an ``OSError`` without a number, a ``RuntimeError`` or a library's own class with
only a text), so three things are asked: the chain of causes, the text, and a probe write.

A file system that is read-only (EROFS) while it fails over to another server is a state like that
to a worker, which can wait; to whoever names a folder it is a mistake in the name.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from infra.store.atomic import remove_quietly, temporary_name
from refiner_core.contract.errors import NoSpaceError

log = logging.getLogger(__name__)

_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
_TEXTS = (
    "no space left on device",
    "disk quota exceeded",  # and not only "quota exceeded": paid services say that of themselves
    "os error 28",  # Rust libraries (safetensors)
    "os error 122",
    "errno 28",
    "errno 122",
)
_READ_ONLY_TEXTS = ("read-only file system", "os error 30")
#: torch and others say only that a write went wrong; then a probe decides.
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


def is_read_only(error: BaseException) -> bool:
    """Whether ``error`` comes from a file system that takes no writes at all."""
    return any(
        (isinstance(link, OSError) and link.errno == errno.EROFS)
        or any(t in str(link).lower() for t in _READ_ONLY_TEXTS)
        for link in chain_of(error)
    )


def says_no_space(text: str) -> bool:
    """Whether a message speaks of a full disk or quota."""
    lowered = text.lower()
    return any(t in lowered for t in _TEXTS)


def is_no_space(error: BaseException, folder: Path | None = None) -> bool:
    """Whether ``error`` comes from a full disk or quota.

    ``folder`` is where the write went; it is probed only where the error itself is about writing
    but does not say why.
    """
    doubtful = False
    for link in chain_of(error):
        if isinstance(link, NoSpaceError):
            return True
        if isinstance(link, OSError) and link.errno in _NUMBERS:
            return True
        text = f"{type(link).__name__}: {link}"
        if says_no_space(text):
            return True
        doubtful |= isinstance(link, OSError) and link.errno is None
        doubtful |= any(t in text.lower() for t in _WRITE_TROUBLE)
    return doubtful and folder is not None and not has_room(folder)


def has_room(folder: Path, size: int = PROBE_BYTES) -> bool:
    """Whether ``size`` bytes can be written into ``folder`` now: by writing them.

    Free-space figures know nothing of quotas, so they are not asked. Errors other than a lack of
    room count as room: they are somebody else's to report.
    """
    return refusal(folder, size) is None


def refusal(folder: Path, size: int = PROBE_BYTES) -> int | None:
    """The number (ENOSPC, EDQUOT or EROFS) with which ``folder`` refuses ``size`` bytes; None if it
    takes them."""
    probe = temporary_name(folder / "probe")
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(size))  # not zeros: a compressing file system would hide them
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno if error.errno in (*_NUMBERS, errno.EROFS) else None
    finally:
        remove_quietly(probe)
    return None


def number_of(error: BaseException, folder: Path) -> int | None:
    """Which of ENOSPC, EDQUOT and EROFS an error means; a writer that does not say is asked by a
    probe."""
    for link in chain_of(error):
        if isinstance(link, OSError) and link.errno in _NUMBERS:
            return link.errno
    text = " ".join(str(link).lower() for link in chain_of(error))
    if any(t in text for t in ("disk quota exceeded", "os error 122", "errno 122")):
        return errno.EDQUOT
    if is_read_only(error):
        return errno.EROFS
    return errno.ENOSPC if says_no_space(text) else refusal(folder)


def no_space_error(folder: Path, doing: str, error: BaseException | None = None) -> NoSpaceError:
    """The error a user reads when ``doing`` did not fit into ``folder``."""
    number = None if error is None else number_of(error, folder)
    try:
        free = f"; {shutil.disk_usage(folder).free / 2**20:.0f} MiB are free there"
        if out_of_inodes(folder):
            free += ", but no inode: no more files can be created"
    except OSError:
        free = ""
    why = f" ({error})" if error is not None else ""
    found = NoSpaceError(
        f"No room left while {doing} in {folder}{why}{free}",
        expected="room on the disk, and in the quota of the user or group",
        fix="free some space (or name another `workspace=`) and run the same command again",
    )
    if number == errno.EROFS:
        found = NoSpaceError(
            f"The file system was read-only while {doing} in {folder}{why}",
            expected="a file system that takes writes",
            fix="nothing while it only fails over to another server: it is tried again; else mount "
            "it so that it can be written, and run the same command again",
        )
    found.errno = number
    return found


def out_of_inodes(folder: Path) -> bool:
    """Whether the file system of ``folder`` takes hardly any more files, however small."""
    found = os.statvfs(folder)
    return found.f_files > 0 and found.f_favail < _FEW_INODES


@contextlib.contextmanager
def no_space_guard(folder: Path, doing: str, *, waits: bool = False) -> Iterator[None]:
    """Turns whatever a writer says about a full disk into :class:`NoSpaceError`, and about a
    read-only one, too, where who writes can wait (``waits``)."""
    try:
        yield
    except NoSpaceError:
        raise
    except Exception as error:
        if is_no_space(error, folder) or (waits and is_read_only(error)):
            raise no_space_error(folder, doing, error) from error
        raise


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error and all that caused it or was being handled when it came."""
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
