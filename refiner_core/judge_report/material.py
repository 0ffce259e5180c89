"""Material that a judge is measured on, and asking it, each time as if for the first time.

In: the files that come with refiner (``sample.yaml``, ``hostile/v1.yaml``), or answers of a run; a
way to make a judge that knows nothing yet. Out: :class:`Item` and :class:`Attack` values; scores in
order (None where it failed), and what asking took: seconds and tokens by kind, failures by
reason.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from refiner_core.answers import ParsedEvidence, parse_answer, parse_evidence
from refiner_core.contract.config import JudgeConfig, RewardConfig
from refiner_core.contract.types import Judge, JudgeRequest, JudgeUsage, PromptRow, StreamingJudge
from refiner_core.judges.calls import MAX_SCORE
from refiner_core.judges.surroundings import usage_of
from refiner_core.rewards.combine import plan_citations
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


#: A judge of this configuration whose store is empty.
MakeJudge = Callable[[JudgeConfig], Judge]

#: Calls in flight while seconds are measured: few, so that it is the server that is measured.
LANES = 8
#: Calls below which a percentile would be the largest value under another name.
_FEWEST = {50: 5, 95: 20, 99: 100}


class Asker:
    """Asks judges of one configuration."""

    def __init__(
        self, config: JudgeConfig, make: MakeJudge, told: Callable[[str, int], None]
    ) -> None:
        self.config, self._make, self._told = config, make, told

    def ask(self, requests: Sequence[JudgeRequest], what: str) -> list[float | None]:
        """Scores of a judge that has no store. Errors as of :meth:`Judge.judge`."""
        if not requests:
            return []
        self._told(what, len(requests))
        judge = self._make(self.config)
        try:
            return [judgement.score for judgement in judge.judge(requests)]
        finally:
            _close(judge)

    def ask_timed(
        self, requests: Sequence[JudgeRequest], what: str
    ) -> tuple[list[float | None], dict[str, dict[str, Any]]]:
        """The same, kind by kind, with what it takes: ``seconds`` maps a percentile to seconds of a
        call, with :data:`LANES` in flight (None where there were too few calls, and empty where no
        server was asked); ``reasons`` counts answers and tries without a usable judgement, those
        that were mended by another try too."""
        scores: dict[int, float | None] = {}
        costs: dict[str, dict[str, Any]] = {}
        for kind in dict.fromkeys(request.kind for request in requests):
            places = [i for i, request in enumerate(requests) if request.kind == kind]
            self._told(f"{what}, {kind}", len(places))
            found, costs[kind] = self._timed([requests[i] for i in places])
            scores |= dict(zip(places, found, strict=True))
        return [scores[i] for i in range(len(requests))], costs

    def _timed(self, requests: Sequence[JudgeRequest]) -> tuple[list[float | None], dict[str, Any]]:
        judge = self._make(self.config)
        parts = _calls(requests, self.config)

        def one(part: list[int]) -> tuple[list[float | None], float]:
            began = time.perf_counter()
            judgements = judge.judge([requests[i] for i in part])
            return [j.score for j in judgements], time.perf_counter() - began

        try:
            with ThreadPoolExecutor(min(LANES, self.config.concurrency)) as lanes:
                answers = list(lanes.map(one, parts))
            used = usage_of(judge) or JudgeUsage()
        finally:
            _close(judge)
        scores: list[float | None] = [None] * len(requests)
        for part, (found, _) in zip(parts, answers, strict=True):
            for place, score in zip(part, found, strict=True):
                scores[place] = score
        seconds = sorted(s for _, s in answers) if isinstance(judge, StreamingJudge) else []
        return scores, {
            "judgements": len(requests),
            "failed": sum(score is None for score in scores),
            "calls": used.calls,
            "timed": len(seconds),
            "seconds": {p: _percentile(seconds, p) for p in _FEWEST} if seconds else {},
            "prompt_tokens": used.prompt_tokens,
            "completion_tokens": used.completion_tokens,
            "reasons": _reasons(used),
        }


def is_batched(config: JudgeConfig) -> bool:
    """True if rubrics are judged in company."""
    return config.kind == "openai" and config.form == "batched"


def _calls(requests: Sequence[JudgeRequest], config: JudgeConfig) -> list[list[int]]:
    """Places of the requests that are one call; the same request is asked once."""
    batched = is_batched(config)
    calls: dict[tuple[str, ...], list[int]] = {}
    for place, request in enumerate(requests):
        key: tuple[str, ...] = (request.kind, request.question, request.text)
        if not (batched and request.kind == "rubric"):
            key = (*key, request.reference)
        calls.setdefault(key, []).append(place)
    return list(calls.values())


def _percentile(ordered: Sequence[float], percent: int) -> float | None:
    """The smallest value that at least ``percent`` of them do not exceed."""
    if len(ordered) < _FEWEST[percent]:
        return None
    return ordered[math.ceil(percent / 100 * len(ordered)) - 1]


def _reasons(used: JudgeUsage) -> dict[str, int]:
    found = Counter({f"HTTP {status}": n for status, n in used.answers.items() if status != 200})
    found.update(used.lost)
    found.update(used.unusable)
    return dict(sorted(found.items()))


def _close(judge: Judge) -> None:
    """End threads and connections of a judge that has some."""
    close = getattr(judge, "close", None)
    if close is not None:
        close()
