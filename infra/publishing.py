"""Targets of publishing, and publishing into folders; :mod:`infra.hub` publishes to the Hub.

In: a :class:`Publication` (files with their hashes, a repository, a step). Out: a
:class:`PublishedFiles`, the present files of the target; and the decisions shared by folders and
the Hub: the owner of a place by its ``refiner.json``, whether a name is taken, whether ``main``
moves forward. Targets only move bytes: cards are written elsewhere. Every target can be called
again after an interruption at any point, sends only missing files, verifies all of them by hash
before it returns, and moves names (branches, tags) last.

Folders have the Hub's layout: ``ROOT/OWNER/NAME`` is the Hub's ``main``, and
``ROOT/OWNER/NAME@step-50`` each step that shares the repository; each is swapped in as a whole
once every copied byte was checked against its SHA-256. A folder that refiner has not published is
never touched, and files that others have added to one of ours stay. Unchanged files are linked, not
copied, also between folders.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from infra.host.files import link
from infra.store import atomic
from infra.store.atomic import no_space_guard, put_back, swap_in
from infra.store.stage_records import CARD, EVIDENCE, PublishedState, published_at, read_evidence
from refiner_core.cards.facts import step_revision
from refiner_core.contract.config import PublishConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, StageFailed
from refiner_core.contract.records import OutputFile
from refiner_core.contract.types import Progress

_PAPERS = (CARD, EVIDENCE)
_CHUNK = 4 << 20
#: Error numbers of a place where no file can be created.
_NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@dataclass(frozen=True)
class FileToPublish:
    """One file: its name in the repository, size and SHA-256, and its content: a path, or the
    bytes. Files of a stage's output were hashed when the stage ended, and are not hashed again."""

    name: str
    bytes: int
    sha256: str
    source: Path | None = None
    content: builtins.bytes | None = field(default=None, repr=False)

    @classmethod
    def of_text(cls, name: str, text: str) -> FileToPublish:
        """A small file from a text."""
        data = text.encode()
        return cls(name, len(data), hashlib.sha256(data).hexdigest(), content=data)

    @property
    def described(self) -> OutputFile:
        """The file without its bytes."""
        return OutputFile(self.name, self.bytes, self.sha256)


@dataclass(frozen=True)
class Publication:
    """The desired files of a repository.

    Attributes
    ----------
    repo_id
        ``OWNER/NAME``.
    files
        All files, with the card and :data:`EVIDENCE`; with ``only_these`` only the replaced or
        added ones, while everything else stays (a card that is updated).
    step
        The optimiser step of the weights.
    final
        The last checkpoint of its run, where ``main`` must end.
    fingerprint
        Fingerprint of the stage that trained the weights, which identifies the repository.
    message
        Message of the commit.
    """

    repo_id: str
    files: tuple[FileToPublish, ...]
    step: int
    final: bool
    fingerprint: str
    message: str
    only_these: bool = False


@dataclass(frozen=True)
class PublishedFiles:
    """The present files, verified by hash.

    Attributes
    ----------
    where
        ``folder`` or ``hub``.
    target
        The folder, or the address of the revision.
    revision
        Branch or tag of the step; ``main`` if it has none.
    commit
        The commit on the Hub.
    files
        All files of the revision that refiner has published.
    changed
        Names of files that were sent or written by this call.
    """

    where: Literal["folder", "hub"]
    target: str
    revision: str
    files: tuple[OutputFile, ...]
    changed: tuple[str, ...]
    commit: str | None = None


