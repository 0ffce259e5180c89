"""Answers, prompts and agents' attempts on pages: marked, bounded, escaped.

In: texts sampled by policies, which may contain anything, and the JSON of
:class:`~refiner_core.environments.protocol.EpisodeRecord`, which may be older than this code. Out:
escaped markup, in which a claim in its snippet tag is a mark that names its ids, and plain lines
that templates escape. A page holds a bounded number of characters, and reports omissions.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from refiner_core.answers import (
    Tag,
    parse_answer,
    parse_evidence,
    read_attributes,
    says_something,
    scan_tags,
    strip_tags,
)
from refiner_core.evaluation.metric_names import FAILURE_WORDS
from refiner_core.report.drawing import shares
from refiner_core.report.printing import count, plain
from refiner_core.report.run.run_report import Row

MOST_OF_ANSWER = 4_000
MOST_OF_PROMPT = 16_000
#: Characters of all answers and judgements of a page.
MOST_IN_ALL = 600_000
#: Shown judgements of an answer, and parts of its reward.
MOST_JUDGEMENTS, MOST_PARTS = 24, 40
#: Fields that an answer itself does not have.
_BARE: Row = {"reward": None, "status": "", "finish_reason": "", "failed": "", "parts": ()}


def example_html(prompt: str, answers: Sequence[Row], name: str, of: int) -> dict[str, Any]:
    """A prompt and at least two of its answers or attempts, as many as fit as one of ``of`` prompts
    on a page; ``name`` keeps its anchors apart from those of others."""
    room = MOST_IN_ALL // max(1, of) - min(len(prompt), MOST_OF_PROMPT)
    kept: list[Row] = []
    for answer in answers:
        text, episode = answer["text"], answer["episode"]
        room -= min(len(text), MOST_OF_ANSWER) if episode is None else size_of(episode)
        room -= 300 + 300 * min(len(answer["judgements"]), MOST_JUDGEMENTS)
        if room < 0 and len(kept) > 1:
            break
        kept.append(answer)
    evidence = evidence_of(prompt, (answer["text"] for answer in kept), name)
    said = [_shown({**_BARE, **answer}, evidence) for answer in kept]
    left_out = len(answers) - len(kept)
    return {"evidence": evidence.markup, "said": said, "left_out": left_out}


def _shown(said: Row, evidence: _Evidence) -> dict[str, Any]:
    """An answer or an attempt for display."""
    kept = said["judgements"][:MOST_JUDGEMENTS]
    claims: dict[Any, dict[str, Any]] = {}
    rubrics: list[Mapping[str, Any]] = []
    others: list[Mapping[str, Any]] = []
    for one in kept:
        kind = str(one.get("kind") or "")
        if kind.startswith("citation"):
            place = one.get("claim_index")
            found = claims.setdefault(place, {"place": place, "claim": one.get("claim"), "on": []})
            found["on"].append((kind.removeprefix("citation_"), one))
        else:
            (rubrics if kind in ("rubric", "") else others).append(one)
    counted, measured = shares(said["parts"][:MOST_PARTS])
    return {
        "said": said,
        "text": answer_markup(said["text"], evidence),
        "conversation": conversation(said["episode"]) if said["episode"] is not None else None,
        "shares": counted,
        "measured": measured,
        "rubrics": rubrics,
        "claims": list(claims.values()),
        "others": others,
        "judgements_left_out": len(said["judgements"]) - len(kept),
    }


class _Span(NamedTuple):
    """A piece of a text: in a snippet (``ids`` are its ids, perhaps none) or not (None);
    ``before`` and ``after`` are the snippet's own tags."""

    text: str
    ids: tuple[str, ...] | None = None
    before: str = ""
    after: str = ""


