"""When too many rollouts have no reward, work stops instead of going on with what is left.

In: results, and the share that may be unscored. Out: nothing, or :class:`JudgeOutage` that says how
many there are and what the judge's most frequent failures were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from refiner_core.contract.errors import JudgeOutage
from refiner_core.contract.types import RewardResult

_REASONS_SHOWN = 3


def require_scored(results: Sequence[RewardResult], max_failed_share: float, *, of: str) -> None:
    """Refuse to go on where more than ``max_failed_share`` of ``results`` is unscored.

    Parameters
    ----------
    of
        What the results are of, e.g. ``rollouts of a step``.

    Raises
    ------
    JudgeOutage
        Names the most frequent reasons.
    """
    unscored = sum(1 for result in results if result.status == "unscored")
    if unscored <= max_failed_share * len(results):
        return
    reasons = failure_reasons(results)
    why = f": {reasons}" if reasons else ""
    raise JudgeOutage(
        f"The judge failed on {unscored} of {len(results)} {of}{why}",
        expected=f"at most a share of {max_failed_share} (judge.max_failed_share)",
        fix="see that the judge answers, then run the same command again",
    )


def failure_reasons(results: Sequence[RewardResult]) -> str:
    """The most frequent reasons why judgements failed, with how often; empty where none failed."""
    counts = Counter(
        str(judgement.get("detail") or "no reason given")
        for result in results
        for judgement in result.judgements
        if judgement.get("status") == "failed"
    )
    shown = [
        f"{reason} ({n} times)" if n > 1 else reason
        for reason, n in counts.most_common(_REASONS_SHOWN)
    ]
    further = counts.total() - sum(n for _, n in counts.most_common(_REASONS_SHOWN))
    if further:
        shown.append(f"{further} further failed judgements")
    return "; ".join(shown)
