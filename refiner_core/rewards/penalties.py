"""Penalties: measures of answers that a recipe may put a price on (``reward.penalties``).

In: a parsed answer, its evidence, the support of its claims. Out: a measure in [0, 1] per price
that is not 0. All are read from the text or from judgements that the reward has anyway: no call.

=============== ================================================================================
price           measure
=============== ================================================================================
copied          ``quality/copied_share``: words of the claims in a run that the evidence has
copied_sources  share of the evidence's words in a run that the claims have
uncited         claims without a sound citation (of a known source): the larger of their shares of
                all claims (1 - ``quality/cited_share``) and of all words
outside         ``quality/outside_share``, under ``answer_only``
long_spans      share of the claims' words beyond the first ``long_span_words`` of their tag
unsupported     share of the cited claims that their sources do not support in full
repeated        ``quality/repeated_share``
length          share of the words beyond ``length_words``, text outside of the block included
abstention      1 for an answer that cites nothing
=============== ================================================================================

Lengths are in words, not tokens, so that they are the same for each model and for stored answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from refiner_core.answers import ParsedAnswer, ParsedEvidence, compared, strip_tags
from refiner_core.contract.config import PenaltiesConfig
from refiner_core.contract.types import ANSWER_ONLY
from refiner_core.rewards.course import compared_sources, copied_words, in_one, measures_of, share

PRICES = (
    *("copied", "copied_sources", "uncited", "outside", "long_spans", "unsupported"),
    *("repeated", "length", "abstention"),
)
_COMPONENT = "penalty_"


def prices_of(penalties: PenaltiesConfig) -> dict[str, float]:
    """The prices that are not 0, by component."""
    found = {f"{_COMPONENT}{name}": getattr(penalties, name) for name in PRICES}
    return {name: price for name, price in found.items() if price}


def penalty_measures(
    penalties: PenaltiesConfig,
    answer: ParsedAnswer,
    text: str,
    evidence: ParsedEvidence,
    refiner_mode: str,
    support: Sequence[float],
) -> dict[str, float]:
    """The measures that have a price, as components.

    Parameters
    ----------
    text
        The answer as sampled.
    support
        Scores of the citation questions about support.
    """
    prices = prices_of(penalties)
    if not prices:
        return {}
    sources = compared_sources(evidence)
    looks = measures_of(answer, text, in_one(sources))
    lengths = [len(claim.text.split()) for claim in answer.claims]
    tagged = [len(claim.text.split()) for claim in answer.tagged_claims]
    sound = sum(len(claim.text.split()) for claim in answer.claims if claim.well_formed)
    said = len(strip_tags(text).split())
    measures = {
        "copied": looks["copied_share"],
        "uncited": 1.0 - min(looks["cited_share"], share(sound, sum(lengths))),
        "outside": looks["outside_share"] if refiner_mode == ANSWER_ONLY else 0.0,
        "long_spans": share(_beyond(tagged, penalties.long_span_words), sum(lengths)),
        "unsupported": share(sum(score < 1.0 for score in support), len(support)),
        "repeated": looks["repeated_share"],
        "length": share(_beyond([said], penalties.length_words), said),
        "abstention": float(not answer.cited_ids),
    }
    if penalties.copied_sources:
        claims = in_one(compared(claim.text) for claim in answer.claims)
        copied = sum(copied_words(source, claims) for source in sources)
        measures["copied_sources"] = share(copied, sum(len(s.split()) for s in sources))
    found = {f"{_COMPONENT}{name}": value for name, value in measures.items()}
    return {name: found[name] for name in prices}


def _beyond(lengths: Sequence[int], free: int) -> int:
    return sum(max(0, length - free) for length in lengths)
