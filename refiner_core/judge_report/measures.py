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
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from refiner_core.contract.errors import ConfigurationError
from refiner_core.evaluation.statistics import (
    CONFIDENCE,
    Difference,
    Estimate,
    Row,
    estimate,
    two_way_mean,
)
from refiner_core.judge_report.material import Attack, Item

Scores = Sequence[float | None]

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
class AttackResult:
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
    attacks: tuple[AttackResult, ...]


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
    rows, left_out = [], 0
    for item, scores in zip(items, zip(*repeats, strict=True), strict=True):
        known = [score for score in scores if score is not None]
        if len(known) < len(scores) or len(scores) < 2:
            left_out += len(known) < len(scores)
            continue
        pairs = [abs(a - b) for i, a in enumerate(known) for b in known[:i]]
        rows.append(
            {
                "sample_id": item.question_id,
                "identical": float(len(set(known)) == 1),
                "difference": sum(pairs) / len(pairs),
            }
        )
    return Repeatability(
        repeats=len(repeats),
        identical=estimate(rows, "identical", kind="yes_no"),
        difference=estimate(rows, "difference", kind="share"),
        left_out=left_out,
    )


def changes(first: Scores, second: Scores) -> list[float | None]:
    """1 where two series differ, else 0; None where one lacks a score."""
    return [
        None if a is None or b is None else float(a != b)
        for a, b in zip(first, second, strict=True)
    ]


def shift(items: Sequence[Item], before: Scores, after: Scores, noise: Scores | None) -> Shift:
    """Of scores before and after a change. ``noise`` says of each item whether its score changes
    when nothing does (:func:`changes` of two repeats)."""
    rows: list[dict[str, str | float | None]] = []
    for number, item in enumerate(items):
        a, b = before[number], after[number]
        if a is None or b is None:
            continue
        changed, by_itself = float(a != b), noise[number] if noise is not None else None
        rows.append(
            {
                "sample_id": item.question_id,
                "shift": b - a,
                "changed": changed,
                "beyond": None if by_itself is None else changed - by_itself,
            }
        )
    return Shift(
        shift=paired(rows, "shift"),
        changed=estimate(rows, "changed", kind="yes_no"),
        beyond=paired(rows, "beyond"),
        left_out=len(items) - len(rows),
    )


def by_place(items: Sequence[Item]) -> list[Literal[-1, 0, 1]]:
    """Of rubrics of one answer in one call: 1 where an item stands in the first half, and so in the
    last when the order is turned round; -1 where it is the other way; 0 for the one in the middle,
    and where there is one alone."""
    count: dict[str, int] = {}
    for item in items:
        count[item.answer_id] = count.get(item.answer_id, 0) + 1
    seen: dict[str, int] = {}
    places: list[Literal[-1, 0, 1]] = []
    for item in items:
        place = seen.get(item.answer_id, 0)
        seen[item.answer_id] = place + 1
        turned = count[item.answer_id] - 1 - place
        places.append(1 if place < turned else -1 if place > turned else 0)
    return places


