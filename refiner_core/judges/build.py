"""From configuration to judge."""

from __future__ import annotations

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.types import Judge
from refiner_core.judges.lexical import LexicalJudge
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
