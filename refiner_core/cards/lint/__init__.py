"""Lint of a card before publication.

In: the text of a README.md (of refiner or any other), and optionally its evidence. Out: findings,
each with its line, rule and severity; none is a good sign::

    text ──> markdown ──> secrets, paths           form
                     └──> quantities ──> numbers   consistency of numbers
    text, evidence ──> against                     agreement with the evidence, number by number

Rules avoid false positives: a number that can be right is not reported. Secrets are searched
everywhere; nothing is executed. Whether the command on a card reproduces its model is verified
when the card is made (:mod:`flows.cards.reproduction`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from refiner_core.cards.facts import CONTROLS
from refiner_core.cards.lint.evidence_check import evidence_findings
from refiner_core.cards.lint.markdown import CardFinding, Document, front_findings, read_document
from refiner_core.cards.lint.numbers import (
    claim_findings,
    impossible_shares,
    part_findings,
    quantities,
    totals,
)
from refiner_core.contract.checks.secrets import has_secret

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
