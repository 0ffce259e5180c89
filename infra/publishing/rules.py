"""What lies at a place of publication, by its ``refiner.json``, and what a new one may change.

In: the evidence file of a revision or folder. Out: whose it is, of which step, which files belong
to it; and the decisions that a folder and the Hub share: whether a name is taken, and whether
``main`` moves on.
"""

from __future__ import annotations

from infra.publishing.targets import FileToPublish, Publication
from infra.store.published import EVIDENCE, Lying, read_evidence
from refiner_core.contract.config import PublishConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.records import OutputFile


def own_evidence(publication: Publication) -> Lying | None:
    """What the evidence file says that the publication brings."""
    for file in publication.files:
        if file.name == EVIDENCE:
            return read_evidence(bytes_of(file))
    return None


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
