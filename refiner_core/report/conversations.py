"""An agent's attempt for the page: who said what, what was called, what it was worth.

In: the JSON of an :class:`~refiner_core.environments.record.EpisodeRecord`, as an
:class:`~refiner_core.report.sweep.document.Answer` has it. Out: plain lines and phrases, bounded,
which the template escapes. Records may be of environments of anybody's, and older than this code:
what is missing is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from refiner_core.evaluation.names import FAILURE_WORDS
from refiner_core.report.printing import counted
from refiner_core.report.sweep.document import Answer, AttemptsRow

#: Characters of one message, and of a whole attempt, on a page; an attempt's size for its bound.
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

Who = Literal["user", "agent", "call", "tool"]


@dataclass(frozen=True)
class Said:
    """One thing in a transcript. ``label`` names who; ``trouble`` what was wrong with it; ``other``
    is what was sampled beside it where a turn was sampled twice, and ``other_label`` says which;
    ``cut`` characters are left out."""

    who: Who
    label: str
    text: str
    trouble: str = ""
    other: str = ""
    other_label: str = ""
    cut: int = 0


@dataclass(frozen=True)
class CheckShown:
    """One thing that a task asked for."""

    kind: str
    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Conversation:
    """An attempt as it is shown. ``verdict`` is ``passed``, ``failed`` or ``error``; ``left_out``
    says what does not fit."""

    verdict: Literal["passed", "failed", "error"]
    why: str
    said: tuple[Said, ...]
    checks: tuple[CheckShown, ...]
    excluded: tuple[str, ...]
    left_out: str


def conversation(episode: Mapping[str, Any]) -> Conversation:
    """What the page shows of an attempt."""
    kept: list[Said] = []
    room, everything = MOST_OF_EPISODE, list(_said(episode))
    for said in everything:
        room -= min(len(said.text), MOST_OF_MESSAGE) + min(len(said.other), MOST_OF_MESSAGE)
        if room < 0 and kept:
            break
        kept.append(_within(said))
    missing = len(everything) - len(kept)
    checks = [_check(check) for check in episode.get("checks") or ()]
    verdict, why = verdict_of(episode)
    return Conversation(
        verdict,
        why,
        tuple(kept),
        tuple(sorted(checks, key=lambda check: check.passed)[:_MOST_CHECKS]),
        tuple(str(name) for name in episode.get("excluded") or ()),
        f"{counted(missing, 'message')} more in report.json." if missing else "",
    )


def size_of(episode: Mapping[str, Any]) -> int:
    """Characters that an attempt takes on a page, about."""
    found = sum(
        min(len(said.text), MOST_OF_MESSAGE) + min(len(said.other), MOST_OF_MESSAGE) + 120
        for said in _said(episode)
    )
    return min(found, MOST_OF_EPISODE) + 120 * len(episode.get("checks") or ())


def verdict_of(episode: Mapping[str, Any]) -> tuple[Literal["passed", "failed", "error"], str]:
    """How an attempt ended, and why, in words."""
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


def _within(said: Said) -> Said:
    return replace(
        said,
        text=said.text[:MOST_OF_MESSAGE],
        other=said.other[:MOST_OF_MESSAGE],
        cut=max(0, len(said.text) - MOST_OF_MESSAGE),
    )


def _said(episode: Mapping[str, Any]) -> Iterator[Said]:
    for role, content in episode.get("first_messages") or ():
        yield _message(role, content)
    for place, turn in enumerate(episode.get("turns") or (), start=1):
        messages = turn.get("messages") or ()
        yield _turn(place, turn, messages)
        for role, content in messages:
            yield _message(role, content)


def _message(role: str, content: str) -> Said:
    return Said("user", "User", content) if role == "user" else Said("tool", "Tool", content)


def _turn(place: int, turn: Mapping[str, Any], messages: Sequence[Sequence[str]]) -> Said:
    call, label = turn.get("call"), f"Agent, turn {place}"
    status = str(turn.get("status") or "ok")
    if call is None:
        other = str(turn.get("retried") or "")
        told = "sampled once more, which was no call either" if other else ""
        trouble = _TURN_WORDS.get(status, status)
        return Said("agent", label, str(turn.get("text")), trouble, other, told)
    other = str(turn.get("repaired") or "")
    told = "sampled again: what came first was no call" if other else ""
    trouble = _REFUSED.get(str(turn.get("tool_error")), str(turn.get("tool_error") or ""))
    name, arguments = str(call.get("name")), call.get("arguments") or {}
    spoken = _spoken(arguments)
    if spoken and messages and all(role == "user" for role, _ in messages):
        return Said("agent", f"{label}, to the user ({name})", spoken, trouble, other, told)
    return Said("call", label, f"{name}({_arguments(arguments)})", trouble, other, told)


def _spoken(arguments: Mapping[str, Any]) -> str:
    """The words of a call that has nothing but words."""
    values = list(arguments.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else ""


def _arguments(arguments: Mapping[str, Any]) -> str:
    said = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    return ", ".join(said)


def _check(check: Mapping[str, Any]) -> CheckShown:
    return CheckShown(
        str(check.get("kind") or ""),
        str(check.get("name") or ""),
        bool(check.get("passed")),
        str(check.get("detail") or ""),
    )


def attempts_of(answers: Iterable[Answer]) -> list[int]:
    """Numbers of the attempts that are shown, ascending."""
    return sorted({answer.sample_index for answer in answers if answer.episode is not None})


# ---------------------------------------------------------------- counts


@dataclass(frozen=True)
class AttemptsTable:
    """Attempts of one model under one way of measuring; a row per arm and domain, and where there
    are several domains one of all of them."""

    name: str
    classes: tuple[str, ...]
    kinds: tuple[str, ...]
    rows: tuple[AttemptsRow, ...]


def attempts_tables(rows: Sequence[AttemptsRow], arms: Sequence[str]) -> list[AttemptsTable]:
    """Tables of the arms given, in their order; only classes that occur have a column."""
    by_name: dict[str, list[AttemptsRow]] = {}
    for row in rows:
        if row.arm in arms:
            name = f"{row.model}, {row.decoding}, protocol {row.protocol}"
            by_name.setdefault(name, []).append(row)
    made = []
    for name, found in by_name.items():
        shown: list[AttemptsRow] = []
        for arm in arms:
            mine = [row for row in found if row.arm == arm]
            shown += [*mine, _all_of(mine)] if len(mine) > 1 else mine
        occurring = {c for row in found for c, n in row.failures.items() if n}
        known = [c for c in FAILURE_WORDS if c in occurring]
        classes = (*known, *sorted(occurring - set(known)))
        kinds = tuple(sorted({kind for row in found for kind, n in row.errors.items() if n}))
        made.append(AttemptsTable(name, classes, kinds, tuple(shown)))
    return made


def _all_of(rows: Sequence[AttemptsRow]) -> AttemptsRow:
    first = rows[0]
    return AttemptsRow(
        first.arm,
        first.model,
        first.decoding,
        first.protocol,
        "",
        sum(row.tasks for row in rows),
        sum(row.asked for row in rows),
        sum(row.passed for row in rows),
        _sum([row.failures for row in rows]),
        _sum([row.errors for row in rows]),
    )


def _sum(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for found in counts for name in found)
    return {name: sum(found.get(name, 0) for found in counts) for name in names}
