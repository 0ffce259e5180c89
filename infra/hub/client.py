"""A client for one repository on the Hub, with the few operations of publishing.

In: a repository id and operations; files with the hashes computed by their stage. Out: commits,
trees with hashes, branches and tags; every failure as a refiner error.

Requests go through one HTTP session of ours, so they are counted, bounded in time and
interruptible: rate limits, outages and lost connections are waited for within
``publish.patience_s``. The client's own retries, which have no time limit (six tries, each after as
long as the Hub asks for), never see a failure, because this session raises only final ones. Files
go through huggingface_hub without being hashed again; while they are sent, progress is reported and
a request to stop is noticed.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote

import httpx2
import huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo, RepoFile
from huggingface_hub.utils import (
    build_hf_headers,
    disable_progress_bars,
    hf_raise_for_status,
    parse_ratelimit_headers,
)
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils._runtime import is_xet_available

from infra.host.secrets import masked
from infra.hub.errors import (
    RevisionConflict,
    TimeBudget,
    UploadError,
    in_our_words,
    outage,
    rejection,
    translated,
)
from infra.publishing import FileToPublish, bytes_of, replaced, stopped
from refiner_core.contract.types import Progress

#: Files sent at the same time.
THREADS = 4
#: Smaller files are read and checked before sending: the Hub may store them in git itself, and then
#: has no SHA-256 that would reveal a replaced file.
READ_BYTES = 10 << 20
#: Progress of a large file is reported after this many bytes.
_TELL_BYTES = 32 << 20
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
#: The client requests this for words in its user agent, and works without an answer. The request
#: must neither use up patience nor reach another Hub than the one being published to.
_BY_THE_WAY = "/api/agent-harnesses"
_FINAL = (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError)
#: The client repeats this one at once and for ever; here it is waited for.
_BUSY = "another conflicting operation is in progress"
#: Effectively unlimited.
_MOST_S = 366 * 86_400.0
#: The client has one session in a process, so one publication at a time uses it.
_ONE_AT_A_TIME = threading.Lock()


class RemoteFile(NamedTuple):
    """A file of a commit: its size, its git blob, and the SHA-256 of a large one."""

    bytes: int
    oid: str
    sha256: str | None


class HubClient:
    """One repository; see :func:`infra.hub.target.open_hub`."""

    def __init__(self, repo_id: str, endpoint: str, session: _HubSession) -> None:
        self.repo_id, self.endpoint = repo_id, endpoint
        self.session = session
        self._api = huggingface_hub.HfApi(endpoint=endpoint)
        #: Whether large files go by Xet, the official Hub's own transfer, outside this session.
        self.by_xet = is_xet_available()

    def address(self, revision: str) -> str:
        """Address where a person finds a revision."""
        return masked(f"{self.endpoint}/{self.repo_id}/tree/{quote(revision, safe='')}")

    # ------------------------------------------------------------------ reading
    def whoami(self) -> dict[str, Any]:
        """The owner of the token."""
        with self._words("asking whose the token is"):
            found: dict[str, Any] = self._api.whoami()
            return found

    def info(self) -> ModelInfo | None:
        """The repository; None if there is none that this token can see."""
        with self._words("asking for the repository"):
            try:
                return self._api.model_info(self.repo_id)
            except RepositoryNotFoundError as error:
                if error.response.status_code != 404:
                    raise
                return None

    def refs(self) -> dict[str, str]:
        """Commits by name: ``tags/step-50``, ``heads/main``."""
        with self._words("reading its branches and tags"):
            found = self._api.list_repo_refs(self.repo_id)
            tags = {f"tags/{r.name}": str(r.target_commit) for r in found.tags}
            return tags | {f"heads/{r.name}": str(r.target_commit) for r in found.branches}

    def tree(self, commit: str) -> dict[str, RemoteFile]:
        """Path -> file of a commit."""
        with self._words("reading its files"):
            return {
                e.path: RemoteFile(e.size, e.blob_id, e.lfs.sha256 if e.lfs else None)
                for e in self._api.list_repo_tree(self.repo_id, recursive=True, revision=commit)
                if isinstance(e, RepoFile)
            }

    def text(self, revision: str, name: str) -> str | None:
        """A small file of a revision; None if there is none."""
        path = f"{quote(revision, safe='')}/{quote(name)}"
        with self._words(f"reading {name}"):
            response = huggingface_hub.get_session().get(
                f"{self.endpoint}/{self.repo_id}/resolve/{path}", headers=build_hf_headers()
            )
            if response.status_code == 404:
                return None
            hf_raise_for_status(response)
            return str(response.content.decode(errors="replace"))

    # ------------------------------------------------------------------ changing
    def create(self, *, private: bool) -> None:
        """Create the repository unless it exists."""
        with self._words("creating the repository"), _unless(409):
            self._api.create_repo(self.repo_id, private=private)

    def commit(self, branch: str, parent: str, operations: Sequence[Any], message: str) -> str:
        """Send the files of ``operations`` and commit them on top of ``parent``; the new commit.

        Raises
        ------
        RevisionConflict
            The branch is no longer at ``parent``, or is gone.
        UploadError
            The storage of large files did not accept one.
        """
        with self._words("sending files"):
            try:
                self._send_by_xet(branch, operations)
                done = self._api.create_commit(
                    self.repo_id,
                    list(operations),
                    commit_message=message,
                    revision=branch,
                    parent_commit=parent,
                    num_threads=THREADS,
                )
            except RevisionNotFoundError as error:
                raise RevisionConflict(f"{branch} is gone") from error
            except HfHubHTTPError as error:
                path = error.response.request.url.path
                if error.response.status_code in (409, 412) and "/commit/" in path:
                    raise RevisionConflict(f"{branch} has moved on") from error
                raise
            except RuntimeError as error:  # the client's class for a failed upload
                if words := rejection(error):
                    raise UploadError(words) from None
                raise
            return str(done.oid)

    def _send_by_xet(self, branch: str, operations: Sequence[Any]) -> None:
        """Send large files one by one, with progress and a check for stops in between.

        The transfer hashes what it reads, which reveals a replaced source.
        """
        for operation in operations if self.by_xet else ():
            if not getattr(operation, "is_large", False):
                continue
            try:
                how = {"revision": branch, "num_threads": THREADS, "free_memory": False}
                self._api.preupload_lfs_files(self.repo_id, [operation], **how)
            except (RuntimeError, ConnectionError, TimeoutError) as error:
                why = f"the Xet transfer failed: {error}"
                found = translated(error, self.session.doing, self.repo_id)
                raise found or outage(why, self.session.doing, self.repo_id) from None
            operation.check_sent()

    def pause(self, failures: int, why: str = "") -> None:
        """Wait before the retry after failure number ``failures``.

        Raises
        ------
        HubOutage
            Patience is over; only if ``why`` gives the failure.
        """
        patience = self.session.patience
        if not patience.wait(failures, None, patience.clock()) and why:
            raise outage(why, self.session.doing, self.repo_id)

    def create_branch(self, branch: str, commit: str) -> None:
        """Create a branch unless it exists."""
        with self._words(f"making the branch {branch}"):
            self._api.create_branch(self.repo_id, branch=branch, revision=commit, exist_ok=True)

    def delete_branch(self, branch: str) -> None:
        """Delete a branch if it exists."""
        with self._words(f"removing the branch {branch}"), _unless(404):
            self._api.delete_branch(self.repo_id, branch=branch)

    def create_tag(self, tag: str, commit: str) -> None:
        """Create a tag unless it exists (wherever it points)."""
        with self._words(f"making the tag {tag}"):
            self._api.create_tag(self.repo_id, tag=tag, revision=commit, exist_ok=True)

    def delete_tag(self, tag: str) -> None:
        """Delete a tag if it exists."""
        with self._words(f"moving the tag {tag}"), _unless(404):
            self._api.delete_tag(self.repo_id, tag=tag)

    @contextmanager
    def _words(self, doing: str) -> Iterator[None]:
        self.session.doing = doing
        with in_our_words(doing, self.repo_id):
            yield


@contextmanager
def hub_client(
    repo_id: str, endpoint: str, patience: TimeBudget, timeout_s: float
) -> Iterator[HubClient]:
    """Make huggingface_hub use our session until the end of the block."""
    with in_our_words("checking for permission", repo_id):
        if constants.HF_HUB_OFFLINE:
            raise OfflineModeIsEnabled("HF_HUB_OFFLINE")
    with _ONE_AT_A_TIME:
        session = _HubSession(repo_id, patience, timeout_s)
        disable_progress_bars()
        huggingface_hub.set_client_factory(lambda: session)
        try:
            yield HubClient(repo_id, endpoint, session)
        finally:
            huggingface_hub.set_client_factory(default_client_factory)
            session.close()


@contextmanager
def _unless(status: int) -> Iterator[None]:
    """Ignore an answer that means that the request's effect exists already."""
    try:
        yield
    except HfHubHTTPError as error:
        if error.response.status_code != status:
            raise


