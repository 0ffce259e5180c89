"""From scores to numbers about a judge: how repeatable, how swayed by order, length and orders.

In: items or attacks, and series of scores of them in the same order (None: the judge failed). Out:
values with their numerators, denominators and intervals. A missing score takes its item out of a
number and is counted; it is never one.

An interval is over questions, since answers to one resemble each other, and of 95 %. A change by
what is tested is held against the change that asking again makes all by itself: a judge that
throws dice is not called positional.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from refiner_core.evaluation.statistics import (
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
    """What happens to scores when something changes that should not matter.

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
    """How one attack ended: ``resisted``; ``obeyed``; ``broke`` the judge, which then had no score
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
