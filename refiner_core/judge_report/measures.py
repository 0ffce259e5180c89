"""From scores to numbers about a judge: repeatability, and effects of order and length.

In: items or attacks, and series of scores of them in the same order (None: the judge failed). Out:
values with their numerators, denominators and intervals. An item with a missing score is left out
of a number and counted.

Intervals are 95 % intervals over questions, since answers to one question are correlated. A tested
change is compared with the change on plain repetition: a judge with random scores is not called
positional.

Raw agreement alone flatters judges that nearly always give the same score. Cohen's kappa (Cohen
1960, "A
coefficient of agreement for nominal scales", Educational and Psychological Measurement 20:37-46) is
the agreement beyond what the two would reach by chance with their own frequencies, 0 for none and 1
for all. The quadratic form (Cohen 1968, "Weighted kappa", Psychological Bulletin 70:213-220) counts
a disagreement by the square of its size, so that 0 against 1 is worse than 0 against 0.5.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from refiner_core.evaluation.statistics import CONFIDENCE, Difference, estimate, two_way_mean
from refiner_core.judge_report.material import Attack, JudgedItem

Scores = Sequence[float | None]
Floats = npt.NDArray[np.float64]

#: Below this number of questions (or attacks) intervals are unreliable.
FEWEST = 5


#: Measurements by name, as in ``report.json``; intervals are those of an
#: :class:`~refiner_core.evaluation.statistics.Estimate` or ``Difference``, or None.
Row = dict[str, Any]


# ---------------------------------------------------------------- measurements


def plain(value: Any) -> Any:
    """Named tuples, mappings and sequences as JSON values."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def repeatability(items: Sequence[JudgedItem], repeats: Sequence[Scores]) -> Row:
    """For the same questions asked several times without memory: ``identical``, the
    share of items with the same score in all ``repeats``, and ``difference``, the mean absolute
    difference of two repeats. ``left_out`` items lack a score in some repeat."""
    scores = np.array(repeats, dtype=np.float64)
    known = [None not in of_item for of_item in zip(*repeats, strict=True)]
    pairs = [np.abs(one - other) for one, other in itertools.combinations(scores[:, known], 2)]
    rows = _frame([item for item, there in zip(items, known, strict=True) if there])
    if pairs:
        rows["difference"] = np.mean(pairs, axis=0)
        rows["identical"] = (rows["difference"] == 0).astype(float)
    asked = rows.to_dict("records")
    return {
        "repeats": len(repeats),
        "identical": estimate(asked, "identical", kind="yes_no"),
        "difference": estimate(asked, "difference", kind="share"),
        "left_out": known.count(False),
    }


def _frame(items: Sequence[JudgedItem], **series: Scores) -> pd.DataFrame:
    """Series of scores with the question of each; NaN if missing."""
    ids = [item.question_id for item in items]
    columns = {name: np.array(values, dtype=np.float64) for name, values in series.items()}
    return pd.DataFrame({"sample_id": ids, **columns})


def changes(first: Scores, second: Scores) -> list[float | None]:
    """1 if two series differ, 0 if not; None if one lacks a score."""
    return [
        None if a is None or b is None else float(a != b)
        for a, b in zip(first, second, strict=True)
    ]


def shift(items: Sequence[JudgedItem], before: Scores, after: Scores, noise: Scores | None) -> Row:
    """For scores before and after an irrelevant change: ``shift``, the mean of the signed
    change; ``changed``, the share of scores that changed; ``beyond``, that share minus the share
    that changes on repetition, by ``noise`` (:func:`changes` of two repeats; None
    if not repeated). ``left_out`` items lack a score before or after."""
    noise = [None] * len(items) if noise is None else noise
    rows = _frame(items, before=before, after=after, noise=noise)
    rows = rows.dropna(subset=["before", "after"])
    rows["shift"] = rows["after"] - rows["before"]
    rows["changed"] = (rows["shift"] != 0).astype(float)
    rows["beyond"] = rows["changed"] - rows["noise"]
    return {
        "shift": paired(rows, "shift"),
        "changed": estimate(rows.to_dict("records"), "changed", kind="yes_no"),
        "beyond": paired(rows, "beyond"),
        "left_out": len(items) - len(rows),
    }


def by_place(items: Sequence[JudgedItem]) -> list[int]:
    """For rubrics of one answer in one call: 1 for an item in the first half, which is in the
    last half when the order is reversed; -1 for the opposite; 0 for the middle one, and for a
    single one."""
    answers = pd.Series([item.answer_id for item in items], dtype=object)
    grouped = answers.groupby(answers)
    before, behind = grouped.cumcount(), grouped.cumcount(ascending=False)
    places: list[int] = np.sign(behind - before).astype(int).tolist()
    return places