class _HubSession(httpx2.Client):
    """A session that retries for as long as ``patience`` lasts."""

    def __init__(self, repo_id: str, patience: TimeBudget, timeout_s: float) -> None:
        super().__init__(follow_redirects=True, timeout=timeout_s)
        #: The present operation, for messages.
        self.doing = "asking for the repository"
        self._repo_id, self.patience = repo_id, patience

    def request(self, method: str, url: Any, **kwargs: Any) -> httpx2.Response:
        """Send a request until the answer is final.

        Raises
        ------
        HubOutage
            There was none within the limit of patience.
        Interrupted
            A stop was requested.
        """
        if str(url).endswith(_BY_THE_WAY):
            raise httpx2.ConnectError("not asked")
        if kwargs.get("timeout") is None:
            kwargs.pop("timeout", None)  # the client's "none" would wait for ever
        body: Any = kwargs.get("data")
        begin = body.tell() if hasattr(body, "seek") else None
        failures = 0
        while True:
            self.patience.check()
            since = self.patience.clock()
            try:
                response = super().request(method, url, **kwargs)
            except _FINAL:
                raise
            except httpx2.TransportError as error:
                why, asked = f"{type(error).__name__}: {error}".rstrip(": "), None
            else:
                if not _passing(response):
                    return response
                why, asked = _words(response), asked_wait(response)
            failures += 1
            if not self.patience.wait(failures, asked, since):
                why += "" if asked is None else f"; it asks to wait {asked:.0f} s"
                raise outage(why, self.doing, self._repo_id) from None
            if begin is not None:
                body.seek(begin)


