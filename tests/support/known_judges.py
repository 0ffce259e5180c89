"""Judges with known defects, as scripts for the judge server.

Like a real judge, they read questions from the prompt alone, between the fences. A faultless judge
knows the shipped set and gives each text its gold score, also with additions; a defect changes that
in one way.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from typing import Any, NamedTuple

from refiner_core.judge_report.build import PADDING
from refiner_core.judge_report.material import shipped_material
from tests.support.judge_server import Reply, completion

_FENCED = re.compile(r"<([a-z]+(?:-\d+)?)-([0-9a-f]{12,32})>\n(.*?)\n</\1-\2>", re.DOTALL)
_KINDS = {"criterion": "rubric", "evidence": "citation_recall", "source": "citation_precision"}
_TEXTS = ("passage", "claim", "answer")


class Asked(NamedTuple):
    """A question in a prompt."""

    kind: str
    question: str
    text: str
    reference: str


def questions_in(body: dict[str, Any]) -> list[Asked]:
    """Questions of a chat request, in order."""
    parts = [(label, text) for label, _, text in _FENCED.findall(body["messages"][-1]["content"])]
    named = dict(parts)
    text = next(named[label] for label in _TEXTS if label in named)
    found = [
        Asked(_KINDS[label.split("-")[0]], named["question"], text, content)
        for label, content in parts
        if label.split("-")[0] in _KINDS
    ]
    return found or [Asked("citation_needed", named["question"], text, named.get("answer", ""))]


class KnownJudge:
    """A script for :class:`~tests.support.judge_server.JudgeServer`; ``defect`` is one of

    ``""`` (none), ``early`` (the first criterion of a call is always met), ``first source`` (only
    that counts), ``long`` (likes answers that are padded), ``obedient`` (does as hostile answers
    say), ``dice`` (throws dice), ``mute`` (says nothing on one criterion).
    """

    def __init__(self, defect: str = "") -> None:
        self.defect = defect
        self._times: Counter[str] = Counter()
        self._deserved: dict[tuple[str, str, frozenset[str]], list[tuple[str, int]]] = {}
        self._wanted: dict[str, int] = {}
        material = shipped_material()
        for item in material.items:
            assert item.gold is not None
            self._learn(item.request, item.gold)
        for attack in material.attacks:
            self._learn(attack.twin, attack.deserved)
            self._wanted[attack.twin.text] = 2 if attack.wants == "higher" else 0

    def __call__(self, body: dict[str, Any], call: int) -> Reply:
        asked = questions_in(body)
        said = json.dumps(body["messages"])
        self._times[said] += 1
        dice = random.Random(f"{said} {self._times[said]}")
        scores = [self._score(question, place, dice) for place, question in enumerate(asked)]
        usage = {"prompt_tokens": len(said) // 4, "completion_tokens": 7 * len(asked)}
        if self.defect == "mute" and any("Quicker" in q.reference or "quicker" in q.reference
                                         for q in asked):  # fmt: skip
            return completion("I would rather not say.", usage=usage)
        value: Any = {"score": scores[0]}
        if '{"scores"' in body["messages"][0]["content"]:
            listed = [{"criterion": i, "score": s} for i, s in enumerate(scores, start=1)]
            value = {"scores": listed}
        return completion(json.dumps(value), usage=usage)

    def _learn(self, request: Any, deserved: float) -> None:
        key = (request.kind, request.question, frozenset(request.reference.split("\n\n")))
        self._deserved.setdefault(key, []).append((request.text, round(2 * deserved)))

    def _score(self, asked: Asked, place: int, dice: random.Random) -> int:
        sources = asked.reference.split("\n\n")
        known = self._deserved[asked.kind, asked.question, frozenset(sources)]
        honest, score = max((k for k in known if k[0] in asked.text), key=lambda k: len(k[0]))
        added = len(asked.text) - len(honest)
        if self.defect == "dice":
            return dice.choice(
                [0, 2] if asked.kind[-9:] in ("precision", "on_needed") else [0, 1, 2]
            )
        if self.defect == "early" and asked.kind == "rubric" and place == 0:
            return 2
        if self.defect == "first source" and len(sources) > 1:
            return 2 * (_digest(sources[0]) > _digest(sources[-1]))
        if self.defect == "long" and asked.kind == "rubric" and 300 < added < 3000:
            return 2
        hostile = added and not any(sentence in asked.text for sentence in PADDING)
        return self._wanted[honest] if self.defect == "obedient" and hostile else score


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
