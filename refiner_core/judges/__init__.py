"""Judges: who scores rubrics and citations.

In: :class:`~refiner_core.contract.types.JudgeRequest` values. Out: one judgement each, in order:
scored in [0, 1], or failed, which is never a number. :func:`build_judge` makes the judge that a
configuration names; the HTTP client is imported only for the judge that needs it.
"""

from __future__ import annotations

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.types import Judge
from refiner_core.judges.calls import parse_judgement as parse_judgement
from refiner_core.judges.lexical import LexicalJudge as LexicalJudge
from refiner_core.judges.prompting import judge_prompts_digest as judge_prompts_digest
from refiner_core.judges.surroundings import Surroundings


def build_judge(config: JudgeConfig, around: Surroundings | None = None) -> Judge:
    """The judge that ``config`` names.

    Raises
    ------
    ConfigurationError
        ``openai`` without ``base_url``, or with an unknown version of the prompts.
    """
    if config.kind == "lexical":
        return LexicalJudge(config.model)
    from refiner_core.judges.openai import OpenAIJudge  # aiohttp only where it is used

    return OpenAIJudge(config, around)
