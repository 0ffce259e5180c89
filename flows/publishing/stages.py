"""The stages `publish` and `card`: facts become files, files go to the target.

    publish   weights, card and evidence of a checkpoint; numbers where they are there already
    card      the card again, with the numbers of evaluations that came after it

In: the work of a stage. Out: what lies at the target, and the stage's report about it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from flows.publishing.behind import need_result, runs_of, subject_at_work, weights_of
from flows.publishing.delivery import model_files, papers
from flows.publishing.facts import Collected, collect
from flows.stages.work import StageWork
from infra.foreign.exports import require_whole
from infra.publishing.opening import make_target
from infra.publishing.targets import FileToPublish, Publication, Target, report_of
from infra.store.published import CARD, EVIDENCE
from refiner_core.cards import CardFacts, load_evidence
from refiner_core.contract.errors import DataError, HealthStop
from refiner_core.contract.malformed import all_malformed
from refiner_core.contract.protocols import without_protocol
from refiner_core.contract.records import OutputFile

log = logging.getLogger(__name__)


class _Papers(NamedTuple):
    """Card and evidence that are sent; ``kept`` where those at the target say more."""

    files: tuple[FileToPublish, ...]
    card: str
    kept: bool


def publish(work: StageWork) -> dict[str, Any]:
    """Weights and a card to the target. Numbers that are not there yet come later, by ``card``."""
    found = collect(subject_at_work(work))
    _require_an_answer(work, found)
    role = next(r for r, i in weights_of(subject_at_work(work)).items() if i == found.made.weights)
    if work.spec.model == "command":
        require_whole(work.inputs[role] / "model", "publishing")
    weights = model_files(work.workspace, found.made.weights, work.config.publish.files)
    target = make_target(work.config, work.workspace.layout.published)
    sent = _papers(work, found, target, [f.described for f in weights])
    publication = Publication(
        repo_id=found.facts.repo_id,
        files=(*weights, *sent.files),
        step=found.facts.step,
        final=found.ends_run,
        fingerprint=found.facts.fingerprint,
        message=_message(found),
    )
    return _send(work, target, publication, found, sent)


def _require_an_answer(work: StageWork, found: Collected) -> None:
    """Refuse a trained model that has not given a single well-formed answer, as far as that is
    known by now: by its training, or by evaluations that are done. Checkpoints on the way may well
    give none yet.

    Raises
    ------
    HealthStop
        Names the option that publishes it all the same.
    """
    if work.config.publish.malformed or not found.ends_run:
        return
    model = work.spec.model
    doubt = all_malformed(found.made.reports.get(model, {}))
    if not doubt and (run := runs_of(subject_at_work(work), found.made.trained)[0]) is not None:
        measured = (i for n, i in run.stages.items() if without_protocol(n) == f"evaluate-{model}")
        results = filter(None, map(work.workspace.read_result, measured))
        doubt = next(filter(None, (all_malformed(r.report) for r in results)), "")
    if doubt:
        raise HealthStop(
            f"The {model} model is not published: {doubt}.",
            expected="answers of the form that the recipe's rows ask for, at least one",
            fix="look at what it writes (`refiner report`, samples) and at the demonstrations; "
            "publish.malformed=true publishes it all the same",
        )


def refresh_card(work: StageWork) -> dict[str, Any]:
    """The card that is published, with the evaluations' numbers in it."""
    found = collect(subject_at_work(work))
    published = need_result(work.workspace, work.input_stages["publish"]).report
    listed = [OutputFile(f["path"], f["bytes"], f["sha256"]) for f in published["files"]]
    target = make_target(work.config, work.workspace.layout.published)
    sent = _papers(work, found, target, listed)
    publication = Publication(
        repo_id=str(published["repo_id"]),
        files=sent.files,
        step=found.facts.step,
        final=found.ends_run,
        fingerprint=found.facts.fingerprint,
        message=f"Step {found.facts.step}: numbers in the card",
        only_these=True,
    )
    return _send(work, target, publication, found, sent)


def _send(
    work: StageWork, target: Target, publication: Publication, found: Collected, sent: _Papers
) -> dict[str, Any]:
    published = target.publish(publication, work.io.progress, work.io.should_stop)
    report = {
        **report_of(published, publication),
        "final": publication.final,
        "only_these": publication.only_these,
        "card": sent.card,
        "card_kept": sent.kept,
        "made_with": dict(found.decided),
    }
    if found.choice is not None:
        report["best"] = found.choice.report()
    return report


def _message(found: Collected) -> str:
    what = f"Step {found.facts.step}"
    if found.choice is not None:
        return f"{what}, the best of {len(found.choice.candidates)} checkpoints"
    return f"{what}, the last" if found.facts.final else what


# ---------------------------------------------------------------- the newer card stays


def _papers(
    work: StageWork, found: Collected, target: Target, files: Sequence[OutputFile]
) -> _Papers:
    """Card and evidence to send: those of this stage, unless others that lie there already say the
    same of the same weights and more (a stage that is repeated after a later one)."""
    made = papers(found.facts, files, work.output_dir)
    texts = {paper.name: _text(paper) for paper in made}
    there = _newer(target, found.facts, texts[EVIDENCE])
    if there is None:
        return _Papers(tuple(made), texts[CARD], kept=False)
    log.info("the card that is published has more numbers than this stage knows: it stays")
    rest = tuple(paper for paper in made if paper.name not in there)
    kept = tuple(FileToPublish.of_text(name, text) for name, text in there.items())
    for paper in kept:
        (work.output_dir / paper.name).write_bytes(paper.content or b"")
    return _Papers((*rest, *kept), there[CARD], kept=True)


def _newer(target: Target, facts: CardFacts, evidence: str) -> dict[str, str] | None:
    """Card and evidence at the target, if they are of these weights and know all numbers of
    ``facts`` and others."""
    text = target.read_text(facts.repo_id, facts.revision, EVIDENCE)
    if text is None:
        return None
    try:
        there, ours = load_evidence(text), load_evidence(evidence)
    except DataError as error:
        log.warning("the %s at the target is replaced: %s", EVIDENCE, error)
        return None
    same = (there.fingerprint, there.step, there.files) == (ours.fingerprint, ours.step, ours.files)
    if not same or not _numbers(ours.facts) < _numbers(there.facts):
        return None
    card = target.read_text(facts.repo_id, facts.revision, CARD)
    return None if card is None else {CARD: card, EVIDENCE: text}


def _numbers(facts: CardFacts) -> set[tuple[str, ...]]:
    names = ("stage", "protocol", "decoding", "metric", "value", "n")
    return {tuple(str(entry.get(name)) for name in names) for entry in facts.evaluations}


def _text(paper: FileToPublish) -> str:
    return (paper.content or b"").decode()
