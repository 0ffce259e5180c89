"""Publishing into folders, in the layout of the Hugging Face Hub.

In: a :class:`~infra.publishing.targets.Publication`. Out: ``ROOT/OWNER/NAME``, which is what
``main`` is on a Hub, and ``ROOT/OWNER/NAME@step-50`` for each step that shares the repository;
each is swapped in as a whole once every copied byte was checked against its SHA-256.
``refiner.json`` says what lies there. A folder that refiner has not published is never touched,
and files that others have added to one of ours stay. What has not changed is linked, not copied,
also from one folder to the other.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra.publishing.targets import (
    FileToPublish,
    Publication,
    Published,
    Target,
    all_files,
    bytes_of,
    check_replaced,
    check_same_run,
    check_update,
    moves_main,
    step_revision,
)
from infra.store import atomic
from infra.store.atomic import no_space_guard, put_back, swap_in
from infra.store.stage_records import CARD, EVIDENCE, OLD_MANIFEST, Lying, lying_at
from refiner_core.contract.config import PublishConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, StageFailed
from refiner_core.contract.records import OutputFile
from refiner_core.contract.types import Progress

_PAPERS = (CARD, EVIDENCE)
_CHUNK = 4 << 20
#: What the system says where nobody may make a file.
_NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


class FolderTarget:
    """Folders below ``root``, one for each repository and step."""

    def __init__(self, root: Path, config: PublishConfig) -> None:
        self._root, self._config = root, config

    def publish(
        self,
        publication: Publication,
        progress: Callable[[Progress], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Published:
        """See :class:`infra.publishing.targets.Target`."""
        revision = step_revision(self._config, publication.step, final=publication.final)
        place, main = (self._place(publication.repo_id, r) for r in (revision, "main"))
        for folder in (place, main):
            put_back(folder)
        before = _known(main)
        work = _Bringing(publication, progress, should_stop)
        if place == main:
            check_replaced(before, publication, self._config, str(main))
            files = work.bring(main, donors=())
        else:
            check_same_run(before, publication, str(main))
            files = work.bring(place, donors=(main,))
            if moves_main(before, publication, self._config):
                work.bring(main, donors=(place,))
        changed = tuple(sorted(work.changed))
        return Published("folder", str(place), revision, files, changed)

    def read_text(self, repo_id: str, revision: str, name: str) -> str | None:
        """See :class:`infra.publishing.targets.Target`."""
        try:
            return (self._place(repo_id, revision) / name).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _place(self, repo_id: str, revision: str) -> Path:
        main = self._root / repo_id
        return main if revision == "main" else main.with_name(f"{main.name}@{revision}")


@dataclass(eq=False)
class _Bringing:
    """One publication on its way into its folders.

    Attributes
    ----------
    changed
        Names that were written or linked anew.
    """

    publication: Publication
    progress: Callable[[Progress], None]
    should_stop: Callable[[], bool]
    changed: set[str] = field(default_factory=set)

    def bring(self, place: Path, donors: Sequence[Path]) -> tuple[OutputFile, ...]:
        """Make ``place`` what the publication says; all files of ours that lie there then."""
        publication = self.publication
        before = _known(place)
        if publication.only_these:
            check_update(before, publication, str(place))
        wanted = [f for f in publication.files if not _lies(place, before, f)]
        ours = before.names if before else frozenset[str]()
        gone = set() if publication.only_these else ours - {f.name for f in publication.files}
        if wanted or any((place / name).exists() for name in gone):
            with (
                no_space_guard(place.parent, f"publishing to {place}"),
                _refused_by_name(place),
            ):
                if publication.only_these:
                    # Small files; the evidence last, so that a repetition finds what is left.
                    for file in sorted(wanted, key=lambda f: f.name == EVIDENCE):
                        atomic.write_bytes(place / file.name, bytes_of(file))
                else:
                    self._swap(place, before, wanted, donors)
            self.changed |= {f.name for f in wanted}
        return all_files(publication, before)

    def _swap(
        self,
        place: Path,
        before: Lying | None,
        wanted: Sequence[FileToPublish],
        donors: Sequence[Path],
    ) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = {f.name for f in wanted}
        temporary = atomic.temporary_name(place)
        try:
            temporary.mkdir()
            for number, file in enumerate(self.publication.files):
                self._check_stop()
                at = temporary / file.name
                at.parent.mkdir(parents=True, exist_ok=True)
                if file.name not in fresh and _linked(place / file.name, at):
                    continue
                if not any(_given(donor, file, at) for donor in donors):
                    self._copy(file, at)
                done = Progress(number + 1, len(self.publication.files), f"wrote {file.name}")
                self.progress(done)
            _keep_strangers(place, temporary, before)
            atomic.sync_tree(temporary)
            swap_in(temporary, place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _copy(self, file: FileToPublish, to: Path) -> None:
        """The bytes, checked as they pass."""
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
            raise StageFailed(
                f"{file.source} is not what its stage has left, so it is not published.",
                expected=f"SHA-256 {file.sha256[:12]}…, not {digest.hexdigest()[:12]}…",
                fix="run the recipe again; a stage whose output is damaged is made again",
            )

    def _check_stop(self) -> None:
        if self.should_stop():
            raise Interrupted(
                "Publishing was stopped on request; what was published is as it was.",
                fix="run the same command again",
            )


def _known(place: Path) -> Lying | None:
    """What of ours lies at a place that may be written to; None if it is empty.

    Raises
    ------
    ConfigurationError
        It is somebody else's.
    """
    lying = lying_at(place)
    if lying is None and place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigurationError(
            f"{place} exists and was not published by refiner",
            expected="a folder of its own for each published model",
            fix="name another one with `publish.path=` or `publish.repo_id=`, or move that one "
            "away",
        )
    return lying


def _lies(place: Path, before: Lying | None, file: FileToPublish) -> bool:
    """Whether a file lies there already. Weights are known by manifest and size; the small files
    that change are read."""
    path = place / file.name
    if before is None or not path.is_file() or path.stat().st_size != file.bytes:
        return False
    if file.described in before.files:
        return True
    return file.source is None and path.read_bytes() == file.content


def _given(donor: Path, file: FileToPublish, to: Path) -> bool:
    """Link a file from another folder of ours that has it."""
    lying = lying_at(donor)
    named = next((f.path for f in lying.files if f.sha256 == file.sha256), None) if lying else None
    if named is None:
        return False
    path = donor / named
    return path.is_file() and path.stat().st_size == file.bytes and _linked(path, to)


def _keep_strangers(place: Path, temporary: Path, before: Lying | None) -> None:
    """What others have put into a folder of ours goes along."""
    ours = {OLD_MANIFEST, *(before.names if before else ())}
    for path in sorted(place.rglob("*")) if place.is_dir() else ():
        name = path.relative_to(place)
        at = temporary / name
        if name.as_posix() in ours or at.exists():
            continue
        if path.is_dir() and not path.is_symlink():
            at.mkdir(parents=True, exist_ok=True)
        elif path.is_symlink() or not _linked(path, at):
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


def _linked(old: Path, new: Path) -> bool:
    try:
        os.link(old, new)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True


def make_target(config: RecipeConfig, published: Path) -> Target:
    """The target that a recipe names; ``published`` is the workspace's own folder for it."""
    if config.publish.target == "hub":
        from infra.hub.target import HubTarget  # the Hub client only where it is used

        return HubTarget(config.publish)
    path = config.publish.path
    root = Path(path).expanduser().absolute() if path else published
    return FolderTarget(root, config.publish)
