"""Warnings about the wording of one rubric.

In: a rubric. Out: (rule, what) pairs. All of it goes by patterns: they are made to pass what people
write on purpose, and a set may accept a warning with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from refiner_core.rubrics.rows import Rubric

LONG_WORDS, TERSE_WORDS = 120, 3

_QUOTED = re.compile(r"\"[^\"]*\"|“[^”]*”")
_CLAUSE = re.compile(r"(?<=[.;!?])\s+")
#: Clauses that say when a score is given: they describe the scale in words.
_ANCHOR = re.compile(
    r"\b(?:(?:full(?:y|est)?|half|no|zero|partial(?:ly)?)[ -](?:marks?|credit|true|met|satisfied)"
    r"|(?:true|met) in part|not (?:true|met) if|none if|score [012] if"
    r"|(?:^|\s)[012]\s?(?:[:=–—-]|if)\s)",
    re.IGNORECASE,
)  # fmt: skip


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: What an answer does, and what things in the world do not.
_SAYING = _listed(
    """acknowledge argue assess cite clarify compare contrast critici[sz]e define describe discuss
    elaborate emphasi[sz]e enumerate evaluate explain highlight illustrate justify mention note
    outline recommend summari[sz]e"""
)
#: What others do as well: `methods that learn X and provide Y` is one demand.
_DOING = _listed(
    """address begin conclude contain cover detail differentiate distinguish end give identify
    include introduce list name present propose provide quote report specify state suggest"""
)
#: Verbs that are nouns as well demand something only where an object follows.
_NOUNS = frozenset(
    _listed(
        """address cite compare contrast cover detail end highlight list name note outline present
        quote report state"""
    )
)
_OBJECT = (
    r"(?=\s+(?:the|an?|its|it|them|their|how|why|what|that|which|some|at|each|every|all|any|both"
    r"|whether|this|different|other)\b)"
)


def _third(verb: str) -> str:
    if verb.endswith("fy"):
        return f"{verb[:-1]}ies"
    return f"{verb}es" if verb.endswith(("ss", "sh")) else f"{verb}s"


def _first(suffixed: bool) -> re.Pattern[str]:
    verbs = [_third(v) if suffixed else v for v in (*_SAYING, *_DOING)]
    return re.compile(rf"\b(?:{'|'.join(verbs)})\b", re.IGNORECASE)


def _second(verbs: tuple[str, ...], suffixed: bool) -> re.Pattern[str]:
    """A further demand: a verb of the same form behind `and` and the like."""
    formed = {v: _third(v) if suffixed else v for v in verbs}
    free = "|".join(form for v, form in formed.items() if v not in _NOUNS)
    bound = "|".join(form for v, form in formed.items() if v in _NOUNS)
    lead = r"(?:,?\s+(?:and|as well as|but|then)|[;,]\s*then)\s+"
    filler = r"(?:(?:also|then|it|the answer|should|must|needs? to|\w+ly)\s+)*"
    return re.compile(rf"{lead}{filler}(?:(?:{free})\b|(?:{bound})\b{_OBJECT})", re.IGNORECASE)


_FORMS = [
    (_first(suffixed), _second(_SAYING, suffixed), _second(_DOING, suffixed))
    for suffixed in (False, True)
]
_RELATIVE = re.compile(r"\b(?:that|which|who|where|how|why|whether|when)\b", re.IGNORECASE)
_FURTHER = re.compile(
    r"^(?:(?:also|additionally|in addition|furthermore|moreover|finally|then),?\s+)?"
    r"(?:it|the (?:answer|response)|they|this)\s+(?:\w+ly\s+)?(?:should|must|needs? to|also|"
    r"has to|is expected to)\b",
    re.IGNORECASE,
)

_SUBJECT = r"^(?:(?:the|an?|this|its)\s+)?(?:answer|response|text|reply|output|summary|it)?\s*"
_NEGATED = re.compile(
    rf"{_SUBJECT}(?:(?:does|do|did|is|are|was|has|have|can|could|will|would)\s*(?:not|n[’']t)\b"
    r"|never\b|cannot\b|can[’']t\b|fail(?:s|ed|ing|ure)?\s+to\b|lacks?\b|lacking\b|omits?\b"
    r"|miss(?:es|ing)\b|neglects?\b|contains?\s+no\b|includes?\s+no\b|has\s+no\b|makes?\s+no\b"
    r"|gives?\s+no\b|no\b|not\b|without\b|absence\s+of\b)",
    re.IGNORECASE,
)
_WANTED = re.compile(
    rf"{_SUBJECT}(?:(?:should|must|ought\s+to|needs?\s+to|has\s+to)\b|avoids?\b|avoiding\b"
    r"|refrains?\b|is\s+free\s+(?:of|from)\b|stays?\s+(?:on|within|away)\b)",
    re.IGNORECASE,
)
_UNWANTED = re.compile(
    rf"{_SUBJECT}(?:(?:should|must|ought)\s*(?:not|n[’']t|never|avoid|refrain)\b|avoids?\b|avoiding\b"
    r"|refrains?\b|do\s+not\b|don[’']t\b)",
    re.IGNORECASE,
)

_SOURCES = (
    r"(?:(?:the|its|cited|given|provided|retrieved|these|any|search)\s+)?"
    r"(?:sources?|snippets?|tool outputs?|search results?|retrieved (?:documents?|passages?|text)"
    r"|(?:given|provided|cited|retrieved|supplied|attached) (?:documents?|passages?|evidence|"
    r"context|references?|material|articles?|papers?))"
)
_TELLS = (
    r"(?:sa(?:y|ys|id)|stat(?:e|es|ed|ing)|support\w*|show\w*|contain\w*|contradict\w*|back\w*"
    r"|confirm\w*|provid\w*|mention\w*|give|gives)"
)
_UNSEEN = [
    (re.compile(pattern, re.IGNORECASE), kind)
    for pattern, kind in (
        (rf"\b{_SOURCES}\s+(?:actually\s+)?(?:(?:that|which)\s+)?(?:do(?:es)? not\s+|merely\s+)?"
         rf"{_TELLS}\b", "what the sources say"),
        (rf"\b(?:found|present|stat(?:ed|es)|supported|contained|backed|verified|verifiable|"
         rf"grounded|faithful|consistent|accord\w*|match\w*|checked|missing|stands?|appear\w*|"
         rf"based)\s+(?:\w+\s+){{0,2}}(?:in|by|with|to|from|against|on)\s+(?:\w+\s+)?{_SOURCES}\b",
         "what the sources say"),
        (r"\bopens? the (?:cited )?sources?\b", "what the sources say"),
        (r"\b(?:tool|function|api)[ -]calls?\b|\bcall(?:s|ed)? (?:the|a|any) (?:search )?tools?\b"
         r"|\bsearch quer(?:y|ies)\b|\b(?:number|order) of (?:searches|queries|calls)\b",
         "tool calls"),
        (r"\b(?:the )?(?:agent|assistant|policy|system)\s+(?:searche[sd]|quer(?:ies|ied)|called|"
         r"calls|browse[sd]|retrieve[sd]|spent|took)\b", "what the agent did"),
        (r"\b(?:response|answering) time\b|\blatency of the (?:answer|response|agent)\b"
         r"|\b(?:answers?|answered|responds?|responded|generated) (?:quickly|within \d+ "
         r"(?:ms|seconds?|minutes?))\b|\btokens? (?:used|spent|generated)\b", "time or cost"),
        (r"\b(?:chain of thought|hidden reasoning|internal reasoning|reasoning trace|"
         r"thinking (?:block|process|tokens?)|<think)", "the reasoning behind the answer"),
        (r"\b(?:reference|gold(?:en)?|ground[- ]truth|expected|ideal|correct|model) "
         r"(?:answer|response|solution)s?\b|\bthe ground truth\b", "a reference answer"),
        (r"\bsystem prompt\b|\b(?:previous|earlier|prior) (?:turns?|messages?|conversation)\b"
         r"|\bconversation history\b|\bother (?:answers|responses|candidates|rollouts|samples)\b",
         "the rest of the conversation"),
    )
]  # fmt: skip

_SCALE = re.compile(
    r"\b(?:out of|/)\s*(?:\d+|five|ten|a hundred)\b(?!\s*\w+\s+(?:are|is|were|was|of)\b)"
    r"|\b(?:scale|score|rating|rate|grade|marks?)\b(?:\s+\w+){0,3}\s+(?:from\s+)?(?:[013-9]|\d{2,})"
    r"\s*(?:-|–|to|out of|/)\s*\d+"
    r"|\b(?:scores?|rating|grade)\s+(?:of\s+)?(?:[3-9]|\d{2,})\b"
    r"|\b\d+\s+(?:stars|marks)\b|\b\d+\s+points?\s+(?:for|if|each|per)\b"
    r"|\b(?:score|rate|rating|grade|marks?|credit)\w*\b[^.;]{0,30}(?:\d\s?%|\bper ?cent)"
    r"|\d\s?%\s+of\s+(?:the\s+)?(?:marks?|credit|score|points)\b",
    re.IGNORECASE,
)
_ADJECTIVES = (
    r"(?:good|great|nice|appropriate|adequate|reasonable|suitable|proper|decent|excellent|"
    r"high[- ]quality|satisfactory|well[- ](?:written|structured|organi[sz]ed|formed)|clear|"
    r"concise|comprehensive|thorough|helpful|useful|sufficient|coherent|readable|professional|"
    r"interesting|insightful|accurate|correct|acceptable|meaningful|informative|engaging|"
    r"complete|detailed|balanced|relevant)"
)
_QUALITIES = (
    r"(?:answers?|responses?|explanations?|details?|levels?|depth|amounts?|length|structures?|"
    r"tone|style|wording|language|manner|way|quality|organi[sz]ation|writing|formatting|prose|"
    r"use of (?:citations?|sources?))"
)
_VAGUE = re.compile(
    rf"\b(?:answer|response|text|writing|explanation|it)\s+(?:is|are|should be|must be|reads as)\s+"
    rf"(?:\w+ly\s+|very\s+|quite\s+)*{_ADJECTIVES}\b(?!\s+(?:that|about|of|in|with|to))"
    rf"|\b{_ADJECTIVES}\s+(?:and\s+\w+\s+)?{_QUALITIES}\b"
    r"|\b(?:appropriately|adequately|properly|sufficiently|reasonably|suitably|satisfactorily|"
    r"nicely)\s+\w+(?:ed|es|s|e)?\b",
    re.IGNORECASE,
)
_ADDRESSED = re.compile(
    r"\b(?:give|grant|award|assign|deduct|subtract|penali[sz]e|reward)s?\b[^.;]{0,30}"
    r"\b(?:marks?|points?|scores?|credits?)\b"
    r"|\b(?:penali[sz]e|deduct)\b|\b(?:you|your)\b|\bplease\b"
    r"|\bas (?:a|the|an) (?:\w+ )?(?:judge|evaluator|grader|rater)\b"
    r"|\b(?:ignore|disregard) (?:the|all|any|every|previous|other)\b"
    r"|\b(?:return|output|respond with|reply with|score(?: it| this)?(?: as)?) "
    r"(?:an? )?(?:\{|\d\b|json\b)|\b(?:the )?(?:judge|grader|evaluator) (?:should|must|is to)\b",
    re.IGNORECASE,
)
_EXAMPLE = re.compile(
    r"(?:\be\.\s?g|\bsuch as|\blike|\bfor (?:example|instance)|\bso-called|\bphrases?|\bwords?"
    r"|\bexpressions?|\bterms?)[^A-Za-z0-9]*(?:(?:or|and)[^A-Za-z0-9]*)*$",
    re.IGNORECASE,
)


def wording(rubric: Rubric) -> Iterator[tuple[str, str]]:
    """All warnings about one rubric's own wording as (rule, what)."""
    if rubric.weight == 0:
        yield "weightless", "its weight is 0"
    for rule, look in _RULES.items():
        if what := look(rubric):
            yield rule, what


