"""Evidence out of prompts, claims out of answers.

In: the text of a prompt, the text that a policy sampled. Out: :class:`ParsedEvidence` (id to text)
and :class:`ParsedAnswer` (claims, their ids, everything that is wrong with them). Imports nothing
but the standard library; knows nothing of judges or rewards.

The same tag marks evidence in a prompt and claims in an answer, so the two readers are separate:
:func:`parse_evidence` is only ever given the prompt, :func:`parse_answer` only the answer.
"""

from refiner_core.answers.claims import (
    Claim,
    ParsedAnswer,
    parse_answer,
    says_something,
    strip_tags,
)
from refiner_core.answers.evidence import ParsedEvidence, parse_evidence
from refiner_core.answers.tags import Problem
from refiner_core.answers.wording import compared

__all__ = [
    "Claim",
    "ParsedAnswer",
    "ParsedEvidence",
    "Problem",
    "compared",
    "parse_answer",
    "parse_evidence",
    "says_something",
    "strip_tags",
]
