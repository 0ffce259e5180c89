"""Model cards as pure functions of records.

In: :class:`CardFacts`, plain values taken from records. Out: the README.md of a published
checkpoint (:func:`build_card`), the evidence that lies beside it (:func:`evidence_text`), which
number of it shows which fact (:func:`card_numbers`), and what is wrong with a card
(:func:`lint_card`). Nothing here reads a file of a run, the clock or the network: the same facts
give the same bytes.
"""

from refiner_core.cards.build import (
    CardNumber,
    build_card,
    card_numbers,
    check_template,
    shipped_template,
)
from refiner_core.cards.evidence import (
    Evidence,
    evidence_text,
    facts_from_json,
    facts_to_json,
    load_evidence,
)
from refiner_core.cards.facts import AttemptNote, CardFacts, attempt_notes, record_of
from refiner_core.cards.lint import lint_card

__all__ = [
    "AttemptNote",
    "CardFacts",
    "CardNumber",
    "Evidence",
    "attempt_notes",
    "build_card",
    "card_numbers",
    "check_template",
    "evidence_text",
    "facts_from_json",
    "facts_to_json",
    "lint_card",
    "load_evidence",
    "record_of",
    "shipped_template",
]
