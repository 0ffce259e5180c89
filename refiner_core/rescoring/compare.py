"""Comparison of two scorings of the same rollouts, in numbers with intervals.

In: rollouts and two :class:`~refiner_core.rescoring.scores.Scores` of them, first what is compared
with. Out: a :class:`Comparison`. Every share is a numerator, a denominator and an interval of 95 %
over prompts, since samples of one prompt resemble each other.

What is counted over what:

================  ===================================  ===========================================
number            of                                   over
================  ===================================  ===========================================
spearman          advantages, pooled                   samples with an advantage on both sides
kendall           advantages within a group (tau-b),   groups in which neither side is constant
                  mean over groups
best_changed      groups that share no best sample     groups with two or more samples that are
                                                       scored on both sides
best_differs      groups whose sets of best samples    the same groups
                  are not the same (ties count)
no_signal         groups without spread                groups with two or more scored samples
sign_changed      advantages that change sign          samples with an advantage on both sides
means             a component of the reward            samples that are scored on both sides
================  ===================================  ===========================================

Rewards that differ by rounding alone are equal, as they are in training.

Where two judges judged the same thing, their agreement is told by criterion (:func:`judges_agree`).
Policies that were asked the same prompts make a judge x policy matrix (:func:`make_matrix`): a mean
with an interval per cell, each setting's ranking of the policies, and the pairs of policies that
two settings put in different orders, with paired differences.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from refiner_core.contract.errors import ConfigurationError
from refiner_core.evaluation.statistics import (
    CONFIDENCE,
    Difference,
    Estimate,
    Kind,
    estimate,
    paired_difference_over_seeds,
)
from refiner_core.judge_report.measures import Agreement, agreement
from refiner_core.rescoring.rollouts import StoredRollout, described, groups_of
from refiner_core.rescoring.scores import METRICS, Metric, Scores
from refiner_core.training.rollouts.rollout import EQUAL_REWARDS

Floats = npt.NDArray[np.float64]
#: An advantage that is smaller has no sign: it is what rounding leaves of a mean.
NO_SIGN = 1e-6
RESAMPLES = 1000
#: Above this share of resamples without a correlation, the rest would give an interval of luck.
_MOST_UNDEFINED = 0.05


class Correlation(NamedTuple):
    """A rank correlation over ``samples`` of ``prompts``; None where one side is constant."""

    value: float | None
    low: float | None
    high: float | None
    samples: int
    prompts: int


class Beside(NamedTuple):
    """One number under both scorings."""

    first: Estimate | None
    second: Estimate | None


@dataclass(frozen=True)
class Comparison:
    """See the table in the module's docstring. ``means`` maps a component to its mean under both;
    ``unscored`` counts the rollouts that have no total under each."""

    spearman: Correlation
    kendall: Estimate | None
    best_changed: Estimate | None
    best_differs: Estimate | None
    no_signal: Beside
    sign_changed: Estimate | None
    means: dict[str, Beside]
    unscored: tuple[int, int]
    rollouts: int
    groups: int
    prompts: int


def compare(
    rollouts: Sequence[StoredRollout],
    first: Scores,
    second: Scores,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Hold the second scoring against the first."""
    groups = groups_of(rollouts)
    prompts = [rollout.prompt.sample_id for rollout in rollouts]
    rows = [
        {"sample_id": prompts[members[0]], **_group_row(members, first, second)}
        for members in groups.values()
    ]
    signs = [
        {
            "sample_id": prompt,
            "changed": None if a is None or b is None else float(sign_changes(a, b)),
        }
        for prompt, a, b in zip(prompts, first.advantages, second.advantages, strict=True)
    ]

    def share(table: Sequence[dict[str, Any]], name: str) -> Estimate | None:
        return _estimate(table, name, "yes_no", resamples, seed)

    return Comparison(
        spearman=pooled_spearman(
            first.advantages, second.advantages, prompts, resamples=resamples, seed=seed
        ),
        kendall=_estimate(rows, "tau", "number", resamples, seed),
        best_changed=share(rows, "changed"),
        best_differs=share(rows, "differs"),
        no_signal=Beside(
            no_signal(rollouts, first, resamples=resamples, seed=seed),
            no_signal(rollouts, second, resamples=resamples, seed=seed),
        ),
        sign_changed=share(signs, "changed"),
        means=_means(rollouts, first, second, resamples, seed),
        unscored=(first.unscored, second.unscored),
        rollouts=len(rollouts),
        groups=len(groups),
        prompts=len(set(prompts)),
    )


