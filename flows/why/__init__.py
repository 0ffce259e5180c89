"""`refiner why`: from a printed number to what it was made of.

    words ──> figures ──> evidence ──> text
              which       protocol, samples, one answer      for a terminal, or as JSON
              recorded    with its judgements, files
              number

In: a number as it was printed, or names (`citation_f1 grpo greedy`); a workspace, or a card with
the ``refiner.json`` beside it. Out: everything behind it, each with the file that it lies in.
"""

from flows.why.explanation import Explanation, explain_number
from flows.why.figures import Figure, Query, figures_of_card, figures_of_stages, parse_query

__all__ = [
    "Explanation",
    "Figure",
    "Query",
    "explain_number",
    "figures_of_card",
    "figures_of_stages",
    "parse_query",
]
