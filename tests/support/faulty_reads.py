"""A file system that fails to *answer*: read number *k* below one folder fails, by any code.

In: a folder, a number, an errno. Out: while the context lasts, each opening for reading, read,
listing, ``stat`` and ``access`` below the folder, and each start of a process, is one *operation*,
counted from 1 in all threads, or in those whose names begin as asked. The operation fails once, as
it does on NFS when another node has replaced a file, or from then on, as on a mount that has gone.
Writes are left alone; see :mod:`tests.support.faulty_disk` for those.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from tests.support.faulty_disk import in_their_place, inside

Lasting = Literal["once", "from then on"]
_BY_PATH = ("stat", "lstat", "listdir", "scandir")
_STARTS = ("fork", "posix_spawn")
_READS = ("read", "readinto", "readline", "readlines", "__next__")


class FaultyReads:
    """Reads below ``root``; operation number ``at`` (0: none) fails with the error ``number``.

    Parameters
    ----------
    lasting
        ``from then on`` lasts until :meth:`mend`.
    thread
        How the names of the threads begin whose operations count; none: all do.

    Attributes
    ----------
    operations
        All that were tried, in order.
    """

    def __init__(
        self, root: Path, at: int = 0, number: int = 0, lasting: Lasting = "once", thread: str = ""
    ) -> None:
        self.root, self.at, self.number, self.lasting = os.path.realpath(root), at, number, lasting
        self.thread = thread
        self.operations: list[str] = []
        self._lock = threading.Lock()
        self._mended = False

    @contextlib.contextmanager
    def mounted(self) -> Iterator[FaultyReads]:
        """Every read of this process goes through this object."""
        opened = self._open_file(builtins.open)
        starts = self._start("start a process", subprocess.Popen.__init__)
        with in_their_place(
            [
                (builtins, "open", opened),
                (io, "open", opened),
                (os, "open", self._open_descriptor(os.open)),
                (os, "access", self._access(os.access)),
                *((os, name, self._by_path(name, getattr(os, name))) for name in _BY_PATH),
                *((os, name, self._start(name, getattr(os, name))) for name in _STARTS),
                (subprocess.Popen, "__init__", starts),
            ]
        ):
            yield self

    def fix(self) -> None:
        """Nothing fails any more."""
        self._mended = True

    def fails(self, name: str, path: str = "") -> bool:
        """Count one operation: whether it is to fail."""
        if not threading.current_thread().name.startswith(self.thread):
            return False
        with self._lock:
            where = os.path.relpath(path, self.root) if path else ""
            self.operations.append(f"{name} {where}".strip())
            count = len(self.operations)
        due = count == self.at or (self.lasting == "from then on" and 0 < self.at < count)
        return due and not self._mended

    def operate(self, name: str, path: str = "") -> None:
        """Count one operation; raises where it goes wrong."""
        if self.fails(name, path):
            raise OSError(self.number, os.strerror(self.number), path or None)

    # ------------------------------------------------------------ what is replaced

    def _by_path(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, dir_fd: int | None = None, **more: Any) -> Any:
            if found := inside(self.root, path, dir_fd):
                self.operate(name, found)
            if dir_fd is not None:
                more["dir_fd"] = dir_fd
            return function(path, *args, **more)

        return call

    def _access(self, function: Callable[..., bool]) -> Callable[..., bool]:
        def call(path: Any, *args: Any, **more: Any) -> bool:
            found = inside(self.root, path)
            if found and self.fails("access", found):
                return False  # it knows no other way to say so
            return function(path, *args, **more)

        return call

    def _start(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            self.operate(name)
            return function(*args, **more)

        return call

    def _open_descriptor(self, function: Any) -> Callable[..., int]:
        def opened(path: Any, flags: int, *args: Any, dir_fd: int | None = None) -> int:
            reads = not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if reads and (found := inside(self.root, path, dir_fd)):
                self.operate("open", found)
            return int(function(path, flags, *args, dir_fd=dir_fd))

        return opened

    def _open_file(self, function: Any) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
            found = None if set(mode) & set("wax+") else inside(self.root, file)
            if found is None or isinstance(file, int):
                return function(file, mode, *args, **more)
            self.operate("open", found)
            return FaultyReader(self, function(file, mode, *args, **more), found)

        return opened


class FaultyReader:
    """A file object whose reads are operations."""

    def __init__(self, reads: FaultyReads, file: Any, path: str) -> None:
        self._reads, self._file, self._path = reads, file, path

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        if name not in _READS:
            return found

        def read(*args: Any) -> Any:
            self._reads.operate("read", self._path)
            return found(*args)

        return read

    def __iter__(self) -> FaultyReader:
        return self

    def __next__(self) -> Any:
        return self.__getattr__("__next__")()

    def __enter__(self) -> FaultyReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
