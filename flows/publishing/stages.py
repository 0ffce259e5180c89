"""The stages `publish` and `card`: facts become files, files go to the target.

    publish   weights, card and evidence of a checkpoint; numbers where they are there already
    card      the card again, with the numbers of evaluations that came after it

In: the work of a stage. Out: what lies at the target, and the stage's report about it. Nothing
leaves with a card that does not hold: it is checked here, and refused with all that is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from flows.cards.reproduction import RECIPE_FILE
from flows.publishing.facts import Collected, collect
from flows.publishing.lineage import need_result, subject_at_work
from flows.stages.work import StageWork
from infra.foreign.exports import COMPANIONS, lacking, matches, require_whole
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

#: What a model needs, and may not go without.
MODEL_FILES = (
    *("model*.safetensors", "model.safetensors.index.json", *COMPANIONS, "LICENSE*", "NOTICE*"),
)
_FOLDER = "model/"
#: Findings that an error names one by one.
_SAID = 5


def model_files(
    workspace: Workspace, stage_id: str, patterns: Sequence[str] = ()
) -> list[FileToPublish]:
    """The files of a finished stage's model that go along, with the hashes of its record.

    Parameters
    ----------
    patterns
        Which (``publish.files``); none: all that a model needs.

    Raises
    ------
    StageFailed
        It is no model in the layout of the Hub, or the patterns leave out what one needs.
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
            + ("would not go along" if patterns else "not there"),
            expected="an export with config, safetensors and tokenizer",
            fix="correct publish.files"
            if patterns
            else "delete the training stage's folder in the workspace and run the recipe again",
        )
    return chosen


def papers(facts: CardFacts, files: Sequence[OutputFile]) -> list[FileToPublish]:
    """The card, what it was made from, and the recipe where it is no shipped one; ``files`` are the
    others of the publication.

    Raises
    ------
    StageFailed
        The card does not hold.
    """
    made = []
    if facts.recipe_file is not None:
        made.append(FileToPublish.of_text(RECIPE_FILE, facts.recipe_file))
    others = {f.path: f for f in (*files, *(p.described for p in made))}
    card, evidence = build_card(facts), evidence_text(facts, list(others.values()))
    refuse_unless_it_holds(card, evidence, template=facts.template)
    return [*made, FileToPublish.of_text(CARD, card), FileToPublish.of_text(EVIDENCE, evidence)]


def refuse_unless_it_holds(card: str, evidence: str, *, template: str | None) -> None:
    """Refuse a card in which not everything holds, with all that is wrong.

    Raises
    ------
    StageFailed
        It does not.
    """
    findings = lint_card(card, evidence, template=template)
    if not findings:
        return
    more = f"; and {len(findings) - _SAID} more" if len(findings) > _SAID else ""
    raise StageFailed(
        f"The card does not hold, so nothing is published: {'; '.join(findings[:_SAID])}{more}",
        expected="licence and base model in its front matter, and no number without evidence",
        fix="correct publish.card_template (`refiner card template` prints the shipped one)"
        if template is not None
        else "run the same command with --debug and report it: such a card is a bug in refiner",
    )


log = logging.getLogger(__name__)


def publish(work: StageWork) -> dict[str, Any]:
    """Weights and a card to the target. Numbers that are not there yet come later, by ``card``."""
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
    if not doubt and found.asked is not None:
        stages = found.asked.stages.items()
        measured = (i for n, i in stages if without_protocol(n) == f"evaluate-{model}")
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
    message = f"Step {found.facts.step}: numbers in the card"
    return _send(work, found, None, listed, str(published["repo_id"]), message)


def _send(
    work: StageWork,
    found: Collected,
    weights: Sequence[FileToPublish] | None,
    others: Sequence[OutputFile],
    repo_id: str,
    message: str,
) -> dict[str, Any]:
    """Send card and evidence, and ``weights`` where they are not there already; ``others`` are the
    publication's files beside card and evidence. A card at the target that says the same of the
    same weights and more stays (a stage that is repeated after a later one)."""
    sent = {paper.name: paper for paper in papers(found.facts, others)}
    target = make_target(work.config, work.workspace.layout.published)
    there = _newer(target, found.facts, _text(sent[EVIDENCE]))
    if there:
        log.info("the card that is published has more numbers than this stage knows: it stays")
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
        "only_these": publication.only_these,
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
    """Card and evidence at the target, if they are of these weights and know all numbers of
    ``facts`` and others."""
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
