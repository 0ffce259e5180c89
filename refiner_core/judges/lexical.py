"""The embedded judges: word overlap, deterministic, without model or network.

In: judge requests. Out: judgements, always scored. It is a stand-in that lets the whole loop run
and be tested anywhere, not a measure of quality: it matches words, not meaning, and ignores
negation, numbers in other units, synonyms and paraphrase.

================== ==============================================================================
kind               score
================== ==============================================================================
rubric             With double-quoted phrases in the description: the share of them that the answer
                   contains (any case, whole words, blanks as one). Otherwise the share of the
                   description's content words that it contains: 1 from 60 %, 0.5 from 30 %, else 0.
citation_recall    By the share of the claim's content words that the evidence contains: 1 from
                   80 %, 0.5 above 50 %, else 0.
citation_precision By the same share in one snippet: 1 above 50 %, else 0.
citation_needed    0 for at most three words (titles, connectives); else 1 from four content words
                   or with a finite verb of :data:`FINITE_VERBS`; else 0.
================== ==============================================================================

This is `lexical-1`. `lexical-loose-1` is a second judge, for ablations and comparisons of judges:
it is more lenient, so that a policy trained on it can please it without being right. For quoted
phrases it takes the share of their *words* that the answer contains, in any order and anywhere; all
other thresholds are lower (:data:`STANDARDS`); ``citation_needed`` is the same.

Content words are words without :data:`STOPWORDS`, lightly stemmed. A text without content words has
share 0: a claim without content cannot be supported. Only the text inside ``<answer>`` counts (all
of it if the request carries the inside alone), and no text inside a tag.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from refiner_core.answers import strip_tags
from refiner_core.contract.config import LEXICAL_MODELS
from refiner_core.contract.types import Judgement, JudgeRequest


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Words that carry no content: function words and discourse markers.
STOPWORDS = _words(
    """a about above after again against all also although am among an and any are as at be because
    been before being below between both but by can could did do does doing down during each either
    e.g few for from further furthermore had has have having he hence her here hers him his how
    however i if in indeed instead into is it its itself just likewise may me meanwhile might more
    moreover most much must my namely neither nevertheless no nonetheless nor not now of off on once
    only or other otherwise our out over own per rather same she should similarly since so some
    still such than that the their them then there thereby therefore these they this those though
    through thus to too under until up upon us very via was we were what when where whereas whether
    which while who whom whose why will with within without would yet you your addition additionally
    conclusion consequently contrast example finally first instance lastly overall particular
    particularly second specifically summary third hand"""
)
#: Words of rubric descriptions that fit any answer; not searched for in the answer.
INSTRUCTIONS = _words(
    """answer attribute briefly cite contain describe discuss explain give include list mention
    point provide quote refer response say state"""
)
FINITE_VERBS = _words(
    """is are was were am has have had does did do can could will would may might must shall
    should"""
)


class _Standard(NamedTuple):
    """Leniency of a judge: shares of content words, all in [0, 1].

    Attributes
    ----------
    rubric_full, rubric_partial
        From here on a rubric without quotes has score 1, or 0.5.
    recall_full, recall_partial
        From here on, or above this, evidence supports a claim fully, or in part.
    precision_relevant
        Above this a snippet is relevant to a claim.
    whole_phrases
        Whether a quoted phrase counts only verbatim, or each of its words separately.
    """

    rubric_full: float = 0.6
    rubric_partial: float = 0.3
    recall_full: float = 0.8
    recall_partial: float = 0.5
    precision_relevant: float = 0.5
    whole_phrases: bool = True


#: By the judge's name, in the order of :data:`~refiner_core.contract.config.LEXICAL_MODELS`.
STANDARDS = dict(
    zip(LEXICAL_MODELS, (_Standard(), _Standard(0.4, 0.2, 0.6, 0.3, 0.3, False)), strict=True)
)
LEAD_WORDS = 3
NEEDED_CONTENT_WORDS = 4

_WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")
_QUOTED = re.compile(r"\"([^\"]+)\"|“([^”]+)”")
_ANSWER = re.compile(r"<answer>(.*)</answer>", re.DOTALL)
_SUFFIXES = ("ingly", "edly", "ings", "ing", "ies", "ied", "ed", "es", "ly", "s")
_MIN_STEM = 4


@functools.lru_cache(maxsize=65_536)
def stem(word: str) -> str:
    """A lower-case word without its common English ending; at least four letters remain."""
    if word.endswith(("'s", "’s")):
        word = word[:-2]
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= _MIN_STEM:
            word = word[: -len(suffix)] + ("y" if suffix in ("ies", "ied") else "")
            break
    return word[:-1] if word.endswith("e") and len(word) > _MIN_STEM else word


#: Cached, since groups of rollouts share prompts and rubrics.
_remembered = functools.lru_cache(maxsize=4096)


@_remembered
def content_words(text: str) -> frozenset[str]:
    """The stems of the words of ``text`` that are not stopwords."""
    return frozenset(stem(w) for w in _WORD.findall(text.casefold()) if w not in STOPWORDS)


@_remembered
def _criterion_words(description: str) -> frozenset[str]:
    words = content_words(description)
    return words - _INSTRUCTION_STEMS or words


_INSTRUCTION_STEMS = frozenset(map(stem, INSTRUCTIONS))


class LexicalJudge:
    """Implements :class:`~refiner_core.contract.types.Judge`; never fails.

    Parameters
    ----------
    model
        One of :data:`STANDARDS`.
    """

    def __init__(self, model: str = LEXICAL_MODELS[0]) -> None:
        self.standard = STANDARDS[model]

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        """One judgement per request, in order; identical requests are judged once."""
        known: dict[tuple[str, str, str], Judgement] = {}
        judgements = []
        for request in requests:
            key = (request.kind, request.text, request.reference)
            if key not in known:
                known[key] = Judgement("scored", _SCORERS[request.kind](request, self.standard))
            judgements.append(known[key])
        return judgements


@_remembered
def _answer_words(text: str) -> str:
    """An answer's text: inside ``<answer>``, without tags, lower case, single blanks."""
    inside = _ANSWER.search(text)
    return " ".join(strip_tags(inside[1] if inside else text).casefold().split())


