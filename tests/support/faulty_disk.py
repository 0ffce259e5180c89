"""A disk on which write number *k* fails: everything below one folder, by any code.

Python's ways of changing a disk (``os.open``, ``write``, ``fsync``, ``mkdir``, ``rename``, …, and
the file objects of ``open``) are replaced while the context lasts. Each call below the folder is
one *operation*, counted from 1 in the main thread; a write that fails has written half of its data,
as on a real disk.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Literal

Fault = Literal["refused once", "full from then on", "killed"]
_NUMBERS = {"refused once": errno.EDQUOT, "full from then on": errno.ENOSPC}
#: What works on a full disk, too.
_ALWAYS_WORKS = ("unlink", "rmdir")
_BY_PATH = ("mkdir", "unlink", "remove", "rmdir")
_BY_TARGET = ("rename", "replace", "link")


class Killed(BaseException):
    """The process ends here: whatever it still tries to do to the disk has no effect."""


class FaultyDisk:
    """The disk below ``root``; operation number ``at`` (0: none) goes wrong.

    ``operations`` names all that were tried, in order.
    """

    def __init__(self, root: Path, at: int = 0, fault: Fault = "killed") -> None:
        self.root, self.at, self.fault = os.path.realpath(root), at, fault
        self.operations: list[str] = []
        self.is_dead = False
        self._main = threading.main_thread()

    @contextlib.contextmanager
    def mounted(self) -> Iterator[FaultyDisk]:
        """Every write of this process goes through this object."""
        opened = self._open_file(builtins.open)
        replaced: list[tuple[Any, str, Callable[..., Any]]] = [
            (builtins, "open", opened),
            (io, "open", opened),
            (os, "open", self._open_descriptor(os.open)),
            (os, "write", self._write(os.write)),
            (os, "fsync", self._fsync(os.fsync)),
            *((os, n, self._by_path(n, getattr(os, n))) for n in _BY_PATH),
            *((os, n, self._by_target(n, getattr(os, n))) for n in _BY_TARGET),
        ]
        with in_their_place(replaced):
            yield self

    # ------------------------------------------------------------ one operation

    def operate(self, name: str, path: str, torn: Callable[[], object] = lambda: None) -> None:
        """Count one operation; raises where it goes wrong, after doing half of it (``torn``)."""
        if threading.current_thread() is not self._main:
            if self.is_dead or (self._is_full and name not in _ALWAYS_WORKS):
                raise OSError(errno.ENOSPC, "No space left on device", path)
            return
        if self.is_dead:
            raise Killed
        self.operations.append(f"{name} {os.path.relpath(path, self.root)}")
        if name in _ALWAYS_WORKS and self.fault in _NUMBERS:
            return
        now = len(self.operations) == self.at
        if now and self.fault == "killed":
            torn()
            self.is_dead = True
            raise Killed
        if now or self._is_full:
            if now:
                torn()
            number = _NUMBERS[self.fault]
            raise OSError(number, os.strerror(number), path)

    @property
    def _is_full(self) -> bool:
        passed = 0 < self.at <= len(self.operations)
        return self.fault == "full from then on" and passed

    def _inside(self, target: Any, dir_fd: int | None = None) -> str | None:
        return inside(self.root, target, dir_fd)

    # ------------------------------------------------------------ what is replaced

    def _by_path(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, dir_fd: int | None = None, **more: Any) -> Any:
            if found := self._inside(path, dir_fd):
                self.operate("unlink" if name == "remove" else name, found)
            return function(path, *args, dir_fd=dir_fd, **more)

        return call

    def _by_target(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, target: Any, **more: Any) -> Any:
            if found := self._inside(target):
                self.operate(name, found)
            return function(source, target, **more)

        return call

    def _fsync(self, function: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            if found := self._inside(descriptor):
                self.operate("fsync", found)
                return  # the end of a process loses nothing that was written, so it need not wait
            function(descriptor)

        return call

    def _write(self, function: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
        def call(descriptor: int, data: bytes) -> int:
            if found := self._inside(descriptor):
                half = data[: len(data) // 2]
                self.operate("write", found, lambda: function(descriptor, half))
            return function(descriptor, data)

        return call

    def _open_descriptor(self, function: Any) -> Callable[..., int]:
        def opened(path: Any, flags: int, *args: Any, dir_fd: int | None = None) -> int:
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and (found := self._inside(path, dir_fd)):
                self.operate("open", found)
            return int(function(path, flags, *args, dir_fd=dir_fd))

        return opened

    def _open_file(self, function: Any) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
            found = self._inside(file) if set(mode) & set("wax+") else None
            if found is None:
                return function(file, mode, *args, **more)
            if not isinstance(file, int):
                self.operate("open", found)
            return FaultyFile(self, function(file, mode, *args, **more), found)

        return opened


def inside(root: str, target: Any, dir_fd: int | None = None) -> str | None:
    """The real path of a name or descriptor, if it is below the folder."""
    if isinstance(target, int):
        with contextlib.suppress(OSError):
            target = Path(f"/proc/self/fd/{target}").readlink()
    if not isinstance(target, str | os.PathLike):
        return None
    base = "" if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
    path = os.path.abspath(os.path.join(base, os.fspath(target)))  # noqa: PTH100, PTH118
    return path if path.startswith(root + os.sep) else None


@contextlib.contextmanager
def in_their_place(replaced: Collection[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """These attributes (of module or class, by name) are these functions while it lasts."""
    real = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in real:
            setattr(owner, name, function)


class FaultyFile:
    """A file object whose writes and closing are operations."""

    def __init__(self, disk: FaultyDisk, file: Any, path: str) -> None:
        self._disk, self._file, self._path = disk, file, path

    def write(self, data: Any) -> int:
        """Write at once: nothing waits in a buffer for a disk that is dead by then."""
        self._disk.operate("write", self._path, lambda: self._put(data[: len(data) // 2]))
        return self._put(data)

    def _put(self, data: Any) -> int:
        count = int(self._file.write(data))
        self._file.flush()
        return count

    def close(self) -> None:
        """Small writes fail here on some disks."""
        if self._file.closed:
            return
        self._file.close()
        self._disk.operate("close", self._path)

    def __enter__(self) -> FaultyFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
