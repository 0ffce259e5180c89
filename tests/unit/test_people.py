"""Statistics of people's labels: agreement, the judge's errors, corrected means."""

from __future__ import annotations

import numpy as np
import pytest

from refiner_core.rescoring.labels import LabelledQuestion, corrected_mean, labels_report
from tests.support.judged_worlds import LabelWorld, covered


def test_corrected_intervals_hold_what_people_would_say_and_the_judges_do_not() -> None:
    share, raw, width = covered(LabelWorld(0.7, 0.9, 0.6), labelled=50, repetitions=400)
    assert 0.92 <= share <= 0.98
    assert raw < 0.05
    assert width < 0.2


def test_a_judge_that_people_always_confirm_keeps_its_mean() -> None:
    means = np.random.default_rng(0).random(100)
    drawn = means[:30]
    found = corrected_mean(means, drawn, drawn, drawn)
    assert found.value == pytest.approx(means.mean())
    blind = corrected_mean(means, drawn, np.zeros(30), drawn)
    assert blind.value == pytest.approx(drawn.mean()), "people alone, if the judge says nothing"


def test_few_labels_have_no_interval() -> None:
    found = corrected_mean(np.ones(20), np.ones(4), np.ones(4), np.zeros(4))
    assert (found.value, found.low, found.high) == (0.0, None, None)


def test_errors_of_the_judge_are_in_credits() -> None:
    def question(number: int, fault: bool, score: float, *labels: float) -> LabelledQuestion:
        given = {f"person {i}": label for i, label in enumerate(labels)}
        return LabelledQuestion(f"prompt {number}", "rubric", fault, score, given)

    report = labels_report(
        [
            question(1, False, 1.0, 1.0, 1.0),  # met, and the judge says so
            question(2, True, 1.0, 0.0, 0.0),  # no fault, but the judge sees one
            question(3, True, 0.0, 1.0, 1.0),  # a fault that the judge does not see
            question(4, False, 0.0, 1.0, 0.0),  # people do not agree
        ]
    )
    judge = report["judge"]["all"]
    assert judge["sensitivity"]["value"] == 0.5
    assert judge["specificity"]["value"] == 0.0
    assert judge["undecided"] == 1
    (pair,) = report["pairs"]
    assert (pair["raw"]["numerator"], pair["raw"]["denominator"]) == (3.0, 4)
