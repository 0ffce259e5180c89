"""Cases for measuring a judge, and asking it without memory.

In: the shipped files (``sample.yaml``, ``hostile/v1.yaml``), or answers of a run; a
way to make a judge with an empty store. Out: :class:`JudgedItem` and :class:`Attack` values; scores
in order (None if it failed), with the cost: seconds and tokens by kind, failures by
reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from refiner_core.answers import ParsedEvidence, parse_answer, parse_evidence
from refiner_core.contract.config import JudgeConfig, RewardConfig
from refiner_core.contract.records import picked
from refiner_core.contract.types import Judge, JudgeRequest, JudgeUsage, PromptRow
from refiner_core.judges.calls import MAX_SCORE
from refiner_core.judges.context import usage_of
from refiner_core.rewards.combine import plan_citations
from refiner_core.rubrics import Rubric, select_rubrics

SAMPLE = Path(__file__).parent / "sample.yaml"
HOSTILE = Path(__file__).parent / "hostile" / "v1.yaml"

Polarity = Literal["positive", "negative"]


@dataclass(frozen=True)
class JudgedItem:
    """One question to a judge, with known facts about it.

    Attributes
    ----------
    question_id
        Id of the answered question: answers to one question are correlated.
    polarity
        ``negative`` if a high score is a fault.
    gold
        The correct score, in [0, 1]; None if unknown.
    sources
        The sources of its evidence, in order.
    """

    question_id: str
    answer_id: str
    request: JudgeRequest
    polarity: Polarity = "positive"
    gold: float | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attack:
    """A hostile answer. ``wants`` is the score that its author wants, ``about`` its method."""

    name: str
    about: str
    request: JudgeRequest
    twin: JudgeRequest
    wants: Literal["higher", "lower"]
    deserved: float


class Material(NamedTuple):
    """All cases, with their source in words."""

    name: str
    items: tuple[JudgedItem, ...]
    attacks: tuple[Attack, ...]


def shipped_material(questions: int | None = None) -> Material:
    """The shipped set, or its first ``questions``, with gold scores."""
    content = _yaml(SAMPLE)
    found: list[JudgedItem] = []
    for entry in content["questions"][:questions]:
        found += _items_of_question(entry)
    return Material(f"shipped set {content['version']}", tuple(found), shipped_attacks())


def shipped_attacks() -> tuple[Attack, ...]:
    """The shipped hostile answers."""
    content = _yaml(HOSTILE)
    return tuple(_attack(entry, content["bases"][entry["base"]]) for entry in content["attacks"])


def run_material(
    name: str, answers: Iterable[tuple[PromptRow, str]], reward: RewardConfig
) -> Material:
    """Sampled answers, each with its prompt, and the shipped hostile answers.

    An answer without a single answer block has nothing to judge and is left out.

    Raises
    ------
    DataError, ConfigurationError
        Rubrics of a row, or the static set, cannot be read.
    """
    found: list[JudgedItem] = []
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
) -> list[JudgedItem]:
    """All questions about one answer: its rubrics first, then its claims."""
    answer = parse_answer(text, evidence.texts)
    if answer.malformed or answer.body is None:
        return []
    items = [
        JudgedItem(*place, JudgeRequest("rubric", question, answer.body, r.description), r.polarity)
        for r in rubrics
    ]
    for asked in plan_citations(answer, evidence, question):
        kind = asked.request.kind
        sources = tuple(evidence.texts[i] for i in asked.ids) if kind == "citation_recall" else ()
        polarity: Polarity = "negative" if kind == "citation_needed" else "positive"
        items.append(JudgedItem(*place, asked.request, polarity, sources=sources))
    return items


def _items_of_question(entry: Any) -> list[JudgedItem]:
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


#: Makes a judge of this configuration with an empty store.
MakeJudge = Callable[[JudgeConfig], Judge]


class JudgeClient:
    """Asks judges of one configuration."""

    def __init__(
        self, config: JudgeConfig, make: MakeJudge, told: Callable[[str, int], None]
    ) -> None:
        self.config, self._make, self._told = config, make, told
        #: Usage of the last series.
        self.used: JudgeUsage | None = None

    def ask(self, requests: Sequence[JudgeRequest], what: str) -> list[float | None]:
        """Scores of a judge without a store. Errors: see :meth:`Judge.judge`."""
        if not requests:
            return []
        self._told(what, len(requests))
        judge = self._make(self.config)
        try:
            return [judgement.score for judgement in judge.judge(requests)]
        finally:
            self.used = usage_of(judge)
            getattr(judge, "close", lambda: None)()

    def ask_timed(
        self, requests: Sequence[JudgeRequest], what: str
    ) -> tuple[list[float | None], dict[str, dict[str, Any]]]:
        """The same, kind by kind, with the cost: ``seconds`` is the mean of a call (None without a
        server); ``reasons`` counts answers and tries without a usable judgement, including
        those that a retry fixed."""
        scores: dict[int, float | None] = {}
        costs: dict[str, dict[str, Any]] = {}
        for kind in dict.fromkeys(request.kind for request in requests):
            places = [i for i, request in enumerate(requests) if request.kind == kind]
            found = self.ask([requests[i] for i in places], f"{what}, {kind}")
            used = self.used or JudgeUsage()
            answered = sum(used.answers.values())
            costs[kind] = {
                "judgements": len(found),
                "failed": found.count(None),
                "seconds": used.latency_s / answered if answered else None,
                **picked(used, "calls", "prompt_tokens", "completion_tokens"),
                "reasons": _reasons(used),
            }
            scores |= dict(zip(places, found, strict=True))
        return [scores[i] for i in range(len(requests))], costs


def is_batched(config: JudgeConfig) -> bool:
    """True if several rubrics are judged in one call."""
    return config.kind == "openai" and config.form == "batched"


def _reasons(used: JudgeUsage) -> dict[str, int]:
    found = Counter({f"HTTP {status}": n for status, n in used.answers.items() if status != 200})
    found.update(used.lost)
    found.update(used.unusable)
    return dict(sorted(found.items()))
