"""Model cards as pure functions of records.

In: :class:`CardFacts`, plain values taken from records. Out: the README.md of a published
checkpoint (:func:`build_card`), the evidence that lies beside it (:func:`evidence_text`), and what
is wrong with a card (:func:`lint_card`). Nothing here reads a file of a run, the clock or the
network: the same facts give the same bytes.
"""