@_remembered
def _phrases(description: str) -> tuple[str, ...]:
    found = (" ".join((a or b).casefold().split()) for a, b in _QUOTED.findall(description))
    return tuple(dict.fromkeys(phrase for phrase in found if phrase))


@_remembered
def _pattern(phrase: str) -> re.Pattern[str]:
    """The phrase as whole words."""
    begin, end = (r"\b" if re.match(r"\w", phrase[at]) else "" for at in (0, -1))
    return re.compile(f"{begin}{re.escape(phrase)}{end}")


def _share(wanted: frozenset[str], found: frozenset[str]) -> float:
    return len(wanted & found) / len(wanted) if wanted else 0.0


def _rubric(request: JudgeRequest, standard: _Standard) -> float:
    answer = _answer_words(request.text)
    phrases = _phrases(request.reference)
    words = frozenset(word for phrase in phrases for word in _WORD.findall(phrase))
    if words and not standard.whole_phrases:
        return _share(words, frozenset(_WORD.findall(answer)))
    if phrases:
        return sum(bool(_pattern(phrase).search(answer)) for phrase in phrases) / len(phrases)
    share = _share(_criterion_words(request.reference), content_words(answer))
    return (
        1.0 if share >= standard.rubric_full else 0.5 if share >= standard.rubric_partial else 0.0
    )


def _supported(request: JudgeRequest) -> float:
    return _share(content_words(request.text), content_words(request.reference))


def _recall(request: JudgeRequest, standard: _Standard) -> float:
    share = _supported(request)
    return 1.0 if share >= standard.recall_full else 0.5 if share > standard.recall_partial else 0.0


def _precision(request: JudgeRequest, standard: _Standard) -> float:
    return 1.0 if _supported(request) > standard.precision_relevant else 0.0


def _needed(request: JudgeRequest, standard: _Standard) -> float:
    words = _WORD.findall(request.text.casefold())
    if len(words) <= LEAD_WORDS:
        return 0.0
    stated = len(content_words(request.text)) >= NEEDED_CONTENT_WORDS
    return 1.0 if stated or not FINITE_VERBS.isdisjoint(words) else 0.0


_SCORERS: dict[str, Callable[[JudgeRequest, _Standard], float]] = {
    "rubric": _rubric,
    "citation_recall": _recall,
    "citation_precision": _precision,
    "citation_needed": _needed,
}
