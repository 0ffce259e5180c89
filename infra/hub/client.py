"""A repository on the Hub, in the few words that publishing needs.

In: a repository id and what to ask or do. Out: commits, trees with hashes, branches and tags; every
failure as an error of ours. Requests go through :mod:`infra.hub.session`, so they are counted,
bounded in time, and can be stopped; uploads go through huggingface_hub.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from infra.host.secrets import masked
from infra.hub.errors import Moved, Rejected, in_our_words, outage, rejection, translated
from refiner_core.contract.config import PublishConfig

if TYPE_CHECKING:
    from infra.hub.session import HubSession, Traffic

OFFICIAL = "https://huggingface.co"
#: Files that are sent at the same time.
THREADS = 4


class RemoteFile(NamedTuple):
    """A file of a commit: its size, its git blob, and the SHA-256 of a large one."""

    bytes: int
    oid: str
    sha256: str | None


class RepoInfo(NamedTuple):
    """A repository: the commit at ``main``, and whether it is private."""

    commit: str
    private: bool
    names: frozenset[str]


class Refs(NamedTuple):
    """Name -> commit."""

    branches: dict[str, str]
    tags: dict[str, str]


def endpoint_now() -> str:
    """The Hub's address."""
    return (os.environ.get("HF_ENDPOINT") or OFFICIAL).rstrip("/")


@contextmanager
def open_hub(
    repo_id: str,
    config: PublishConfig,
    endpoint: str | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    patience_s: float | None = None,
) -> Iterator[HubClient]:
    """A client for one repository until the end of the block."""
    endpoint = (endpoint or endpoint_now()).rstrip("/")
    _choose_transfer(endpoint)
    from infra.hub.session import hub_session

    patience_s = config.patience_s if patience_s is None else patience_s
    with hub_session(repo_id, patience_s, config.request_timeout_s, should_stop) as session:
        yield HubClient(repo_id, endpoint, session)


