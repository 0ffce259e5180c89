"""Judged answers of known quality: criteria with known parameters, and judges of known errors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]


class Criteria(NamedTuple):
    """Criteria of a two-parameter logistic model. The first sixth are nearly always met, the next
    sixth nearly never; the last ``copies`` are paraphrases of others."""

    slopes: Floats
    places: Floats
    copies: int

    @property
    def informative(self) -> slice:
        """Those with parameters that answers can show."""
        base = len(self.slopes)
        return slice(base // 3, base)


def draw_criteria(seed: int, *, criteria: int, copies: int = 0, slope: float = 1.5) -> Criteria:
    """Criteria with slopes around a median."""
    rng = np.random.default_rng(seed)
    base = criteria - copies
    places = rng.normal(size=base)
    places[: base // 6], places[base // 6 : base // 3] = -6.0, 6.0
    slopes = slope * rng.lognormal(0.0, 0.5, base)
    slopes[: base // 3] = slope
    return Criteria(slopes, places, copies)


def judge_answers(
    criteria: Criteria, seed: int, *, prompts: int = 200, samples: int = 8
) -> pd.DataFrame:
    """Rows as of :func:`refiner_core.rescoring.criteria.rubric_credits`."""
    rng = np.random.default_rng(seed)
    quality = 0.7 * rng.normal(size=(prompts, 1)) + 0.714 * rng.normal(size=(prompts, samples))
    odds = criteria.slopes * (quality[..., None] - criteria.places)
    chance = 1 / (1 + np.exp(-odds))
    met = rng.random(chance.shape) < chance
    of = rng.integers(criteria.informative.start, len(criteria.slopes), criteria.copies)
    same = rng.random((prompts, samples, criteria.copies)) < 0.9
    again = np.where(same, met[..., of], rng.random(same.shape) < chance[..., of])
    credit = np.concatenate([met, again], axis=-1).astype(float)
    answers, count = prompts * samples, credit.shape[-1]
    prompt = np.repeat(np.arange(answers) // samples, count)
    name = np.tile([f"criterion {i}" for i in range(count)], answers)
    return pd.DataFrame(
        {
            "answer": np.repeat(np.arange(answers), count),
            "group": [f"group {i}" for i in prompt],
            "step": prompt // 8,
            "sample_id": [f"prompt {i}" for i in prompt],
            "source": "made",
            "polarity": "positive",
            "criterion": name,
            "title": name,
            "weight": 1.0,
            "credit": credit.ravel(),
        }
    )


class LabelWorld(NamedTuple):
    """Answers that people find good with a share ``quality`` per criterion, and a judge with a
    sensitivity and a specificity."""

    quality: float
    sensitivity: float
    specificity: float
    criteria: int = 4

    def draw(self, rng: np.random.Generator, prompts: int, samples: int) -> tuple[Floats, Floats]:
        """People's and the judge's mean credit [prompts, samples]."""
        shift = np.log(self.quality / (1 - self.quality))
        spread = rng.normal(size=(prompts, 1)) + rng.normal(size=(prompts, samples))
        chance = 1 / (1 + np.exp(-(spread + shift)))[..., None]
        people = rng.random((prompts, samples, self.criteria)) < chance
        given = np.where(people, self.sensitivity, 1 - self.specificity)
        judged = rng.random(people.shape) < given
        return people.mean(axis=-1), judged.mean(axis=-1)

    def truth(self) -> float:
        """The mean that people give to all answers."""
        return float(self.draw(np.random.default_rng(0), 400_000, 1)[0].mean())


def covered(world: LabelWorld, labelled: int, repetitions: int, seed: int = 0) -> tuple[float, ...]:
    """Shares of 95 % intervals that hold the truth: of corrected means, and of the judge's means;
    and the mean width of the former."""
    from refiner_core.evaluation.statistics import two_way_mean
    from refiner_core.rescoring.labels import corrected_mean

    rng, truth, found = np.random.default_rng(seed), world.truth(), []
    for _ in range(repetitions):
        people, judged = world.draw(rng, 200, 4)
        drawn = rng.choice(200, labelled, replace=False), rng.integers(4, size=labelled)
        means = judged.mean(axis=1)
        corrected = corrected_mean(means, means[drawn[0]], judged[drawn], people[drawn])
        raw = two_way_mean(means[None])
        ends = [(e.low or 0.0, e.high or 0.0) for e in (corrected, raw)]
        found.append((*(low <= truth <= high for low, high in ends), ends[0][1] - ends[0][0]))
    return tuple(np.mean(found, axis=0).tolist())
