"""Rows of samples and rollouts as what a model has said: text or episode, judgements, rewards.

In: rows as evaluations and trainings store them. Out:
:class:`~refiner_core.report.run.document.Said`. Pure. A reward is taken apart by the formula of
:mod:`refiner_core.rewards.combine`; where the parts do not add up to what is recorded, they stand
without their shares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from refiner_core.contract.config import RewardConfig
from refiner_core.evaluation.metrics import EPISODE_METRICS
from refiner_core.evaluation.samples import METRICS
from refiner_core.report.run.document import RewardPart, Said
from refiner_core.rewards.citations import F1_SHARE, FORMAT_SHARE
from refiner_core.rewards.combine import reward_terms

#: Characters of an answer, of a prompt, and of each text of an episode or judgement that a report
#: keeps.
MOST_OF_ANSWER, MOST_OF_PROMPT, MOST_OF_TURN, MOST_OF_JUDGEMENT = 12_000, 24_000, 4_000, 1_500
_CUT = " […]"
_NEAR = 1e-6


def said_in_evaluation(row: Mapping[str, Any], model: str, reward: RewardConfig) -> Said:
    """One sample of an evaluation."""
    known = (*EPISODE_METRICS,) if "episode" in row else METRICS
    metrics = {m: row[m] for m in known if row.get(m) is not None and m != "reward"}
    components = {
        "rubric": row.get("rubric_score"),
        "citation": _citation(row.get("citation_f1"), row.get("citation_format")),
        "format_bonus": None,
    }
    return _said(row, model, metrics, () if "episode" in row else _parts(row, components, reward))


def said_in_training(row: Mapping[str, Any], reward: RewardConfig) -> Said:
    """One rollout, by the step it was sampled in."""
    mine = (key for key in row if key.startswith("reward/"))
    components = {key.removeprefix("reward/"): row[key] for key in mine}
    parts = _episode_parts(row, components) if "episode" in row else _parts(row, components, reward)
    of_parts = {"total", *(part.name for part in parts)}
    metrics = {k: v for k, v in components.items() if v is not None and k not in of_parts}
    if row.get("advantage") is not None:
        metrics["advantage"] = row["advantage"]
    return _said(row, f"step {row['step']}", metrics, parts)


def _said(
    row: Mapping[str, Any],
    model: str,
    metrics: Mapping[str, float | None],
    parts: Sequence[RewardPart],
) -> Said:
    judgements = _judgements(row.get("judgements"))
    episode = None
    if row.get("episode"):
        recorded = json.loads(row["episode"])
        # A failure stands in the samples' own column, in rollouts in the record itself.
        failure = row["failure"] or None if "failure" in row else recorded.get("failure")
        episode = clipped({**recorded, "failure": failure}, MOST_OF_TURN)
    return Said(
        model=model,
        text="" if episode is not None else clip(str(row["response_text"]), MOST_OF_ANSWER),
        status=str(row.get("status") or ""),
        finish_reason=str(row.get("finish_reason") or ""),
        reward=_finite(row.get("reward")),
        parts=tuple(parts),
        judgements=tuple(clipped(j, MOST_OF_JUDGEMENT) for j in judgements),
        metrics={k: _finite(v) for k, v in metrics.items()},
        episode=episode,
        failed=_failed(row, judgements, episode),
    )


def _judgements(stored: Any) -> list[dict[str, Any]]:
    """As text in files, or as they were."""
    found = json.loads(stored) if isinstance(stored, str) else stored
    return [dict(j) for j in found or ()]


def _failed(
    row: Mapping[str, Any],
    judgements: Sequence[Mapping[str, Any]],
    episode: Mapping[str, Any] | None,
) -> str:
    """Why there is no reward, or why an episode failed; empty where nothing did."""
    if episode is not None and (episode.get("error") or episode.get("failure")):
        kind = episode.get("error_kind") or episode.get("failure")
        return ": ".join(filter(None, [str(kind or ""), str(episode.get("error") or "")]))
    if row.get("status") not in ("unscored", "failed"):
        return ""
    details = [str(j.get("detail") or "") for j in judgements if j.get("status") != "scored"]
    return next(filter(None, details), "a judgement failed")


# ---------------------------------------------------------------- parts of a reward


def _citation(f1: float | None, form: float | None) -> float | None:
    return None if f1 is None or form is None else F1_SHARE * f1 + FORMAT_SHARE * form


def _parts(
    row: Mapping[str, Any], components: Mapping[str, float | None], reward: RewardConfig
) -> tuple[RewardPart, ...]:
    """The terms of the reward, weighed as the total has them."""
    total = _finite(row.get("reward"))
    if reward.non_stop_penalty and row.get("finish_reason") != "stop":
        value = reward.non_stop_penalty_value
        return (RewardPart("did not stop", 1.0, value, value),)
    without = bool(components.get("no_rubrics")) or components.get("rubric") is None
    known = {**components, "no_rubrics": float(without)}
    scale = reward.verification_reward
    parts = [
        _part(term.name, known.get(term.name), scale * term.weight * term.gate)
        for term in reward_terms(known, reward)
    ]
    return _checked(parts, total)


def _episode_parts(
    row: Mapping[str, Any], components: Mapping[str, float | None]
) -> tuple[RewardPart, ...]:
    """The environment's own reward, and partial credit by its weight."""
    counts = row.get("status") == "scored"  # of any other episode the reward is what a rule says
    alpha = components.get("alpha") or 0.0
    parts = [_part("reward", components.get("reward"), 1.0 if counts else 0.0)]
    if components.get("partial") is not None:
        parts.append(_part("partial", components["partial"], alpha if counts else 0.0))
    return _checked(parts, _finite(row.get("reward")))


def _part(name: str, value: float | None, weight: float) -> RewardPart:
    value, weighs = _finite(value), _finite(weight)
    share = None if value is None or weighs is None else value * weighs
    return RewardPart(name, value, weighs, share)


def _checked(parts: Sequence[RewardPart], total: float | None) -> tuple[RewardPart, ...]:
    """Shares only where they add up to the recorded reward."""
    shares = math.fsum(part.share or 0.0 for part in parts)
    if total is not None and abs(shares - total) <= _NEAR * max(1.0, abs(total)):
        return tuple(parts)
    return tuple(RewardPart(part.name, part.value) for part in parts)


def _finite(value: Any) -> float | None:
    known = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if known else None


# ---------------------------------------------------------------- long texts


def clip(text: str, most: int) -> str:
    """The beginning of a long text."""
    return text if len(text) <= most else text[:most] + _CUT


def clipped(value: Any, most: int) -> Any:
    """JSON whose long texts are cut; numbers that are not finite are None."""
    if isinstance(value, Mapping):
        return {str(k): clipped(v, most) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clipped(v, most) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return clip(value, most) if isinstance(value, str) else value
