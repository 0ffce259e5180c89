"""Stored rollouts and evaluation samples as values, their questions, their totals and advantages,
as stored and under other settings; and comparisons of two scorings.

In: rows of Parquet files and their prompts; settings of a reward; a judge. Out:
:class:`StoredRollout` values in the order of their rows, their groups (samples of one prompt, whose
advantages are relative to each other), their questions, judges that answer from records;
:class:`Scores`, parallel to the rollouts; :func:`fidelity`: whether the run's own settings
reproduce the stored values to the bit, without which no difference between settings would be
meaningful; and numbers by name, as in ``rescore.json``. Every share is a numerator, a denominator
and a 95 % interval over prompts, since samples of one prompt are correlated.

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

Rewards that differ only by rounding are equal, as in training. If two judges judged the same
questions, their agreement is reported by criterion (:func:`judges_agree`). Policies with the same
prompts give a judge x policy matrix (:func:`make_matrix`): a mean with an interval per cell, and
each setting's ranking of the policies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from refiner_core.contract.config import LEXICAL_MODELS, JudgeConfig, RewardConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.marks import walk
from refiner_core.contract.types import Judge, Judgement, JudgeRequest, PromptRow, RewardResult
from refiner_core.evaluation.statistics import Estimate, estimate
from refiner_core.judge_report.measures import agreement, plain
from refiner_core.judges import judge_prompts_digest
from refiner_core.rewards import RewardInput, compute_rewards
from refiner_core.training.rollouts.rollout import DropReason, Normalization, group_advantages

_COMPONENT = "reward/"
#: Metric of an evaluation's sample -> component of the reward.
_OF_SAMPLES = {
    "rubric_score": "rubric",
    **{
        name: name
        for name in (
            *("citation_precision", "citation_recall", "citation_f1", "citation_format"),
            *("format_valid", "claims", "uncited"),
        )
    },
}


@dataclass(frozen=True)
class StoredRollout:
    """One sample with its stored reward.

    Attributes
    ----------
    group
        Samples it is compared with: its step (or decoding) and prompt.
    stopped
        Whether it ended by itself, not at the length limit.
    result, advantage
        As stored; no total or advantage if the judge failed. An evaluation stores no advantages.
    """

    group: str
    step: int | None
    sample_index: int
    prompt: PromptRow
    text: str
    stopped: bool
    result: RewardResult
    advantage: float | None


def stored_rollouts(
    rows: Iterable[Mapping[str, Any]], prompts: Sequence[PromptRow], decoding: str = ""
) -> list[StoredRollout]:
    """Rollouts of training steps; with a ``decoding``, samples of an evaluation.

    Raises
    ------
    DataError
        A row's prompt is not among ``prompts``.
    """
    found = []
    by_id = {prompt.sample_id: prompt for prompt in prompts}
    for row in rows:
        # By position if a row has one, since ids need not be unique.
        position, wanted = row.get("prompt_index"), str(row["sample_id"])
        there = prompts[position] if position is not None and position < len(prompts) else None
        prompt = there if there and there.sample_id == wanted else by_id.get(wanted)
        if prompt is None:
            raise DataError(
                f"The prompt {wanted} of a stored rollout is not among the {len(prompts)} prompts "
                "of the run's data",
                expected="the prompts that the rollouts were sampled from",
                fix="restore the output of the run's data stage",
            )
        if decoding:
            group = f"{decoding}, {row['sample_id']}"
            components = {component: row.get(m) for m, component in _OF_SAMPLES.items()}
        else:
            group = f"step {row['step']}, prompt {row.get('prompt_index', row['sample_id'])}"
            mine = (n for n in row if n.startswith(_COMPONENT))
            components = {n.removeprefix(_COMPONENT): row[n] for n in mine}
        judged = row["judgements"]
        rollout = StoredRollout(
            group=group,
            step=row.get("step"),
            sample_index=int(row["sample_index"]),
            prompt=prompt,
            text=str(row["response_text"]),
            stopped=row["finish_reason"] == "stop",
            result=RewardResult(
                row["status"],
                row["reward"],
                {n: float(v) for n, v in components.items() if v is not None},
                (json.loads(judged) if isinstance(judged, str) else judged) or [],
            ),
            advantage=row.get("advantage"),
        )
        found.append(rollout)
    return found


def groups_of(rollouts: Sequence[StoredRollout]) -> dict[str, list[int]]:
    """Positions of the members of each group, groups in order of appearance, members by sample."""
    groups: dict[str, list[int]] = {}
    for position, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group, []).append(position)
    return {
        name: sorted(members, key=lambda i: rollouts[i].sample_index)
        for name, members in groups.items()
    }


def some_groups(rollouts: Sequence[StoredRollout], count: int) -> list[StoredRollout]:
    """All samples of ``count`` groups, drawn by their names: deterministic, and nested for
    different counts. All groups if there are no more."""
    names = sorted(groups_of(rollouts), key=lambda n: hashlib.sha256(n.encode()).digest())
    chosen = set(names[:count])
    return [rollout for rollout in rollouts if rollout.group in chosen]


#: Fields without effect on judgements.
_NOT_OF_A_JUDGEMENT = ("max_failed_share",)
_VERDICT = ("score", "status", "detail", "title", "polarity", "weight", "source")
#: Question to a judge, with the key of its stored judgement.
Question = tuple[JudgeRequest, Mapping[str, Any]]


def judge_identity(config: JudgeConfig, prompts_digest: str | None = None) -> dict[str, Any]:
    """Settings that identify a judge.

    Parameters
    ----------
    config
        The judge.
    prompts_digest
        Of its prompts at the time in question; None: today's.

    Raises
    ------
    ConfigurationError
        There are no such prompts.
    """
    if config.kind == "lexical":
        known = {"kind": "lexical"}  # the form from before there were several
        return known if config.model == LEXICAL_MODELS[0] else {**known, "model": config.model}
    identity = {
        path: get_field(config, path)
        for path, info in walk(JudgeConfig)
        if info.mark == "identity" and path not in _NOT_OF_A_JUDGEMENT
    }
    digest = prompts_digest or judge_prompts_digest(config.prompt, config.form)
    return {**identity, "prompt_digest": digest}


def items_of(rollouts: Iterable[StoredRollout]) -> list[RewardInput]:
    """Rollouts as inputs of the reward."""
    return [RewardInput(r.prompt, r.text, r.stopped) for r in rollouts]


def questions_of(items: Sequence[RewardInput], reward: RewardConfig) -> list[tuple[Question, ...]]:
    """The questions of each answer under these settings, in the order of judging.

    Raises
    ------
    DataError, ConfigurationError
        See :func:`~refiner_core.rewards.compute_rewards`.
    """
    listener = _Listener()
    results = compute_rewards(items, reward, listener)
    return [
        tuple((listener.heard[int(d["detail"])], d) for d in result.judgements)
        for result in results
    ]


class _Listener:
    """A judge that records every question; its answers identify their questions."""

    def __init__(self) -> None:
        self.heard: list[JudgeRequest] = []

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        first = len(self.heard)
        self.heard += requests
        return [Judgement("scored", 0.0, str(first + i)) for i in range(len(requests))]


def recorded(
    rollouts: Sequence[StoredRollout], questions: Sequence[Sequence[Question]]
) -> dict[JudgeRequest, Judgement]:
    """Judgements stored with the rollouts, by the questions of their own settings."""
    known: dict[JudgeRequest, Judgement] = {}
    for rollout, asked in zip(rollouts, questions, strict=True):
        stored = {described(entry): entry for entry in rollout.result.judgements}
        for request, detail in asked:
            if entry := stored.get(described(detail)):
                scored = entry["status"] == "scored" and entry["score"] is not None
                why = str(entry.get("detail") or "")
                known[request] = (
                    Judgement("scored", float(entry["score"]), why)
                    if scored
                    else Judgement("failed", None, why)
                )
    return known


def described(detail: Mapping[str, Any]) -> Hashable:
    """Key of a stored judgement's question."""
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in sorted(detail.items())
        if name not in _VERDICT
    )


