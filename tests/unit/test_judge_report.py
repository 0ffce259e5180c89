"""Reports on a judge: agreement, intervals, material, measures and findings."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from refiner_core.contract.config import RewardConfig
from refiner_core.contract.types import JudgeRequest, PromptRow
from refiner_core.judge_report.material import (
    Attack,
    JudgedItem,
    run_material,
    shipped_attacks,
    shipped_material,
)
from refiner_core.judge_report.measures import agreement, changes, repeatability, resistance, shift
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


def cohen_kappa(a: Sequence[float], b: Sequence[float], weights: str | None = None) -> float | None:
    found = agreement(a, b, range(len(a)), resamples=2)
    return found["kappa" if weights is None else "quadratic"]["value"]


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


def test_the_shipped_set_is_complete_with_gold_scores() -> None:
    material = shipped_material()
    assert {item.request.kind for item in material.items} == {
        "rubric", "citation_recall", "citation_precision", "citation_needed",
    }  # fmt: skip
    assert 8 <= len({item.question_id for item in material.items}) <= 12
    assert all(item.gold in (0.0, 0.5, 1.0) for item in material.items)
    assert {item.polarity for item in material.items if item.request.kind == "rubric"} == {
        "positive", "negative",
    }  # fmt: skip
    # Yes or no is yes or no.
    for item in material.items:
        if item.request.kind in ("citation_precision", "citation_needed"):
            assert item.gold != 0.5
        if item.sources:
            assert item.request.reference == "\n\n".join(item.sources)
    assert len(shipped_material(3).items) < len(material.items)


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


def test_answers_of_a_run_are_asked_about_as_in_training() -> None:
    prompt = (
        "Which crop?\n<tool_output><snippet id=S_1>Wheat grows.</snippet>"
        "<snippet id=S_2>Much of it.</snippet></tool_output>"
    )
    rubric = {
        "positive_rubrics": [{"title": "t", "description": "Names wheat", "weight": 1}],
        "negative_rubrics": [{"title": "u", "description": "Invents", "weight": 1}],
    }
    row = PromptRow("row", "Which crop?", prompt, (1,), json.dumps(rubric))
    good = "<answer><snippet id=S_1,S_2>Wheat grows.</snippet> So it is.</answer>"
    material = run_material("run", [(row, good), (row, "no answer")], RewardConfig())
    assert [item.request.kind for item in material.items] == [
        "rubric", "rubric", "citation_recall", "citation_precision", "citation_precision",
        "citation_needed",
    ]  # fmt: skip
    assert [item.polarity for item in material.items[:2]] == ["positive", "negative"]
    assert material.items[2].sources == ("Wheat grows.", "Much of it.")
    assert {item.answer_id for item in material.items} == {"row/0"}


# ---------------------------------------------------------------- measures


def items(count: int, *, answers: int = 1, kind: Any = "rubric") -> list[JudgedItem]:
    """``count`` questions to a judge on each answer, about as many questions as answers."""
    return [
        JudgedItem(f"q{a}", f"a{a}", JudgeRequest(kind, f"q{a}", f"text {a}", f"criterion {c}"))
        for a in range(answers)
        for c in range(count)
    ]


def test_repeatability_counts_identical_scores() -> None:
    found = repeatability(items(4), [[0, 1, None, 1], [0, 0, 1, 1], [0, 0.5, 1, 1]])
    assert found["identical"] is not None
    assert (found["identical"].numerator, found["identical"].denominator) == (2, 3)
    assert found["left_out"] == 1
    assert found["difference"] is not None
    assert found["difference"].numerator == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert repeatability(items(2), [[0, 1]])["identical"] is None


def test_noise_of_asking_again_is_no_shift() -> None:
    asked = items(1, answers=8)
    before, after = [0.0] * 8, [1.0, 0.0] * 4
    noise = changes(before, [0.0, 1.0] * 4)
    found = shift(asked, before, after, noise)
    assert found["changed"] is not None
    assert found["changed"].numerator == 4
    assert found["beyond"] is not None
    assert found["beyond"].value == 0.0
    assert shift(asked, before, after, None)["beyond"] is None
    assert changes([0, None], [0, 1]) == [0.0, None]


@pytest.mark.parametrize(
    ("wants", "twin", "attacked", "result"),
    [
        ("higher", 0.0, 0.0, "resisted"),
        ("higher", 0.0, 0.5, "obeyed"),
        ("higher", 1.0, 1.0, "no room"),
        ("higher", None, 1.0, "no room"),
        ("higher", 0.0, None, "broke"),
        ("lower", 1.0, 1.0, "resisted"),
        ("lower", 1.0, 0.5, "obeyed"),
        ("lower", 0.0, 0.0, "no room"),
    ],
)
def test_an_attack_is_judged_by_the_score_that_it_wants(
    wants: Any, twin: float | None, attacked: float | None, result: str
) -> None:
    honest = JudgeRequest("rubric", "q", "honest", "criterion")
    hostile = replace(honest, text="honest, but")
    attack = Attack("a", "", hostile, honest, wants, 0.0 if wants == "higher" else 1.0)
    found = resistance([attack], [twin], [twin], [attacked])
    assert found["attacks"][0]["result"] == result
    share = found["resisted"]
    assert (None if share is None else share.value) == {"no room": None, "resisted": 1.0}.get(
        result, 0.0
    )


# ---------------------------------------------------------------- the whole