def spans(text: str, *, any_case: bool = False) -> Iterator[_Span]:
    """A text split at its snippet tags, as an answer's claims are; joined, the pieces give the
    text. A tag that is broken, that closes nothing or that is not in lower case (unless
    ``any_case``, as in prompts) is text."""
    at = 0
    opened: tuple[tuple[str, ...], str] | None = None
    for tag in scan_tags(text):
        if tag.name != "snippet" or not tag.complete or not (tag.lower_case or any_case):
            continue
        raw, inside = text[tag.start : tag.end], text[at : tag.start]
        if opened is not None:
            yield _Span(inside, *opened, raw if tag.closing else "")
        elif tag.closing:
            continue
        elif inside:
            yield _Span(inside)
        opened = None if tag.closing else (read_attributes(tag.attributes).ids, raw)
        at = tag.end
    if opened is not None:
        yield _Span(text[at:], *opened)
    elif text[at:]:
        yield _Span(text[at:])


def tagged(span: _Span) -> Markup:
    """A span with its original tags."""
    before, after = (_TAG.format(t) if t else Markup("") for t in (span.before, span.after))
    return before + escape(span.text) + after


def left_out(characters: int) -> Markup:
    """Sign for omitted characters; empty if there are none."""
    if characters <= 0:
        return Markup("")
    return Markup('<span class="cut"> … {} characters more are in report.json</span>').format(
        count(characters)
    )


_TAG = Markup('<span class="tag">{}</span>')
_OUTSIDE = Markup('<span class="outside" title="not in an answer block">{}</span>')
_UNCITED = Markup(
    '<span class="claim uncited" data-n="{}" title="claim {}: cites nothing">{}</span>'
)


@dataclass(frozen=True)
class _Evidence:
    """A prompt for display: ``anchors`` are the elements of its snippets by id; ``known`` is
    every citable id."""

    markup: Markup
    anchors: dict[str, str]
    known: frozenset[str]


def evidence_of(prompt: str, answers: Iterable[str], name: str) -> _Evidence:
    """The prompt with its snippets marked, cited ones more strongly; ``name`` keeps anchors of
    prompts apart. A web page's opening tag may be cited too."""
    known = frozenset(parse_evidence(prompt).texts)
    cited = {i for text in answers for span in spans(text[:MOST_OF_ANSWER]) for i in span.ids or ()}
    anchors: dict[str, str] = {}
    numbers = itertools.count()

    def source(shown: Markup, ids: Iterable[str]) -> Markup:
        mine = [i for i in ids if i in known]
        if not mine:
            return shown
        anchor = f"{name}-s{next(numbers)}"
        for i in mine:
            anchors.setdefault(i, anchor)
        kind = "source cited" if cited.intersection(mine) else "source"
        mark = Markup('<mark class="{}" id="{}" tabindex="-1">{}</mark>')
        return mark.format(kind, anchor, shown)

    parts: list[Markup] = []
    for span in spans(plain(prompt[:MOST_OF_PROMPT]), any_case=True):
        if span.ids is not None:
            parts.append(source(tagged(span), span.ids))
            continue
        at, text = 0, span.text
        for tag in scan_tags(text):
            raw = _TAG.format(text[tag.start : tag.end])
            page = tag.name == "webpage" and not tag.closing
            parts.append(escape(text[at : tag.start]))
            parts.append(source(raw, read_attributes(tag.attributes).ids) if page else raw)
            at = tag.end
        parts.append(escape(text[at:]))
    whole = Markup("").join([*parts, left_out(len(prompt) - MOST_OF_PROMPT)])
    return _Evidence(whole, anchors, known)


def answer_markup(text: str, evidence: _Evidence) -> Markup:
    """An answer with its claims numbered as in its judgements."""
    shown, body = plain(text[:MOST_OF_ANSWER]), parse_answer(text).body
    start = end = 0
    if body is not None:
        start = next(t.end for t in scan_tags(text) if _opens_answer(t))
        end = start + len(body)
    parts = [_OUTSIDE.format(shown[:start])]
    count = 0
    for span in spans(shown[start:end]):
        if span.ids is not None:
            count += 1
            parts.append(_claim(span, evidence, count))
        elif says_something(strip_tags(span.text)):
            count += 1
            parts.append(_UNCITED.format(count, count, span.text))
        else:
            parts.append(escape(span.text))
    parts += [_OUTSIDE.format(shown[end:]), left_out(len(text) - MOST_OF_ANSWER)]
    return Markup("").join(parts)


