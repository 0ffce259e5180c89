"""Rubrics: what an answer is judged by.

In: a row's rubric JSON, the name or file of a static rubric set, the reward configuration.
Out: :class:`Rubric` values in a fixed order (a row's own first, then the static ones).
"""

from refiner_core.rubrics.rows import Rubric, normalise_rubrics, parse_rubrics
from refiner_core.rubrics.sets import (
    RubricSet,
    check_rubrics_unchanged,
    hold_rubrics,
    load_rubric_set,
    rubric_set_digest,
    select_rubrics,
    shipped_rubric_sets,
)

__all__ = [
    "Rubric",
    "RubricSet",
    "check_rubrics_unchanged",
    "hold_rubrics",
    "load_rubric_set",
    "normalise_rubrics",
    "parse_rubrics",
    "rubric_set_digest",
    "select_rubrics",
    "shipped_rubric_sets",
]
