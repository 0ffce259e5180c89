"""Judges, which score rubrics and citations.

In: :class:`~refiner_core.contract.types.JudgeRequest` values. Out: one judgement each, in order:
scored in [0, 1], or failed, which is never a number. :func:`build_judge` makes the configured
judge; the HTTP client is imported only if it needs one.
"""

from __future__ import annotations

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.types import Judge
from refiner_core.judges.calls import parse_judgement as parse_judgement
from refiner_core.judges.context import JudgeContext
from refiner_core.judges.lexical import LexicalJudge as LexicalJudge
from refiner_core.judges.prompting import judge_prompts_digest as judge_prompts_digest


def build_judge(config: JudgeConfig, around: JudgeContext | None = None) -> Judge:
    """The judge named by ``config``.

    Raises
    ------
    ConfigurationError
        ``openai`` without ``base_url``, or with an unknown version of the prompts.
    """
    if config.kind == "lexical":
        return LexicalJudge(config.model)
    from refiner_core.judges.openai import OpenAIJudge  # imports aiohttp

    return OpenAIJudge(config, around)
