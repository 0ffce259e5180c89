"""Judges: who scores rubrics and citations.

In: :class:`~refiner_core.contract.types.JudgeRequest` values. Out: one judgement each, in order:
scored in [0, 1], or failed, which is never a number. :func:`build_judge` makes the judge that a
configuration names; the HTTP client is imported only for the judge that needs it.
"""

from refiner_core.judges.build import build_judge
from refiner_core.judges.lexical import LexicalJudge
from refiner_core.judges.parsing import parse_judgement
from refiner_core.judges.prompting import judge_prompts_digest, render_prompt

__all__ = [
    "LexicalJudge",
    "build_judge",
    "judge_prompts_digest",
    "parse_judgement",
    "render_prompt",
]
