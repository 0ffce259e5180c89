"""The files of a commit, as huggingface_hub takes them.

In: files with the hashes that their stage has computed. Out: operations of a commit. Nothing is
hashed again; while bytes go out, progress is told and a stop is noticed.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from huggingface_hub import CommitOperationAdd, CommitOperationDelete

from infra.hub.errors import stopped
from infra.publishing.targets import FileToPublish, bytes_of
from refiner_core.contract.errors import StageFailed
from refiner_core.contract.types import Progress

#: Smaller files are read and checked before they go out: the Hub may keep them in git itself, and
#: then it knows no SHA-256 that would tell that one was replaced.
READ_BYTES = 10 << 20
#: Progress of a large file is told this often.
_TELL_BYTES = 32 << 20


class Sending:
    """What is told while files go out, by any of the sending threads."""

    def __init__(
        self, total: int, progress: Callable[[Progress], None], should_stop: Callable[[], bool]
    ) -> None:
        self._total, self._progress, self._should_stop = total, progress, should_stop
        self._done: set[str] = set()
        self._bytes, self._untold = 0, 0
        self._lock = threading.Lock()

    def moved(self, name: str, count: int) -> None:
        """``count`` more bytes of a file are on their way; 0 is its end."""
        if self._should_stop():
            raise stopped()
        with self._lock:
            self._bytes += count
            self._untold += count
            if not count:
                self._done.add(name)
            elif self._untold < _TELL_BYTES:
                return
            self._untold = 0
            values = {"sent_bytes": float(self._bytes)}
            self._progress(Progress(len(self._done), self._total, f"sending {name}", values))


class _Told(io.FileIO):
    """A file that says how much of it was read."""

    def __init__(self, path: str, name: str, sending: Sending) -> None:
        super().__init__(path)
        self._repo_name, self._sending = name, sending

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if data:
            self._sending.moved(self._repo_name, len(data))
        return data or b""


class _Addition(CommitOperationAdd):  # type: ignore[misc]
    """A file whose hash is known; ``trusted`` is whether the receiver will check it.

    Attributes
    ----------
    is_large
        Its bytes are read from disk while it is sent.
    """

    def __init__(self, file: FileToPublish, sending: Sending, *, trusted: bool) -> None:
        small = file.source is None or file.bytes <= READ_BYTES
        super().__init__(file.name, _checked(file) if small else file.source)
        self.is_large = not small
        if trusted:
            self.upload_info.sha256 = bytes.fromhex(file.sha256)
        self._file, self._sending = file, sending

    def check_sent(self) -> None:
        """After a transfer that has hashed what it read: was it the file that was meant?

        Raises
        ------
        StageFailed
            It was another one.
        """
        info = self.upload_info
        if info.is_hashed and info.sha256.hex() != self._file.sha256:
            raise replaced(self._file, "has other content")
        info.sha256 = bytes.fromhex(self._file.sha256)
        self._sending.moved(self._file.name, 0)

    @contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
        """The bytes; ``with_tqdm`` is how the client says that it uploads them."""
        if with_tqdm and isinstance(self.path_or_fileobj, str):
            with _Told(self.path_or_fileobj, self.path_in_repo, self._sending) as file:
                yield file
        else:
            with super().as_file() as plain:
                yield plain
        if with_tqdm:
            self._sending.moved(self.path_in_repo, 0)


def _checked(file: FileToPublish) -> bytes:
    """The bytes of a small file, if they still are what they were."""
    data = bytes_of(file)
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise replaced(file, "has other content")
    return data


def replaced(file: FileToPublish, why: str) -> StageFailed:
    """The error for a source that is no longer what its stage has left."""
    return StageFailed(
        f"{file.source or file.name} {why}, so it is not published: it was another file when its "
        "stage ended.",
        expected="the output as the stage has left it",
        fix="run the recipe again; a stage whose output is damaged is made again",
    )


def operations(
    wanted: Sequence[FileToPublish],
    gone: Sequence[str],
    progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    *,
    trusted: bool,
) -> list[Any]:
    """Operations that send ``wanted`` and delete ``gone``.

    ``trusted`` says that who receives large files checks their hashes; otherwise the transfer
    computes them as it reads.

    Raises
    ------
    StageFailed
        A small file is not what its stage has left.
    """
    sending = Sending(len(wanted), progress, should_stop)
    deleted = [CommitOperationDelete(name) for name in gone]
    return [*(_Addition(file, sending, trusted=trusted) for file in wanted), *deleted]
