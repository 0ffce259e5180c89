"""Comparison of two scorings of the same rollouts, in numbers with intervals.

In: rollouts and two scorings of them (:class:`~refiner_core.rescoring.rollouts.Scores`), the
baseline first. Out: numbers by name, as in ``rescore.json``. Every share is a numerator, a
denominator and a 95 % interval over prompts, since samples of one prompt are correlated.

Definitions:

================  ===================================  ===========================================
number            of                                   over
================  ===================================  ===========================================
kendall           advantages within a group (tau-b),   groups in which neither side is constant
                  mean over groups
best_changed      groups that share no best sample     groups with two or more samples scored
                                                       on both sides
no_signal         groups without spread                groups with two or more scored samples
sign_changed      advantages that change sign          samples with an advantage on both sides
means             a component of the reward            samples scored on both sides
================  ===================================  ===========================================

Rewards that differ only by rounding are equal, as in training.

If two judges judged the same questions, their agreement is reported by criterion
(:func:`judges_agree`). Policies with the same prompts give a judge x policy matrix
(:func:`make_matrix`): a mean with an interval per cell, and each setting's ranking of the policies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from refiner_core.contract.errors import ConfigurationError
from refiner_core.evaluation.statistics import Estimate, estimate
from refiner_core.judge_report.measures import agreement, plain
from refiner_core.rescoring.rollouts import METRICS, Scores, StoredRollout, described, groups_of

#: A smaller advantage has no sign: it is a rounding error of a mean.
NO_SIGN = 1e-6
RESAMPLES = 1000
_SIDES = ("baseline", "setting")


def compare(
    rollouts: Sequence[StoredRollout], first: Scores, second: Scores, *, resamples: int = RESAMPLES
) -> dict[str, Any]:
    """Compare the second scoring with the first: see the table in the module's docstring. ``means``
    maps a component to its mean under both; ``unscored`` counts the rollouts without a total
    under each."""
    groups, sides = groups_of(rollouts), dict(zip(_SIDES, (first, second), strict=True))
    prompts = [rollout.prompt.sample_id for rollout in rollouts]
    of_groups = [
        {"sample_id": prompts[members[0]], **_group_row(name, members, sides)}
        for name, members in groups.items()
    ]
    of_samples: list[dict[str, Any]] = [
        {"sample_id": prompt, "changed": None if a is None or b is None else sign_changes(a, b)}
        for prompt, a, b in zip(prompts, first.advantages, second.advantages, strict=True)
    ]
    both = [None not in pair for pair in zip(first.totals, second.totals, strict=True)]
    for metric in METRICS:
        for side, scores in sides.items():
            for row, scored, value in zip(of_samples, both, scores.values(metric), strict=True):
                row[f"{metric} {side}"] = value if scored else None

    def number(name: str, stream: str = "") -> Estimate | None:
        rows = of_samples if stream else of_groups
        return estimate(rows, name, resamples=resamples, stream=stream)

    def share(name: str, rows: Sequence[dict[str, Any]] = of_groups) -> Estimate | None:
        stream = name.partition(" ")[0]
        return estimate(rows, name, kind="yes_no", resamples=resamples, stream=stream)

    return {
        "kendall": number("tau"),
        "best_changed": share("changed"),
        "no_signal": {side: share(f"flat {side}") for side in sides},
        "sign_changed": share("changed", of_samples),
        "means": {m: {side: number(f"{m} {side}", "value") for side in sides} for m in METRICS},
        "unscored": {side: scores.totals.count(None) for side, scores in sides.items()},
        "rollouts": len(rollouts),
        "groups": len(groups),
        "prompts": len(set(prompts)),
    }


# ---------------------------------------------------------------- groups


def _group_row(
    name: str, members: Sequence[int], sides: Mapping[str, Scores]
) -> dict[str, float | None]:
    first, second = (scores.totals for scores in sides.values())
    row: dict[str, float | None] = {
        f"flat {side}": None
        if scores.dropped[name] == "too_few_scored"
        else scores.dropped[name] == "zero_std"
        for side, scores in sides.items()
    }
    pairs = [(first[i], second[i]) for i in members]
    scored = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(scored) >= 2:
        a, b = ([pair[side] for pair in scored] for side in (0, 1))
        best_a, best_b = best_samples(a), best_samples(b)
        row["changed"] = best_a.isdisjoint(best_b)
        row["tau"] = kendall_tau_b(a, b)
    return row


def _levels(values: Sequence[float]) -> npt.NDArray[np.int64]:
    """Rank of each value among the distinct ones; values that differ only by rounding are equal."""
    return np.unique(np.round(values, 9), return_inverse=True)[1]


def best_samples(totals: Sequence[float]) -> frozenset[int]:
    """Positions of the highest totals."""
    levels = _levels(totals)
    return frozenset(np.flatnonzero(levels == levels.max()).tolist())


def kendall_tau_b(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Kendall's tau-b (Kendall 1945, "The treatment of ties in ranking problems", Biometrika
    33:239-251) of totals in one group; None if a side is constant. Advantages of a group have
    the order of its totals."""
    from scipy.stats import kendalltau

    sides = (_levels(a), _levels(b))
    return None if min(map(np.ptp, sides)) == 0 else float(kendalltau(*sides).statistic)


