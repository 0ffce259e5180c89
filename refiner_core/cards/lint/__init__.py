"""What is wrong with a card, before anybody else reads it.

In: the text of a README.md (ours or any other), and for one of ours its evidence. Out: findings,
each with its line, rule and severity; none is a good sign::

    text ──> markdown ──> front, text, commands                        what the Hub and readers meet
                     └──> quantities ──> tables, shares, claims, prose, index     what numbers say
    text, evidence ──> against, proof                          what it should be, number by number

Rules are strict about what they find: a number that can be right is left alone.
"""

from __future__ import annotations

from refiner_core.cards.lint.against import evidence_findings
from refiner_core.cards.lint.commands import CommandCheck
from refiner_core.cards.lint.findings import RULES, Finding
from refiner_core.cards.lint.general import LARGEST, general_findings

__all__ = ["RULES", "CommandCheck", "Finding", "check_card", "lint_card"]


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
    """What makes a card unfit to be published, one sentence per problem; warnings are left out."""
    found = check_card(text, evidence, template=template)
    return [f"line {f.line}: {f.message}" for f in found if f.is_error]
