"""What is sent: a model's files, its card, what the card was made from.

In: the stage whose output is a model, and :class:`CardFacts`. Out: files, each with its hash; those
of the model have been hashed when their stage ended. Nothing leaves with a card that does not hold:
it is checked here, and refused with all that is wrong.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

from flows.cards.reproduction import RECIPE_FILE
from flows.publishing.behind import need_result
from infra.publishing.targets import FileToPublish
from infra.store.published import CARD, EVIDENCE
from infra.store.workspace import Workspace
from refiner_core.cards import CardFacts, build_card, evidence_text, lint_card
from refiner_core.contract.errors import StageFailed
from refiner_core.contract.records import OutputFile

#: What a model needs, and may not go without.
MODEL_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors"),
    *("model.safetensors.index.json", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.*", "merges.txt", "chat_template.*", "*.model", "*.tiktoken"),
    *("LICENSE*", "NOTICE*"),
)
_NEEDED = ("config.json", "tokenizer_config.json", "*.safetensors")
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
    chosen = [f for f in there if _matches(f.name, patterns or MODEL_FILES)]
    missing = [n for n in _NEEDED if not any(_matches(f.name, (n,)) for f in chosen)]
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


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def papers(facts: CardFacts, files: Sequence[OutputFile], output_dir: Path) -> list[FileToPublish]:
    """The card, what it was made from, and the recipe where it is no shipped one; also written to
    ``output_dir``.

    Parameters
    ----------
    files
        The other files of the publication.

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
    made += [FileToPublish.of_text(CARD, card), FileToPublish.of_text(EVIDENCE, evidence)]
    for paper in made:
        assert paper.content is not None, "made of text"
        (output_dir / paper.name).write_bytes(paper.content)
    return made


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