def _unquoted(text: str) -> str:
    """``text`` with what stands in double quotes replaced: it is cited, not said."""
    return _QUOTED.sub("…", text)


def _clauses(rubric: Rubric, *, anchors: bool) -> list[str]:
    """The clauses of the description that are anchors, or those that are not."""
    found = [c.strip() for c in _CLAUSE.split(_unquoted(rubric.description)) if c.strip()]
    return [clause for clause in found if bool(_ANCHOR.search(clause)) == anchors]


def _shown(text: str, match: re.Match[str]) -> str:
    """The words around a match, for a message."""
    start, end = max(0, match.start() - 20), min(len(text), match.end() + 20)
    cut = text[start:end].strip()
    return f"{'…' if start else ''}{cut}{'…' if end < len(text) else ''}"


def _several_demands(rubric: Rubric) -> str:
    body = _clauses(rubric, anchors=False)
    for first, saying, doing in _FORMS:
        for clause in body:
            begun = first.search(clause)
            if begun is None:
                continue
            further = saying.search(clause, begun.end())
            if further is None:
                further = doing.search(clause, begun.end())
                if further and _RELATIVE.search(clause, begun.end(), further.start()):
                    further = None
            if further:
                return f"it asks for two things ({_shown(clause, further)!r})"
    if sum(clause.endswith(";") for clause in body) >= 2:
        return "it strings several sentences together with semicolons"
    more = [clause for clause in body[1:] if _FURTHER.search(clause)]
    return f"a further sentence asks for more ({more[0][:60]!r})" if more else ""


