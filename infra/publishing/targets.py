"""Places that checkpoints are published to: what a folder and the Hub have in common.

In: a :class:`Publication` (files with their hashes, a repository, a step). Out: a
:class:`Published`, which says what lies there now; and the decisions that both share: whose a
place is by its ``refiner.json``, whether a name is taken, whether ``main`` moves on. Targets only
move bytes: what a card says is decided elsewhere. Every target may be called again after it was
interrupted anywhere, sends what is not there yet, verifies all of it by hash before it returns,
and moves names (branches, tags) last.
"""

from __future__ import annotations

import builtins
import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from infra.store.stage_records import EVIDENCE, Lying, read_evidence
from refiner_core.contract.config import PublishConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.records import OutputFile
from refiner_core.contract.types import Progress


@dataclass(frozen=True)
class FileToPublish:
    """One file: its name in the repository, size and SHA-256, and where its bytes are: a path, or
    the bytes themselves. Files of a stage's output have been hashed when the stage ended; nobody
    hashes them again."""

    name: str
    bytes: int
    sha256: str
    source: Path | None = None
    content: builtins.bytes | None = field(default=None, repr=False)

    @classmethod
    def of_text(cls, name: str, text: str) -> FileToPublish:
        """A small file that is made on the spot."""
        data = text.encode()
        return cls(name, len(data), hashlib.sha256(data).hexdigest(), content=data)

    @property
    def described(self) -> OutputFile:
        """Without the bytes."""
        return OutputFile(self.name, self.bytes, self.sha256)


@dataclass(frozen=True)
class Publication:
    """What is to lie in a repository.

    Attributes
    ----------
    repo_id
        ``OWNER/NAME``.
    files
        Everything, with the card and :data:`EVIDENCE`; with ``only_these`` what is replaced or
        added, everything else stays (a card that is updated).
    step
        The optimiser step of the weights.
    final
        The last checkpoint of its run: it is what ``main`` is to end at.
    fingerprint
        Of the stage that trained the weights: what the repository is known by.
    message
        Of the commit.
    """

    repo_id: str
    files: tuple[FileToPublish, ...]
    step: int
    final: bool
    fingerprint: str
    message: str
    only_these: bool = False


@dataclass(frozen=True)
class Published:
    """What lies there now, verified by hash.

    Attributes
    ----------
    where
        ``folder`` or ``hub``.
    target
        The folder, or the address of the revision.
    revision
        Branch or tag of the step; ``main`` where it has none.
    commit
        On the Hub.
    files
        All files of the revision that refiner has put there.
    changed
        Names whose bytes were sent or written by this call.
    sent_bytes, requests
        What this call took.
    """

    where: Literal["folder", "hub"]
    target: str
    revision: str
    files: tuple[OutputFile, ...]
    changed: tuple[str, ...]
    commit: str | None = None
    sent_bytes: int = 0
    requests: int = 0


