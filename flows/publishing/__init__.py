"""Publishing: a card from a run's records; weights and card to their target.

    publish   weights, card and evidence of a checkpoint, with the metrics known so far
    card      the card again, with the metrics of later evaluations

In: the work of a stage. Out: files at the target, and the stage's report about them. The card is a
pure function of records (:mod:`refiner_core.cards`); ``facts`` collects them. Every card is checked
here; one with errors is refused with all of them, and nothing is published.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from flows.cards.reproduction import RECIPE_FILE
from flows.publishing.facts import PublicationFacts, collect
from flows.publishing.lineage import need_result, subject_at_work
from flows.stages.work import StageWork
from infra.external.exports import COMPANIONS, lacking, matches, require_whole
from infra.hub.target import make_target
from infra.publishing import FileToPublish, Publication, Target, report_of
from infra.store.stage_records import CARD, EVIDENCE
from infra.store.workspace import Workspace
from refiner_core.cards.build import build_card
from refiner_core.cards.evidence import evidence_text, load_evidence
from refiner_core.cards.facts import CardFacts
from refiner_core.cards.lint import lint_card
from refiner_core.contract.errors import DataError, HealthStop, StageFailed
from refiner_core.contract.protocols import without_protocol
from refiner_core.contract.records import OutputFile, all_malformed

#: Files that a model requires.
MODEL_FILES = (
    *("model*.safetensors", "model.safetensors.index.json", *COMPANIONS, "LICENSE*", "NOTICE*"),
)
_FOLDER = "model/"
#: Maximum number of findings in an error message.
_SAID = 5


def model_files(
    workspace: Workspace, stage_id: str, patterns: Sequence[str] = ()
) -> list[FileToPublish]:
    """The published files of a finished stage's model, with the hashes of its record.

    Parameters
    ----------
    patterns
        ``publish.files``; empty: all files that a model needs.

    Raises
    ------
    StageFailed
        It is no model in the layout of the Hub, or the patterns leave out a required file.
    """
    result = need_result(workspace, stage_id)
    folder = workspace.layout.stage(stage_id).data / result.output_dir
    there = [
        FileToPublish(f.path.removeprefix(_FOLDER), f.bytes, f.sha256, source=folder / f.path)
        for f in result.files
        if f.path.startswith(_FOLDER) and "/" not in f.path.removeprefix(_FOLDER)
    ]
    chosen = [f for f in there if matches(f.name, patterns or MODEL_FILES)]
    missing = lacking(f.name for f in chosen)
    if missing:
        raise StageFailed(
            f"The model in {folder / _FOLDER} cannot be published: {', '.join(missing)} "
            + ("would be left out" if patterns else "missing"),
            expected="an export with config, safetensors and tokenizer",
            fix="correct publish.files"
            if patterns
            else "delete the training stage's folder in the workspace and run the recipe again",
        )
    return chosen


def _card_files(facts: CardFacts, files: Sequence[OutputFile]) -> dict[str, FileToPublish]:
    """The card, its facts, and the recipe unless it is a shipped one; ``files`` are the other files
    of the publication.

    Raises
    ------
    StageFailed
        The card has errors; the message lists them.
    """
    made = {}
    if facts.recipe_file is not None:
        made[RECIPE_FILE] = FileToPublish.of_text(RECIPE_FILE, facts.recipe_file)
    others = {f.path: f for f in (*files, *(p.described for p in made.values()))}
    card, evidence = build_card(facts), evidence_text(facts, list(others.values()))
    if findings := lint_card(card, evidence, template=facts.template):
        more = f"; and {len(findings) - _SAID} more" if len(findings) > _SAID else ""
        raise StageFailed(
            f"The card has errors, so nothing is published: {'; '.join(findings[:_SAID])}{more}",
            expected="licence and base model in its front matter, and no number without evidence",
            fix="correct publish.card_template (`refiner card template` prints the shipped one)"
            if facts.template is not None
            else "run the same command with --debug and report it: such a card is a bug in refiner",
        )
    texts = {CARD: card, EVIDENCE: evidence}
    return made | {name: FileToPublish.of_text(name, text) for name, text in texts.items()}


log = logging.getLogger(__name__)


def publish(work: StageWork) -> dict[str, Any]:
    """Send weights and a card to the target. Later metrics are added by ``card``."""
    found = collect(subject_at_work(work))
    _require_an_answer(work, found)
    if work.spec.model == "command":
        require_whole(work.inputs[found.role] / "model", "publishing")
    weights = model_files(work.workspace, found.made.weights, work.config.publish.files)
    message = f"Step {found.facts.step}"
    if found.best is not None:
        message += f", the best of {len(found.best['candidates'])} checkpoints"
    elif found.facts.final:
        message += ", the last"
    others = [f.described for f in weights]
    return _send(work, found, weights, others, found.facts.repo_id, message)


def _require_an_answer(work: StageWork, found: PublicationFacts) -> None:
    """Refuse a trained model without a single well-formed answer in its training or finished
    evaluations. Intermediate checkpoints are exempt.

    Raises
    ------
    HealthStop
        Names the option that publishes it nevertheless.
    """
    if work.config.publish.malformed or not found.ends_run:
        return
    model = work.spec.model
    doubt = all_malformed(found.made.reports.get(model, {}))
    if not doubt and found.asked is not None:
        stages = found.asked.stages.items()
        measured = (i for n, i in stages if without_protocol(n) == f"evaluate-{model}")
        results = filter(None, map(work.workspace.read_result, measured))
        doubt = next(filter(None, (all_malformed(r.report) for r in results)), "")
    if doubt:
        raise HealthStop(
            f"The {model} model is not published: {doubt}.",
            expected="at least one answer in the form of the recipe's rows",
            fix="look at its answers (`refiner report`, samples) and at the demonstrations; "
            "publish.malformed=true publishes it nevertheless",
        )


def refresh_card(work: StageWork) -> dict[str, Any]:
    """Update the published card with the metrics of the evaluations."""
    found = collect(subject_at_work(work))
    published = need_result(work.workspace, work.input_stages["publish"]).report
    listed = [OutputFile(f["path"], f["bytes"], f["sha256"]) for f in published["files"]]
    message = f"Step {found.facts.step}: numbers in the card"
    return _send(work, found, None, listed, str(published["repo_id"]), message)


def _send(
    work: StageWork,
    found: PublicationFacts,
    weights: Sequence[FileToPublish] | None,
    others: Sequence[OutputFile],
    repo_id: str,
    message: str,
) -> dict[str, Any]:
    """Send card and evidence, and ``weights`` unless they are there; ``others`` are the
    publication's files beside card and evidence. A card at the target for the same weights with
    more metrics stays (for a stage repeated after a later one)."""
    sent = _card_files(found.facts, others)
    target = make_target(work.config, work.workspace.layout.published)
    there = _newer(target, found.facts, _text(sent[EVIDENCE]))
    if there:
        log.info("the published card has more metrics than this stage: it stays")
    sent |= {name: FileToPublish.of_text(name, text) for name, text in there.items()}
    for name, paper in sent.items():
        (work.output_dir / name).write_bytes(paper.content or b"")
    publication = Publication(
        repo_id=repo_id,
        files=(*(weights or ()), *sent.values()),
        step=found.facts.step,
        final=found.ends_run,
        fingerprint=found.facts.fingerprint,
        message=message,
        only_these=weights is None,
    )
    published = target.publish(publication, work.io.progress, work.io.should_stop)
    report = {
        **report_of(published, publication),
        "final": publication.final,
        "card": _text(sent[CARD]),
        "card_kept": bool(there),
        "made_with": dict(found.decided),
    }
    if found.best is not None:
        report["best"] = dict(found.best)
    return report


def _text(paper: FileToPublish) -> str:
    return (paper.content or b"").decode()


def _newer(target: Target, facts: CardFacts, evidence: str) -> dict[str, str]:
    """Card and evidence at the target, if they are for these weights and include all metrics of
    ``facts`` and more."""
    text = target.read_text(facts.repo_id, facts.revision, EVIDENCE)
    if text is None:
        return {}
    try:
        there, ours = load_evidence(text), load_evidence(evidence)
    except DataError as error:
        log.warning("the %s at the target is replaced: %s", EVIDENCE, error)
        return {}
    same = (there.fingerprint, there.step, there.files) == (ours.fingerprint, ours.step, ours.files)
    if not same or not _numbers(ours.facts) < _numbers(there.facts):
        return {}
    card = target.read_text(facts.repo_id, facts.revision, CARD)
    return {} if card is None else {CARD: card, EVIDENCE: text}


def _numbers(facts: CardFacts) -> set[tuple[str, ...]]:
    names = ("stage", "protocol", "decoding", "metric", "value", "n")
    return {tuple(str(entry.get(name)) for name in names) for entry in facts.evaluations}
