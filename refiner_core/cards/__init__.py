"""Model cards as pure functions of records.

In: :class:`CardFacts`, plain values from records. Out: the README.md of a published checkpoint
(:func:`build_card`), the evidence beside it (:func:`evidence_text`), and the errors of a card
(:func:`lint_card`). Nothing here reads a run's files, the clock or the network: the same facts
give the same bytes.
"""