class Target(Protocol):
    """A place to publish to."""

    def publish(
        self,
        publication: Publication,
        progress: Callable[[Progress], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> PublishedFiles:
        """Bring the repository to the state of the publication.

        Raises
        ------
        ConfigurationError
            The name is taken by something that refiner has not published.
        HubRefused, HubOutage
            See :mod:`refiner_core.contract.errors`.
        NoSpaceError
            A folder's disk is full; its contents are unchanged.
        Interrupted
            ``should_stop`` returned True; sent files stay and are not sent again.
        """

    def read_text(self, repo_id: str, revision: str, name: str) -> str | None:
        """A small text file of a revision; None if there is none."""


def report_of(published: PublishedFiles, publication: Publication) -> dict[str, Any]:
    """Values for a stage's report, which other parts of refiner read."""
    facts = {"repo_id": publication.repo_id, "step": publication.step, "verified": True}
    return {**asdict(published), **facts, "only_these": publication.only_these}


def own_evidence(publication: Publication) -> PublishedState | None:
    """Contents of the publication's own evidence file."""
    brought = next((file for file in publication.files if file.name == EVIDENCE), None)
    return read_evidence(bytes_of(brought)) if brought else None


def bytes_of(file: FileToPublish) -> bytes:
    """The bytes of a small file."""
    if file.content is not None:
        return file.content
    assert file.source is not None, "a file is a path or bytes"
    return file.source.read_bytes()


def all_files(publication: Publication, before: PublishedState | None) -> tuple[OutputFile, ...]:
    """All files of refiner in a revision once the publication is there."""
    brought = {f.name: f.described for f in publication.files}
    if publication.only_these:
        stays = own_evidence(publication) or before
        brought = {f.path: f for f in (stays.files if stays else ())} | brought
    return tuple(brought[name] for name in sorted(brought))


def holds(published_state: PublishedState | None, publication: Publication) -> bool:
    """True if a place has this very step of this very run."""
    here = (publication.step, publication.fingerprint)
    return (
        published_state is not None and (published_state.step, published_state.fingerprint) == here
    )


def moves_main(
    published_state: PublishedState | None, publication: Publication, config: PublishConfig
) -> bool:
    """True if ``main`` of a shared repository moves to this step.

    It never goes back: a late step only gets its own name. With ``publish.which=best`` one step is
    published, and main moves to it from any other.
    """
    if publication.only_these:
        return holds(published_state, publication)
    return (
        config.which == "best"
        or published_state is None
        or published_state.step <= publication.step
    )


def check_run(
    published_state: PublishedState | None,
    publication: Publication,
    config: PublishConfig,
    where: str,
    *,
    alone: bool,
) -> None:
    """Refuse to replace another run's weights, unless that is requested, or to publish beside them,
    if steps are not ``alone``.

    Names with {fingerprint} never collide; a fixed name is easily used twice.
    """
    if published_state is None or published_state.fingerprint == publication.fingerprint:
        return
    what = (
        f"{where} holds step {published_state.step} of another run "
        f"({published_state.fingerprint[:8]}, this is {publication.fingerprint[:8]})"
    )
    if not alone:
        raise ConfigurationError(
            f"{what}, and steps of two runs under the same names would replace each other.",
            expected="a repository for each run that publishes several steps",
            fix="put {fingerprint} or {seed} into `publish.repo_id`, or move the other one away",
        )
    if not config.replace and not publication.only_these:
        raise ConfigurationError(
            f"{what}.",
            expected="a repository of its own for each run, or publish.replace=true",
            fix="name another publish.repo_id (it may use {fingerprint} and {seed}), or set "
            "publish.replace=true to replace it by this one; nothing is trained again",
        )


def check_update(
    published_state: PublishedState | None, publication: Publication, where: str
) -> None:
    """Refuse to put a card beside weights of another publication."""
    brought = own_evidence(publication)
    names = {f.name for f in publication.files}
    said, there = (
        {f for f in (of.files if of else ()) if f.path not in names}
        for of in (brought, published_state)
    )
    if not holds(published_state, publication) or (brought is not None and said != there):
        raise ConfigurationError(
            f"{where} does not have step {publication.step} of {publication.repo_id} as it was "
            "published, so its card is not updated.",
            expected="the publication of the card",
            fix="publish that step again (`refiner run`, or `refiner publish RUN --step "
            f"{publication.step}`), or give each run a repository of its own",
        )


class FolderTarget:
    """Folders below ``root``, one for each repository and step."""

    def __init__(self, root: Path, config: PublishConfig) -> None:
        self._root, self._config = root, config

    def publish(
        self,
        publication: Publication,
        progress: Callable[[Progress], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> PublishedFiles:
        """See :class:`infra.publishing.Target`."""
        revision = step_revision(self._config, publication.step, final=publication.final)
        place, main = (self._place(publication.repo_id, r) for r in (revision, "main"))
        for folder in (place, main):
            put_back(folder)
        before = _known(main)
        work = _FolderPublication(publication, progress, should_stop)
        check_run(before, publication, self._config, str(main), alone=place == main)
        if place == main:
            files = work.publish_files(main, donors=())
        else:
            files = work.publish_files(place, donors=(main,))
            if moves_main(before, publication, self._config):
                work.publish_files(main, donors=(place,))
        changed = tuple(sorted(work.changed))
        return PublishedFiles("folder", str(place), revision, files, changed)

    def read_text(self, repo_id: str, revision: str, name: str) -> str | None:
        """See :class:`infra.publishing.Target`."""
        try:
            return (self._place(repo_id, revision) / name).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _place(self, repo_id: str, revision: str) -> Path:
        main = self._root / repo_id
        return main if revision == "main" else main.with_name(f"{main.name}@{revision}")


@dataclass(eq=False)
class _FolderPublication:
    """One publication on its way into its folders.

    Attributes
    ----------
    changed
        Names of files that were written or linked.
    """

    publication: Publication
    progress: Callable[[Progress], None]
    should_stop: Callable[[], bool]
    changed: set[str] = field(default_factory=set)

    def publish_files(self, place: Path, donors: Sequence[Path]) -> tuple[OutputFile, ...]:
        """Bring ``place`` to the state of the publication; returns all of our files there."""
        publication = self.publication
        before = _known(place)
        if publication.only_these:
            check_update(before, publication, str(place))
        wanted = [f for f in publication.files if not _lies(place, before, f)]
        ours = before.names if before else frozenset[str]()
        gone = set() if publication.only_these else ours - {f.name for f in publication.files}
        if wanted or any((place / name).exists() for name in gone):
            with no_space_guard(place.parent, f"publishing to {place}"), _refused_by_name(place):
                if publication.only_these:
                    # Small files; the evidence last, so that a repetition finds what is missing.
                    for file in sorted(wanted, key=lambda f: f.name == EVIDENCE):
                        atomic.write_bytes(place / file.name, bytes_of(file))
                else:
                    self._swap(place, before, donors)
            self.changed |= {f.name for f in wanted}
        return all_files(publication, before)

    def _swap(self, place: Path, before: PublishedState | None, donors: Sequence[Path]) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        ours = {**{donor: published_at(donor) for donor in donors}, place: before}
        there = {f.sha256: at / f.path for at, held in ours.items() if held for f in held.files}
        temporary = atomic.temporary_name(place)
        try:
            temporary.mkdir()
            for number, file in enumerate(self.publication.files):
                self._check_stop()
                at, known = temporary / file.name, there.get(file.sha256)
                at.parent.mkdir(parents=True, exist_ok=True)
                whole = known and known.is_file() and known.stat().st_size == file.bytes
                if not (known and whole and link(known, at)):
                    self._copy(file, at)
                done = Progress(number + 1, len(self.publication.files), f"wrote {file.name}")
                self.progress(done)
            _keep_strangers(place, temporary, before)
            atomic.sync_tree(temporary)
            swap_in(temporary, place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _copy(self, file: FileToPublish, to: Path) -> None:
        """Copy the bytes, checked on the way."""
        if file.source is None:
            to.write_bytes(bytes_of(file))
            return
        digest = hashlib.sha256()
        with file.source.open("rb") as reading, to.open("wb") as writing:
            while chunk := reading.read(_CHUNK):
                self._check_stop()
                digest.update(chunk)
                writing.write(chunk)
        if digest.hexdigest() != file.sha256:
            raise replaced(file, "has other content")

    def _check_stop(self) -> None:
        if self.should_stop():
            raise stopped()


def stopped() -> Interrupted:
    """A stop was requested during publishing."""
    return Interrupted(
        "Publishing was stopped on request.",
        fix="run the same command again; sent files are not sent again",
    )


def replaced(file: FileToPublish, why: str) -> StageFailed:
    """The error for a source that differs from what its stage wrote."""
    return StageFailed(
        f"{file.source or file.name} {why}, so it is not published: it was another file when its "
        "stage ended.",
        expected="the output as the stage wrote it",
        fix="run the recipe again; a stage whose output is damaged is made again",
    )


def _known(place: Path) -> PublishedState | None:
    """Our publication at a writable place; None if it is empty.

    Raises
    ------
    ConfigurationError
        The place belongs to someone else.
    """
    published_state = published_at(place)
    if published_state is None and place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigurationError(
            f"{place} exists and was not published by refiner",
            expected="a folder of its own for each published model",
            fix="name another one with `publish.path=` or `publish.repo_id=`, or move that one "
            "away",
        )
    return published_state


def _lies(place: Path, before: PublishedState | None, file: FileToPublish) -> bool:
    """True if a file is there already. Weights are compared by manifest and size; the small files
    that change are read."""
    path = place / file.name
    if before is None or not path.is_file() or path.stat().st_size != file.bytes:
        return False
    if file.described in before.files:
        return True
    return file.source is None and path.read_bytes() == file.content


def _keep_strangers(place: Path, temporary: Path, before: PublishedState | None) -> None:
    """Keep files that others have added to a folder of ours."""
    ours = before.names if before else frozenset[str]()
    for path in sorted(place.rglob("*")) if place.is_dir() else ():
        name = path.relative_to(place)
        at = temporary / name
        if name.as_posix() in ours or at.exists():
            continue
        if path.is_dir() and not path.is_symlink():
            at.mkdir(parents=True, exist_ok=True)
        elif path.is_symlink() or not link(path, at):
            shutil.copy2(path, at, follow_symlinks=False)


@contextlib.contextmanager
def _refused_by_name(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        nowhere = error.errno == errno.ENOENT and not target.parent.is_dir()
        if error.errno not in _NO_PLACE and not nowhere:
            raise
        raise ConfigurationError(
            f"{target} cannot be written: {error.strerror}: {error.filename or target}.",
            expected="a folder in which you may create files",
            fix="correct its permissions, or name another one with `publish.path=`",
        ) from error
