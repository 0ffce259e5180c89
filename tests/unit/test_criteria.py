"""`refiner rubrics report`: what criteria teach, and a smaller set."""

from __future__ import annotations

import random

import numpy as np
import pandas as pd
import pytest

from refiner_core.contract.config import DataConfig, RewardConfig
from refiner_core.contract.types import PromptRow
from refiner_core.data.rows import parse_row
from refiner_core.data.sources import read_rows, resolve_source
from refiner_core.judges.lexical import LexicalJudge
from refiner_core.report.printing import document
from refiner_core.rescoring.criteria import criteria_report, rubric_credits, sections
from refiner_core.rescoring.rollouts import StoredRollout
from refiner_core.rewards import RewardInput, compute_rewards
from refiner_core.rewards.attacks import random_baseline_answers
from tests.support.judged_worlds import draw_criteria, judge_answers
from tests.support.real_rows import RL_ROWS


def test_known_parameters_are_recovered_and_few_criteria_keep_the_order() -> None:
    made = draw_criteria(1, criteria=24)
    found = criteria_report(judge_answers(made, 1, prompts=120))
    rows, inside = found["criteria"], made.informative
    assert [row["state"] for row in rows[:8]] == ["saturated"] * 4 + ["dead"] * 4
    assert not any(row["state"] for row in rows[inside])
    slopes = np.array([row["slope"] for row in rows][inside])
    places = np.array([row["place"] for row in rows][inside])
    assert np.abs(slopes - made.slopes[inside]).mean() < 0.3
    assert np.abs(places - made.places[inside]).mean() < 0.2
    smaller = found["smaller"]
    assert smaller["reached"]
    assert len(smaller["kept"]) <= 0.5 * len(rows)
    assert smaller["low"] < smaller["spearman"] < smaller["high"]
    assert smaller["spearman"] > 0.93
    assert not {kept["title"] for kept in smaller["kept"]} & {r["title"] for r in rows[:8]}


def test_two_criteria_that_say_the_same_are_named_and_one_is_enough() -> None:
    rows = judge_answers(draw_criteria(2, criteria=3), 2, prompts=60)
    twin = rows[rows["criterion"] == "criterion 2"].assign(criterion="twin", title="twin")
    found = criteria_report(pd.concat([rows, twin], ignore_index=True))
    (pair,) = found["redundant"]
    assert (pair["first"], pair["second"]) == ("criterion 2", "twin")
    kept = {one["title"]: one["weight"] for one in found["smaller"]["kept"]}
    assert len(kept.keys() & {"criterion 2", "twin"}) == 1
    assert max(kept.values()) == pytest.approx(2.0, abs=0.1), "one stands for both"


def test_answers_without_a_score_are_counted_and_left_out() -> None:
    rows = judge_answers(draw_criteria(3, criteria=3), 3, prompts=20)
    rows.loc[0, "credit"] = np.nan
    found = criteria_report(rows)
    assert found["unusable"] == 1
    assert {row["answers"] for row in found["criteria"]} == {159}


def real_rollouts(reward: RewardConfig) -> list[StoredRollout]:
    """Answers that copy at random, to real questions with their own rubrics."""
    source = resolve_source(DataConfig(rl_path=str(RL_ROWS)), "rl")
    made = []
    for raw in read_rows(source):
        row = parse_row(raw, "rl")
        prompt = PromptRow(
            *(row.sample_id, row.question, row.prompt_text, ()),
            *(row.rubrics, row.refiner_mode, None),
        )
        for index in range(4):
            text = random_baseline_answers(row.prompt_text, random.Random(index))
            made.append((prompt, index, text))
    results = compute_rewards([RewardInput(p, t, True) for p, _, t in made], reward, LexicalJudge())
    return [
        StoredRollout(f"step 1, {p.sample_id}", 1, index, p, text, True, result, None)
        for (p, index, text), result in zip(made, results, strict=True)
    ]


def test_real_rows_have_numbers_for_what_they_share_and_counts_for_what_they_do_not() -> None:
    reward = RewardConfig(rubric_source="instance+static", static_rubrics="v3")
    found = criteria_report(rubric_credits(real_rollouts(reward)))
    assert [row["source"] for row in found["criteria"]] == ["v3"] * 3
    (own,) = found["of_prompts"]
    assert own["prompts"] == found["prompts"] == 6
    assert own["criteria"] > 20
    text = document("Criteria", "", sections(found))
    assert "Citation Discipline" in text
    assert "each has too few answers" in text