def _negated(rubric: Rubric) -> str:
    match = _NEGATED.search(_unquoted(rubric.description).lstrip())
    if rubric.polarity == "positive" or match is None:
        return ""
    return f"a negative rubric that begins with a negation ({match[0].strip()!r})"


def _polarity(rubric: Rubric) -> str:
    negative = rubric.polarity == "negative"
    match = (_WANTED if negative else _UNWANTED).search(_unquoted(rubric.description).lstrip())
    if match is None:
        return ""
    kind = "negative rubric says what is wanted" if negative else "positive rubric names a fault"
    return f"a {kind} ({match[0].strip()!r})"


def _unseen(rubric: Rubric) -> str:
    text = _unquoted(rubric.description)
    for pattern, kind in _UNSEEN:
        if match := pattern.search(text):
            return f"it asks for {kind} ({_shown(text, match)!r})"
    return ""


def _scale(rubric: Rubric) -> str:
    text = _unquoted(rubric.description)
    match = _SCALE.search(text)
    return f"it speaks of another scale ({_shown(text, match)!r})" if match else ""


def _vague(rubric: Rubric) -> str:
    if _clauses(rubric, anchors=True):
        return ""
    for clause in _clauses(rubric, anchors=False):
        if match := _VAGUE.search(clause):
            return f"{match[0].strip()!r} without saying what that looks like"
    return ""


