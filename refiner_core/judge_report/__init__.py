"""Measurement of a judge's reliability on questions, answers and evidence.

In: a judge (or two) and cases: stored answers of a run, or a small shipped set. Out: numbers with
their evidence and intervals, as JSON-ready values and as Markdown.
"""