def no_signal(
    rollouts: Sequence[StoredRollout], scores: Scores, *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate | None:
    """Share of the groups with two or more scored samples whose rewards are all equal: they teach
    nothing."""
    rows = [
        {
            "sample_id": rollouts[members[0]].prompt.sample_id,
            "flat": None
            if scores.dropped[name] == "too_few_scored"
            else float(scores.dropped[name] == "zero_std"),
        }
        for name, members in groups_of(rollouts).items()
    ]
    return _estimate(rows, "flat", "yes_no", resamples, seed)


def mean_of(
    rollouts: Sequence[StoredRollout],
    values: Sequence[float | None],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate | None:
    """The mean over the rollouts that have a value, with an interval over prompts."""
    rows = [
        {"sample_id": rollout.prompt.sample_id, "value": value}
        for rollout, value in zip(rollouts, values, strict=True)
    ]
    return _estimate(rows, "value", "number", resamples, seed)


def _estimate(
    rows: Sequence[dict[str, Any]], name: str, kind: Kind, resamples: int, seed: int
) -> Estimate | None:
    """Of few or nearly equal groups BCa has no interval, and SciPy says so in a warning; the
    estimate has its percentiles then."""
    from scipy.stats import DegenerateDataWarning

    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", DegenerateDataWarning)
        warnings.filterwarnings("ignore", "Degrees of freedom", RuntimeWarning)
        return estimate(rows, name, kind=kind, resamples=resamples, seed=seed)


def _means(
    rollouts: Sequence[StoredRollout], first: Scores, second: Scores, resamples: int, seed: int
) -> dict[str, Beside]:
    pairs = zip(first.totals, second.totals, strict=True)
    both = [a is not None and b is not None for a, b in pairs]

    def mean(scores: Scores, metric: Metric) -> Estimate | None:
        known = zip(scores.values(metric), both, strict=True)
        values = [value if scored else None for value, scored in known]
        return mean_of(rollouts, values, resamples=resamples, seed=seed)

    return {metric: Beside(mean(first, metric), mean(second, metric)) for metric in METRICS}


# ---------------------------------------------------------------- groups


def _group_row(members: Sequence[int], first: Scores, second: Scores) -> dict[str, float | None]:
    both = [i for i in members if first.totals[i] is not None and second.totals[i] is not None]
    if len(both) < 2:
        return {"changed": None, "differs": None, "tau": None}
    a, b = ([float(s.totals[i] or 0.0) for i in both] for s in (first, second))
    best_a, best_b = best_samples(a), best_samples(b)
    return {
        "changed": float(best_a.isdisjoint(best_b)),
        "differs": float(best_a != best_b),
        "tau": kendall_tau_b(a, b),
    }


def best_samples(totals: Sequence[float]) -> frozenset[int]:
    """Positions of the highest totals; those that differ from it by rounding alone are as good."""
    highest = max(totals)
    slack = EQUAL_REWARDS * max(1.0, max(abs(t) for t in totals))
    return frozenset(i for i, t in enumerate(totals) if highest - t <= slack)


def kendall_tau_b(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Kendall's tau-b (Kendall 1945, "The treatment of ties in ranking problems", Biometrika
    33:239-251) of totals in one group; None where a side is constant. Advantages of a group have
    the order of its totals."""
    signs = []
    for side in (a, b):
        apart = np.subtract.outer(side, side)[np.tril_indices(len(side), -1)]
        slack = EQUAL_REWARDS * max(1.0, max(abs(t) for t in side))
        signs.append(np.where(np.abs(apart) <= slack, 0.0, np.sign(apart)))
    apart_in_both = np.count_nonzero(signs[0]) * np.count_nonzero(signs[1])
    if not apart_in_both:
        return None
    return float(signs[0] @ signs[1]) / math.sqrt(apart_in_both)


def sign_changes(a: float, b: float) -> bool:
    """True if two advantages of a sample push in opposite directions."""
    return _sign(a, NO_SIGN) * _sign(b, NO_SIGN) < 0


def _sign(value: float, slack: float) -> int:
    return 0 if abs(value) <= slack else (1 if value > 0 else -1)


# ---------------------------------------------------------------- pooled ranks


def pooled_spearman(
    first: Sequence[float | None],
    second: Sequence[float | None],
    prompts: Sequence[str],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Correlation:
    """Spearman's rank correlation of what both sides have, and its percentile interval over
    prompts: a prompt is drawn again with all its samples, and ranks are taken anew each time."""
    kept = [
        (a, b, p)
        for a, b, p in zip(first, second, prompts, strict=True)
        if a is not None and b is not None
    ]
    numbers = {p: i for i, p in enumerate(dict.fromkeys(p for _, _, p in kept))}
    nothing = Correlation(None, None, None, len(kept), len(numbers))
    if len(kept) < 2:
        return nothing
    # Rounded, so that what rounding has left of equal values is one rank.
    a, b = (np.round(np.array([k[side] for k in kept], dtype=np.float64), 9) for side in (0, 1))
    unit = np.array([numbers[p] for _, _, p in kept])
    places = [np.unique(side, return_inverse=True)[1] for side in (a, b)]
    value = _weighted_spearman(places, np.ones(len(kept)))
    if value is None:
        return nothing
    if len(numbers) < 2:
        return nothing._replace(value=value)
    rng = np.random.default_rng(seed)
    drawn = [
        _weighted_spearman(places, np.bincount(pick, minlength=len(numbers))[unit].astype(float))
        for pick in rng.integers(0, len(numbers), size=(resamples, len(numbers)))
    ]
    known = [v for v in drawn if v is not None]
    if len(known) < (1 - _MOST_UNDEFINED) * resamples:
        return nothing._replace(value=value)
    low, high = np.quantile(known, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Correlation(value, float(low), float(high), len(kept), len(numbers))


def _weighted_spearman(places: Sequence[npt.NDArray[Any]], weights: Floats) -> float | None:
    """Of samples that stand ``weights`` times each; ``places`` number the distinct values in
    order."""
    ranks = []
    for place in places:
        at_value = np.bincount(place, weights=weights)
        ranks.append((np.cumsum(at_value) - (at_value - 1) / 2)[place])
    total = weights.sum()
    x, y = (rank - (weights * rank).sum() / total for rank in ranks)
    spread = float((weights * x * x).sum()) * float((weights * y * y).sum())
    if spread <= 0:
        return None
    return max(-1.0, min(1.0, float((weights * x * y).sum()) / math.sqrt(spread)))


#: Rubrics that were judged less often by both stand in the numbers of their kind alone.
LEAST_PAIRS = 8
#: Rubrics that are listed, those that were asked most often.
MOST_CRITERIA = 40

Pair = tuple[float | None, float | None, str]


class CriterionAgreement(NamedTuple):
    """``criterion`` is empty for all questions of the kind together."""

    kind: str
    title: str
    criterion: str
    agreement: Agreement


def judges_agree(
    rollouts: Sequence[StoredRollout], first: Scores, second: Scores, *, resamples: int = 1000
) -> list[CriterionAgreement]:
    """Agreement of the judgements that both scorings have, kinds first."""
    kinds: dict[str, list[Pair]] = defaultdict(list)
    rubrics: dict[str, list[Pair]] = defaultdict(list)
    titles: dict[str, str] = {}
    for rollout, a, b in zip(rollouts, first.judgements, second.judgements, strict=True):
        theirs = _by_question(b)
        for question, entry in _by_question(a).items():
            if question not in theirs:
                continue
            pair = (entry["score"], theirs[question]["score"], rollout.prompt.sample_id)
            kinds[entry["kind"]].append(pair)
            if entry["kind"] == "rubric":
                rubrics[entry["criterion"]].append(pair)
                titles[entry["criterion"]] = str(entry.get("title") or "")
    found = [CriterionAgreement(kind, "", "", _of(p, resamples)) for kind, p in kinds.items()]
    listed = sorted(rubrics, key=lambda c: -len(rubrics[c]))[:MOST_CRITERIA]
    found += [
        CriterionAgreement("rubric", titles[c], c, _of(rubrics[c], resamples))
        for c in listed
        if len(rubrics[c]) >= LEAST_PAIRS
    ]
    return found


def _of(pairs: Sequence[Pair], resamples: int) -> Agreement:
    a, b, questions = ([pair[i] for pair in pairs] for i in range(3))
    return agreement(a, b, questions, resamples=resamples)  # type: ignore[arg-type]


def _by_question(judgements: Sequence[Mapping[str, Any]]) -> dict[Hashable, Mapping[str, Any]]:
    return {described(entry): entry for entry in judgements}


#: Scores of a policy's rollouts: per setting, one value per rollout.
Values = Mapping[str, Sequence[float | None]]


class Reversal(NamedTuple):
    """Two policies that ``under`` puts in another order than ``than`` does, the first one ahead.

    The order is that of the means. The differences are first policy minus second, paired on prompts
    that both have a value for; where judgements failed they need not go the same way. ``clear``
    where the one is above 0 and the other below with their whole intervals.
    """

    policies: tuple[str, str]
    than: str
    under: str
    difference_than: Difference
    difference_under: Difference

    @property
    def clear(self) -> bool:
        """True if both orders are more than luck."""
        low, high = self.difference_than.low, self.difference_under.high
        return low is not None and high is not None and low > 0 > high


class Matrix(NamedTuple):
    """``cells`` by policy, then setting; ``ranks`` by setting, then policy, best first: 1 is the
    best, and policies of one mean have one rank."""

    metric: str
    prompts: int
    cells: dict[str, dict[str, Estimate | None]]
    ranks: dict[str, dict[str, int]]
    reversals: tuple[Reversal, ...]


def prompts_of(rollouts: Sequence[StoredRollout]) -> dict[str, str]:
    """Prompt id -> what was asked."""
    return {r.prompt.sample_id: r.prompt.prompt_text for r in rollouts}


def common_prompts(
    policies: Mapping[str, Sequence[StoredRollout]], *, restrict: bool
) -> dict[str, list[StoredRollout]]:
    """The policies' rollouts on the prompts that all of them have.

    Parameters
    ----------
    policies
        Rollouts by policy.
    restrict
        Whether prompts that not all have may be left out.

    Raises
    ------
    ConfigurationError
        They have other prompts and ``restrict`` is off, or no prompt in common.
    """
    asked = {name: prompts_of(rollouts) for name, rollouts in policies.items()}
    (first, reference), *others = asked.items()
    for name, prompts in others:
        if prompts != reference and not restrict:
            shared = len(prompts.items() & reference.items())
            raise ConfigurationError(
                f"{first} and {name} cannot stand in one matrix: {first} has {len(reference)} "
                f"prompts and {name} {len(prompts)}, {shared} of them in common"
                f"{_odd(reference, prompts)}",
                expected="policies that were asked the same",
                fix="add --common to use the prompts that they share, choose --steps in which they "
                "were asked the same, or use `--from evaluation`",
            )
    common = set.intersection(*(set(prompts.items()) for prompts in asked.values()))
    if not common:
        raise ConfigurationError(
            f"{', '.join(policies)} have no prompt in common",
            expected="policies that were asked the same",
            fix="name runs on the same data",
        )
    ids = {prompt for prompt, _ in common}
    return {
        name: [r for r in rollouts if r.prompt.sample_id in ids]
        for name, rollouts in policies.items()
    }


def _odd(a: Mapping[str, str], b: Mapping[str, str]) -> str:
    odd = sorted(set(a) ^ set(b)) or sorted(p for p in a if a[p] != b[p])
    return f" (such as {odd[0]}, on one side only)" if set(a) ^ set(b) else f" (other: {odd[0]})"


def make_matrix(
    metric: str,
    policies: Mapping[str, Sequence[StoredRollout]],
    values: Mapping[str, Values],
    *,
    resamples: int = RESAMPLES,
) -> Matrix:
    """The matrix of a metric. Settings stand in the order in which the first policy has them; the
    first of them is the one whose ranking the others are compared with.

    Parameters
    ----------
    metric
        What is averaged, for people.
    policies
        Rollouts by policy, on the same prompts (:func:`common_prompts`).
    values
        By policy and setting, one value per rollout; None where there is none.
    """
    settings = list(next(iter(values.values())))
    cells = {
        name: {
            setting: mean_of(rollouts, values[name][setting], resamples=resamples)
            for setting in settings
        }
        for name, rollouts in policies.items()
    }
    ranks = {s: _ranks({name: cells[name][s] for name in policies}) for s in settings}
    prompts = len(prompts_of(next(iter(policies.values()))))
    return Matrix(metric, prompts, cells, ranks, _reversals(policies, values, ranks))


def _ranks(column: Mapping[str, Estimate | None]) -> dict[str, int]:
    known = {name: e.value for name, e in column.items() if e is not None}
    slack = EQUAL_REWARDS * max(1.0, *map(abs, known.values())) if known else 0.0
    ranks = {
        name: 1 + sum(other > value + slack for other in known.values())
        for name, value in known.items()
    }
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _reversals(
    policies: Mapping[str, Sequence[StoredRollout]],
    values: Mapping[str, Values],
    ranks: Mapping[str, Mapping[str, int]],
) -> tuple[Reversal, ...]:
    (reference, order), *others = ranks.items()
    found = []
    for setting, other in others:
        for a, b in combinations(order, 2):
            known = a in other and b in other
            if known and (order[a] - order[b]) * (other[a] - other[b]) < 0:
                than, under = (
                    _difference((a, b), policies, values, s) for s in (reference, setting)
                )
                found.append(Reversal((a, b), reference, setting, than, under))
    return tuple(found)


def _difference(
    pair: tuple[str, str],
    policies: Mapping[str, Sequence[StoredRollout]],
    values: Mapping[str, Values],
    setting: str,
) -> Difference:
    sides: list[list[dict[str, Any]]] = [
        [
            {"sample_id": r.prompt.sample_id, "value": v}
            for r, v in zip(policies[name], values[name][setting], strict=True)
        ]
        for name in pair
    ]
    return paired_difference_over_seeds([sides[0]], [sides[1]], "value")