class HubClient:
    """One repository; see :func:`open_hub`."""

    def __init__(self, repo_id: str, endpoint: str, session: HubSession) -> None:
        import huggingface_hub

        self.repo_id, self.endpoint = repo_id, endpoint
        self._session = session
        self._api = huggingface_hub.HfApi(endpoint=endpoint)
        #: Whether large files go by Xet, the official Hub's own transfer, which is no HTTP of ours.
        self.by_xet = has_xet()

    @property
    def traffic(self) -> Traffic:
        """What went over the wire so far."""
        return self._session.traffic

    def address(self, revision: str) -> str:
        """Where a person finds a revision."""
        return masked(f"{self.endpoint}/{self.repo_id}/tree/{quote(revision, safe='')}")

    # ------------------------------------------------------------------ reading
    def whoami(self) -> dict[str, Any]:
        """Whom the token belongs to."""
        with self._words("asking whose the token is"):
            found: dict[str, Any] = self._api.whoami()
            return found

    def info(self) -> RepoInfo | None:
        """The repository; None if there is none that this token may see."""
        from huggingface_hub.errors import RepositoryNotFoundError

        with self._words("asking for the repository"):
            try:
                found = self._api.model_info(self.repo_id)
            except RepositoryNotFoundError as error:
                if error.response.status_code != 404:
                    raise
                return None
            names = frozenset(s.rfilename for s in found.siblings or ())
            return RepoInfo(found.sha, bool(found.private), names)

    def refs(self) -> Refs:
        """Branches and tags."""
        with self._words("reading its branches and tags"):
            found = self._api.list_repo_refs(self.repo_id)
            branches = {r.name: r.target_commit for r in found.branches}
            return Refs(branches, {r.name: r.target_commit for r in found.tags})

    def tree(self, commit: str) -> dict[str, RemoteFile]:
        """Path -> file of a commit."""
        from huggingface_hub.hf_api import RepoFile

        with self._words("reading its files"):
            return {
                e.path: RemoteFile(e.size, e.blob_id, e.lfs.sha256 if e.lfs else None)
                for e in self._api.list_repo_tree(self.repo_id, recursive=True, revision=commit)
                if isinstance(e, RepoFile)
            }

    def text(self, revision: str, name: str) -> str | None:
        """A small file of a revision; None if there is none."""
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        path = f"{quote(revision, safe='')}/{quote(name)}"
        with self._words(f"reading {name}"):
            response = get_session().get(
                f"{self.endpoint}/{self.repo_id}/resolve/{path}", headers=build_hf_headers()
            )
            if response.status_code == 404:
                return None
            hf_raise_for_status(response)
            return str(response.content.decode(errors="replace"))

    # ------------------------------------------------------------------ changing
    def create(self, *, private: bool) -> None:
        """Make the repository, unless it is there."""
        with self._words("creating the repository"), _unless(409):
            self._api.create_repo(self.repo_id, private=private)

    def commit(self, branch: str, parent: str, operations: Sequence[Any], message: str) -> str:
        """Send what operations bring, and commit them on top of ``parent``; the new commit.

        Raises
        ------
        Moved
            The branch is no longer at ``parent``, or is gone.
        Rejected
            The storage of large files has not taken one.
        """
        from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

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
                raise Moved(f"{branch} is gone") from error
            except HfHubHTTPError as error:
                path = error.response.request.url.path
                if error.response.status_code in (409, 412) and "/commit/" in path:
                    raise Moved(f"{branch} has moved on") from error
                raise
            except RuntimeError as error:  # the client's word for an upload that failed
                if words := rejection(error):
                    raise Rejected(words) from None
                raise
            return str(done.oid)

    def _send_by_xet(self, branch: str, operations: Sequence[Any]) -> None:
        """Large files one after the other, so that progress is told and a stop noticed between.

        What the transfer reads it hashes on the way, which is how a replaced source is noticed.
        """
        for operation in operations if self.by_xet else ():
            if not getattr(operation, "is_large", False):
                continue
            try:
                self._api.preupload_lfs_files(
                    self.repo_id,
                    [operation],
                    revision=branch,
                    num_threads=THREADS,
                    free_memory=False,
                )
            except (RuntimeError, ConnectionError, TimeoutError) as error:
                why = f"the Xet transfer failed: {error}"
                found = translated(error, self._session.doing, self.repo_id)
                raise found or outage(why, self._session.doing, self.repo_id) from None
            operation.check_sent()
            self.traffic.sent_bytes += operation.upload_info.size  # at most: known parts are not

    def let_others_end(self, looks: int) -> None:
        """Wait a little before the next look, if there is patience left for it."""
        self._session.pause(looks)

    def pause(self, failures: int, why: str) -> None:
        """Wait before another try of what failed for the ``failures``-th time.

        Raises
        ------
        HubOutage
            Patience is over.
        """
        if not self._session.pause(failures):
            raise outage(why, self._session.doing, self.repo_id)

    def create_branch(self, branch: str, commit: str) -> None:
        """Make a branch, unless it is there."""
        with self._words(f"making the branch {branch}"):
            self._api.create_branch(self.repo_id, branch=branch, revision=commit, exist_ok=True)

    def delete_branch(self, branch: str) -> None:
        """Remove a branch, if it is there."""
        with self._words(f"removing the branch {branch}"), _unless(404):
            self._api.delete_branch(self.repo_id, branch=branch)

    def create_tag(self, tag: str, commit: str) -> None:
        """Make a tag, unless it is there (where it points then is not said)."""
        with self._words(f"making the tag {tag}"):
            self._api.create_tag(self.repo_id, tag=tag, revision=commit, exist_ok=True)

    def delete_tag(self, tag: str) -> None:
        """Remove a tag, if it is there."""
        with self._words(f"moving the tag {tag}"), _unless(404):
            self._api.delete_tag(self.repo_id, tag=tag)

    @contextmanager
    def _words(self, doing: str) -> Iterator[None]:
        self._session.doing = doing
        with in_our_words(doing, self.repo_id):
            yield


@contextmanager
def _unless(status: int) -> Iterator[None]:
    """For requests whose effect is there already if the Hub answers that."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError as error:
        if error.response.status_code != status:
            raise


def has_xet() -> bool:
    """Whether the client sends large files by Xet."""
    from huggingface_hub import constants

    return not constants.HF_HUB_DISABLE_XET and importlib.util.find_spec("hf_xet") is not None


def _choose_transfer(endpoint: str) -> None:
    """Other Hubs than the official one have no Xet storage, and the client knows no way back."""
    if endpoint == OFFICIAL:
        return
    if os.environ.setdefault("HF_HUB_DISABLE_XET", "1").upper() not in ("1", "ON", "YES", "TRUE"):
        return  # the user says that there is
    if constants := sys.modules.get("huggingface_hub.constants"):
        constants.HF_HUB_DISABLE_XET = True  # type: ignore[attr-defined]  # it was read at import