def _opens_answer(tag: Tag) -> bool:
    plainly = tag.complete and tag.lower_case and not tag.attributes.strip()
    return tag.name == "answer" and not tag.closing and plainly


def _claim(span: _Span, evidence: _Evidence, number: int) -> Markup:
    ids = span.ids or ()
    anchors = list(dict.fromkeys(evidence.anchors[i] for i in ids if i in evidence.anchors))
    missing = [i for i in ids if i not in evidence.known]
    kind = "unknown" if missing else "cites" if ids else "uncited"
    said = f"claim {number}: cites {', '.join(ids) or 'nothing'}"
    said += f"; not in the prompt: {', '.join(missing)}" if missing else ""
    if anchors:
        return Markup(
            '<a class="claim {}" href="#{}" data-cites="{}" data-n="{}" title="{}">{}</a>'
        ).format(kind, anchors[0], " ".join(anchors), number, said[:400], tagged(span))
    return Markup('<mark class="claim {}" data-n="{}" title="{}">{}</mark>').format(
        kind, number, said[:400], tagged(span)
    )


#: Limits on characters of a message and of an attempt on a page; size of an attempt in estimates.
MOST_OF_MESSAGE = 2_000
MOST_OF_EPISODE = 16_000
_MOST_CHECKS = 60

_TURN_WORDS = {
    "no_call": "no tool call",
    "many_calls": "more than one call",
    "bad_json": "no JSON in the call",
    "bad_shape": "no call of a name and arguments",
    "too_long": "arguments too long",
    "cut": "cut off",
}
_REFUSED = {
    "wrong_tool": "no such tool",
    "wrong_argument": "arguments refused",
    "rule_broken": "against the rules",
}


def _said(who: str, label: str, text: str, trouble: str = "", again: str = "") -> Row:
    """One entry of a transcript. ``who`` is the user, the agent, a call or a tool, ``label`` its
    name; ``trouble`` its fault; ``again`` is the other sample of a turn that was sampled
    twice."""
    return {"who": who, "label": label, "text": text, "trouble": trouble, "again": again}


def conversation(episode: Mapping[str, Any]) -> dict[str, Any]:
    """An attempt for display; ``left_out`` counts the omitted messages."""
    everything = list(_everything(episode))
    ends = itertools.accumulate(map(_size, everything))
    fitting = [turn for turn, end in zip(everything, ends, strict=True) if end <= MOST_OF_EPISODE]
    kept = fitting or everything[:1]
    names = ("kind", "name", "passed", "detail")
    checks = [{n: check.get(n) or "" for n in names} for check in episode.get("checks") or ()]
    verdict, why = verdict_of(episode)
    return {
        "verdict": verdict,
        "why": why,
        "said": kept,
        "most": MOST_OF_MESSAGE,
        "checks": sorted(checks, key=lambda check: bool(check["passed"]))[:_MOST_CHECKS],
        "excluded": [str(name) for name in episode.get("excluded") or ()],
        "left_out": len(everything) - len(kept),
    }


def _size(said: Row) -> int:
    return sum(min(len(said[name]), MOST_OF_MESSAGE) for name in ("text", "again"))


def size_of(episode: Mapping[str, Any]) -> int:
    """Approximate characters of an attempt on a page."""
    found = sum(_size(said) + 120 for said in _everything(episode))
    return min(found, MOST_OF_EPISODE) + 120 * len(episode.get("checks") or ())