class RecordedJudge:
    """Answers from known judgements and asks ``rest`` the others; without it, those fail. A known
    failed judgement stays failed: it is this judge's result."""

    def __init__(self, known: Mapping[JudgeRequest, Judgement], rest: Judge | None = None) -> None:
        self._known, self._rest = known, rest

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        """One judgement per request, in order. Errors: those of the other judge."""
        unknown = [request for request in requests if request not in self._known]
        answers = [Judgement("failed", None, "not recorded")] * len(unknown)
        if self._rest is not None and unknown:
            answers = self._rest.judge(unknown)
        found = iter(answers)
        return [self._known[r] if r in self._known else next(found) for r in requests]


Metric = Literal["total", "rubric", "citation"]
METRICS: tuple[Metric, ...] = ("total", "rubric", "citation")
#: Rollouts scored at a time, in one request to a judge.
_PIECE = 256


@dataclass(frozen=True)
class Scores:
    """A result and an advantage per rollout (None if its judge failed); ``dropped`` has one
    entry per group, None for a group that is trained on."""

    results: Sequence[RewardResult]
    advantages: Sequence[float | None]
    dropped: Mapping[str, DropReason | None] = field(default_factory=dict)

    @property
    def totals(self) -> list[float | None]:
        """Totals; None if the judge failed."""
        return [result.total for result in self.results]

    def values(self, metric: Metric) -> list[float | None]:
        """A metric per rollout; None if missing: the judge failed, or the row has no rubrics
        or no evidence to cite."""
        return [_value(result, metric) for result in self.results]