def resistance(
    attacks: Sequence[Attack], twin: Scores, control: Scores, attacked: Scores
) -> Resistance:
    """Of attacks, their honest twins, and these with an addition that says nothing."""
    results, rows, off = [], [], 0
    for attack, honest, neutral, found in zip(attacks, twin, control, attacked, strict=True):
        result = _result(attack, honest, found)
        off += honest is not None and honest != attack.deserved
        results.append(
            AttackResult(
                attack.name,
                attack.about,
                attack.request.kind,
                attack.wants,
                honest,
                found,
                result,
            )
        )
        if result == "no room":
            continue
        by_itself = _result(attack, honest, neutral) == "obeyed"
        obeyed = result == "obeyed"
        rows.append(
            {
                "sample_id": attack.name,
                "resisted": float(result == "resisted"),
                "beyond": float(obeyed) - float(by_itself),
            }
        )
    return Resistance(
        resisted=estimate(rows, "resisted", kind="yes_no"),
        beyond=paired(rows, "beyond"),
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


def paired(rows: Sequence[Row], metric: str) -> Difference | None:
    """Mean of differences within questions, over questions, with its t interval: the small number
    of questions is in the t, which a bootstrap would not know of."""
    means: dict[str, list[float]] = {}
    for row in rows:
        if row[metric] is not None:
            means.setdefault(row["sample_id"], []).append(row[metric])
    if not means:
        return None
    return two_way_mean(np.array([[sum(found) / len(found) for found in means.values()]]))


def credit_by_length(items: Sequence[Item], scores: Scores) -> Estimate | None:
    """Spearman's rank correlation of an answer's mean score with its length in characters.

    Faults count as 1 - score. The interval is a bootstrap over questions. None where it is not
    defined: fewer than three answers, or all alike.
    """
    credit: dict[str, list[float]] = {}
    length: dict[str, int] = {}
    question: dict[str, str] = {}
    for item, score in zip(items, scores, strict=True):
        if score is not None:
            good = 1.0 - score if item.polarity == "negative" else score
            credit.setdefault(item.answer_id, []).append(good)
            length[item.answer_id] = len(item.request.text)
            question[item.answer_id] = item.question_id
    means = np.array([sum(v) / len(v) for v in credit.values()])
    lengths = np.array([float(length[name]) for name in credit])
    value = _spearman(means, lengths)
    if value is None:
        return None
    units = list(dict.fromkeys(question.values()))
    members = [np.array([i for i, a in enumerate(credit) if question[a] == u]) for u in units]
    random = np.random.default_rng(0)
    drawn = (
        np.concatenate([members[u] for u in random.integers(0, len(units), len(units))])
        for _ in range(1000)
    )
    found = [r for r in (_spearman(means[i], lengths[i]) for i in drawn) if r is not None]
    name = "bootstrap over questions"
    if len(units) < FEWEST or len(found) < 950:
        return Estimate(value, None, None, len(units), value, len(means), name)
    low, high = np.quantile(found, [0.025, 0.975])
    return Estimate(value, float(low), float(high), len(units), value, len(means), name)


def _spearman(a: np.typing.NDArray[np.float64], b: np.typing.NDArray[np.float64]) -> float | None:
    from scipy.stats import rankdata

    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


Weights = Literal["quadratic"] | None
Floats = npt.NDArray[np.float64]

#: Scores that differ by less are the same score.
_PLACES = 9
#: Resamples in which all scores are equal have no kappa; with more than this share of them, the
#: rest would give an interval of luck.
_MOST_UNDEFINED = 0.05


class Kappa(NamedTuple):
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
    kappa: Kappa
    quadratic: Kappa
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
    kept = [
        (x, y, q)
        for x, y, q in zip(a, b, questions, strict=True)
        if x is not None and y is not None
    ]
    left_out = len(a) - len(kept)
    if not kept:
        nothing = Kappa(None, None, None)
        return Agreement(0, left_out, 0, None, nothing, nothing, None)
    first, second = (
        np.array([pair[side] for pair in kept], dtype=np.float64).round(_PLACES) for side in (0, 1)
    )
    numbers = {q: i for i, q in enumerate(dict.fromkeys(q for _, _, q in kept))}
    unit = np.array([numbers[q] for _, _, q in kept])
    rows = [
        {"sample_id": str(u), "equal": float(x == y)}
        for u, x, y in zip(unit, first, second, strict=True)
    ]
    tables, values = _tables(first, second, unit, len(numbers))
    drawn = _drawn(tables, resamples, seed) if len(numbers) > 1 else None
    return Agreement(
        pairs=len(kept),
        left_out=left_out,
        questions=len(numbers),
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
    """Kappa of each table [n, values, values]; NaN where chance explains all."""
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
) -> Kappa:
    whole = tables.sum(axis=0, keepdims=True).astype(np.float64)
    value = float(_kappas(whole, values, weights)[0])
    if np.isnan(value):
        return Kappa(None, None, None)
    found = np.array([np.nan]) if drawn is None else _kappas(drawn, values, weights)
    known = found[~np.isnan(found)]
    # Where all are equal, drawing again says nothing.
    if len(known) < (1 - _MOST_UNDEFINED) * len(found) or np.ptp(known) < 10**-_PLACES:
        return Kappa(value, None, None)
    low, high = np.quantile(known, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Kappa(value, float(low), float(high))
