"""Publishing to the Hugging Face Hub.

In: a :class:`Publication`. Out: a revision of its repository that holds it, verified hash by hash.

    read: repository, branches and tags, files and refiner.json of the revision
    decide: what differs, whether main moves forward
    send: large files (unless they are there already), one commit on a known parent
    verify: the tree of that commit
    name: the tag, last

Each step reads the present state and does only what is missing, so publishing can be interrupted
at any request and repeated. A commit states its parent, so two publishers cannot overwrite each
other: the second one reads and decides again. ``publish.per_step`` sets how steps share a
repository:

    tag     one commit on main per step, with a tag. A late step is committed on a branch of its
            own, which is deleted once the tag is there; main never goes back.
    branch  each step on its branch; the last one on main, too.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from infra.host.secrets import masked
from infra.hub.errors import (
    RevisionConflict,
    TimeBudget,
    UploadError,
    in_our_words,
    outage,
    refused,
)
from infra.publishing import (
    FileToPublish,
    FolderTarget,
    Publication,
    PublishedFiles,
    Target,
    all_files,
    bytes_of,
    check_run,
    check_update,
    holds,
    moves_main,
    replaced,
)
from infra.store.checkpoints import hash_of
from infra.store.stage_records import EVIDENCE, PublishedState, read_evidence
from refiner_core.cards.facts import step_revision
from refiner_core.contract.config import PublishConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, HubOutage, HubRefused
from refiner_core.contract.types import Progress

if TYPE_CHECKING:
    from infra.hub.client import HubClient, RemoteFile


log = logging.getLogger(__name__)

OFFICIAL = "https://huggingface.co"
#: Conflicts with other publishers before they count as an outage.
ROUNDS = 8
#: Most sends of a large file that arrives damaged.
SENDS = 3
#: Longest wait before a run.
_PATIENCE_S = 5.0
_WRITING = ("write", "admin", "contributor")
#: The Hub's own files in a new repository.
_OF_THE_HUB = frozenset({".gitattributes"})


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
    from infra.hub.client import hub_client

    patience = TimeBudget(config.patience_s if patience_s is None else patience_s, should_stop)
    with hub_client(repo_id, endpoint, patience, config.request_timeout_s) as hub:
        yield hub


def _choose_transfer(endpoint: str) -> None:
    """Disable Xet for other Hubs than the official one: they have none, and the client no
    fallback."""
    if endpoint == OFFICIAL:
        return
    if os.environ.setdefault("HF_HUB_DISABLE_XET", "1").upper() not in ("1", "ON", "YES", "TRUE"):
        return  # set by the user
    if constants := sys.modules.get("huggingface_hub.constants"):
        constants.HF_HUB_DISABLE_XET = True  # type: ignore[attr-defined]  # it was read at import


class HubTarget:
    """Repositories on the Hub at ``HF_ENDPOINT``, with the token of the environment or of
    ``hf auth login``."""

    def __init__(self, config: PublishConfig, endpoint: str | None = None) -> None:
        self._config, self._endpoint = config, endpoint

    def publish(
        self,
        publication: Publication,
        progress: Callable[[Progress], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> PublishedFiles:
        """See :class:`infra.publishing.Target`."""
        _check_sources(publication.files)
        with open_hub(publication.repo_id, self._config, self._endpoint, should_stop) as hub:
            work = _Publishing(hub, self._config, publication, progress, should_stop)
            for looks in range(1, ROUNDS + 1):
                try:
                    return work.publish()
                except RevisionConflict as moved:
                    log.info("%s: %s; looking again", publication.repo_id, moved)
                    hub.pause(looks)
            raise outage("others keep on changing it", "publishing", publication.repo_id)

    def read_text(self, repo_id: str, revision: str, name: str) -> str | None:
        """See :class:`infra.publishing.Target`."""
        with open_hub(repo_id, self._config, self._endpoint) as hub:
            return hub.text(revision, name)


class _Revision(NamedTuple):
    """A commit, its files, and the publication that it holds."""

    commit: str
    files: dict[str, RemoteFile]
    published_state: PublishedState | None


@dataclass(eq=False)
class _Publishing:
    """Reads the repository, and decides."""

    hub: HubClient
    config: PublishConfig
    publication: Publication
    progress: Callable[[Progress], None]
    should_stop: Callable[[], bool]
    changed: set[str] = field(default_factory=set)
    on_side_branch: bool = False
    evidence: PublishedState | None = None

    def publish(self) -> PublishedFiles:
        """Read once, and bring the repository to the state of the publication.

        Raises
        ------
        RevisionConflict
            Another process changed it in between.
        """
        publication = self.publication
        revision = step_revision(self.config, publication.step, final=publication.final)
        main = self._read(self._repository())
        alone, repo_id = revision == "main", publication.repo_id
        check_run(main.published_state, publication, self.config, repo_id, alone=alone)
        if alone:
            commit = self._upload_files("main", main)
        else:
            refs = self.hub.refs()
            if self.config.per_step == "branch":
                commit = self._on_branch(revision, refs, main)
            else:
                commit = self._tagged(revision, refs, main)
        return self._published(revision, commit)

    # ------------------------------------------------------------------ the present state
    def _repository(self) -> str:
        """The commit at ``main``; the repository is created if there is none."""
        publication, wanted = self.publication, self.config.private
        info = self.hub.info()
        if info is None and not publication.only_these:
            self.hub.create(private=wanted)
            info = self.hub.info()
        if info is None:
            raise refused(404, "it is not made, either", "asking for it", publication.repo_id)
        for note in check_visibility(
            publication.repo_id, is_private=bool(info.private), wanted=wanted
        ):
            log.warning("%s", note)
        return str(info.sha)

    def _read(self, commit: str) -> _Revision:
        files = self.hub.tree(commit)
        text = self.hub.text(commit, EVIDENCE) if EVIDENCE in files else None
        published_state = read_evidence(text)
        if published_state is None:
            check_strangers(self.publication.repo_id, files.keys() - {EVIDENCE}, bad=bool(text))
        return _Revision(commit, files, published_state)

    # ------------------------------------------------------------------ the branch
    def _on_branch(self, branch: str, refs: Mapping[str, str], main: _Revision) -> str:
        at = refs.get(f"heads/{branch}")
        if at is None:
            self._nothing_to_update(branch)
            self.hub.create_branch(branch, main.commit)
        commit = self._upload_files(branch, main if at is None else self._read(at))
        if moves_main(main.published_state, self.publication, self.config):
            self._upload_files("main", main)
        return commit

    def _tagged(self, tag: str, refs: Mapping[str, str], main: _Revision) -> str:
        aside = f"refiner-{tag}"
        if moves_main(main.published_state, self.publication, self.config):
            commit = self._upload_files("main", main)
        else:
            commit = self._aside(aside, tag, refs, main)
        self._move_tag(tag, refs.get(f"tags/{tag}"), commit)
        if f"heads/{aside}" in refs or self.on_side_branch:
            self.hub.delete_branch(aside)
        return commit

    def _aside(self, branch: str, tag: str, refs: Mapping[str, str], main: _Revision) -> str:
        """A commit with the publication outside of main."""
        tagged, at = main, refs.get(f"heads/{branch}")
        if (tag_at := refs.get(f"tags/{tag}")) is not None:
            tagged = self._read(tag_at)
            if not any(self._difference(tagged)) and holds(
                tagged.published_state, self.publication
            ):
                self.evidence = tagged.published_state
                return tagged.commit
        elif at is None:  # it outlives a tag that is deleted to be moved
            self._nothing_to_update(tag)
        self.on_side_branch = True
        if at is not None:
            return self._upload_files(branch, self._read(at))
        self.hub.create_branch(branch, tagged.commit)
        return self._upload_files(branch, tagged)

    def _nothing_to_update(self, revision: str) -> None:
        if self.publication.only_these:
            check_update(None, self.publication, f"{self.publication.repo_id}@{revision}")

    def _move_tag(self, tag: str, at: str | None, commit: str) -> None:
        if at == commit:
            return
        if at is not None:
            self.hub.delete_tag(tag)
        self.hub.create_tag(tag, commit)
        if self.hub.refs().get(f"tags/{tag}") != commit:
            raise RevisionConflict(f"the tag {tag} points elsewhere")

    # ------------------------------------------------------------------ sending
    def _upload_files(self, branch: str, before: _Revision) -> str:
        """A verified commit on ``branch`` with the publication."""
        publication = self.publication
        if publication.only_these:
            check_update(before.published_state, publication, f"{publication.repo_id}@{branch}")
        self.evidence = before.published_state
        wanted, gone = self._difference(before)
        if not wanted:  # removed files change the evidence file too
            return before.commit
        self.changed |= {f.name for f in wanted}
        commit = self._send(branch, before.commit, wanted, gone)
        after = self.hub.tree(commit)
        wrong = [f.name for f in publication.files if not _same(after.get(f.name), f)]
        wrong += [name for name in gone if name in after]
        if wrong:
            raise outage(
                f"{wrong[0]} at commit {commit[:12]} differs from what was sent",
                "verifying what was published",
                publication.repo_id,
            )
        return commit

    def _difference(self, there: _Revision) -> tuple[list[FileToPublish], list[str]]:
        """Files to send, and names of our files that are no longer part of it."""
        publication = self.publication
        wanted = [f for f in publication.files if not _same(there.files.get(f.name), f)]
        if publication.only_these or there.published_state is None:
            return wanted, []
        obsolete = there.published_state.names - {f.name for f in publication.files}
        return wanted, sorted(obsolete & there.files.keys())

    def _send(self, branch: str, parent: str, wanted: list[FileToPublish], gone: list[str]) -> str:
        from infra.hub.client import operations

        todo = operations(
            wanted, gone, self.progress, self.should_stop, trusted=not self.hub.by_xet
        )
        sends = 0
        while True:
            try:
                return self.hub.commit(branch, parent, todo, self.publication.message)
            except UploadError as rejected:
                _check_sources(wanted, by_hash=True)  # else the transfer damaged them
                sends += 1
                if sends == SENDS:
                    raise outage(
                        f"its storage refused the files, {SENDS} times: {rejected}",
                        "sending files",
                        self.publication.repo_id,
                    ) from None
                self.hub.pause(sends, str(rejected))

    def _published(self, revision: str, commit: str) -> PublishedFiles:
        return PublishedFiles(
            where="hub",
            target=self.hub.address(revision),
            revision=revision,
            files=all_files(self.publication, self.evidence),
            changed=tuple(sorted(self.changed)),
            commit=commit,
        )


def check_visibility(repo_id: str, *, is_private: bool, wanted: bool) -> list[str]:
    """Refuse a public repository if it must be private; returns remarks.

    Raises
    ------
    HubRefused
        It is public.
    """
    if wanted and not is_private:
        raise HubRefused(
            f"{repo_id} is public on the Hub, and publish.private=true: weights would be seen by "
            "everybody.",
            expected="a private repository",
            fix="make it private in its settings, set publish.private=false, or name another "
            "publish.repo_id",
        )
    said = f"{repo_id} is private on the Hub, though publish.private=false; it stays private."
    return [said] if is_private and not wanted else []


def check_strangers(repo_id: str, names: Collection[str], *, bad: bool = False) -> None:
    """Refuse a repository that has files, but none of ours.

    ``bad``: its ``refiner.json`` is not one of ours.

    Raises
    ------
    ConfigurationError
        The name is taken.
    """
    strange = sorted(set(names) - _OF_THE_HUB)
    if bad or (strange and EVIDENCE not in names):
        held = f"a {EVIDENCE} that is not refiner's" if bad else strange[0]
        raise ConfigurationError(
            f"{repo_id} on the Hub is taken: it holds {held}, which refiner did not put there",
            expected="a repository of its own for refiner's publications",
            fix="name another one with `publish.repo_id=`, or move that one away",
        )


def _same(remote: RemoteFile | None, file: FileToPublish) -> bool:
    """True if the remote file is the same, by hash."""
    if remote is None or remote.bytes != file.bytes:
        return False
    if remote.sha256 is not None:
        return remote.sha256 == file.sha256
    from huggingface_hub.utils.sha import git_hash

    return bool(remote.oid == git_hash(bytes_of(file)))  # the Hub's hash of small files


def _check_sources(files: Sequence[FileToPublish], *, by_hash: bool = False) -> None:
    """Raise if a file on this disk has changed."""
    for file in files:
        if file.source is None:
            continue
        size = file.source.stat().st_size if file.source.is_file() else None
        if size != file.bytes:
            raise replaced(file, "is gone" if size is None else f"has {size} bytes")
        if by_hash and hash_of(file.source) != file.sha256:
            raise replaced(file, "has other content")


def check_hub(config: RecipeConfig) -> list[str]:
    """Ask the Hub whether the token may publish to the recipe's repository; two requests at most.

    Returns
    -------
    list of str
        Remarks for the user that do not prevent the run.

    Raises
    ------
    ConfigurationError
        ``publish.repo_id`` is not a valid name, or the name is taken.
    HubRefused
        The token or the repository does not permit it.
    """
    name = config.publish.repo_id
    known = {"recipe": config.recipe, "seed": config.seed}
    repo_id = name.format(step=1, fingerprint="0" * 8, **known)
    with in_our_words("checking the name of the repository", repo_id):
        _check_name(repo_id)
    try:
        with open_hub(repo_id, config.publish, patience_s=_PATIENCE_S) as hub:
            _check_token(hub.whoami(), repo_id)
            if "{step}" in name or "{fingerprint}" in name:
                return []  # the repository is not known yet
            info, private = hub.info(), config.publish.private
            if info is None:
                return []
            notes = check_visibility(repo_id, is_private=bool(info.private), wanted=private)
            check_strangers(repo_id, {s.rfilename for s in info.siblings or ()})
            return notes
    except HubOutage as error:
        return [masked(f"Whether the Hub accepts {repo_id} is not known: {error}")]


def _check_name(repo_id: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if repo_id.count("/") != 1:
        raise HFValidationError("it must have an owner and a name")
    validate_repo_id(repo_id)


def _check_token(who: Mapping[str, Any], repo_id: str) -> None:
    owner, token = repo_id.partition("/")[0], (who.get("auth") or {}).get("accessToken") or {}
    roles = {str(o.get("name")): str(o.get("roleInOrg") or "") for o in who.get("orgs") or ()}
    may = {str(who.get("name")), *(o for o, role in roles.items() if role in _WRITING)}
    if owner not in may:
        said = f"write to {', '.join(sorted(may))} alone"
    elif token.get("role") == "read" or _scoped_elsewhere(token, owner, repo_id):
        said = "not write there"
    else:
        return
    raise HubRefused(
        f"{repo_id} could not be published: the token of {who.get('name')} may {said}.",
        expected=f"a token that may write to {owner}",
        fix="use one with write access (`hf auth login`, or HF_TOKEN where the publish stages "
        "run), or name another owner in publish.repo_id",
    )


def _scoped_elsewhere(token: Mapping[str, Any], owner: str, repo_id: str) -> bool:
    """True if a fine-grained token lists its write permissions, without this repository."""
    scopes = (token.get("fineGrained") or {}).get("scoped")
    if token.get("role") != "fineGrained" or not scopes:
        return False
    written = {s["entity"].get("name") for s in scopes if "repo.write" in s.get("permissions", ())}
    return not written & {owner, repo_id}


def make_target(config: RecipeConfig, published: Path) -> Target:
    """The target that a recipe names; ``published`` is the workspace's own folder for it."""
    if config.publish.target == "hub":
        return HubTarget(config.publish)
    path = config.publish.path
    root = Path(path).expanduser().absolute() if path else published
    return FolderTarget(root, config.publish)