def sign_changes(a: float, b: float) -> bool:
    """True if two advantages of a sample have opposite signs."""
    return a * b < 0 and min(abs(a), abs(b)) > NO_SIGN


def judges_agree(
    rollouts: Sequence[StoredRollout], first: Scores, second: Scores, *, resamples: int = 1000
) -> list[dict[str, Any]]:
    """Agreement of the judgements in both scorings, for each kind of question."""
    rows = []
    for rollout, *both in zip(rollouts, first.results, second.results, strict=True):
        one, other = ({described(e): e for e in result.judgements} for result in both)
        for question in (q for q in one if q in other):
            pair = one[question]["score"], other[question]["score"]
            rows.append((one[question]["kind"], *pair, rollout.prompt.sample_id))
    pairs = pd.DataFrame(rows, columns=["kind", "a", "b", "prompt"]).astype(
        {"a": float, "b": float}
    )
    return [
        {"kind": kind, **plain(agreement(p["a"], p["b"], p["prompt"], resamples=resamples))}
        for kind, p in pairs.groupby("kind")
    ]


#: Scores of a policy's rollouts: one value per rollout, by setting.
Values = Mapping[str, Sequence[float | None]]


def prompts_of(rollouts: Sequence[StoredRollout]) -> dict[str, str]:
    """Prompt id -> prompt text."""
    return {r.prompt.sample_id: r.prompt.prompt_text for r in rollouts}


def common_prompts(
    policies: Mapping[str, Sequence[StoredRollout]],
) -> dict[str, list[StoredRollout]]:
    """The policies' rollouts on the prompts that all of them have.

    Raises
    ------
    ConfigurationError
        They have no prompt in common.
    """
    asked = (prompts_of(rollouts).items() for rollouts in policies.values())
    ids = {prompt for prompt, _ in set.intersection(*map(set, asked))}
    if not ids:
        raise ConfigurationError(
            f"{', '.join(policies)} have no prompt in common",
            expected="policies with common prompts",
            fix="choose --steps with common prompts, or use `--from evaluation`",
        )
    return {
        name: [r for r in rollouts if r.prompt.sample_id in ids]
        for name, rollouts in policies.items()
    }


def make_matrix(
    metric: str,
    policies: Mapping[str, Sequence[StoredRollout]],
    values: Mapping[str, Values],
    *,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """The matrix of a metric. Settings have the order of the first policy.

    ``cells`` are by policy, then setting, with their intervals; ``ranks`` by setting, then policy,
    best first: 1 is the best, and policies with equal means share a rank.

    Parameters
    ----------
    metric
        Name of the averaged metric, for people.
    policies
        Rollouts by policy, on the same prompts (:func:`common_prompts`).
    values
        By policy and setting, one value per rollout; None if missing.
    """
    cells: dict[str, dict[str, Estimate | None]] = {}
    for name, rollouts in policies.items():
        prompts_in = [rollout.prompt.sample_id for rollout in rollouts]
        for setting, found in values[name].items():
            pairs = zip(prompts_in, found, strict=True)
            rows = [{"sample_id": prompt, "value": value} for prompt, value in pairs]
            cells.setdefault(name, {})[setting] = estimate(rows, "value", resamples=resamples)
    means = pd.DataFrame(
        {name: {s: e.value for s, e in row.items() if e} for name, row in cells.items()}
    ).T
    # Rounded, so that rounding errors of equal means give one rank.
    ranks = means.round(9).rank(method="min", ascending=False)
    return {
        "metric": metric,
        "prompts": len(prompts_of(next(iter(policies.values())))),
        "cells": cells,
        "ranks": {
            setting: ranks[setting].dropna().sort_values(kind="stable").astype(int).to_dict()
            if setting in ranks
            else {}
            for setting in next(iter(values.values()))
        },
    }
