"""Rescoring: reuse of judgements, and numbers worked out by hand."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from flows.rescoring.rescore_plan import (
    RescoreOptions,
    judge_of,
    make_settings,
    own_setting,
    rubrics_of,
)
from refiner_core.contract.config import JudgeConfig, RecipeConfig, RewardConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.types import Judgement, JudgeRequest, PromptRow, RewardResult
from refiner_core.rescoring.rollouts import (
    RecordedJudge,
    Scores,
    StoredRollout,
    best_samples,
    compare,
    fidelity,
    judge_identity,
    judges_agree,
    kendall_tau_b,
    make_matrix,
    scores_under,
    stored_rollouts,
    with_advantages,
)

EVIDENCE = "<tool_output><snippet id=a>one two three</snippet></tool_output>"


NONE = RewardResult("scored", None, {})


def rollout(group: str, index: int, text: str = "") -> StoredRollout:
    prompt = PromptRow(group.split("/")[-1], f"{group}?", EVIDENCE, (), "")
    return StoredRollout(group, 1, index, prompt, text, True, NONE, None)


def scored(totals: Sequence[Sequence[float | None]]) -> tuple[list[StoredRollout], Scores]:
    """Groups of totals, as rollouts and their scores."""
    rollouts = [
        rollout(f"g{g}", i) for g, members in enumerate(totals) for i in range(len(members))
    ]
    results = [
        RewardResult("unscored" if t is None else "scored", t, {"rubric": t or 0.0})
        for members in totals
        for t in members
    ]
    return rollouts, with_advantages(rollouts, results, "standard")


# ---------------------------------------------------------------- numbers by hand


def test_every_number_of_a_comparison_is_what_one_counts_by_hand() -> None:
    rollouts, first = scored([[0, 1, 2, 3], [5, 5, 1, 1], [4, 4, 4, 4], [1, 2, None, None]])
    _, second = scored([[3, 1, 2, 0], [5, 4, 1, 1], [1, 2, 3, 4], [2, 1, 7, None]])
    found = compare(rollouts, first, second, resamples=50)
    # g0: best 3 -> 0, lost. g1: {0, 1} -> {0}. g2: all -> {3}. g3: 1 -> 0, lost.
    assert (found["best_changed"].numerator, found["best_changed"].denominator) == (2, 4)
    baseline, setting = found["no_signal"].values()
    assert (baseline.numerator, baseline.denominator) == (1, 4), "g2 taught nothing"
    assert (setting.numerator, setting.denominator) == (0, 4)
    # g0: samples 0 and 3 change sides. g1: none does. g2: there was no sign before. g3: sample 1
    # was above the mean, and is below the one that the third sample's 7 has raised.
    assert (found["sign_changed"].numerator, found["sign_changed"].denominator) == (3, 14)
    # Kendall: g0 has 6 pairs of which 1 agrees: (1 - 5) / 6. g1: of the 6 pairs, 2 are ties in
    # the first and 1 in the second; the 4 others agree: 4 / sqrt(4 * 5). g2: no order. g3: -1.
    assert found["kendall"].denominator == 3
    assert found["kendall"].numerator == pytest.approx(-4 / 6 + 4 / math.sqrt(20) - 1)
    assert found["unscored"] == {"baseline": 2, "setting": 1}
    before, after = found["means"]["total"].values()
    assert before.value == pytest.approx((6 + 12 + 16 + 3) / 14)
    assert after.value == pytest.approx((6 + 11 + 10 + 3) / 14), "7 has nothing beside it"


def test_ties_by_rounding_are_ties() -> None:
    assert best_samples([0.3, 0.1 + 0.2, 0.2]) == {0, 1}
    assert kendall_tau_b([0.3, 0.1 + 0.2], [1.0, 2.0]) is None
    assert best_samples([-5.0]) == {0}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=12))
def test_the_correlation_is_that_of_scipy(pairs: list[tuple[int, int]]) -> None:
    a, b = ([float(p[i]) for p in pairs] for i in (0, 1))
    tau = kendall_tau_b(a, b)
    constant = len(set(a)) == 1 or len(set(b)) == 1
    assert tau == (None if constant else pytest.approx(kendalltau(a, b).statistic))


# ---------------------------------------------------------------- what is known and what is asked


class Asked:
    """A judge that keeps its questions; the score is the number of the question."""

    def __init__(self) -> None:
        self.requests: list[JudgeRequest] = []

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        self.requests += (r for r in dict.fromkeys(requests) if r not in self.requests)
        return [Judgement("scored", self.requests.index(r) / 100) for r in requests]


def ask(text: str, criterion: str) -> JudgeRequest:
    return JudgeRequest("rubric", "q", text, criterion)


def test_only_new_questions_are_asked() -> None:
    known = {ask("t", "a"): Judgement("scored", 0.5), ask("t", "z"): Judgement("failed", None)}
    nobody = Asked()
    judge = RecordedJudge(known, nobody)
    answers = judge.judge([ask("t", "b"), ask("t", "a"), ask("t", "z")])
    assert nobody.requests == [ask("t", "b")]
    assert [a.score for a in answers] == [0.0, 0.5, None], "a failure that is known stays one"


ANSWER = "<answer>Well now. <snippet id=a>one two three</snippet></answer>"
RUBRICS = json.dumps([{"title": "R", "description": 'says "one"', "weight": 1}])


def stored_by(judge: Any, reward: RewardConfig, texts: Sequence[str]) -> list[StoredRollout]:
    prompt = PromptRow("p", "q", EVIDENCE, (), RUBRICS)
    blank = [StoredRollout("g", 1, i, prompt, t, True, NONE, None) for i, t in enumerate(texts)]
    scores = scores_under(blank, reward, judge, "standard")
    rows = [
        {
            "step": 1, "prompt_index": 0, "sample_id": "p", "sample_index": i,
            "response_text": text, "finish_reason": "stop", "status": result.status,
            "reward": result.total, "advantage": scores.advantages[i],
            "judgements": json.dumps(result.judgements),
            **{f"reward/{k}": v for k, v in result.components.items()},
        }
        for i, (text, result) in enumerate(zip(texts, scores.results, strict=True))
    ]  # fmt: skip
    return stored_rollouts(rows, [prompt])


def test_totals_that_differ_from_stored_ones_are_counted() -> None:
    rollouts = stored_by(Asked(), RewardConfig(), [ANSWER, ANSWER.replace("Well", "So")])
    results, advantages = [r.result for r in rollouts], [r.advantage for r in rollouts]
    assert fidelity(rollouts, Scores(results, advantages))["exact"]
    near = replace(results[0], total=math.nextafter(results[0].total or 0.0, 99.0))
    for changed in (near, replace(results[0], total=None)):
        found = fidelity(rollouts, Scores([changed, results[1]], advantages))
        assert not found["exact"]
        assert "1 of 2 totals differ" in found["warning"]


# ---------------------------------------------------------------- judges and settings


def test_two_judges_are_the_same_if_nothing_differs_that_decides_a_judgement() -> None:
    judge = JudgeConfig(kind="openai", model="m", base_url="http://a/v1")
    elsewhere = JudgeConfig(kind="openai", model="m", base_url="http://b/v1", max_failed_share=0.9)
    assert judge_identity(judge) == judge_identity(elsewhere)
    for other in (
        JudgeConfig(kind="openai", model="n"),
        JudgeConfig(kind="openai", model="m", temperature=1.0),
        JudgeConfig(kind="openai", model="m", form="batched"),
    ):
        assert judge_identity(other) != judge_identity(judge)
    assert judge_identity(judge, "older") != judge_identity(judge), "its prompts were others"


def test_a_rubric_set_is_added_to_instance_rubrics() -> None:
    for had, gets in (
        ("instance", "instance+static"),
        ("instance+static", "instance+static"),
        ("static", "static"),
        ("none", "static"),
    ):
        assert rubrics_of("v3", RewardConfig(rubric_source=had)).rubric_source == gets
    assert rubrics_of("static:v3", RewardConfig()).rubric_source == "static"
    assert rubrics_of("none", RewardConfig()).rubric_source == "none"


def test_a_judge_is_given_by_name_pairs_or_file(tmp_path: Any) -> None:
    base = RecipeConfig(
        judge=JudgeConfig(kind="openai", model="big", revision="r1", base_url="http://a/v1")
    )
    file = tmp_path / "strict.yaml"
    file.write_text("judge: {kind: openai, model: small, base_url: 'http://b/v1'}\n")
    extra = 'extra_body={"a": 1, "b": 2}'
    specs = ("lexical", str(file), f"model=org/other,{extra}", "prompt=v1,temperature=0.5")
    lexical, strict, other, own = make_settings(base, RescoreOptions(judges=specs))
    assert [s.name for s in (lexical, strict)] == ["judge=lexical", "judge=strict"]
    assert strict.config.judge.model == "small"
    assert other.config.judge.base_url == "http://a/v1", "asked where the run's own judge is"
    assert other.config.judge.revision is None, "a revision is one of its model"
    assert json.loads(other.config.judge.extra_body) == {"a": 1, "b": 2}
    assert (own.config.judge.model, own.config.judge.temperature) == ("big", 0.5)
    with pytest.raises(ConfigurationError, match="gpt is not understood"):
        make_settings(base, RescoreOptions(judges=("gpt",)))


def test_the_file_of_a_judge_is_read_like_a_recipe(tmp_path: Any) -> None:
    """Its prompts lie beside it, and further fields of requests are written as YAML."""
    (tmp_path / "prompts").mkdir()
    file = tmp_path / "mine.yaml"
    file.write_text(
        "judge: {kind: openai, model: m, base_url: 'http://b/v1', prompt: ./prompts, "
        "extra_body: {chat_template_kwargs: {enable_thinking: false}}}\n"
    )
    _, judge = judge_of(str(file), RecipeConfig())
    assert judge.prompt == str(tmp_path / "prompts")
    assert json.loads(judge.extra_body) == {"chat_template_kwargs": {"enable_thinking": False}}


def test_the_address_of_a_judge_is_no_setting() -> None:
    base = RecipeConfig(judge=JudgeConfig(kind="openai", model="m", base_url="http://a/v1"))
    where = ("judge.base_url=http://b/v1", "judge.concurrency=3")
    assert make_settings(base, RescoreOptions(overrides=where)) == []
    assert own_setting(base, where).config.judge.base_url == "http://b/v1"
    (setting,) = make_settings(
        base, RescoreOptions(overrides=(*where, "reward.verification_reward=1"))
    )
    assert setting.name == "reward.verification_reward=1"
    assert setting.config.judge.concurrency == 3


# ---------------------------------------------------------------- matrix, tables


def policy(totals: Sequence[float], name: str = "") -> list[StoredRollout]:
    return [rollout(f"g/p{i}", 0, text=name) for i in range(len(totals))]


def test_each_setting_ranks_the_policies() -> None:
    a, b = [1.0, 2.0, 3.0, 2.5], [0.0, 1.1, 2.2, 1.4]
    values = {"a": {"own": a, "other": b}, "b": {"own": b, "other": a}}
    found = make_matrix("total", {n: policy(a) for n in values}, values, resamples=50)
    assert found["ranks"] == {"own": {"a": 1, "b": 2}, "other": {"b": 1, "a": 2}}
    assert found["cells"]["a"]["own"].value == pytest.approx(2.125)


def test_equal_policies_share_a_rank() -> None:
    same = [0.1 + 0.2, 0.5]
    values = {"a": {"own": same, "x": same}, "b": {"own": [0.3, 0.5], "x": same}}
    found = make_matrix("total", {n: policy(same) for n in values}, values, resamples=5)
    assert found["ranks"]["own"] == {"a": 1, "b": 1}


def test_agreement_is_of_what_both_have_judged() -> None:
    def judged(scores: Sequence[float | None]) -> tuple[dict[str, Any], ...]:
        return tuple(
            {"kind": "rubric", "title": f"T{i}", "criterion": f"c{i}", "score": s, "detail": ""}
            for i, s in enumerate(scores)
        )

    rollouts = [rollout(f"g{i}", 0) for i in range(10)]
    first, second = (
        Scores([RewardResult("scored", 1.0, {}, judged(given))] * 10, [None] * 10)
        for given in ([1.0, 0.5], [1.0, None])
    )
    (kind,) = judges_agree(rollouts, first, second, resamples=20)
    assert (kind["kind"], kind["pairs"]) == ("rubric", 10)
    assert kind["left_out"] == 10, "a failed judgement agrees with nothing"
