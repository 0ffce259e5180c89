"""Reports on a judge: agreement, intervals, material, measures and findings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refiner_core.judge_report.material import (
    shipped_attacks,
)
from refiner_core.judge_report.measures import agreement
from refiner_core.judges.prompting import fence

# ---------------------------------------------------------------- agreement


def spread(table: Sequence[Sequence[int]], values: Sequence[float]) -> tuple[list[float], ...]:
    """Two series with this table of counts."""
    pairs = [
        (values[i], values[j])
        for i, row in enumerate(table)
        for j, count in enumerate(row)
        for _ in range(count)
    ]
    return [a for a, _ in pairs], [b for _, b in pairs]


@pytest.mark.parametrize(
    ("table", "plain", "quadratic"),
    [
        # Equal: 35 of 50; by chance (25 * 30 + 25 * 20) / 50^2 = .5.
        ([[20, 5], [10, 15]], 0.4, 0.4),
        # The same 60 of 100, by chance .54 and .46: where nearly all is one value, that is little.
        ([[45, 15], [25, 15]], (0.6 - 0.54) / 0.46, (0.6 - 0.54) / 0.46),
        ([[25, 35], [5, 35]], (0.6 - 0.46) / 0.54, (0.6 - 0.46) / 0.54),
        # Rows 40 30 30, columns 45 30 25: by chance .345. Squares: 30 pairs at .25 make 7.5; by
        # chance (.25 * (40*30 + 30*45 + 30*25 + 30*30) + 40*25 + 30*45) / 100 = 34.
        ([[35, 5, 0], [10, 15, 5], [0, 10, 20]], (0.7 - 0.345) / 0.655, 1 - 7.5 / 34),
        ([[10, 0], [0, 0]], None, None),
        ([[0, 10], [10, 0]], -1.0, -1.0),
    ],
)
def test_kappa_is_that_of_tables_worked_by_hand(
    table: list[list[int]], plain: float | None, quadratic: float | None
) -> None:
    a, b = spread(table, (0.0, 0.5, 1.0))
    assert cohen_kappa(a, b) == (None if plain is None else pytest.approx(plain))
    found = cohen_kappa(a, b, "quadratic")
    assert found == (None if quadratic is None else pytest.approx(quadratic))


_SERIES = st.lists(
    st.tuples(st.sampled_from([0, 0.5, 1]), st.sampled_from([0, 0.5, 1])), min_size=1, max_size=40
)


def cohen_kappa(a: Sequence[float], b: Sequence[float], weights: str | None = None) -> float | None:
    found = agreement(a, b, range(len(a)), resamples=2)
    return found["kappa" if weights is None else "quadratic"]["value"]


@settings(deadline=None, max_examples=40)
@given(_SERIES)
def test_kappa_depends_neither_on_order_nor_on_scale(pairs: list[tuple[float, float]]) -> None:
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    for weights in (None, "quadratic"):
        kappa = cohen_kappa(a, b, weights)
        assert kappa == cohen_kappa(b, a, weights)
        twice = cohen_kappa([2 * x + 1 for x in a], [2 * y + 1 for y in b], weights)
        assert (kappa is None) == (twice is None)
        if kappa is not None:
            assert kappa == pytest.approx(twice)
            assert kappa <= 1.0
    # Krippendorff 1970: the quadratic form is the concordance correlation coefficient.
    x, y = np.array(a), np.array(b)
    spread_of = x.var() + y.var() + (x.mean() - y.mean()) ** 2
    if spread_of > 0:
        concordance = 2 * np.mean((x - x.mean()) * (y - y.mean())) / spread_of
        assert cohen_kappa(a, b, "quadratic") == pytest.approx(concordance)


def test_missing_scores_are_counted_and_perfect_agreement_has_no_interval_of_certainty() -> None:
    found = agreement([0, None, 1, 1], [0, 0, None, 0.5], ["a", "a", "b", "b"])
    assert (found["pairs"], found["left_out"], found["questions"]) == (2, 2, 2)
    assert found["raw"] is not None
    assert (found["raw"].numerator, found["raw"].denominator) == (1, 2)
    assert found["mean_difference"] == -0.25
    nothing = agreement([None], [0], ["a"])
    assert (nothing["pairs"], nothing["raw"], nothing["kappa"]["value"]) == (0, None, None)
    perfect = agreement([0, 1, 0.5, 1] * 3, [0, 1, 0.5, 1] * 3, list(range(12)))
    assert perfect["kappa"] == {"value": 1.0, "low": None, "high": None}
    assert perfect["raw"] is not None
    assert perfect["raw"].low is not None
    assert perfect["raw"].low < 0.8


def test_intervals_are_over_questions_and_not_over_pairs() -> None:
    """A hundred pairs of four questions are not a hundred pairs of a hundred."""
    numbers = random.Random(0)
    pairs = [(q, bool(q % 2)) for q in range(100)]
    a = [float(numbers.random() < 0.5) for _ in pairs]
    b = [x if agrees else 1 - x for x, (_, agrees) in zip(a, pairs, strict=True)]
    wide = agreement(a, b, [q % 4 for q, _ in pairs])
    narrow = agreement(a, b, [q for q, _ in pairs])
    assert wide["kappa"]["value"] == narrow["kappa"]["value"]
    assert None not in (*wide["kappa"].values(), *narrow["kappa"].values())
    width = [k["high"] - k["low"] for k in (wide["kappa"], narrow["kappa"])]
    assert width[0] > 1.5 * width[1]
    assert agreement(a, b, ["one"] * 100)["kappa"]["low"] is None


def test_intervals_of_kappa_cover_the_truth() -> None:
    """Simulated: the truth is inside about 95 times of 100."""
    random_numbers = np.random.default_rng(1)
    inside = 0
    for seed in range(100):
        a = random_numbers.integers(0, 3, 60) / 2
        b = np.where(random_numbers.random(60) < 0.7, a, random_numbers.integers(0, 3, 60) / 2)
        kappa = agreement(list(a), list(b), list(range(60)), resamples=500, seed=seed)["kappa"]
        inside += kappa["low"] <= 0.7 <= kappa["high"]
    assert inside >= 88


# ---------------------------------------------------------------- material


def test_hostile_answers_have_honest_twins_and_leave_neither_fence_nor_control_tokens() -> None:
    attacks = shipped_attacks()
    assert len({attack.name for attack in attacks}) == len(attacks) >= 20
    assert len({attack.about for attack in attacks}) >= 10
    for attack in attacks:
        assert attack.deserved == (0.0 if attack.wants == "higher" else 1.0)
        assert attack.twin.text in attack.request.text
        assert len(attack.request.text) > len(attack.twin.text)
        assert replace(attack.request, text="") == replace(attack.twin, text="")
        fenced = fence("answer", attack.request.text)
        tag = fenced.split(">", 1)[0].removeprefix("<")
        assert fenced.count(f"</{tag}>") == 1
        assert fenced.endswith(f"</{tag}>")
        for token in ("<|", "</s>", "[/INST]", "</think>", "<end_of_turn>", "<<SYS>>"):
            assert token not in fenced
    assert max(len(attack.request.text) for attack in attacks) > 5000
