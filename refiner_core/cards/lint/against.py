"""A card against its evidence: what it should say, line by line, and where each number comes from.

In: the text of a card and of the ``refiner.json`` that belongs to it. Out: findings. The card is
made again from the facts; whatever differs is found, numbers or words.

The evidence is held against itself as well, as far as that needs no samples: a value is its
numerator over its denominator, an interval holds it, Wilson intervals follow from counts, and what
is said twice is said alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

from refiner_core.cards.build import build_card, marked_card
from refiner_core.cards.evidence import Evidence, load_evidence
from refiner_core.cards.facts import CardFacts, finite, numbers_in, record_of
from refiner_core.cards.lint.markdown import Finding
from refiner_core.cards.public import proof_problems
from refiner_core.cards.results import index_numbers
from refiner_core.contract.errors import RefinerError

_CLOSE = 1e-9
_FIX_EVIDENCE = "evaluate and publish again; or take the evidence that was published"


def inconsistencies(evidence: Evidence) -> Iterator[Finding]:
    """Statements of the evidence that cannot be."""
    facts = evidence.facts
    pairs = {
        "step": (evidence.step, facts.step),
        "final": (evidence.final, facts.final),
        "fingerprint": (evidence.fingerprint, facts.fingerprint or evidence.fingerprint),
    }
    for name, (outside, inside) in pairs.items():
        if outside != inside:
            yield _finding(f"{name} is {outside!r}, and facts.{name} is {inside!r}")
    for problem in [*_of_rows(facts), *proof_problems(facts)]:
        yield _finding(problem)
    for place, entry in enumerate(facts.evaluations):
        for problem in [*_of_number(entry), *_of_protocol(facts, entry)]:
            yield _finding(f"{_name(facts, place, entry)}: {problem}")
        if _is_outside(entry):
            bootstrap = str(entry.get("interval", "")).startswith("bootstrap")
            value, low, high = entry["value"], entry["low"], entry["high"]
            message = f"{value!r} does not lie in its interval [{low!r}, {high!r}]"
            yield replace(
                _finding(f"{_name(facts, place, entry)}: {message}"),
                severity="warning" if bootstrap else "error",
            )


def _of_number(entry: Mapping[str, Any]) -> Iterator[str]:
    value, low, high = (finite(entry.get(key)) for key in ("value", "low", "high"))
    numerator, denominator = finite(entry.get("numerator")), finite(entry.get("denominator"))
    n = finite(entry.get("n"))
    if value is None:
        return
    quotient = numerator / denominator if numerator is not None and denominator else None
    if quotient is not None and not math.isclose(value, quotient, rel_tol=_CLOSE, abs_tol=_CLOSE):
        yield f"{value!r} is not {numerator:g} / {denominator:g} = {quotient!r}"
    if denominator is not None and n is not None and denominator < n:
        yield f"{n:g} prompts have {denominator:g} samples"
    if low is not None and high is not None:
        if low > high:
            yield f"its interval [{low!r}, {high!r}] ends before it begins"
        yield from _wilson(entry, value, low, high)


def _is_outside(entry: Mapping[str, Any]) -> bool:
    """True if a value does not lie in its interval; few prompts and a skew can bring a bootstrap
    there, nothing brings a Wilson interval there."""
    value, low, high = (finite(entry.get(key)) for key in ("value", "low", "high"))
    if value is None or low is None or high is None or low > high:
        return False
    slack = _CLOSE * max(1.0, abs(value))
    return not low - slack <= value <= high + slack


def _of_protocol(facts: CardFacts, entry: Mapping[str, Any]) -> Iterator[str]:
    """No more prompts count than the protocol has."""
    prompts = finite((facts.protocols.get(entry["protocol"]) or {}).get("num_prompts"))
    n = finite(entry["n"])
    if prompts is not None and n is not None and n > prompts:
        yield f"n is {n:g}, and its protocol has {prompts:g} prompts"


def _of_rows(facts: CardFacts) -> Iterator[str]:
    """Rows that were read were kept or dropped."""
    for which, counts in (facts.reports.get("data") or {}).items():
        known = [finite(counts.get(key)) for key in ("read", "kept")] if counts else [None]
        if which in ("sft", "rl") and None not in known:
            read, kept = known
            dropped = sum((counts.get("dropped") or {}).values())
            if read != kept + dropped:
                yield (
                    f"facts.reports.data.{which}: {read:g} rows were read, and {kept:g} kept + "
                    f"{dropped:g} dropped"
                )


def _wilson(entry: Mapping[str, Any], value: float, low: float, high: float) -> Iterator[str]:
    """Wilson intervals follow from counts alone; others need the samples."""
    counts = {
        "wilson": (entry.get("numerator"), entry.get("denominator")),
        "wilson over prompts": (value * int(entry["n"]), entry["n"]),
    }.get(str(entry.get("interval")))
    numbers = [finite(count) for count in counts or (None, None)]
    successes, trials = numbers
    if successes is None or not trials or not 0 <= round(successes) <= round(trials):
        return
    from refiner_core.evaluation.statistics import wilson

    first, last = wilson(round(successes), round(trials))
    if not (math.isclose(first, low, abs_tol=1e-6) and math.isclose(last, high, abs_tol=1e-6)):
        yield (
            f"its interval is [{low:.6f}, {high:.6f}]; Wilson's of {round(successes)} of "
            f"{round(trials)} is [{first:.6f}, {last:.6f}]"
        )


def _name(facts: CardFacts, place: int, entry: Mapping[str, Any]) -> str:
    record = record_of(facts, f"evaluations.{place}")
    where = f", from {record}" if record else ""
    return (
        f"facts.evaluations.{place} ({entry['metric']} of {entry['stage']}, {entry['decoding']}"
        f"{where})"
    )


def _finding(message: str) -> Finding:
    return Finding(1, "evidence-inconsistent", message, _FIX_EVIDENCE)


_TOKEN = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?|[^\W\d]+|\s+|.", re.DOTALL)
#: So many changes of a line are told one by one.
_MOST = 6
#: Characters of an evidence file.
LARGEST = 10_000_000
_FIX = "take the card that the evidence gives, or publish again"

_NOT_RUN = Finding(
    1,
    "evidence",
    "it was made by a template of somebody's own, which is not run here: its words were not "
    "compared with the evidence",
    "read the template in refiner.json, and name a file with the same text by --template FILE",
    "warning",
)


def evidence_findings(text: str, evidence: str, template: str | None = None) -> list[Finding]:
    """Differences between a card and what its evidence gives; empty where there is none.

    A template that the evidence brings is a stranger's program. It is run where it is ``template``,
    which the caller trusts, and else not.
    """
    if len(evidence) > LARGEST:
        what = f"its evidence has {len(evidence)} characters, at most {LARGEST} are read"
        return [Finding(1, "too-large", what, _FIX)]
    try:
        read = load_evidence(evidence)
        if read.facts.template not in (None, template):
            return [_NOT_RUN, *inconsistencies(read)]
        expected = build_card(read.facts)
    except RefinerError as error:
        return [Finding(1, "evidence", f"its evidence cannot be used: {error.what}", error.fix)]
    return [*inconsistencies(read), *differences(text, expected, read)]


def differences(text: str, expected: str, evidence: Evidence) -> Iterator[Finding]:
    """One finding per line that differs, with the number that does where it is one."""
    if text == expected:
        return
    have, want = text.split("\n"), expected.split("\n")
    if len(have) > 2 * len(want) + 200:
        what = f"it has {len(have)} lines, and the evidence gives {len(want)}"
        yield Finding(1, "evidence", what, _FIX)
        return
    origin = _Origin(evidence.facts, want)
    matcher = SequenceMatcher(None, have, want, autojunk=False)
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        if kind == "equal":
            continue
        paired = min(i2 - i1, j2 - j1)
        for offset in range(paired):
            yield from _changed(i1 + offset + 1, have[i1 + offset], j1 + offset, origin)
        for i in range(i1 + paired, i2):
            yield Finding(
                i + 1, "evidence", f"the evidence gives no line {_short(have[i])!r}", _FIX
            )
        for j in range(j1 + paired, j2):
            line = min(i2, len(have) - 1) + 1
            yield Finding(
                line, "evidence", f"here the evidence gives the line {_short(want[j])!r}", _FIX
            )


def _changed(line: int, have: str, place: int, origin: _Origin) -> Iterator[Finding]:
    """Differences of two lines: each number or word that does, unless most of them do."""
    want = origin.lines[place]
    ours, theirs = _TOKEN.findall(have), _TOKEN.findall(want)
    changes = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
    if len(ours) != len(theirs) or not 0 < len(changes) <= _MOST:
        yield Finding(line, "evidence", f"the evidence gives the line {_short(want)!r}", _FIX)
        return
    for i in changes:
        start = len("".join(theirs[:i]))
        source = origin.of(place, start, start + len(theirs[i]))
        message = f"{_short(ours[i])!r} stands here, and the evidence gives {_short(theirs[i])!r}"
        around = "".join(theirs[max(0, i - 6) : i + 5]).strip()
        yield Finding(line, "evidence", f"{message}{source}: …{around}…", _FIX)


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "…"


class _Origin:
    """Origin of each number of a card: its fact."""

    def __init__(self, facts: CardFacts, lines: Sequence[str]) -> None:
        self.facts, self.lines = facts, lines
        marked = marked_card(facts, facts.template).split("\n")
        self._placed = [list(numbers_in(line)) for line in marked]
        line, start = 0, 0
        front = next((i for i, text in enumerate(lines) if text.startswith("## ")), len(lines))
        for text, fact in index_numbers(facts):
            # By itself, or else as part of a name (`H200`).
            pattern = re.compile(rf"(?<![\w.]){re.escape(text)}(?!\w|\.\d)")
            for place in range(line, front):
                if found := pattern.search(lines[place], start if place == line else 0):
                    line, start = place, found.end()
                    self._placed[line].append((found.start(), start, fact))
                    break

    def of(self, line: int, start: int, end: int) -> str:
        """`` (fact evaluations.3.value, from stages/…)``; empty where no number stands there."""
        facts = (fact for a, b, fact in self._placed[line] if a < end and start < b)
        fact = next(facts, None)
        record = None if fact is None else record_of(self.facts, fact)
        return f" (fact {fact}, from {record})" if record else f" (fact {fact})" if fact else ""