def _addressed(rubric: Rubric) -> str:
    for clause in _clauses(rubric, anchors=False) + _clauses(rubric, anchors=True):
        if match := _ADDRESSED.search(clause):
            return f"it speaks to the judge ({_shown(clause, match)!r})"
    return ""


def _quoted(rubric: Rubric) -> str:
    text = rubric.description
    if text.count('"') % 2:
        return "it has a double quote without its pair"
    position = 0
    for match in _QUOTED.finditer(text):
        before, position = text[position : match.start()], match.end()
        if not any(c.isalnum() for c in match[0]):
            return "it has quotes around nothing"
        if "…" in match[0] or "..." in match[0] or _EXAMPLE.search(before):
            return f"{match[0]:.60} looks like an example, not like the words to be found"
    return ""


def _long(rubric: Rubric) -> str:
    count = len(rubric.description.split())
    return f"it has {count} words (up to {LONG_WORDS} are usual)" if count > LONG_WORDS else ""


def _terse(rubric: Rubric) -> str:
    count = len(rubric.description.split())
    return f"it has {count} word{'s' * (count != 1)}" if count < TERSE_WORDS else ""


_RULES: dict[str, Callable[[Rubric], str]] = {
    "several-demands": _several_demands,
    "negated": _negated,
    "polarity": _polarity,
    "unseen": _unseen,
    "scale": _scale,
    "vague": _vague,
    "addressed": _addressed,
    "quoted": _quoted,
    "long": _long,
    "terse": _terse,
}
