"""People's labels of judged questions: agreement, the judge's errors, corrected means.

In: labels by person and question, the judge's scores, the judge's means of all prompts. Out:
numbers with intervals over prompts.

- Agreement of people: share of equal labels and Cohen's kappa of each pair
  (:func:`~refiner_core.judge_report.measures.agreement`).
- The judge against the mean label of a question, in credits (one minus the score of a fault):
  *sensitivity* is its mean credit where people's is above one half, *specificity* one minus its
  mean credit where theirs is below. A mean label of exactly one half counts in neither.
- A corrected mean (:func:`corrected_mean`) adds people's mean correction of the judge on the
  labelled answers to the judge's mean over all answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from refiner_core.evaluation.statistics import CONFIDENCE, Estimate, estimate
from refiner_core.judge_report.measures import agreement, plain
from refiner_core.report.people import corrected_section, shown
from refiner_core.report.printing import Section

Floats = npt.NDArray[np.float64]
Row = dict[str, Any]
#: Fewest labelled prompts of an interval.
FEWEST = 10


class LabelledQuestion(NamedTuple):
    """A judged question with people's labels. ``fault``: a high score is bad."""

    sample_id: str
    kind: str
    fault: bool
    score: float
    labels: Mapping[str, float]

    @property
    def label(self) -> float:
        """The mean label."""
        return float(np.mean([*self.labels.values()]))


def corrected_mean(means: Floats, of_labelled: Floats, judged: Floats, labels: Floats) -> Estimate:
    """The mean that people would give to all answers, by prediction-powered inference
    (Angelopoulos et al. 2023, "Prediction-powered inference", Science 382:669-674) with the
    weight of least variance (Angelopoulos, Duchi & Zrnic 2023, "PPI++", arXiv:2311.01453).

    Unlike a correction by sensitivity and specificity (Rogan & Gladen 1978), it needs no yes or
    no, and no assumption that the judge errs on one kind of answer as on another. Residuals of few
    labels are enlarged by their leverage (HC3 of MacKinnon & White 1985).

    Parameters
    ----------
    means
        The judge's mean per prompt, of all prompts.
    of_labelled
        The same of the prompts with a labelled answer, which were drawn at random.
    judged, labels
        The judge's value and people's value of the labelled answer of each of these.

    Returns
    -------
    Estimate
        With a t interval over prompts, None below :data:`FEWEST` labelled ones. Few labels of a
        share near 0 or 1 cover less than 95 % (``python -m tests.prove.labels``).
    """
    from scipy.special import stdtrit

    n, share = len(labels), len(labels) / len(means)
    weight, variance = 1.0, float("nan")
    if n >= FEWEST:
        spread, of_means = np.cov(np.stack([labels, judged, of_labelled])), means.var(ddof=1)
        gain = spread[0, 1] - share * spread[0, 2]
        cost = share * of_means + spread[1, 1] - 2 * share * spread[1, 2]
        weight = float(np.clip(gain / cost, 0.0, 1.0)) if cost > 1e-12 else 1.0
        terms = labels - weight * judged + share * weight * of_labelled
        away = judged - judged.mean()
        leverage = 1 / n + away**2 / max(float(away @ away), 1e-12)
        residuals = (terms - terms.mean()) / (1 - np.minimum(leverage, 0.99))
        variance = residuals @ residuals / n**2 + (1 - share) * weight**2 * of_means / len(means)
    value = float(weight * means.mean() + (labels - weight * judged).mean())
    half = float(stdtrit(max(n - 2, 1), (1 + CONFIDENCE) / 2)) * variance**0.5
    known = bool(np.isfinite(half))
    low, high = (value - half, value + half) if known else (None, None)
    how = f"prediction-powered, weight {weight:.2f}" if known else "none"
    return Estimate(value, low, high, n, float(labels.sum()), n, how)


def labels_report(questions: Sequence[LabelledQuestion]) -> Row:
    """Agreement between people, and the judge against them."""
    people = list(dict.fromkeys(person for q in questions for person in q.labels))
    prompts = [q.sample_id for q in questions]
    pairs = []
    for first, second in combinations(people, 2):
        one, other = ([q.labels.get(person) for q in questions] for person in (first, second))
        pairs.append({"first": first, "second": second, **agreement(one, other, prompts)})
    kinds = ("all", *dict.fromkeys(q.kind for q in questions))
    chosen = {k: [q for q in questions if k in ("all", q.kind)] for k in kinds}
    return plain(  # type: ignore[no-any-return]
        {
            "people": {p: sum(p in q.labels for q in questions) for p in people},
            "pairs": pairs,
            "judge": {kind: _judge(part) for kind, part in chosen.items()},
        }
    )


def _judge(questions: Sequence[LabelledQuestion]) -> Row:
    rows = []
    for q in questions:
        credit, score = (1 - v if q.fault else v for v in (q.label, q.score))
        met = {"sensitivity": score} if credit > 0.5 else {}
        unmet = {"specificity": 1 - score} if credit < 0.5 else {}
        rows.append({"sample_id": q.sample_id, **met, **unmet})
    scores, labels = [q.score for q in questions], [q.label for q in questions]
    return {
        "questions": len(questions),
        **{n: estimate(rows, n, kind="share") for n in ("sensitivity", "specificity")},
        "undecided": sum(len(row) == 1 for row in rows),
        "agreement": agreement(labels, scores, [q.sample_id for q in questions]),
    }


# ---------------------------------------------------------------- text


def sections(document: Mapping[str, Any]) -> Iterator[Section]:
    """The document as tables."""
    pairs = tuple(
        (f"{p['first']}, {p['second']}", str(p["pairs"]), shown(p["raw"]), shown(p["kappa"]),
         shown(p["quadratic"]))
        for p in document["pairs"]
    )  # fmt: skip
    if pairs:
        of_pairs = ("people", "questions", "equal", "kappa", "quadratic kappa")
        yield Section("Agreement between people", (), of_pairs, pairs)
    rows = tuple(
        (kind, str(one["questions"]), *(_of(one[n]) for n in ("sensitivity", "specificity")),
         shown(one["agreement"]["raw"]), shown(one["agreement"]["quadratic"]))
        for kind, one in document["judge"].items()
    )  # fmt: skip
    header = ("kind", "questions", "sensitivity", "specificity", "equal", "quadratic kappa")
    words = (
        "Sensitivity: the judge's mean credit where people give more than half; specificity: one "
        "minus it where they give less.",
    )
    yield Section("The judge against people", words, header, rows)
    several = len({row["run"] for row in document["corrected"]}) > 1
    yield corrected_section(document["corrected"], *["run"] * several)


def _of(found: Mapping[str, Any] | None) -> str:
    return shown(found) + ("" if found is None else f" (n = {found['denominator']})")
