"""What a judge model wrote, as judgements.

In: the text of a completion. Out: a :class:`~refiner_core.contract.types.Judgement` (scored with
score/2, or failed with the reason), or a list of them where several criteria were asked in one
call. Never a number where the text does not say one.

Reading takes time in proportion to the text, whatever stands in it: a text that is longer than any
judgement, nested deeper than Python's limit, or that has to be begun again too often, is a failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from refiner_core.contract.types import UNPARSABLE, Judgement

#: A judge is asked for 0 to 2, so that "in part" has a number of its own.
MAX_SCORE = 2.0

#: Of what follows the reasoning. A judgement is a short object.
_MAX_CHARACTERS = 100_000
#: What may be read in vain: characters as a multiple of the text's length, and beginnings.
_MOST_REREAD = 16
_MOST_BEGUN = 1000
#: Where a JSON value of each kind may begin; the braces of a formula do not look so.
_BEGINS = {"{": re.compile(r'\{(?=\s*["}])'), "{[": re.compile(r'\{(?=\s*["}])|\[')}
_ABSENT = object()


class BatchReading(NamedTuple):
    """What a reply says on each criterion: None where it has no score for it, and why."""

    judgements: tuple[Judgement | None, ...]
    problem: str = ""


class _Unreadable(Exception):
    """The text is no judgement; says why."""


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
    score: Any = _ABSENT
    try:
        for value in _values(text, "{"):
            found = _score_in(value)
            score = score if found is _ABSENT else found
        if score is _ABSENT:
            raise _Unreadable(f"no object with a score{_quoted(text)}")
        return Judgement("scored", _read_score(score, allowed))
    except _Unreadable as error:
        return Judgement("failed", None, f"{UNPARSABLE}, {error}")


def parse_batch(text: str, count: int, allowed: tuple[float, ...] | None = None) -> BatchReading:
    """Read the scores of criteria 1 to ``count`` out of a judge's reply.

    The form asked for is ``{"scores": [{"criterion": 1, "score": x}, …]}``. The list alone, a list
    of ``count`` numbers, and one object after the other are read, too; what may stand around them
    is as in :func:`parse_judgement`, and of several lists the last wins.

    Returns
    -------
    BatchReading
        ``count`` judgements, all scored, without a problem; or with one, and None for each
        criterion whose score is missing or unusable. Numbers that do not fit (a criterion twice, or
        one that was not asked) leave nothing: whoever miscounts may mean another one everywhere.
    """
    nothing: tuple[Judgement | None, ...] = (None,) * count
    try:
        entries = _last_list(text, count)
        by_number = _numbered(entries, count)
    except _Unreadable as error:
        return BatchReading(nothing, f"{UNPARSABLE}, {error}")
    judgements, problems = list(nothing), []
    for number in range(1, count + 1):
        if number not in by_number:
            problems.append(f"criterion {number} is missing")
            continue
        try:
            score = _read_score(by_number[number], allowed)
        except _Unreadable as error:
            problems.append(f"criterion {number}: {error}")
        else:
            judgements[number - 1] = Judgement("scored", score)
    problem = f"{UNPARSABLE}, {'; '.join(problems[:3])}" if problems else ""
    return BatchReading(tuple(judgements), problem)


# ---------------------------------------------------------------- scores


def _read_score(value: Any, allowed: tuple[float, ...] | None) -> float:
    """A score on the judge's scale as one in [0, 1]."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise _Unreadable(f"the score is no number{_quoted(value)}") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise _Unreadable(f"the score is no number{_quoted(value)}")
    if not 0 <= value <= MAX_SCORE:
        raise _Unreadable(f"the score is out of range{_quoted(value)}")
    if allowed is not None and value not in allowed:
        raise _Unreadable(f"the score is none of {allowed}{_quoted(value)}")
    return float(value) / MAX_SCORE


def _quoted(what: Any) -> str:
    if isinstance(what, int) and not -(10**9) < what < 10**9:
        return ": a number of many digits"  # Python refuses to write the longest of them
    return f": {what[:200] if isinstance(what, str) else what!r:.120}" if what != "" else ""


