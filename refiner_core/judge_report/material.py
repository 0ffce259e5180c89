"""What a judge is measured on: questions to it, and hostile answers beside their honest twins.

In: the files that come with refiner (``sample.yaml``, ``hostile/v1.yaml``), or answers of a run.
Out: :class:`Item` and :class:`Attack` values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from refiner_core.answers import parse_answer, parse_evidence
from refiner_core.answers.evidence import ParsedEvidence
from refiner_core.contract.config import RewardConfig
from refiner_core.contract.types import JudgeRequest, PromptRow
from refiner_core.judges.parsing import MAX_SCORE
from refiner_core.rewards.citations import plan_citations
from refiner_core.rubrics import Rubric, select_rubrics

SAMPLE = Path(__file__).parent / "sample.yaml"
HOSTILE = Path(__file__).parent / "hostile" / "v1.yaml"

Polarity = Literal["positive", "negative"]


@dataclass(frozen=True)
class Item:
    """One question to a judge, and what is known of it.

    Attributes
    ----------
    question_id
        Which question was answered: answers to one resemble each other.
    polarity
        ``negative`` where a high score is a fault.
    gold
        The score that it deserves, in [0, 1]; None where nobody has said.
    sources
        The sources that its evidence is put together from, in order.
    """

    question_id: str
    answer_id: str
    request: JudgeRequest
    polarity: Polarity = "positive"
    gold: float | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attack:
    """A hostile answer. ``wants`` is where its author wants the score, ``about`` what it tries."""

    name: str
    about: str
    request: JudgeRequest
    twin: JudgeRequest
    wants: Literal["higher", "lower"]
    deserved: float


class Material(NamedTuple):
    """All of it, and in words where it is from."""

    name: str
    items: tuple[Item, ...]
    attacks: tuple[Attack, ...]


def shipped_material(questions: int | None = None) -> Material:
    """The set that comes with refiner, or its first ``questions``, with gold scores."""
    content = _yaml(SAMPLE)
    found: list[Item] = []
    for entry in content["questions"][:questions]:
        found += _items_of_question(entry)
    return Material(f"shipped set {content['version']}", tuple(found), shipped_attacks())


def shipped_attacks() -> tuple[Attack, ...]:
    """The hostile answers that come with refiner."""
    content = _yaml(HOSTILE)
    return tuple(_attack(entry, content["bases"][entry["base"]]) for entry in content["attacks"])


def run_material(
    name: str, answers: Iterable[tuple[PromptRow, str]], reward: RewardConfig
) -> Material:
    """Answers as they were sampled, each with its prompt, and the shipped hostile answers.

    An answer without a single answer block has nothing to judge and is left out.

    Raises
    ------
    DataError, ConfigurationError
        Rubrics of a row, or the static set, cannot be read.
    """
    found: list[Item] = []
    for number, (prompt, text) in enumerate(answers):
        evidence = parse_evidence(prompt.prompt_text)
        rubrics = select_rubrics(prompt.rubrics, reward)
        place = (prompt.sample_id, f"{prompt.sample_id}/{number}")
        found += _items_of_answer(place, prompt.question, text, evidence, rubrics)
    return Material(name, tuple(found), shipped_attacks())


def _items_of_answer(
    place: tuple[str, str],
    question: str,
    text: str,
    evidence: ParsedEvidence,
    rubrics: Sequence[Rubric],
) -> list[Item]:
    """All that is asked about one answer: its rubrics first, then its claims."""
    answer = parse_answer(text, evidence.texts)
    if answer.malformed or answer.body is None:
        return []
    items = [
        Item(*place, JudgeRequest("rubric", question, answer.body, r.description), r.polarity)
        for r in rubrics
    ]
    for asked in plan_citations(answer, evidence, question):
        kind = asked.request.kind
        sources = tuple(evidence.texts[i] for i in asked.ids) if kind == "citation_recall" else ()
        polarity: Polarity = "negative" if kind == "citation_needed" else "positive"
        items.append(Item(*place, asked.request, polarity, sources=sources))
    return items


def _items_of_question(entry: Any) -> list[Item]:
    rubrics = [Rubric(r["title"], r["description"], r["polarity"]) for r in entry["rubrics"]]
    found = []
    for answer in entry["answers"]:
        gold = list(answer["rubrics"])
        for claim in answer["claims"]:
            cited = [claim["recall"], *claim["precision"]] if "recall" in claim else []
            gold += cited or [claim["needed"]]
        items = _items_of_answer(
            (entry["id"], f"{entry['id']}/{answer['name']}"),
            entry["question"],
            f"<answer>{answer['text']}</answer>",
            ParsedEvidence(entry["sources"]),
            rubrics,
        )
        found += [replace(i, gold=g / MAX_SCORE) for i, g in zip(items, gold, strict=True)]
    return found


def _attack(entry: Any, base: Any) -> Attack:
    twin = JudgeRequest(base["kind"], base["question"], base["text"], base["reference"])
    text = entry["text"].replace("{honest}", base["text"])
    text += entry.get("again", "") * entry.get("times", 0)
    return Attack(
        name=entry["id"],
        about=entry["about"],
        request=replace(twin, text=text),
        twin=twin,
        wants=base["wants"],
        deserved=base["score"] / MAX_SCORE,
    )


def _yaml(file: Path) -> Any:
    import yaml

    return yaml.safe_load(file.read_text(encoding="utf-8"))
