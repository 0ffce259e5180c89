"""When too many rollouts have no reward, work stops instead of going on with what is left.

In: results, and the share that may be unscored. Out: nothing, or :class:`JudgeOutage` that says how
many there are and what the judge's most frequent failures were; :class:`JudgeUnusable` where it was
there, and most of what failed is what it said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from refiner_core.contract.errors import JudgeOutage, JudgeUnusable
from refiner_core.contract.types import CUT_SHORT, UNPARSABLE, RewardResult

_REASONS_SHOWN = 3


def require_scored(results: Sequence[RewardResult], max_failed_share: float, *, of: str) -> None:
    """Refuse to go on where more than ``max_failed_share`` of ``results`` is unscored.

    Parameters
    ----------
    of
        What the results are of, e.g. ``rollouts of a step``.

    Raises
    ------
    JudgeOutage, JudgeUnusable
        Names the most frequent reasons.
    """
    unscored = sum(1 for result in results if result.status == "unscored")
    if unscored <= max_failed_share * len(results):
        return
    reasons = failure_reasons(results)
    why = f": {reasons}" if reasons else ""
    share = f"at most a share of {max_failed_share} (judge.max_failed_share)"
    failed = [str(judgement.get("detail")) for judgement in _failed(results)]
    answered = Counter(text for text in map(_what_was_said, failed) if text)
    if 2 * answered.total() > len(failed):
        said = "; ".join(f"{text} ({n} times)" for text, n in answered.most_common(_REASONS_SHOWN))
        raise JudgeUnusable(
            f"The judge's answers are no judgements: {said}, on {unscored} of {len(results)} {of}",
            expected=f"{share}, and one of the scores that its prompts ask for: 0, 1 or 2",
            fix="correct the judge, judge.prompt, judge.max_tokens or judge.extra_body until "
            "`refiner judge ask` with the recipe's judge gets its scores, then run the same "
            "command again",
        )
    raise JudgeOutage(
        f"The judge failed on {unscored} of {len(results)} {of}{why}",
        expected=share,
        fix="see that the judge answers, then run the same command again",
    )


def _what_was_said(detail: str) -> str:
    """What is wrong with an answer that is no judgement; empty where there was none."""
    if UNPARSABLE in detail:
        return detail.partition(UNPARSABLE)[2].lstrip(", ")
    return detail[detail.index(CUT_SHORT) :] if CUT_SHORT in detail else ""


def _failed(results: Sequence[RewardResult]) -> list[Mapping[str, Any]]:
    return [j for result in results for j in result.judgements if j.get("status") == "failed"]


def failure_reasons(results: Sequence[RewardResult]) -> str:
    """The most frequent reasons why judgements failed, with how often; empty where none failed."""
    counts = Counter(str(j.get("detail") or "no reason given") for j in _failed(results))
    shown = [
        f"{reason} ({n} times)" if n > 1 else reason
        for reason, n in counts.most_common(_REASONS_SHOWN)
    ]
    further = counts.total() - sum(n for _, n in counts.most_common(_REASONS_SHOWN))
    if further:
        shown.append(f"{further} further failed judgements")
    return "; ".join(shown)