def _score_in(value: Any) -> Any:
    """The score in a decoded value: its own key first, else the last one below it."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if "score" in value:
                return value["score"]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return _ABSENT


# ---------------------------------------------------------------- lists of scores


def _last_list(text: str, count: int) -> Sequence[Any]:
    """What the reply lists: entries with a score, or bare numbers."""
    named: Sequence[Any] | None = None
    numbers: Sequence[Any] | None = None
    loose: list[Any] = []
    for value in _values(text, "{["):
        found, is_named = _list_in(value)
        if is_named:
            named = found
        elif len(found) == count:
            numbers = found
        elif _is_entry(value) and "criterion" in value:
            loose.append(value)
    listed = named or numbers or loose
    if not listed:
        raise _Unreadable(f"no list of scores{_quoted(text)}")
    return listed


def _list_in(value: Any) -> tuple[list[Any], bool]:
    """The list of scores in a decoded value, the last one if there are several, and whether it says
    that it is one: by its name, or by those of its entries."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            scores = value.get("scores")
            if isinstance(scores, list) and scores:
                return scores, True
            waiting += value.values()
        elif isinstance(value, list) and value:
            if all(map(_is_entry, value)):
                return value, True
            if not any(isinstance(entry, dict | list) for entry in value):
                return value, False
            waiting += value
    return [], False


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and "score" in value


def _numbered(entries: Sequence[Any], count: int) -> dict[int, Any]:
    """Raw scores by the number of the criterion."""
    bare = not any(isinstance(entry, dict) for entry in entries)
    if bare or not any(isinstance(entry, dict) and "criterion" in entry for entry in entries):
        if len(entries) != count:
            raise _Unreadable(f"{len(entries)} scores for {count} criteria")
        if not bare and not all(map(_is_entry, entries)):
            raise _Unreadable("some entries have no score")
        return dict(enumerate([e if bare else e["score"] for e in entries], start=1))
    found: dict[int, Any] = {}
    for entry in entries:
        number = _number(entry.get("criterion") if isinstance(entry, dict) else None)
        if number is None or not 1 <= number <= count:
            raise _Unreadable(f"an entry that names none of the {count} criteria")
        if number in found:
            raise _Unreadable(f"criterion {number} stands there twice")
        found[number] = entry.get("score")
    return found


def _number(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 6:
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# ---------------------------------------------------------------- JSON in text


def _values(text: str, opening: str) -> Iterator[Any]:
    """The JSON values in a reply that begin with one of ``opening``, in order."""
    whole = text.strip()
    if whole[:1] in ("{", "[") and len(whole) <= _MAX_CHARACTERS:
        try:  # held to a schema, it is nothing else, and may quote any tag
            value = json.loads(whole)
        except (ValueError, RecursionError):
            pass
        else:
            yield value
            return
    yield from _embedded(_without_reasoning(text), opening)


def _without_reasoning(text: str) -> str:
    _, closed, tail = text.rpartition("</think>")
    if not closed and "<think>" in text:
        raise _Unreadable("the reasoning did not end")
    if len(tail) > _MAX_CHARACTERS:
        raise _Unreadable(f"it has {len(tail):,} characters")
    return tail


def _embedded(text: str, opening: str) -> Iterator[Any]:
    decoder, begins = json.JSONDecoder(), _BEGINS[opening]
    characters, times = _MOST_REREAD * len(text), _MOST_BEGUN
    match = begins.search(text)
    while match is not None:
        start = match.start()
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            end, times, characters = start + 1, times - 1, characters - (error.pos - start)
        except (ValueError, RecursionError) as error:
            raise _Unreadable(f"it is nested or long beyond reading{_quoted(text)}") from error
        else:
            yield value
        if characters < 0 or times < 0:
            raise _Unreadable(f"too much of it begins and does not end{_quoted(text)}")
        match = begins.search(text, end)