def _value(result: RewardResult, metric: Metric) -> float | None:
    found = result.components
    lacks_rubrics = metric == "rubric" and found.get("no_rubrics")
    lacks_evidence = metric == "citation" and not found.get("citation_applicable", 1.0)
    if result.total is None or metric == "total" or lacks_rubrics or lacks_evidence:
        return result.total if metric == "total" else None
    return found.get(metric)


def scores_under(
    rollouts: Sequence[StoredRollout],
    reward: RewardConfig,
    judge: Judge,
    normalization: Normalization,
    tell: Callable[[int], None] = lambda scored: None,
) -> Scores:
    """Reward the rollouts again; ``tell`` is called with the number of newly scored ones. Errors:
    see :func:`~refiner_core.rewards.compute_rewards`."""
    results: list[RewardResult] = []
    items = items_of(rollouts)
    for begin in range(0, len(items), _PIECE):
        results += compute_rewards(items[begin : begin + _PIECE], reward, judge)
        tell(min(_PIECE, len(items) - begin))
    return with_advantages(rollouts, results, normalization)


def stored_scores(
    rollouts: Sequence[StoredRollout], again: Scores, normalization: Normalization
) -> Scores:
    """Stored scores. Advantages of an evaluation, which stores none, are computed from its totals;
    components missing in its files are those of ``again``, a rescoring under the same settings."""
    results = [
        replace(rollout.result, components={**more.components, **rollout.result.components})
        for rollout, more in zip(rollouts, again.results, strict=True)
    ]
    made = with_advantages(rollouts, results, normalization)
    if all(rollout.step is None for rollout in rollouts):
        return made
    return replace(made, advantages=[rollout.advantage for rollout in rollouts])


def with_advantages(
    rollouts: Sequence[StoredRollout], results: Sequence[RewardResult], normalization: Normalization
) -> Scores:
    """Results with their advantages within groups."""
    found: list[float | None] = [None] * len(rollouts)
    dropped: dict[str, DropReason | None] = {}
    for name, members in groups_of(rollouts).items():
        group = group_advantages([results[i].total for i in members], normalization)
        dropped[name] = group.dropped
        for position, value in zip(members, group.values, strict=True):
            found[position] = value
    return Scores(results, found, dropped)


# ---------------------------------------------------------------- fidelity


def fidelity(rollouts: Sequence[StoredRollout], again: Scores) -> dict[str, Any]:
    """How much of the stored values the run's own settings reproduce, bit by bit.

    Returns
    -------
    dict
        ``totals`` and ``advantages``: how many of ``rollouts`` are equal (``advantages`` is None
        for an evaluation). ``exact``: all are. ``warning``: names the first difference; empty if
        there is none.
    """
    in_training = any(rollout.step is not None for rollout in rollouts)
    names = ("total", "advantage") if in_training else ("total",)
    frame = pd.DataFrame(
        [(r.result.total, r.advantage) for r in rollouts],
        columns=["total", "advantage"],
        dtype=float,
    )
    now = pd.DataFrame({"total": again.totals, "advantage": again.advantages}, dtype=float)
    same = (frame.eq(now) | (frame.isna() & now.isna()))[list(names)]
    warning = ""
    if odd := [i for i, alike in enumerate(same.all(axis=1)) if not alike]:
        counts = ", ".join(f"{(~same[n]).sum()} of {len(same)} {n}s differ" for n in names)
        name = next(n for n in names if not same[n][odd[0]])
        rollout, was, is_now = rollouts[odd[0]], frame[name][odd[0]], now[name][odd[0]]
        warning = (
            f"the run's own settings do not give back what was stored: {counts} (first: "
            f"{rollout.group}, sample {rollout.sample_index}: {name} {was} -> {is_now}). "
            "Differences below are in part those of the code, not of the settings; the row "
            "`own, again` shows how much."
        )
    return {
        "rollouts": len(rollouts),
        "totals": int(same["total"].sum()),
        "advantages": int(same["advantage"].sum()) if in_training else None,
        "exact": not warning,
        "warning": warning,
    }


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