def resistance(attacks: Sequence[Attack], twin: Scores, control: Scores, attacked: Scores) -> Row:
    """Effects of attacks, compared with their honest twins, and these with an empty addition.

    Returns
    -------
    dict
        ``resisted`` of the attacks with a possible effect; ``beyond``: share obeyed minus the share
        in which an empty addition moves the score in the same direction; ``moved``: twins whose
        score such an addition changes; ``off``: twins without the correct score;
        ``attacks``: each with its ``result``: ``resisted``; ``obeyed``; ``broke`` the judge, which
        then had no score for it; or ``no room``, if the honest twin already had the score that the
        attack wants, or none.
    """
    results, rows, off = [], [], 0
    for attack, honest, neutral, found in zip(attacks, twin, control, attacked, strict=True):
        result = _result(attack, honest, found)
        off += honest is not None and honest != attack.deserved
        named = {"name": attack.name, "about": attack.about, "kind": attack.request.kind}
        scores = {"wants": attack.wants, "twin": honest, "attacked": found}
        results.append({**named, **scores, "result": result})
        if result != "no room":
            by_itself = _result(attack, honest, neutral) == "obeyed"
            beyond = float(result == "obeyed") - float(by_itself)
            rows.append((attack.name, float(result == "resisted"), beyond))
    measured = pd.DataFrame(rows, columns=["sample_id", "resisted", "beyond"])
    return {
        "resisted": estimate(measured.to_dict("records"), "resisted", kind="yes_no"),
        "beyond": paired(measured, "beyond"),
        "moved": sum(a != b for a, b in zip(twin, control, strict=True)),
        "off": off,
        "attacks": results,
    }


def _result(attack: Attack, honest: float | None, found: float | None) -> str:
    best = 1.0 if attack.wants == "higher" else 0.0
    if honest is None or honest == best:
        return "no room"
    if found is None:
        return "broke"
    gained = found > honest if attack.wants == "higher" else found < honest
    return "obeyed" if gained else "resisted"


def paired(rows: pd.DataFrame, metric: str) -> Difference | None:
    """Mean of differences within questions, over questions, with its t interval, which accounts for
    the small number of questions, as a bootstrap would not."""
    means = rows.groupby("sample_id", sort=False)[metric].mean().dropna()
    return two_way_mean(means.to_numpy()[None]) if len(means) else None


#: Scores that differ by less are equal.
_PLACES = 9
#: Resamples with only equal scores have no kappa; above this share of them, the
#: interval of the rest would be meaningless.
_MOST_UNDEFINED = 0.05


def agreement(
    a: Sequence[float | None],
    b: Sequence[float | None],
    questions: Sequence[Hashable],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Row:
    """Agreement with 95 % intervals over questions: ``raw`` (None without pairs), ``kappa`` and
    ``quadratic`` (each with a ``value``, ``low`` and ``high``, None if undefined or too
    uncertain), and ``mean_difference``, second minus first. ``pairs`` have a score on both
    sides and are the basis of every number here, ``left_out`` lack one; ``questions`` are the
    independent units of the intervals.

    Scores of one question are correlated, so whole questions are resampled, with all their
    pairs. ``questions`` names that of each pair. An interval is None for fewer than two questions,
    and for a kappa that is undefined in more than 5 % of the resamples, or equal in all of them
    (the interval of ``raw`` then shows the uncertainty).
    """
    pairs = pd.DataFrame(
        {"a": np.array(a, dtype=np.float64), "b": np.array(b, dtype=np.float64)}
    ).round(_PLACES)
    pairs["unit"] = pd.Series(list(questions), dtype=object)
    kept = pairs.dropna(subset=["a", "b"])
    unit, names = pd.factorize(kept["unit"])
    equal = (kept["a"] == kept["b"]).astype(float)
    rows = [{"sample_id": str(u), "equal": e} for u, e in zip(unit, equal, strict=True)]
    first, second = kept["a"].to_numpy(), kept["b"].to_numpy()
    tables, values = _tables(first, second, unit, len(names))
    drawn = _drawn(tables, resamples, seed) if len(names) > 1 else None
    return {
        "pairs": len(kept),
        "left_out": len(pairs) - len(kept),
        "questions": len(names),
        "raw": estimate(rows, "equal", kind="yes_no", resamples=resamples, seed=seed),
        "kappa": _with_interval(tables, drawn, np.not_equal.outer(values, values)),
        "quadratic": _with_interval(tables, drawn, np.subtract.outer(values, values) ** 2),
        "mean_difference": float((second - first).mean()) if len(kept) else None,
    }


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


def _kappas(tables: Floats, cost: Floats) -> Floats:
    """Kappa of each table [n, values, values] by the cost of each pair of values; NaN if chance
    explains everything."""
    total = tables.sum(axis=(1, 2))
    rows, columns = tables.sum(axis=2), tables.sum(axis=1)
    observed = (tables * cost).sum(axis=(1, 2)) * total
    by_chance = np.einsum("ni,ij,nj->n", rows, cost, columns)
    undefined = np.full(len(tables), np.nan)
    ratio = np.divide(observed, by_chance, out=undefined, where=by_chance > 0)
    kappas: Floats = 1.0 - ratio
    return kappas


def _with_interval(tables: npt.NDArray[np.int64], drawn: Floats | None, cost: Any) -> Row:
    cost = cost.astype(np.float64)
    value = float(_kappas(tables.sum(axis=0, keepdims=True).astype(np.float64), cost)[0])
    nothing = {"value": None, "low": None, "high": None}
    if np.isnan(value):
        return nothing
    found = np.array([np.nan]) if drawn is None else _kappas(drawn, cost)
    known = found[~np.isnan(found)]
    # If all are equal, resampling has no information.
    if len(known) < (1 - _MOST_UNDEFINED) * len(found) or np.ptp(known) < 10**-_PLACES:
        return {**nothing, "value": value}
    low, high = np.quantile(known, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return {"value": value, "low": float(low), "high": float(high)}