def asked_wait(response: httpx2.Response) -> float | None:
    """Seconds that the Hub asks to wait: its rate limit's reset, or ``Retry-After``."""
    limit = parse_ratelimit_headers(response.headers)
    value = response.headers.get("retry-after", "").strip()
    if limit is not None and limit.remaining == 0:
        value = str(limit.reset_in_seconds)
    return min(float(value), _MOST_S) if value.isdecimal() else None


def _passing(response: httpx2.Response) -> bool:
    """True if the same request may get another answer soon."""
    if response.status_code in _TRANSIENT:
        return True
    return response.status_code == 409 and _BUSY in response.text


def _words(response: httpx2.Response) -> str:
    said = response.headers.get("x-error-message") or response.reason_phrase
    return f"{response.status_code}: {said}"


@dataclass(eq=False)
class _Sending:
    """Progress of sent files, reported by any of the sending threads."""

    total: int
    progress: Callable[[Progress], None]
    should_stop: Callable[[], bool]

    def __post_init__(self) -> None:
        self._done: set[str] = set()
        self._bytes, self._untold = 0, 0
        self._lock = threading.Lock()

    def moved(self, name: str, count: int) -> None:
        """Note ``count`` more sent bytes of a file; 0 is its end."""
        if self.should_stop():
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
            self.progress(Progress(len(self._done), self.total, f"sending {name}", values))


class _ProgressFile(io.FileIO):
    """A file that reports how much of it was read."""

    def __init__(self, path: str, name: str, sending: _Sending) -> None:
        super().__init__(path)
        self._repo_name, self._sending = name, sending

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if data:
            self._sending.moved(self._repo_name, len(data))
        return data or b""


class _Addition(CommitOperationAdd):  # type: ignore[misc]
    """A file with a known hash; ``trusted`` is whether the receiver will check it.

    Attributes
    ----------
    is_large
        Its bytes are read from disk while being sent.
    """

    def __init__(self, file: FileToPublish, sending: _Sending, *, trusted: bool) -> None:
        small = file.source is None or file.bytes <= READ_BYTES
        super().__init__(file.name, _checked(file) if small else file.source)
        self.is_large = not small
        if trusted:
            self.upload_info.sha256 = bytes.fromhex(file.sha256)
        self._file, self._sending = file, sending

    def check_sent(self) -> None:
        """Check a transfer's hash against the file's.

        Raises
        ------
        StageFailed
            It was another file.
        """
        info = self.upload_info
        if info.is_hashed and info.sha256.hex() != self._file.sha256:
            raise replaced(self._file, "has other content")
        info.sha256 = bytes.fromhex(self._file.sha256)
        self._sending.moved(self._file.name, 0)

    @contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
        """The bytes; ``with_tqdm`` marks the client's upload."""
        if with_tqdm and isinstance(self.path_or_fileobj, str):
            with _ProgressFile(self.path_or_fileobj, self.path_in_repo, self._sending) as file:
                yield file
        else:
            with super().as_file() as plain:
                yield plain
        if with_tqdm:
            self._sending.moved(self.path_in_repo, 0)


def _checked(file: FileToPublish) -> bytes:
    """The bytes of a small file, checked against its hash."""
    data = bytes_of(file)
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise replaced(file, "has other content")
    return data


def operations(
    wanted: Sequence[FileToPublish],
    gone: Sequence[str],
    progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    *,
    trusted: bool,
) -> list[Any]:
    """Operations that send ``wanted`` and delete ``gone``.

    ``trusted``: the receiver of large files checks their hashes; otherwise the transfer computes
    them as it reads.

    Raises
    ------
    StageFailed
        A small file differs from what its stage wrote.
    """
    sending = _Sending(len(wanted), progress, should_stop)
    deleted = [CommitOperationDelete(name) for name in gone]
    return [*(_Addition(file, sending, trusted=trusted) for file in wanted), *deleted]
