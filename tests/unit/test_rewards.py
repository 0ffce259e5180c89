"""The reward, part by part: golden vectors, the traps, and what must hold for any judge."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refiner_core.contract.config import RewardConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.types import JudgeRequest
from refiner_core.data.synthetic import generate_rows
from refiner_core.judges import LexicalJudge
from refiner_core.rewards import compute_rewards
from refiner_core.rewards.combine import aggregate_rubrics
from refiner_core.rubrics import Rubric, load_rubric_set
from tests.support.rewarding import (
    BOTH,
    GOOD,
    NEGATIVE,
    POSITIVE,
    ScriptedJudge,
    by_kind,
    hashed_judge,
    reward_of,
    rollout,
)

NONE: dict[str, Any] = {"positive_rubrics": [], "negative_rubrics": []}
SCORED = {
    "rubric", "citation", "citation_precision", "citation_recall", "citation_f1",
    "citation_format", "citation_applicable", "claims", "uncited", "format_bonus",
    "format_valid", "total", "no_rubrics",
}  # fmt: skip


# ---------------------------------------------------------------- the citation reward


def test_every_component_is_there_and_a_float() -> None:
    for text in (GOOD, "malformed"):
        components = reward_of(rollout(text)).components
        assert set(components) == SCORED
        assert all(type(value) is float for value in components.values())


def test_golden_citation_reward() -> None:
    """Two cited claims, one plain statement, one lead; one of three cited ids is unknown."""
    text = (
        "<answer>Lead<snippet id='a,b'>claim one</snippet> Some plain statement "
        "<snippet id=b,z>claim two</snippet></answer>"
    )
    judge = by_kind(
        needed_Lead=0.0, needed_statement=1.0, recall_one=0.5, recall_two=1.0, precision_two=1.0
    )
    inner = judge.script

    def script(request: JudgeRequest) -> float | None:
        if request.kind == "citation_precision" and request.text == "claim one":
            return 1.0 if request.reference == "evidence a" else 0.0
        return inner(request)

    judge.script = script
    parts = reward_of(rollout(text), judge).components
    # claim       Lead        one                     plain   two
    # recall      1           0.5                     0       1
    # precision   1           (1 + 0)/2               1       1
    # F1          1           0.5                     0       1
    assert parts["citation_recall"] == pytest.approx(2.5 / 4)
    assert parts["citation_precision"] == pytest.approx(3.5 / 4)
    assert parts["citation_f1"] == pytest.approx(2.5 / 4)
    assert parts["citation_format"] == pytest.approx(2 / 3)
    assert parts["citation"] == pytest.approx(0.6 * 2.5 / 4 + 0.4 * 2 / 3)
    assert (parts["claims"], parts["uncited"], parts["citation_applicable"]) == (4, 2, 1)
    (asked,) = judge.calls
    recall = [r for r in asked if r.kind == "citation_recall"]
    assert [(r.text, r.reference) for r in recall] == [
        ("claim one", "evidence a\n\nevidence b"),
        ("claim two", "evidence b"),
    ]


@pytest.mark.parametrize(
    ("recall", "precision", "f1"), [(1, 1, 1), (0.5, 1, 2 / 3), (0, 1, 0), (1, 0, 0), (0, 0, 0)]
)
def test_f1_is_the_harmonic_mean_and_0_where_both_are_0(
    recall: float, precision: float, f1: float
) -> None:
    parts = reward_of(rollout(GOOD), by_kind(recall=recall, precision=precision)).components
    assert parts["citation_f1"] == pytest.approx(f1)
    assert parts["citation"] == pytest.approx(0.6 * f1 + 0.4)


def test_a_prompt_without_evidence_has_no_citation_reward_and_asks_nothing() -> None:
    judge = by_kind()
    parts = reward_of(rollout(GOOD, prompt="Only a question."), judge).components
    assert parts["citation"] == parts["citation_f1"] == parts["citation_applicable"] == 0
    assert {r.kind for r in judge.calls[0]} == {"rubric"}


def test_an_uncited_statement_scores_by_whether_it_needs_a_citation() -> None:
    text = "<answer>plain statement</answer>"
    for needed, f1 in ((1.0, 0.0), (0.0, 1.0)):
        parts = reward_of(rollout(text), by_kind(needed=needed)).components
        assert parts["citation_f1"] == f1
        assert parts["citation_precision"] == 1.0
        assert parts["citation_format"] == 0.0
        assert parts["uncited"] == 1.0


@pytest.mark.parametrize("order", [1, -1])
def test_a_tag_around_nothing_scores_0_without_a_question(order: int) -> None:
    tags = ["<snippet id=a>claim one</snippet>", "<snippet id=b></snippet>"][::order]
    judge = by_kind()
    parts = reward_of(rollout(f"<answer>{''.join(tags)}</answer>"), judge).components
    for part in ("citation_f1", "citation_recall", "citation_precision"):
        assert parts[part] == 0.5, "nothing that is said is not precise either"
    assert len([r for r in judge.calls[0] if r.kind == "citation_recall"]) == 1


# ---------------------------------------------------------------- rubrics


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("weighted_mean", (2 * 0.5 + 1 * (1 - 0.25) + 3 * 1.0) / 6),
        ("signed_mean", (2 * 0.5 - 1 * 0.25 + 3 * 1.0) / 6),
        ("positive_sum", (2 * 0.5 - 1 * 0.25 + 3 * 1.0) / 5),
    ],
)
def test_golden_aggregations(aggregation: str, expected: float) -> None:
    scores = [
        (Rubric("p", "d", "positive", 2.0), 0.5),
        (Rubric("n", "d", "negative", 1.0), 0.25),
        (Rubric("q", "d", "positive", 3.0), 1.0),
    ]
    assert aggregate_rubrics(scores, aggregation) == pytest.approx(expected)


def test_positive_sum_divides_by_one_at_least() -> None:
    assert aggregate_rubrics([(Rubric("p", "d", weight=0.5), 1.0)], "positive_sum") == 0.5


def test_a_negative_rubric_is_flipped_and_its_raw_score_is_stored() -> None:
    result = reward_of(rollout(GOOD), by_kind(P=1.0, N=1.0))
    assert result.components["rubric"] == 0.5
    assert reward_of(rollout(GOOD), by_kind(P=1.0, N=0.0)).components["rubric"] == 1.0
    stored = {d["title"]: d for d in result.judgements if d["kind"] == "rubric"}
    assert (stored["N"]["polarity"], stored["N"]["score"]) == ("negative", 1.0)


def test_static_rubrics_join_the_rows_own_and_can_be_dropped_everywhere() -> None:
    for only, extra in ((False, 3), (True, 0)):
        result = reward_of(
            rollout(GOOD), rubric_source="instance+static", instance_rubrics_only=only
        )
        titles = [d["title"] for d in result.judgements if d["kind"] == "rubric"]
        assert titles == ["P", "N", *[r.title for r in load_rubric_set("v3").rubrics][:extra]]


def test_judgements_are_json_ready() -> None:
    result = reward_of(rollout(GOOD), by_kind(P=None))
    details = json.loads(json.dumps(list(result.judgements)))
    assert [d["status"] for d in details if d["kind"] == "rubric"] == ["failed", "scored"]
    recall = next(d for d in details if d["kind"] == "citation_recall")
    assert (recall["claim"], recall["ids"], recall["score"]) == ("claim one", ["a"], 1.0)


def test_a_row_whose_rubrics_do_not_fit_is_named() -> None:
    with pytest.raises(DataError, match=r"row-1.*description"):
        reward_of(rollout(GOOD, rubrics={"positive_rubrics": [{"title": "t"}]}))


# ---------------------------------------------------------------- the total


def test_the_total_of_a_rollout_is_put_together_from_its_components() -> None:
    judge = by_kind(P=0.5, N=0.0, recall=0.5)
    parts = reward_of(rollout(GOOD), judge).components
    assert parts["rubric"] == 0.75
    assert parts["citation"] == pytest.approx(0.6 * 2 / 3 + 0.4)
    assert parts["total"] == pytest.approx(10 * (0.8 * 0.75 + 0.2 * 0.8))


@pytest.mark.parametrize("combination", ["convex", "additive"])
def test_a_row_without_rubrics_has_the_citation_term_alone_and_is_counted(combination: str) -> None:
    result = reward_of(rollout(GOOD, rubrics=NONE), combination=combination)
    assert result.status == "scored"
    assert result.components["no_rubrics"] == 1.0
    assert result.total == pytest.approx(10 * result.components["citation"])
    assert reward_of(rollout(GOOD)).components["no_rubrics"] == 0.0


def test_without_rubrics_and_citation_reward_there_is_nothing_to_score() -> None:
    result = reward_of(rollout(GOOD, rubrics=NONE), apply_paper_citation_reward=False)
    assert result.total == 0.0
    assert result.components["citation_f1"] == 1.0  # still judged and logged


def test_rubrics_without_weight_are_judged_and_logged_but_are_no_judge_term() -> None:
    result = reward_of(rollout(GOOD, rubrics={"positive_rubrics": [{**POSITIVE, "weight": 0}]}))
    assert result.components["no_rubrics"] == 1.0
    assert result.total == pytest.approx(10 * result.components["citation"])
    assert result.judgements[0]["title"] == "P"


@pytest.mark.parametrize(
    "text",
    ["", "text", "<answer>x", f"{GOOD}{GOOD}", "<answer></answer>",
     "<answer><snippet id=a> </snippet></answer>"],
)  # fmt: skip
@pytest.mark.parametrize("rubrics", [BOTH, NONE, {"negative_rubrics": [NEGATIVE]}])
def test_a_malformed_answer_scores_0_even_on_negative_rubrics_and_asks_nothing(
    text: str, rubrics: Any
) -> None:
    judge = ScriptedJudge(lambda request: 0.0)
    result = reward_of(rollout(text, rubrics=rubrics), judge)
    assert result.status == "malformed"
    assert result.total == 0.0
    assert result.components["rubric"] == result.components["citation"] == 0.0
    assert result.components["format_valid"] == 0.0
    assert judge.calls == []


def test_the_ground_truth_reaches_neither_judge_nor_reward() -> None:
    plain = rollout("<answer>Plain <snippet id=a>claim one</snippet></answer>")
    told = plain._replace(prompt=replace(plain.prompt, truth={"gold_ids": ["CANARY"]}))
    judge = by_kind()
    result = reward_of(told, judge)
    assert result == reward_of(plain)
    assert "CANARY" not in repr((judge.calls, result))


# ---------------------------------------------------------------- format


@pytest.mark.parametrize(
    ("text", "bonus", "valid"),
    [
        (GOOD, 1.0, 1.0),
        (f"\n{GOOD} ", 1.0, 1.0),
        (f"Here: {GOOD}", 0.5, 0.0),
        ("<answer>plain words</answer>", 0.5, 0.0),
        ("<answer><snippet id=a>x</snippet><snippet id=z>y</snippet></answer>", 0.75, 0.0),
        ('<answer><snippet ids="a">x</snippet></answer>', 0.5, 0.0),
        ('<answer><snippet id="a, b">x</snippet> and <snippet id=b>y</snippet></answer>', 1.0, 1.0),
        ("<answer><snippet id=a>x</answer>", 0.5, 0.0),
        ("<answer><snippet id=a>x</snippet></snippet></answer>", 1.0, 0.0),
        (f"{GOOD}{GOOD}", 0.0, 0.0),
        ("words", 0.0, 0.0),
    ],
)
def test_golden_format(text: str, bonus: float, valid: float) -> None:
    parts = reward_of(rollout(text)).components
    assert (parts["format_bonus"], parts["format_valid"]) == (bonus, valid)


def test_text_around_the_answer_is_no_fault_in_other_modes() -> None:
    parts = reward_of(rollout(f"Reasoning. {GOOD}", mode="reason_then_answer")).components
    assert (parts["format_bonus"], parts["format_valid"]) == (1.0, 1.0)


# ---------------------------------------------------------------- judge failures


@pytest.mark.parametrize("failing", ["P", "N", "recall", "precision", "needed"])
def test_one_failed_judgement_makes_the_whole_rollout_unscored(failing: str) -> None:
    text = "<answer>Plain <snippet id=a>claim one</snippet></answer>"
    result = reward_of(rollout(text), by_kind(**{failing: None}))
    assert result.status == "unscored"
    assert result.total is None
    assert not {"total", "rubric", "citation", "citation_f1"} & set(result.components)
    assert result.components["format_valid"] == 1.0


def test_a_failure_leaves_the_other_rollouts_alone_and_the_batch_is_one_call() -> None:
    judge = ScriptedJudge(lambda r: None if "bad" in r.text else 1.0)
    bad = "<answer><snippet id=a>bad</snippet></answer>"
    items = [rollout(GOOD), rollout(bad), rollout("malformed"), rollout(GOOD)]
    results = compute_rewards(items, RewardConfig(), judge)
    assert [r.status for r in results] == ["scored", "unscored", "malformed", "scored"]
    assert len(judge.calls) == 1


# ---------------------------------------------------------------- properties

_SPANS = st.sampled_from(
    ["Lead", "some plain statement", "<snippet id=a>one</snippet>", "<snippet ids=a>four</snippet>",
     '<snippet id="a, b">two</snippet>', "<snippet id=z>three</snippet>", "<snippet id=b>five",
     "</snippet>", "<snippet id=a></snippet>", "</answer>"]
)  # fmt: skip
_TEXTS = st.lists(_SPANS, max_size=5).map(lambda spans: f"<answer>{' '.join(spans)}</answer>")
_WEIGHTS = st.none() | st.floats(-5, 5)
_RUBRICS = st.lists(_WEIGHTS, max_size=4).map(
    lambda weights: {
        "rubrics": [{"description": f"says {i}", "weight": w} for i, w in enumerate(weights)]
    }
)
_SCORES = st.integers(0, 2**31)


@settings(deadline=None)
@given(_TEXTS, _RUBRICS, _SCORES, st.floats(0, 1))
def test_components_and_total_are_bounded(text: str, rubrics: Any, seed: int, w: float) -> None:
    result = reward_of(rollout(text, rubrics=rubrics), hashed_judge(seed), paper_citation_weight=w)
    assert result.total is not None
    assert 0.0 <= result.total <= 10.0 + 1e-9
    counts = ("claims", "uncited", "total")
    assert all(0 <= v <= 1 + 1e-12 for k, v in result.components.items() if k not in counts)


@settings(deadline=None)
@given(_TEXTS, _RUBRICS, _SCORES, st.integers(0, 30))
def test_a_failed_judgement_never_gives_a_reward(
    text: str, rubrics: Any, seed: int, position: int
) -> None:
    honest = hashed_judge(seed)
    item = rollout(text, rubrics=rubrics)
    reward_of(item, honest)
    asked = [r for call in honest.calls for r in call]
    if not asked:
        return
    victim = asked[position % len(asked)]
    failing = ScriptedJudge(lambda r: None if r == victim else honest.script(r))
    result = reward_of(item, failing)
    assert (result.status, result.total) == ("unscored", None)


# ---------------------------------------------------------------- with the embedded judge


def test_the_embedded_world_rewards_the_right_answer_over_flawed_ones() -> None:
    totals: dict[str | None, list[float]] = {}
    for row in generate_rows("sft", 200, seed=3):
        prompt, answer = (turn["content"] for turn in row["conversations"])
        item = rollout(answer, rubrics=json.loads(row["rubrics"]), prompt=prompt)
        (result,) = compute_rewards([item], RewardConfig(), LexicalJudge())
        assert result.total is not None
        totals.setdefault(row["metadata"]["flaw"], []).append(result.total)
    assert totals.keys() > {None}
    sound = totals.pop(None)
    assert min(sound) == pytest.approx(10.0)
    for flaw, flawed in totals.items():
        assert sum(flawed) / len(flawed) < 10.0, flaw