def verdict_of(episode: Mapping[str, Any]) -> tuple[str, str]:
    """Verdict on an attempt (passed, failed or error), and its reason in words."""
    if episode.get("status") == "error":
        kind = str(episode.get("error_kind") or "error")
        told = str(episode.get("error") or "")
        return "error", f"{kind}: {told}" if told else kind
    failure = episode.get("failure")
    if not failure:
        return "passed", ""
    ending = {"turn_limit": " (turns)", "context_limit": " (context)"}
    ended = ending.get(str(episode.get("ended")), "") if failure == "limit" else ""
    return "failed", f"{failure}: {FAILURE_WORDS.get(str(failure), 'no reason is given')}{ended}"


def _everything(episode: Mapping[str, Any]) -> Iterator[Row]:
    yield from _messages(episode.get("first_messages") or ())
    for place, turn in enumerate(episode.get("turns") or (), start=1):
        messages = turn.get("messages") or ()
        yield _turn(f"Agent, turn {place}", turn, {role for role, _ in messages})
        yield from _messages(messages)


def _messages(messages: Iterable[Sequence[str]]) -> Iterator[Row]:
    for role, content in messages:
        who = "user" if role == "user" else "tool"
        yield _said(who, who.capitalize(), content)


def _turn(label: str, turn: Mapping[str, Any], answered_by: set[str]) -> Row:
    call = turn.get("call")
    if call is None:
        status = str(turn.get("status") or "ok")
        trouble, again = _TURN_WORDS.get(status, status), str(turn.get("retried") or "")
        return _said("agent", label, str(turn.get("text")), trouble, again)
    error, again = str(turn.get("tool_error") or ""), str(turn.get("repaired") or "")
    trouble = _REFUSED.get(error, error)
    name, arguments = str(call.get("name")), call.get("arguments") or {}
    spoken = next(iter(arguments.values()), None)
    if len(arguments) == 1 and isinstance(spoken, str) and spoken and answered_by == {"user"}:
        # A call with nothing but words.
        return _said("agent", f"{label}, to the user ({name})", spoken, trouble, again)
    said = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items())
    return _said("call", label, f"{name}({said})", trouble, again)


def attempts_of(answers: Iterable[Row]) -> list[int]:
    """Numbers of the shown attempts, ascending."""
    return sorted({answer["sample_index"] for answer in answers if answer["episode"] is not None})


# ---------------------------------------------------------------- counts


def attempts_tables(rows: Sequence[Row], arms: Sequence[str]) -> list[dict[str, Any]]:
    """Attempts of the given arms, a table for each model and way of measuring. One row per arm and
    domain, and with several domains one of their sum; columns for the classes of failures and kinds
    of errors that occur."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        if row["arm"] in arms:
            name = f"{row['model']}, {row['decoding']}, protocol {row['protocol']}"
            by_name.setdefault(name, []).append(row)
    made = []
    for name, found in by_name.items():
        shown: list[Row] = []
        for arm in arms:
            mine = [row for row in found if row["arm"] == arm]
            shown += [*mine, _all_of(mine)] if len(mine) > 1 else mine
        occurring = {c for row in found for c, n in row["failures"].items() if n}
        known = [c for c in FAILURE_WORDS if c in occurring]
        classes = [*known, *sorted(occurring - set(known))]
        kinds = sorted({kind for row in found for kind, n in row["errors"].items() if n})
        made.append({"name": name, "classes": classes, "kinds": kinds, "rows": shown})
    return made


def _all_of(rows: Sequence[Row]) -> Row:
    sums = {n: sum(r[n] for r in rows) for n in ("tasks", "asked", "passed")}
    counts = {n: summed(r[n] for r in rows) for n in ("failures", "errors")}
    return {**rows[0], "domain": "", **sums, **counts}


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts of one kind, summed by name."""
    whole: Counter[str] = Counter()
    for found in counts:
        whole.update(found)
    return dict(whole)
