"""Checks of rubrics before anything is trained on them.

In: a file with a rubric set, or a file of rows with rubrics of their own. Out: :class:`Checked`,
with every :class:`Finding`: where, what, why it matters, what mends it. What is an ``error`` is
refused or counted wrongly by the reward; a ``warning`` is wording that judges tend to get wrong.
Nothing is asked of any judge.
"""

from refiner_core.rubrics.lint.checks import RULES, Checked, Finding, check_file

__all__ = ["RULES", "Checked", "Finding", "check_file"]
