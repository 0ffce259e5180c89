"""Lint of a card before publication.

In: the text of a README.md (of refiner or any other), and optionally its evidence. Out: findings,
each with its line, rule and severity; none is a good sign::

    text ──> markdown ──> secrets, paths   form
                     └──> numbers          consistency of numbers
    text, evidence                         agreement with the evidence, number by number

The card is made again from the facts in its ``refiner.json``; every difference is reported, in
numbers or words. The evidence is also checked for consistency, as far as possible without samples:
a value is its numerator over its denominator, an interval contains it, Wilson intervals follow from
counts, and repeated statements agree.

Rules avoid false positives: a number that can be right is not reported. Secrets are searched
everywhere; nothing is executed. Whether the command on a card reproduces its model is verified
when the card is made (:mod:`flows.cards.reproduction`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

from refiner_core.cards.build import build_card, marked_card
from refiner_core.cards.evidence import CardEvidence, load_evidence
from refiner_core.cards.facts import CONTROLS, CardFacts, finite, numbers_in, record_of
from refiner_core.cards.lint.markdown import CardFinding, Document, front_findings, read_document
from refiner_core.cards.lint.numbers import (
    claim_findings,
    impossible_shares,
    part_findings,
    quantities,
    totals,
)
from refiner_core.cards.public import proof_problems
from refiner_core.contract.checks.secrets import has_secret
from refiner_core.contract.errors import RefinerError

_CLOSE, _CLOSE_BOUND = 1e-9, 1e-6
_ODD = "evidence-inconsistent"
_FIX_EVIDENCE = "evaluate and publish again; or use the published evidence"


def inconsistencies(evidence: CardEvidence) -> Iterator[str]:
    """Impossible or contradictory statements in the evidence."""
    facts = evidence.facts
    pairs = {
        "step": (evidence.step, facts.step),
        "final": (evidence.final, facts.final),
        "fingerprint": (evidence.fingerprint, facts.fingerprint or evidence.fingerprint),
    }
    for name, (outside, inside) in pairs.items():
        if outside != inside:
            yield f"{name} is {outside!r}, and facts.{name} is {inside!r}"
    yield from proof_problems(facts)
    for which in ("sft", "rl"):
        at = f"reports.data.{which}"
        read, kept = (finite(facts.fact(f"{at}.{key}")) for key in ("read", "kept"))
        dropped = sum((facts.fact(f"{at}.dropped") or {}).values())
        if read is not None and kept is not None and read != kept + dropped:
            yield f"facts.{at}: {read:g} rows were read, and {kept:g} kept + {dropped:g} dropped"
    for place, entry in enumerate(facts.evaluations):
        path = f"evaluations.{place}"
        record = record_of(facts, path)
        where = f", from {record}" if record else ""
        name = f"{entry['metric']} of {entry['stage']}, {entry['decoding']}{where}"
        for problem in _of_number(facts, entry):
            yield f"facts.{path} ({name}): {problem}"


def _of_number(facts: CardFacts, entry: Mapping[str, Any]) -> Iterator[str]:
    """Problems of one evaluation: a value is its numerator over its denominator, lies in its
    interval, and counts no more prompts than its protocol has and were sampled."""
    value, low, high, over, under, n = (
        finite(entry.get(key)) for key in ("value", "low", "high", "numerator", "denominator", "n")
    )
    if value is None:
        return
    if over is not None and under and not math.isclose(value, over / under, abs_tol=_CLOSE):
        yield f"{value!r} is not {over:g} / {under:g} = {over / under!r}"
    prompts = finite((facts.protocols.get(entry["protocol"]) or {}).get("num_prompts"))
    if n is not None and under is not None and under < n:
        yield f"{n:g} prompts have {under:g} samples"
    if n is not None and prompts is not None and n > prompts:
        yield f"n is {n:g}, and its protocol has {prompts:g} prompts"
    if low is None or high is None:
        return
    slack, how = _CLOSE * max(1.0, abs(value)), str(entry.get("interval"))
    # Few prompts and skew can move a bootstrap interval away from its value.
    if low > high or not (how.startswith("bootstrap") or low - slack <= value <= high + slack):
        yield f"{value!r} does not lie in its interval [{low!r}, {high!r}]"
    # Wilson intervals follow from counts alone; others need the samples.
    counts = {"wilson": (over, under), "wilson over prompts": (value * (n or 0), n)}.get(how)
    known = [round(count) for count in counts or () if count is not None]
    if len(known) == 2 and 0 <= known[0] <= known[1] != 0:
        from refiner_core.evaluation.statistics import wilson

        first, last = wilson(*known)
        if max(abs(first - low), abs(last - high)) > _CLOSE_BOUND:
            yield (
                f"its interval is [{low:.6f}, {high:.6f}]; Wilson's of {known[0]} of {known[1]} "
                f"is [{first:.6f}, {last:.6f}]"
            )


_TOKEN = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?|[^\W\d]+|\s+|.", re.DOTALL)
#: Largest number of changes in a line that are reported one by one.
_MOST = 6
#: Limit on characters of an evidence file.
LARGEST_EVIDENCE = 10_000_000
_FIX = "use the card made from the evidence, or publish again"

_NOT_RUN = CardFinding(
    1,
    "evidence",
    "it was made by a custom template, which is not run here: its words were not "
    "compared with the evidence",
    "read the template in refiner.json, and name a file with the same text by --template FILE",
    "warning",
)


def evidence_findings(text: str, evidence: str, template: str | None = None) -> list[CardFinding]:
    """Differences between a card and its evidence; empty if there are none.

    A template in the evidence is an untrusted program. It is run only if it equals ``template``,
    which the caller trusts.
    """
    if len(evidence) > LARGEST_EVIDENCE:
        what = f"its evidence has {len(evidence)} characters, at most {LARGEST_EVIDENCE} are read"
        return [CardFinding(1, "too-large", what, _FIX)]
    try:
        read = load_evidence(evidence)
        wrong = [CardFinding(1, _ODD, said, _FIX_EVIDENCE) for said in inconsistencies(read)]
        if read.facts.template not in (None, template):
            return [_NOT_RUN, *wrong]
        expected = build_card(read.facts)
    except RefinerError as error:
        return [CardFinding(1, "evidence", f"its evidence cannot be used: {error.what}", error.fix)]
    return [*wrong, *differences(text, expected, read)]


def differences(text: str, expected: str, evidence: CardEvidence) -> Iterator[CardFinding]:
    """One finding per differing line, with the number if it differs."""
    if text == expected:
        return
    have, want = text.split("\n"), expected.split("\n")
    if len(have) > 2 * len(want) + 200:
        what = f"it has {len(have)} lines, and the evidence gives {len(want)}"
        yield CardFinding(1, "evidence", what, _FIX)
        return
    facts = evidence.facts
    marked = marked_card(facts, facts.template).split("\n")
    matcher = SequenceMatcher(None, have, want, autojunk=False)
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        if kind == "equal":
            continue
        for i, j in zip_longest(range(i1, i2), range(j1, j2)):
            if j is None:
                yield CardFinding(
                    i + 1, "evidence", f"the evidence gives no line {have[i]!r:.160}", _FIX
                )
            elif i is None:
                what = f"here the evidence gives the line {want[j]!r:.160}"
                yield CardFinding(min(i2, len(have) - 1) + 1, "evidence", what, _FIX)
            else:
                for what in _changes(have[i], want[j], list(numbers_in(marked[j])), facts):
                    yield CardFinding(i + 1, "evidence", what, _FIX)


def _changes(
    have: str, want: str, placed: Sequence[tuple[int, int, str]], facts: CardFacts
) -> Iterator[str]:
    """Differences of two lines: each differing number or word with its fact, unless most differ."""
    ours, theirs = _TOKEN.findall(have), _TOKEN.findall(want)
    changes = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
    if len(ours) != len(theirs) or not 0 < len(changes) <= _MOST:
        yield f"the evidence gives the line {want!r:.160}"
        return
    for i in changes:
        start = len("".join(theirs[:i]))
        end = start + len(theirs[i])
        fact = next((fact for a, b, fact in placed if a < end and start < b), None)
        record = fact and record_of(facts, fact)
        source = f" (fact {fact}{f', from {record}' if record else ''})" if fact else ""
        around = "".join(theirs[max(0, i - 6) : i + 5]).strip()
        said = f"{ours[i]!r:.160} is here, but the evidence gives {theirs[i]!r:.160}"
        yield f"{said}{source}: …{around:.160}…"


__all__ = ["CardFinding", "check_card", "lint_card"]

_UNKNOWN_BASE = re.compile(r"(?im)^[-* \t]*+base model\W+(?:not recorded|unknown)\b")
_NO_EVIDENCE = CardFinding(
    1,
    "evidence-missing",
    "its evidence (refiner.json) is missing: numbers can only be checked against each other",
    "use the refiner.json that was published with it (`--evidence FILE`)",
    "warning",
)
_OUR_SECTIONS = {"Training set-up", "Reproduction", "Known notes", "Provenance"}
#: A folder of a machine: cards of refiner contain none.
_PATH = re.compile(
    r"(?<![\w.:/-])(?:/(?:root|mnt|work|data|tmp|opt|var|home|Users|scratch|gpfs|lustre|nfs)/"
    r"[\w.~-]+|~/\.?\w[\w.-]*|[A-Z]:\\\w+)"
)
#: Characters of a card; a larger file is not a card.
LARGEST = 1_000_000


def check_card(
    text: str, evidence: str | None = None, *, template: str | None = None
) -> list[CardFinding]:
    """All errors of a card, in the order of its lines.

    Parameters
    ----------
    text
        Text of the README.md.
    evidence
        Text of its ``refiner.json``.
    template
        A trusted template that may be run: the text of the user's own.
    """
    if len(text) > LARGEST:
        what = f"it has {len(text)} characters, at most {LARGEST} are read"
        return [CardFinding(1, "too-large", what, "name a card")]
    found = {*_of_itself(text, has_evidence=evidence is not None)}
    if evidence is not None:
        found |= {*evidence_findings(text, evidence, template)}
    return sorted(found)


def lint_card(text: str, evidence: str | None = None, *, template: str | None = None) -> list[str]:
    """Reasons against publishing a card, a sentence each; warnings are left out."""
    found = check_card(text, evidence, template=template)
    return [f"line {f.line}: {f.message}" for f in found if f.is_error]


def _of_itself(text: str, *, has_evidence: bool) -> Iterator[CardFinding]:
    """Findings about a README by itself."""
    document = read_document(text)
    ours = {*document.headings} >= _OUR_SECTIONS
    if ours and not has_evidence:
        yield _NO_EVIDENCE
    unknown_base = bool(_UNKNOWN_BASE.search(text))
    yield from front_findings(document.front, unknown_base=unknown_base)
    yield from _signs(document, ours=ours)
    for table in document.tables:
        yield from totals(table)
    known = quantities(document)
    shares = list(impossible_shares(document, known))
    yield from (finding for finding, _ in shares)
    yield from claim_findings(document, known, [q for _, q in shares if q is not None])
    yield from part_findings(document)


def _signs(document: Document, *, ours: bool) -> Iterator[CardFinding]:
    """Secrets, invisible characters, and on a card of refiner paths."""
    for number, line in enumerate(document.text.split("\n"), start=1):
        if has_secret(line):
            what = "something looks like an access token or key"
            yield CardFinding(number, "secret", what, "remove and revoke it")
        if found := CONTROLS.search(line):
            what = f"the character U+{ord(found.group()):04X} is invisible"
            yield CardFinding(number, "control-character", what, "remove it")
        if ours and (found := _PATH.search(line)):
            what = f"{found.group()} is a local path"
            yield CardFinding(number, "machine-path", what, "use a name that others can resolve")
