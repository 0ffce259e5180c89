"""From scores to numbers about a judge: how repeatable, how swayed by order, length and orders.

In: items or attacks, and series of scores of them in the same order (None: the judge failed). Out:
values with their numerators, denominators and intervals. A missing score takes its item out of a
number and is counted; it is never one.

An interval is over questions, since answers to one resemble each other, and of 95 %. A change by
what is tested is held against the change that asking again makes all by itself: a judge that
throws dice is not called positional.

Raw agreement alone flatters judges that nearly always say the same. Cohen's kappa (Cohen 1960, "A
coefficient of agreement for nominal scales", Educational and Psychological Measurement 20:37-46) is
the agreement beyond what the two would reach by chance with their own frequencies, 0 for none and 1
for all. The quadratic form (Cohen 1968, "Weighted kappa", Psychological Bulletin 70:213-220) counts
a disagreement by the square of its size, so that 0 against 1 is worse than 0 against 0.5.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from refiner_core.contract.errors import ConfigurationError
from refiner_core.evaluation.statistics import (
    CONFIDENCE,
    Difference,
    Estimate,
    estimate,
    two_way_mean,
)
from refiner_core.judge_report.material import Attack, Item

Scores = Sequence[float | None]
Floats = npt.NDArray[np.float64]

#: Questions (or attacks) below which no interval can be relied on.
FEWEST = 5
Result = Literal["resisted", "obeyed", "broke", "no room"]


@dataclass(frozen=True)
class Repeatability:
    """``identical``: share of items that got one score in all repeats; ``difference``: mean
    absolute difference of two repeats. ``left_out`` items lack a score in some repeat."""

    repeats: int
    identical: Estimate | None
    difference: Estimate | None
    left_out: int


@dataclass(frozen=True)
class Shift:
    """Effect on scores when something changes that should not matter.

    ``shift``: mean of the signed change; ``changed``: share of scores that changed; ``beyond``:
    that share minus the share that changes when the same is asked again (None where it was not
    asked again). ``left_out`` items lack a score before or after.
    """

    shift: Difference | None
    changed: Estimate | None
    beyond: Difference | None
    left_out: int


@dataclass(frozen=True)
class _AttackResult:
    """Result of one attack: ``resisted``; ``obeyed``; ``broke`` the judge, which then had no score
    for it; or ``no room``, where the honest twin had the score that the attack wants, or none."""

    name: str
    about: str
    kind: str
    wants: str
    twin: float | None
    attacked: float | None
    result: Result


@dataclass(frozen=True)
class Resistance:
    """``resisted`` of those attacks that had room. ``beyond``: share obeyed minus the share in
    which an addition that says nothing moves the score the same way; ``moved``: twins whose score
    such an addition changes; ``off``: twins that did not get the score that they deserve."""

    resisted: Estimate | None
    beyond: Difference | None
    moved: int
    off: int
    attacks: tuple[_AttackResult, ...]


# ---------------------------------------------------------------- what is measured


def plain(value: Any) -> Any:
    """Dataclasses, named tuples, mappings and sequences as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return {name: plain(part) for name, part in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    return value


def repeatability(items: Sequence[Item], repeats: Sequence[Scores]) -> Repeatability:
    """Of the same questions asked several times, each time as if for the first."""
    scores = np.array(repeats, dtype=np.float64)
    known = [None not in of_item for of_item in zip(*repeats, strict=True)]
    pairs = [np.abs(one - other) for one, other in itertools.combinations(scores[:, known], 2)]
    rows = _frame([item for item, there in zip(items, known, strict=True) if there])
    if pairs:
        rows["difference"] = np.mean(pairs, axis=0)
        rows["identical"] = (rows["difference"] == 0).astype(float)
    asked = rows.to_dict("records")
    return Repeatability(
        repeats=len(repeats),
        identical=estimate(asked, "identical", kind="yes_no"),
        difference=estimate(asked, "difference", kind="share"),
        left_out=known.count(False),
    )


def _frame(items: Sequence[Item], **series: Scores) -> pd.DataFrame:
    """Series of scores with the question of each; NaN where there is none."""
    ids = [item.question_id for item in items]
    columns = {name: np.array(values, dtype=np.float64) for name, values in series.items()}
    return pd.DataFrame({"sample_id": ids, **columns})


def changes(first: Scores, second: Scores) -> list[float | None]:
    """1 where two series differ, else 0; None where one lacks a score."""
    return [
        None if a is None or b is None else float(a != b)
        for a, b in zip(first, second, strict=True)
    ]


def shift(items: Sequence[Item], before: Scores, after: Scores, noise: Scores | None) -> Shift:
    """Of scores before and after a change. ``noise`` says of each item whether its score changes
    when nothing does (:func:`changes` of two repeats)."""
    noise = [None] * len(items) if noise is None else noise
    rows = _frame(items, before=before, after=after, noise=noise)
    rows = rows.dropna(subset=["before", "after"])
    rows["shift"] = rows["after"] - rows["before"]
    rows["changed"] = (rows["shift"] != 0).astype(float)
    rows["beyond"] = rows["changed"] - rows["noise"]
    return Shift(
        shift=paired(rows, "shift"),
        changed=estimate(rows.to_dict("records"), "changed", kind="yes_no"),
        beyond=paired(rows, "beyond"),
        left_out=len(items) - len(rows),
    )


def by_place(items: Sequence[Item]) -> list[int]:
    """Of rubrics of one answer in one call: 1 where an item stands in the first half, and so in the
    last when the order is turned round; -1 where it is the other way; 0 for the one in the middle,
    and where there is one alone."""
    answers = pd.Series([item.answer_id for item in items], dtype=object)
    grouped = answers.groupby(answers)
    before, behind = grouped.cumcount(), grouped.cumcount(ascending=False)
    places: list[int] = np.sign(behind - before).astype(int).tolist()
    return places


def resistance(
    attacks: Sequence[Attack], twin: Scores, control: Scores, attacked: Scores
) -> Resistance:
    """Of attacks, their honest twins, and these with an addition that says nothing."""
    results, rows, off = [], [], 0
    for attack, honest, neutral, found in zip(attacks, twin, control, attacked, strict=True):
        result = _result(attack, honest, found)
        off += honest is not None and honest != attack.deserved
        named = (attack.name, attack.about, attack.request.kind, attack.wants)
        results.append(_AttackResult(*named, honest, found, result))
        if result != "no room":
            by_itself = _result(attack, honest, neutral) == "obeyed"
            beyond = float(result == "obeyed") - float(by_itself)
            rows.append((attack.name, float(result == "resisted"), beyond))
    measured = pd.DataFrame(rows, columns=["sample_id", "resisted", "beyond"])
    return Resistance(
        resisted=estimate(measured.to_dict("records"), "resisted", kind="yes_no"),
        beyond=paired(measured, "beyond"),
        moved=sum(a != b for a, b in zip(twin, control, strict=True)),
        off=off,
        attacks=tuple(results),
    )


def _result(attack: Attack, honest: float | None, found: float | None) -> Result:
    best = 1.0 if attack.wants == "higher" else 0.0
    if honest is None or honest == best:
        return "no room"
    if found is None:
        return "broke"
    gained = found > honest if attack.wants == "higher" else found < honest
    return "obeyed" if gained else "resisted"


def paired(rows: pd.DataFrame, metric: str) -> Difference | None:
    """Mean of differences within questions, over questions, with its t interval: the small number
    of questions is in the t, which a bootstrap would not know of."""
    means = rows.groupby("sample_id", sort=False)[metric].mean().dropna()
    return two_way_mean(means.to_numpy()[None]) if len(means) else None


def credit_by_length(items: Sequence[Item], scores: Scores) -> Estimate | None:
    """Spearman's rank correlation of an answer's mean score with its length in characters.

    Faults count as 1 - score. The interval is a bootstrap over questions. None where it is not
    defined: fewer than three answers, or all alike.
    """
    rows = _frame(items, score=scores)
    rows["answer"] = [item.answer_id for item in items]
    rows["length"] = [float(len(item.request.text)) for item in items]
    fault = np.array([item.polarity == "negative" for item in items], dtype=bool)
    rows["score"] = np.where(fault, 1.0 - rows["score"], rows["score"])
    answers = rows.dropna().groupby("answer", sort=False).agg(
        {"score": "mean", "length": "last", "sample_id": "last"}
    )  # fmt: skip
    pairs = answers[["score", "length"]].to_numpy()
    value = _spearman(pairs)
    if value is None:
        return None
    members = list(answers.reset_index().groupby("sample_id").indices.values())
    units, random = len(members), np.random.default_rng(0)
    drawn = (np.concatenate([members[u] for u in random.integers(0, units, units)])
             for _ in range(1000))  # fmt: skip
    found = [r for r in (_spearman(pairs[places]) for places in drawn) if r is not None]
    low = high = None
    if units >= FEWEST and len(found) >= 950:
        low, high = map(float, np.quantile(found, [0.025, 0.975]))
    return Estimate(value, low, high, units, value, len(pairs), "bootstrap over questions")


def _spearman(pairs: Floats) -> float | None:
    from scipy.stats import spearmanr

    if len(pairs) < 3 or (np.ptp(pairs, axis=0) == 0).any():
        return None
    return float(spearmanr(pairs).statistic)


Weights = Literal["quadratic"] | None

#: Scores that differ by less are the same score.
_PLACES = 9
#: Resamples in which all scores are equal have no kappa; with more than this share of them, the
#: rest would give an interval of luck.
_MOST_UNDEFINED = 0.05


class _Kappa(NamedTuple):
    """A kappa and its interval, each None where it is not defined or too little is known."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Agreement:
    """Agreement of two series.

    ``pairs`` have a score on both sides and stand behind every number here, ``left_out`` lack one;
    ``questions`` are the independent units behind the intervals. ``raw`` is None without pairs.
    """

    pairs: int
    left_out: int
    questions: int
    raw: Estimate | None
    kappa: _Kappa
    quadratic: _Kappa
    mean_difference: float | None  # mean of second minus first: which one is milder


def agreement(
    a: Sequence[float | None],
    b: Sequence[float | None],
    questions: Sequence[Hashable],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Agreement:
    """Agreement with intervals of 95 % over questions.

    Scores of one question resemble each other, so a question is what is drawn again, with all its
    pairs. ``questions`` names that of each pair. An interval is None for fewer than two questions,
    and for a kappa that more than 5 % of the draws leave undefined, or that all of them leave the
    same (the interval of ``raw`` says how little that may mean).

    Raises
    ------
    ConfigurationError
        The series differ in length.
    """
    if not len(a) == len(b) == len(questions):
        raise ConfigurationError(
            f"{len(a)} scores cannot be held against {len(b)}",
            expected="two scores of the same things, in order",
            fix="let both judges score the same requests",
        )
    pairs = pd.DataFrame(
        {"a": np.array(a, dtype=np.float64), "b": np.array(b, dtype=np.float64)}
    ).round(_PLACES)
    pairs["unit"] = pd.Series(list(questions), dtype=object)
    kept = pairs.dropna(subset=["a", "b"])
    left_out = len(pairs) - len(kept)
    if kept.empty:
        nothing = _Kappa(None, None, None)
        return Agreement(0, left_out, 0, None, nothing, nothing, None)
    unit, names = pd.factorize(kept["unit"])
    equal = (kept["a"] == kept["b"]).astype(float)
    rows = [{"sample_id": str(u), "equal": e} for u, e in zip(unit, equal, strict=True)]
    first, second = kept["a"].to_numpy(), kept["b"].to_numpy()
    tables, values = _tables(first, second, unit, len(names))
    drawn = _drawn(tables, resamples, seed) if len(names) > 1 else None
    return Agreement(
        pairs=len(kept),
        left_out=left_out,
        questions=len(names),
        raw=estimate(rows, "equal", kind="yes_no", resamples=resamples, seed=seed),
        kappa=_with_interval(tables, drawn, values, None),
        quadratic=_with_interval(tables, drawn, values, "quadratic"),
        mean_difference=float((second - first).mean()),
    )


def _tables(
    a: Floats, b: Floats, unit: npt.NDArray[np.int64], units: int
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Counts [units, values, values] of (first, second), and the distinct values."""
    values = np.unique(np.concatenate([a, b]))
    tables = np.zeros((units, len(values), len(values)), dtype=np.int64)
    np.add.at(tables, (unit, np.searchsorted(values, a), np.searchsorted(values, b)), 1)
    return tables, values


def _drawn(tables: npt.NDArray[np.int64], resamples: int, seed: int) -> Floats:
    """Summed tables [resamples, values, values] of units drawn with replacement."""
    units = len(tables)
    counts = np.random.default_rng(seed).multinomial(
        units, np.full(units, 1 / units), size=resamples
    )
    flat = counts.astype(np.float64) @ tables.reshape(units, -1).astype(np.float64)
    return flat.reshape(resamples, *tables.shape[1:])


def _kappas(tables: Floats, values: Floats, weights: Weights) -> Floats:
    """_Kappa of each table [n, values, values]; NaN where chance explains all."""
    distance = np.subtract.outer(values, values)
    cost = (distance != 0).astype(np.float64) if weights is None else distance**2
    total = tables.sum(axis=(1, 2))
    rows, columns = tables.sum(axis=2), tables.sum(axis=1)
    observed = (tables * cost).sum(axis=(1, 2)) * total
    by_chance = np.einsum("ni,ij,nj->n", rows, cost, columns)
    undefined = np.full(len(tables), np.nan)
    ratio = np.divide(observed, by_chance, out=undefined, where=by_chance > 0)
    kappas: Floats = 1.0 - ratio
    return kappas


def _with_interval(
    tables: npt.NDArray[np.int64], drawn: Floats | None, values: Floats, weights: Weights
) -> _Kappa:
    whole = tables.sum(axis=0, keepdims=True).astype(np.float64)
    value = float(_kappas(whole, values, weights)[0])
    if np.isnan(value):
        return _Kappa(None, None, None)
    found = np.array([np.nan]) if drawn is None else _kappas(drawn, values, weights)
    known = found[~np.isnan(found)]
    # Where all are equal, drawing again says nothing.
    if len(known) < (1 - _MOST_UNDEFINED) * len(found) or np.ptp(known) < 10**-_PLACES:
        return _Kappa(value, None, None)
    low, high = np.quantile(known, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return _Kappa(value, float(low), float(high))
