"""Totals and advantages of rollouts: as they were stored, and under other settings.

In: rollouts, settings, a judge. Out: :class:`Scores`, parallel to the rollouts; and
:func:`fidelity`: whether the run's own settings give back to the bit what was stored, without
which no difference between settings would mean anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from refiner_core.contract.config import RewardConfig
from refiner_core.contract.types import Judge
from refiner_core.rescoring.rollouts import StoredRollout, groups_of, items_of
from refiner_core.rewards import compute_rewards
from refiner_core.training.rollouts.rollout import DropReason, Normalization, group_advantages

Metric = Literal["total", "rubric", "citation"]
METRICS: tuple[Metric, ...] = ("total", "rubric", "citation")
#: Relative; advantages of nearly equal rewards magnify what rounding does to them.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Scores:
    """One entry per rollout; ``dropped`` has one per group, None for a group that is trained on.

    A rollout whose judge failed has neither total nor advantage.
    """

    totals: tuple[float | None, ...]
    advantages: tuple[float | None, ...]
    statuses: tuple[str, ...]
    components: tuple[Mapping[str, float], ...]
    judgements: tuple[Sequence[Mapping[str, Any]], ...]
    dropped: Mapping[str, DropReason | None] = field(default_factory=dict)

    @property
    def unscored(self) -> int:
        """Rollouts without a total."""
        return sum(total is None for total in self.totals)

    def values(self, metric: Metric) -> list[float | None]:
        """A metric per rollout; None where there is none: the judge failed, the row has no rubrics
        or no evidence to cite."""
        if metric == "total":
            return list(self.totals)
        return [
            None if total is None else _component(components, metric)
            for total, components in zip(self.totals, self.components, strict=True)
        ]


def _component(components: Mapping[str, float], metric: Metric) -> float | None:
    if metric == "rubric" and components.get("no_rubrics"):
        return None
    if metric == "citation" and not components.get("citation_applicable", 1.0):
        return None
    return components.get(metric)


def scores_under(
    rollouts: Sequence[StoredRollout],
    reward: RewardConfig,
    judge: Judge,
    normalization: Normalization,
) -> Scores:
    """Reward the rollouts again. Errors as of :func:`~refiner_core.rewards.compute_rewards`."""
    results = compute_rewards(items_of(rollouts), reward, judge)
    totals = [result.total for result in results]
    advantages, dropped = _advantages(rollouts, totals, normalization)
    return Scores(
        totals=tuple(totals),
        advantages=tuple(advantages),
        statuses=tuple(result.status for result in results),
        components=tuple(result.components for result in results),
        judgements=tuple(result.judgements for result in results),
        dropped=dropped,
    )


def stored_scores(
    rollouts: Sequence[StoredRollout], again: Scores, normalization: Normalization
) -> Scores:
    """Stored scores. Advantages of an evaluation, which stores none, are made from its totals;
    components that its files leave out are those of ``again``, the same settings once more."""
    totals = [rollout.total for rollout in rollouts]
    made, dropped = _advantages(rollouts, totals, normalization)
    in_training = any(rollout.step is not None for rollout in rollouts)
    return Scores(
        totals=tuple(totals),
        advantages=tuple(r.advantage for r in rollouts) if in_training else tuple(made),
        statuses=tuple(rollout.status for rollout in rollouts),
        components=tuple(
            {**more, **rollout.components}
            for rollout, more in zip(rollouts, again.components, strict=True)
        ),
        judgements=tuple(rollout.judgements for rollout in rollouts),
        dropped=dropped,
    )


def _advantages(
    rollouts: Sequence[StoredRollout],
    totals: Sequence[float | None],
    normalization: Normalization,
) -> tuple[list[float | None], dict[str, DropReason | None]]:
    found: list[float | None] = [None] * len(rollouts)
    dropped: dict[str, DropReason | None] = {}
    for name, members in groups_of(rollouts).items():
        group = group_advantages([totals[i] for i in members], normalization)
        dropped[name] = group.dropped
        for position, value in zip(members, group.values, strict=True):
            found[position] = value
    return found, dropped


# ---------------------------------------------------------------- fidelity


def fidelity(
    rollouts: Sequence[StoredRollout],
    again: Scores,
    *,
    unused: int = 0,
    rejudged: int = 0,
    judged_alike: int = 0,
) -> dict[str, Any]:
    """Share of what was stored that the run's own settings give back, bit by bit.

    Parameters
    ----------
    unused
        Stored judgements that today's code does not ask for: it reads answers, evidence or
        rubrics in another way than the run did.
    rejudged, judged_alike
        With the lexical judge, which costs nothing: judgements made again, and how many of them
        are as they were stored.

    Returns
    -------
    dict
        ``totals`` and ``advantages``: how many of ``rollouts`` are the same (``advantages`` is None
        for an evaluation). ``far``: how many differ by more than rounding does. ``first``: the
        first that differs, in words. ``exact``: everything is as it was. ``sound``: differences
        between settings are those of the settings. ``warning``: empty where all is well.
    """
    in_training = any(rollout.step is not None for rollout in rollouts)
    totals = advantages = far = 0
    first = ""
    for rollout, total, advantage in zip(rollouts, again.totals, again.advantages, strict=True):
        pairs = {"total": (rollout.total, total)}
        if in_training:
            pairs["advantage"] = (rollout.advantage, advantage)
        other = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        totals += "total" not in other
        advantages += "advantage" not in other
        far += any(_is_far(*pair) for pair in other.values())
        if other and not first:
            name, (was, now) = next(iter(other.items()))
            first = f"{rollout.group}, sample {rollout.sample_index}: {name} {was} -> {now}"
    found = {
        **{"rollouts": len(rollouts), "totals": totals},
        **{"advantages": advantages if in_training else None, "far": far},
        **{"rejudged": rejudged, "judged_alike": judged_alike, "first": first, "unused": unused},
    }
    exact = not first and rejudged == judged_alike
    sound = not far and rejudged == judged_alike
    warning = "" if exact else _warning(found, sound=sound)
    return {**found, "exact": exact, "sound": sound, "warning": warning}


def _warning(found: Mapping[str, Any], *, sound: bool) -> str:
    """Warning about settings that do not give back what was stored."""
    if sound:
        return (
            f"the run's own settings give back what was stored up to rounding alone (first: "
            f"{found['first']}): this version adds in another order than the one that trained. No "
            "comparison below depends on that."
        )
    rollouts, advantages = found["rollouts"], found["advantages"]
    counts = {
        "totals differ": (found["totals"], rollouts),
        "advantages differ": (rollouts if advantages is None else advantages, rollouts),
        "judgements differ (lexical judge)": (found["judged_alike"], found["rejudged"]),
    }
    parts = [f"{of - alike} of {of} {what}" for what, (alike, of) in counts.items() if alike < of]
    if found["first"]:
        parts[-1] += f" (first: {found['first']})"
    if found["unused"]:
        parts.append(
            f"{found['unused']} stored judgements answer questions that are not asked any more, "
            "since the rubric set or the reading of answers has changed"
        )
    return (
        f"the run's own settings do not give back what was stored: {', '.join(parts)}. "
        "Differences below are in part those of the code, not of the settings; the row `own, "
        "again` shows how much."
    )


def _is_far(was: float | None, now: float | None) -> bool:
    if was is None or now is None:
        return was is not now
    return abs(was - now) > ROUNDING * max(1.0, abs(was), abs(now))
