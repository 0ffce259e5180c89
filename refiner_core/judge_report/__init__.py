"""Trust in a judge, measured on questions, answers and evidence.

In: a judge (or two) and cases: real ones of a run's stored answers, or a small set that comes with
refiner. Out: numbers with their evidence and intervals, as JSON-ready values and as Markdown.
"""
