"""The rules that any README can be held against.

In: its text. Out: findings in the order of their lines.
"""

from __future__ import annotations

import re

from refiner_core.cards.lint.claims import claim_findings
from refiner_core.cards.lint.commands import CommandCheck, command_findings
from refiner_core.cards.lint.findings import Finding
from refiner_core.cards.lint.front import read_front
from refiner_core.cards.lint.index import index_findings
from refiner_core.cards.lint.markdown import Document, read_document
from refiner_core.cards.lint.prose import prose_findings
from refiner_core.cards.lint.quantities import quantities
from refiner_core.cards.lint.shares import impossible_shares
from refiner_core.cards.lint.tables import table_findings
from refiner_core.cards.lint.text import text_findings

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
    """What is wrong with a README by itself."""
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
        *index_findings(document, front.index, known),
        *command_findings(document, command_check),
    ]
    return sorted(set(found))


def is_ours(document: Document) -> bool:
    """Whether a README looks like one that refiner has made."""
    has = {title for _, title in document.headings}
    return has >= _OUR_SECTIONS and any(
        line.startswith("refiner ") for fence in document.fences for line in fence.lines
    )
