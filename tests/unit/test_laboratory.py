"""The laboratory's parts: planted judges have the bias that their names say, measures count it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from refiner_core.contract.types import JudgeRequest
from refiner_core.data.rows import DataRow
from refiner_core.judges.lexical import LexicalJudge
from refiner_core.judges.prompting import load_judge_prompts
from refiner_core.rubrics import parse_rubrics
from tests.prove.laboratory import Arm, Series, false_stops, outcome, tiny_rows
from tests.support.planted_judges import PlantedJudges, planted_name

ROWS = list(itertools.islice(tiny_rows(), 60))


def first_claim(row: DataRow) -> str:
    """The body of an answer that cites the first snippet, whatever it says."""
    name, text = next(iter(row.evidence.texts.items()))
    return f"<snippet id={name}>{text}</snippet>"


def asked(bias: str, strength: float, row: DataRow) -> list[tuple[JudgeRequest, float]]:
    """A row's rubric questions with the planted judge's scores, in [0, 1]."""
    rubrics = parse_rubrics(row.rubrics)
    requests = [
        JudgeRequest("rubric", row.question, first_claim(row), r.description) for r in rubrics
    ]
    messages = load_judge_prompts("v2", "batched").render_batch(requests)
    body: dict[str, Any] = {"model": planted_name(bias, strength), "messages": messages}
    reply = json.loads(PlantedJudges(ROWS)(body, 0).body)
    said = json.loads(reply["choices"][0]["message"]["content"])
    return [(q, s["score"] / 2) for q, s in zip(requests, said["scores"], strict=True)]


def test_an_honest_twin_judges_as_the_lexical_judge() -> None:
    for row in ROWS:
        for request, score in asked("none", 0.0, row):
            assert score == LexicalJudge().judge([request])[0].score


@pytest.mark.parametrize("strength", [0.3, 1.0])
def test_the_strength_is_the_share_of_judgements_that_the_bias_decides(strength: float) -> None:
    found = [(q.reference.startswith("Attributes"), s) for row in ROWS
             for q, s in asked("first", strength, row)]  # fmt: skip
    best = np.mean([score == (0.0 if fault else 1.0) for fault, score in found])
    honest = np.mean([score == (0.0 if fault else 1.0) for row in ROWS
                      for fault, score in [(q.reference.startswith("Attributes"), s)
                                           for q, s in asked("none", 0.0, row)]])  # fmt: skip
    assert best == pytest.approx(honest + strength * (1 - honest), abs=0.1)
    short = [(q.reference.startswith("Attributes"), s) for q, s in asked("length", 1.0, ROWS[0])]
    assert all(score == float(fault) for fault, score in short), "the worst for a short answer"


def series(gold_end: float, alarm: int | None, seed: int) -> Series:
    rng, steps = np.random.default_rng(seed), list(range(0, 44, 4))
    rows = rng.uniform(0.2, 0.3, 96)
    proxy = np.array([rows + 0.5 * i / 10 for i in range(len(steps))])
    gold = np.array([rows + (gold_end - 0.25) * i / 10 for i in range(len(steps))])
    return Series(Arm("first", 0.6, seed), steps, proxy, gold, gold.mean(axis=1), alarm, steps[-1])


def test_measures_of_runs() -> None:
    honest = [series(0.6, None, seed) for seed in range(3)]
    share, upper = false_stops(honest, 0.05, 100)
    assert (share, upper) == (0.0, pytest.approx(0.0295, abs=1e-3))
    assert false_stops([series(0.05, None, 1)], 0.05, 20)[0] == 1.0
    found = outcome([series(0.05, 20, seed) for seed in range(3)])
    assert (found.runs, found.lost, found.found, found.delay) == (3, 3, 3, 16)
    assert found.kept is not None
    assert found.kept[1] > 0
