"""Where checkpoints are published: what a folder and the Hub have in common.

In: a :class:`Publication` (files with their hashes, a repository, a step). Out: a
:class:`Published`, which says what lies there now. Targets only move bytes: what a card says is
decided elsewhere. Every target may be called again after it was interrupted anywhere, sends what is
not there yet, verifies all of it by hash before it returns, and moves names (branches, tags) last.
"""

from __future__ import annotations

import builtins
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from refiner_core.contract.config import PublishConfig
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
    return {
        "repo_id": publication.repo_id,
        "where": published.where,
        "target": published.target,
        "revision": published.revision,
        "commit": published.commit,
        "step": publication.step,
        "verified": True,
        "only_these": publication.only_these,
        "files": [{"path": f.path, "bytes": f.bytes, "sha256": f.sha256} for f in published.files],
        "changed": list(published.changed),
        "sent_bytes": published.sent_bytes,
        "requests": published.requests,
    }
