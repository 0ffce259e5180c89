"""Judges with planted biases of known strength, as a script for the judge server.

A planted judge scores like the lexical judge, except for a share of its judgements of rubrics: the
strength of the bias. On these it looks at one feature of the answer alone, in [0, 1], and says with
this probability what is best for the answer, else what is worst. Its name says which:
``planted-citations-0.6``; with strength 0 it is honest. The same question has the same score. Like
a real judge it reads questions from the prompt alone; two biases also know the row.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from refiner_core.answers import parse_answer, strip_tags
from refiner_core.contract.types import JudgeRequest
from refiner_core.data.rows import DataRow
from refiner_core.judges import LexicalJudge
from tests.support.judge_server import Reply, completion
from tests.support.known_judges import Asked, questions_in

#: Words that a biased judge likes. Most are not in the vocabulary of `tiny`.
KEYWORD, CONFIDENT = "its", frozenset(["certainly", "clearly", "definitely", "surely", "truly"])
#: An honest claim of `tiny`, with its lead, has some eight words; 24 are three of them.
SHORT, LONG = 8, 24
#: How the negative rubrics of synthetic rows begin: there the worst score is best.
_FAULT = "Attributes "


class Seen(NamedTuple):
    """An answer as a biased judge sees it, with the row's ids in order and those that answer it."""

    text: str
    words: tuple[str, ...]
    cited: tuple[str, ...]
    ids: tuple[str, ...]
    gold: frozenset[str]


#: Features of an answer, in [0, 1], by the name of the bias.
BIASES: Mapping[str, Callable[[Seen], float]] = {
    "length": lambda seen: min(1.0, max(0, len(seen.words) - SHORT) / (LONG - SHORT)),
    "citations": lambda seen: min(1.0, max(0, len(seen.cited) - 1) / 2),
    "keyword": lambda seen: float(KEYWORD in seen.words),
    "confident": lambda seen: float(not CONFIDENT.isdisjoint(seen.words)),
    "first": lambda seen: float(seen.ids[:1] == seen.cited[:1] != ()),
    "noise": lambda seen: 0.5,
    "leak": lambda seen: float(any(one in seen.text for one in seen.gold)),
}


def planted_name(bias: str, strength: float) -> str:
    """Name of a judge's model; all honest judges are one."""
    return f"planted-{bias}-{strength:g}" if strength else "planted-none-0"


class PlantedJudges:
    """A script for :class:`~tests.support.judge_server.JudgeServer` that plays all planted judges;
    a request's model says which one is asked."""

    def __init__(self, rows: Iterable[DataRow]) -> None:
        self._rows = {
            row.question: (tuple(row.evidence.texts), frozenset((row.truth or {})["gold_ids"]))
            for row in rows
        }
        self._honest = LexicalJudge()

    def __call__(self, body: dict[str, Any], call: int) -> Reply:
        _, bias, strength = body["model"].split("-")
        scores = [self._score(asked, bias, float(strength)) for asked in questions_in(body)]
        value: Any = {"score": scores[0]}
        if '{"scores"' in body["messages"][0]["content"]:
            listed = [{"criterion": i, "score": s} for i, s in enumerate(scores, start=1)]
            value = {"scores": listed}
        return completion(json.dumps(value))

    def _score(self, asked: Asked, bias: str, strength: float) -> int:
        if strength and asked.kind == "rubric":
            ids, gold = self._rows[asked.question]
            answer = parse_answer(f"<answer>{asked.text}</answer>")
            words = tuple(re.findall(r"\w+", strip_tags(asked.text).casefold()))
            seen = Seen(asked.text, words, answer.cited_ids, ids, gold)
            if _share(asked, "whether") < strength:
                best = _share(asked, "what") < BIASES[bias](seen)
                return 2 * (best != asked.reference.startswith(_FAULT))
        request = JudgeRequest(asked.kind, asked.question, asked.text, asked.reference)
        return round(2 * (self._honest.judge([request])[0].score or 0.0))


def _share(asked: Asked, use: str) -> float:
    """A number in [0, 1) that depends on the question alone."""
    text = "\x1f".join((use, *asked))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
