"""What a judge model wrote, as a judgement.

In: the text of a completion. Out: a :class:`~refiner_core.contract.types.Judgement`: scored with
score/2, or failed with the reason. Never a number where the text does not say one.
"""

from __future__ import annotations

import json
import math
from typing import Any

from refiner_core.contract.types import Judgement

#: A judge is asked for 0 to 2, so that "in part" has a number of its own.
MAX_SCORE = 2.0

#: A judgement is a short object at the end; of a longer text only this much is read.
_MAX_CHARACTERS = 20_000
_ABSENT = object()


def parse_judgement(text: str, allowed: tuple[float, ...] | None = None) -> Judgement:
    """Read ``{"score": x}``, 0 <= x <= 2, out of a judge's reply.

    A judge's own reasoning (up to the last ``</think>``) is not read. Around the object may stand
    text or a code fence, it may be nested in another, have its braces doubled or one too many; of
    several objects with a score the last wins. Anything else is a failure: no object, a score that
    is no number or out of range (``{"score": 10}`` is not 5.0), or reasoning that never ended.

    Parameters
    ----------
    text
        The completion. One that ended by length is a failure whatever it says; the caller knows.
    allowed
        The scores that the question allows (``(0, 2)`` for yes or no); None allows the range.
    """
    _, closed, tail = text.rpartition("</think>")
    if not closed and "<think>" in text:
        return _failed("the reasoning did not end")
    score = _last_score(tail if closed else text)
    if score is _ABSENT:
        return _failed("no object with a score", tail if closed else text)
    if isinstance(score, str):
        try:
            score = float(score)
        except ValueError:
            return _failed("the score is no number", score)
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        return _failed("the score is no number", score)
    if not 0 <= score <= MAX_SCORE:
        return _failed("the score is out of range", score)
    if allowed is not None and score not in allowed:
        return _failed(f"the score is none of {allowed}", score)
    return Judgement("scored", float(score) / MAX_SCORE)


def _failed(why: str, what: Any = "") -> Judgement:
    shown = f": {what!r:.120}" if what != "" else ""
    return Judgement("failed", None, f"unparsable judgement, {why}{shown}")


def _last_score(text: str) -> Any:
    """The score of the last JSON object that has one, at whatever depth."""
    text = text[-_MAX_CHARACTERS:]
    decoder = json.JSONDecoder()
    found: Any = _ABSENT
    position = text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            score = _search(value)
            found = found if score is _ABSENT else score
        position = text.find("{", end)
    return found


def _search(value: Any) -> Any:
    """The score in a decoded value: its own key first, else the last one below it."""
    if isinstance(value, dict):
        if "score" in value:
            return value["score"]
        value = list(value.values())
    found: Any = _ABSENT
    if isinstance(value, list):
        for child in value:
            score = _search(child)
            found = found if score is _ABSENT else score
    return found
