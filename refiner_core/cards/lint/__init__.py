"""Lint of a card, before anybody else reads it.

In: the text of a README.md (ours or any other), and for one of ours its evidence. Out: findings,
each with its line, rule and severity; none is a good sign::

    text ──> markdown ──> form                                   what the Hub and readers meet
                     └──> quantities ──> tables, claims          what numbers say
    text, evidence ──> against                                   what it should be, number by number

Rules are strict about what they find: a number that can be right is left alone.
"""

from __future__ import annotations

import re

from refiner_core.cards.lint.against import evidence_findings
from refiner_core.cards.lint.claims import claim_findings, prose_findings
from refiner_core.cards.lint.form import CommandCheck, command_findings, read_front, text_findings
from refiner_core.cards.lint.markdown import Document, Finding, read_document
from refiner_core.cards.lint.quantities import quantities
from refiner_core.cards.lint.tables import impossible_shares, index_findings, table_findings

__all__ = ["CommandCheck", "Finding", "check_card", "lint_card"]


_UNKNOWN_BASE = re.compile(r"(?im)^[-* \t]*+base model\W+(?:not recorded|unknown)\b")
_NO_EVIDENCE = Finding(
    1,
    "evidence-missing",
    "its evidence (refiner.json) is not here: numbers can only be checked against each other",
    "take the refiner.json that was published with it (`--evidence FILE`)",
    "warning",
)
_OUR_SECTIONS = {"Training set-up", "Reproduction", "Known notes", "Provenance"}


#: Characters of a card; a larger one is no card.
LARGEST = 1_000_000


def general_findings(
    text: str, command_check: CommandCheck | None = None, *, has_evidence: bool = False
) -> list[Finding]:
    """Findings about a README by itself."""
    document = read_document(text)
    front = read_front(
        document.front, document.front_line, unknown_base=bool(_UNKNOWN_BASE.search(text))
    )
    known = quantities(document)
    shares = list(impossible_shares(document, known))
    impossible = [q for finding, q in shares if q is not None and finding.is_error]
    ours = is_ours(document)
    found = [
        *front.findings,
        *([_NO_EVIDENCE] if ours and not has_evidence else []),
        *text_findings(document, is_ours=ours),
        *table_findings(document, known),
        *(finding for finding, _ in shares),
        *claim_findings(document, known, impossible),
        *prose_findings(document, known),
        *index_findings(front.index, known),
        *command_findings(document, command_check),
    ]
    return sorted(set(found))


def is_ours(document: Document) -> bool:
    """True if a README looks like one that refiner has made."""
    return {*document.headings} >= _OUR_SECTIONS and any(
        line.startswith("refiner ") for fence in document.fences for line in fence.lines
    )


def check_card(
    text: str,
    evidence: str | None = None,
    *,
    command_check: CommandCheck | None = None,
    template: str | None = None,
) -> list[Finding]:
    """All that is wrong with a card, in the order of its lines.

    Parameters
    ----------
    text
        Of the README.md.
    evidence
        Text of the ``refiner.json`` that belongs to it.
    command_check
        What knows refiner's own commands; without it they are only read as a shell would.
    template
        A template that may be run: the text of the user's own.
    """
    if len(text) > LARGEST:
        what = f"it has {len(text)} characters, at most {LARGEST} are read"
        return [Finding(1, "too-large", what, "name a card")]
    found = general_findings(text, command_check, has_evidence=evidence is not None)
    if evidence is not None:
        # The evidence knows how each interval was made; a bootstrap need not hold its value.
        found = [f for f in found if f.rule != "interval"]
        found += evidence_findings(text, evidence, template)
    return sorted(found)


def lint_card(text: str, evidence: str | None = None, *, template: str | None = None) -> list[str]:
    """Reasons why a card is unfit to be published, a sentence each; warnings are left out."""
    found = check_card(text, evidence, template=template)
    return [f"line {f.line}: {f.message}" for f in found if f.is_error]