class Target(Protocol):
    """A place to publish to."""

    def publish(
        self,
        publication: Publication,
        progress: Callable[[Progress], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Published:
        """Bring the repository to what the publication says.

        Raises
        ------
        ConfigurationError
            The name is taken by something that refiner has not published.
        HubRefused, HubOutage
            See :mod:`refiner_core.contract.errors`.
        NoSpaceError
            A folder's disk is full; what was there is as it was.
        Interrupted
            ``should_stop`` said so; what was sent stays and is not sent again.
        """
        ...

    def read_text(self, repo_id: str, revision: str, name: str) -> str | None:
        """A small text file of a revision; None if there is none."""
        ...


def step_revision(config: PublishConfig, step: int, *, final: bool) -> str:
    """Name of the tag or branch of a step; ``main`` where steps do not share a repository."""
    alone = config.per_step == "repository" or (config.which == "final" and final)
    return "main" if alone else f"step-{step}"


def report_of(published: Published, publication: Publication) -> dict[str, Any]:
    """For a stage's report: what other parts of refiner go by."""
    told = {"repo_id": publication.repo_id, "step": publication.step, "verified": True}
    return {**asdict(published), **told, "only_these": publication.only_these}


def own_evidence(publication: Publication) -> Lying | None:
    """What the evidence file says that the publication brings."""
    brought = next((file for file in publication.files if file.name == EVIDENCE), None)
    return read_evidence(bytes_of(brought)) if brought else None


def bytes_of(file: FileToPublish) -> bytes:
    """The bytes of a small file."""
    if file.content is not None:
        return file.content
    assert file.source is not None, "a file is a path or bytes"
    return file.source.read_bytes()


def all_files(publication: Publication, before: Lying | None) -> tuple[OutputFile, ...]:
    """All that refiner has put into a revision once the publication is there."""
    brought = {f.name: f.described for f in publication.files}
    if publication.only_these:
        stays = own_evidence(publication) or before
        brought = {f.path: f for f in (stays.files if stays else ())} | brought
    return tuple(brought[name] for name in sorted(brought))


def holds(lying: Lying | None, publication: Publication) -> bool:
    """Whether a place holds this very step of this very run."""
    if lying is None:
        return False
    known = lying.step is None or lying.step == publication.step
    return known and lying.fingerprint in (None, publication.fingerprint)


def moves_main(lying: Lying | None, publication: Publication, config: PublishConfig) -> bool:
    """Whether ``main`` of a shared repository moves to this step.

    It never goes back: a step that comes late gets its own name only, and what says no step (older
    than the evidence file) is the last one of its run. With ``publish.which=best`` one step is
    published, and main is it, whichever was before.
    """
    if publication.only_these:
        return holds(lying, publication)
    if config.which == "best" or lying is None:
        return True
    if lying.step is None:
        return publication.final
    return lying.step <= publication.step


def check_same_run(lying: Lying | None, publication: Publication, where: str) -> None:
    """Refuse to mix the steps of two runs in one repository."""
    if lying is None or lying.fingerprint in (None, publication.fingerprint):
        return
    raise ConfigurationError(
        f"{where} holds step {lying.step} of another run ({lying.fingerprint[:8]}, this is "
        f"{publication.fingerprint[:8]}), and steps of two runs under the same names would "
        "replace each other.",
        expected="a repository for each run that publishes several steps",
        fix="put {fingerprint} or {seed} into `publish.repo_id`, or move that one away",
    )


def check_replaced(
    lying: Lying | None, publication: Publication, config: PublishConfig, where: str
) -> None:
    """Refuse to put a run's weights in the place of another run's, unless that is asked for.

    Names with {fingerprint} never meet; a name of one's own is easily used twice.
    """
    if config.replace or lying is None or publication.only_these:
        return
    if lying.fingerprint in (None, publication.fingerprint):
        return
    raise ConfigurationError(
        f"{where} holds step {lying.step} of another run ({lying.fingerprint[:8]}, this is "
        f"{publication.fingerprint[:8]}).",
        expected="a repository of its own for each run, or publish.replace=true",
        fix="name another publish.repo_id (it may use {fingerprint} and {seed}), or set "
        "publish.replace=true to put this one in its place; nothing is trained again",
    )


def check_update(lying: Lying | None, publication: Publication, where: str) -> None:
    """Refuse to put a card beside weights that it is not about."""
    brought = own_evidence(publication)
    names = {f.name for f in publication.files}
    said, there = (
        {f for f in (of.files if of else ()) if f.path not in names} for of in (brought, lying)
    )
    if not holds(lying, publication) or (brought is not None and said != there):
        raise ConfigurationError(
            f"{where} does not hold step {publication.step} of {publication.repo_id} as it was "
            "published, so its card is not updated.",
            expected="the publication that the card is about",
            fix="publish that step again (`refiner run`, or `refiner publish RUN --step "
            f"{publication.step}`), or give each run a repository of its own",
        )
