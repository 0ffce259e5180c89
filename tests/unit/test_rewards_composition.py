"""Settings of the reward: totals and advantages by vectors and by properties."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from refiner_core.contract.config import PenaltiesConfig, RewardConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.types import JudgeRequest
from refiner_core.judges import LexicalJudge
from refiner_core.rewards import RewardInput, compute_rewards
from refiner_core.rewards.combine import aggregate_rubrics
from refiner_core.rewards.combine import total_reward as total_of_components
from refiner_core.rewards.course import PRICES, prices_of
from refiner_core.rubrics import Rubric, load_rubric_set
from refiner_core.training.rollouts.rollout import group_advantages
from tests.support.rewarding import EVIDENCE, ScriptedJudge, hashed_judge, reward_of, rollout

GOLDEN = Path(__file__).parent / "golden" / "rewards.json"
AGGREGATIONS = ("weighted_mean", "signed_mean", "positive_sum")
NORMALISATIONS = ("standard", "centered", "sample_std")

# ---------------------------------------------------------------- vectors

#: judge 0.6, citation 0.5, format bonus 0.75, scale 10: (citation weight, with the citation reward,
#: combination, gated) -> total, worked out by hand.
VECTORS: dict[tuple[float, bool, str, bool], float] = {
    (0.2, True, "convex", False): 5.8,  # 10 (0.8 x 0.6 + 0.2 x 0.5)
    (0.2, True, "convex", True): 4.6,  # 10 (0.8 x 0.45 + 0.2 x 0.5): the gate is on the judge term
    (0.2, True, "additive", False): 7.0,  # 10 (0.6 + 0.2 x 0.5)
    (0.2, True, "additive", True): 5.5,
    (0.5, True, "convex", False): 5.5,
    (0.5, True, "convex", True): 4.75,
    (0.5, True, "additive", False): 8.5,
    (0.5, True, "additive", True): 7.0,
    (0.0, True, "convex", False): 6.0,
    (0.0, True, "additive", False): 6.0,
    (1.0, True, "convex", False): 5.0,
    (1.0, True, "convex", True): 5.0,
    (1.0, True, "additive", False): 11.0,  # additive leaves [0, scale]
    (0.2, False, "convex", False): 6.0,  # off means w = 0, not 1 - w of the judge term
    (0.2, False, "convex", True): 4.5,
    (0.2, False, "additive", False): 6.0,
    (0.2, False, "additive", True): 4.5,
}


def total_reward(
    reward: RewardConfig, *, judge: float | None, citation: float, bonus: float, stopped: bool
) -> float:
    """The total of components; ``judge`` None: there are no rubrics."""
    components = {
        "rubric": judge or 0.0,
        "no_rubrics": float(judge is None),
        "citation": citation,
        "format_bonus": bonus,
        **dict.fromkeys(prices_of(reward.penalties), 1.0 - bonus),
    }
    return total_of_components(components, reward, stopped)


@pytest.mark.parametrize("settings", VECTORS)
def test_totals_worked_out_by_hand(settings: tuple[float, bool, str, bool]) -> None:
    weight, citations, combination, gated = settings
    reward = RewardConfig(
        apply_paper_citation_reward=citations,
        paper_citation_weight=weight,
        combination=combination,
        gate_judge_score_with_format_bonus=gated,
    )

    def total(changed: RewardConfig, judge: float | None, *, stopped: bool = True) -> float:
        return total_reward(changed, judge=judge, citation=0.5, bonus=0.75, stopped=stopped)

    for scale in (10.0, 1.0, 0.0):
        scaled = replace(reward, verification_reward=scale)
        assert total(scaled, 0.6) == pytest.approx(VECTORS[settings] * scale / 10)
    assert total(reward, None) == (5.0 if citations else 0.0), "citations alone, without rubrics"
    for judge in (0.6, None):
        assert total(reward, judge, stopped=False) == total(reward, judge)
        for value in (0.0, -1.5, 25.0):
            strict = replace(reward, non_stop_penalty=True, non_stop_penalty_value=value)
            assert total(strict, judge, stopped=False) == value
            assert total(strict, judge) == total(reward, judge)


def test_penalties_worked_out_by_hand() -> None:
    prices = PenaltiesConfig(**dict.fromkeys(PRICES, 1.0), long_span_words=2, length_words=4)
    text = (
        "pre <answer>Lead words here<snippet id=a>one two three four</snippet>"
        "<snippet id=z>One two three four</snippet></answer>"
    )
    prompt = "<snippet id=a>one two three four</snippet><snippet id=b>x y</snippet>"
    half = ScriptedJudge(lambda request: 0.5)
    result = reward_of(rollout(text, prompt=prompt), half, penalties=prices)
    measures = {n: v for n, v in result.components.items() if n.startswith("penalty_")}
    assert measures == pytest.approx(
        {
            "penalty_copied": 8 / 11,  # words of the claims; the lead has three
            "penalty_copied_sources": 4 / 6,
            "penalty_uncited": 2 / 3,  # lead, and a source that does not exist
            "penalty_outside": 4 / len(text),
            "penalty_long_spans": 4 / 11,
            "penalty_unsupported": 1.0,
            "penalty_repeated": 1 / 3,
            "penalty_length": 8 / 12,
            "penalty_abstention": 0.0,
        }
    )
    assert result.total == 0, "all prices together take no more than the score"
    components = {"rubric": 0.6, "citation": 0.5, "no_rubrics": 0.0, "format_bonus": 1.0}
    for price, total in ((0.1, 5.8 - 0.8), (0.5, 5.8 - 4.0), (1.0, 0.0)):
        reward = RewardConfig(penalties=PenaltiesConfig(copied=price))
        found = total_of_components({**components, "penalty_copied": 0.8}, reward, True)
        assert found == pytest.approx(total)
    priced = RewardConfig(penalties=PenaltiesConfig(copied=1.0))
    low = {**components, "rubric": -0.6, "penalty_copied": 0.8}
    assert total_of_components(low, priced, True) == total_of_components(low, RewardConfig(), True)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("weighted_mean", 2.2 / 3.5), ("signed_mean", 0.7 / 3.5), ("positive_sum", 0.7 / 2.0)],
)
def test_aggregations_worked_out_by_hand(aggregation: str, expected: float) -> None:
    scores = [
        (Rubric("a", "d", "positive", 1.5), 1.0),
        (Rubric("b", "d", "positive", 0.5), 0.0),
        (Rubric("c", "d", "negative", 1.0), 0.5),
        (Rubric("d", "d", "negative", 0.5), 0.6),
        (Rubric("e", "d", "negative", 0.0), 1.0),  # weight 0: judged, counts nothing
    ]
    # flipped: 1.5 x 1 + 0.5 x 0 + 1 x 0.5 + 0.5 x 0.4 = 2.2; signed: 1.5 - 0.5 - 0.3 = 0.7
    assert aggregate_rubrics(scores, aggregation) == pytest.approx(expected)
    assert aggregate_rubrics([], aggregation) is None


def test_whole_rollouts_keep_their_components() -> None:
    """Stored rollouts and cards depend on these names and values."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    reward = replace(RewardConfig(), **golden["reward"])
    for case in golden["cases"]:
        item = rollout(case["text"], golden["rubrics"], golden["prompt"], case["stopped"])
        (result,) = compute_rewards([item], reward, LexicalJudge())
        assert result.status == case["status"], case["why"]
        assert dict(result.components) == pytest.approx(case["components"]), case["why"]


# ---------------------------------------------------------------- what may come in

UNIT = st.floats(0, 1)
SETTINGS = st.builds(
    RewardConfig,
    verification_reward=st.sampled_from([1.0, 10.0, 0.3]),
    apply_paper_citation_reward=st.booleans(),
    paper_citation_weight=st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]),
    combination=st.sampled_from(["convex", "additive"]),
    gate_judge_score_with_format_bonus=st.booleans(),
    rubric_source=st.sampled_from(["instance", "instance+static"]),
    instance_rubrics_only=st.booleans(),
    rubric_aggregation=st.sampled_from(AGGREGATIONS),
    penalties=st.sampled_from(
        [PenaltiesConfig(), PenaltiesConfig(**dict.fromkeys(PRICES, 0.1)),
         PenaltiesConfig(**dict.fromkeys(PRICES, 1.0), long_span_words=1, length_words=2)]
    ),
)  # fmt: skip
SCORED = st.lists(
    st.tuples(
        st.builds(
            Rubric,
            title=st.just("t"),
            description=st.just("d"),
            polarity=st.sampled_from(["positive", "negative"]),
            weight=st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.0, 7.0]),
        ),
        UNIT,
    ),
    max_size=6,
)
SPANS = st.sampled_from(
    [
        "Lead",
        "some plain statement",
        "<snippet id=a>one</snippet>",
        '<snippet id="a, b">two</snippet>',
        "<snippet id=z>three</snippet>",
        "<snippet ids=a>four</snippet>",
        "<snippet id=b>five",
        "</snippet>",
    ]
)
TEXTS = st.lists(SPANS, min_size=1, max_size=5).map(
    lambda spans: f"<answer>{' '.join(spans)}</answer>"
)
RUBRICS = st.lists(st.sampled_from([1.0, 2.0, -1.0, 0.5, 0.0]), max_size=4).map(
    lambda weights: [{"description": f"says {i}", "weight": w} for i, w in enumerate(weights)]
)
SEEDS = st.integers(0, 2**31)

# ---------------------------------------------------------------- bounds


@settings(deadline=None)
@given(SCORED, UNIT, UNIT, SETTINGS)
def test_totals_stay_within_the_bounds_of_their_settings(scores, citation, bonus, reward) -> None:
    """``additive`` goes up to scale x (1 + w); signed aggregations go below 0."""
    judge = aggregate_rubrics(scores, reward.rubric_aggregation)
    faults = sum(r.weight for r, _ in scores if r.polarity == "negative")
    lowest = {"weighted_mean": 0.0, "signed_mean": -1.0, "positive_sum": -faults}
    if judge is not None:
        assert lowest[reward.rubric_aggregation] - 1e-9 <= judge <= 1 + 1e-9
    total = total_reward(reward, judge=judge, citation=citation, bonus=bonus, stopped=True)
    added = reward.paper_citation_weight if reward.combination == "additive" else 0.0
    high = reward.verification_reward * (1 + added)
    low = reward.verification_reward * min(lowest[reward.rubric_aggregation], 0.0)
    assert low - 1e-9 <= total <= high + 1e-9


# ---------------------------------------------------------------- monotonicity


@settings(deadline=None, max_examples=40)
@given(TEXTS, RUBRICS, SEEDS, st.integers(0, 30), SETTINGS)
def test_a_better_judgement_of_anything_never_lowers_the_reward(
    text: str, rubrics: list[Any], seed: int, position: int, reward: RewardConfig
) -> None:
    """Through the whole computation: rubrics of both signs and all three citation questions."""
    base = hashed_judge(seed)
    item = rollout(text, {"rubrics": rubrics})
    (before,) = compute_rewards([item], reward, base)
    assume(base.asked)
    victim = base.asked[position % len(base.asked)]
    faults = {r["description"] for r in rubrics if r["weight"] < 0}
    faults |= {r.description for r in load_rubric_set("v3").rubrics if r.polarity == "negative"}
    bad_if_true = victim.kind == "citation_needed" or victim.reference in faults
    better = ScriptedJudge(lambda r: float(not bad_if_true) if r == victim else base.script(r))
    (after,) = compute_rewards([item], reward, better)
    assert after.total is not None
    assert before.total is not None
    assert after.total >= before.total - 1e-9


# ---------------------------------------------------------------- order, polarity, weight 0


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(TEXTS, RUBRICS, st.booleans()), max_size=4), SEEDS, SETTINGS,
       st.randoms())  # fmt: skip
def test_a_reward_does_not_depend_on_the_rest_of_the_batch(rows, seed, reward, rng) -> None:
    items = [rollout(t, {"rubrics": r}, stopped=stopped) for t, r, stopped in rows]
    alone = [compute_rewards([item], reward, hashed_judge(seed))[0] for item in items]
    order = list(range(len(items)))
    rng.shuffle(order)
    mixed = compute_rewards([items[i] for i in order], reward, hashed_judge(seed))
    assert mixed == [alone[i] for i in order]


@settings(deadline=None)
@given(SCORED, UNIT, st.randoms(), st.sampled_from(["positive", "negative"]),
       st.sampled_from(AGGREGATIONS))  # fmt: skip
def test_neither_order_nor_weightless_rubrics_change_an_aggregate(
    scores: list[Any], score: float, rng: random.Random, polarity: Any, aggregation: str
) -> None:
    """Equal to the last bit: otherwise rollouts that are judged alike would differ."""
    expected = aggregate_rubrics(scores, aggregation)
    mixed = [*scores, (Rubric("t", "d", polarity, 0.0), score)]
    rng.shuffle(mixed)
    assert aggregate_rubrics(mixed, aggregation) == expected
    other = {"positive": "negative", "negative": "positive"}
    turned = [(replace(r, polarity=other[r.polarity]), 1.0 - s) for r, s in scores]
    # In the weighted mean, a fault at s is a virtue at 1 - s.
    assert aggregate_rubrics(scores) == pytest.approx(aggregate_rubrics(turned), abs=1e-12)


# ---------------------------------------------------------------- advantages

GROUPS = st.lists(st.tuples(TEXTS, st.booleans()), min_size=2, max_size=6)


@settings(deadline=None, max_examples=40)
@given(GROUPS, RUBRICS, SEEDS, st.integers(0, 99), SETTINGS, st.sampled_from(NORMALISATIONS))
def test_a_failed_judgement_never_raises_an_advantage(
    group: list[Any], rubrics: list[Any], seed: int, position: int, reward: RewardConfig, how: Any
) -> None:
    """Rollouts that asked the question get no advantage; the others have those of a group in which
    the failed ones never were."""
    honest = hashed_judge(seed)
    items = [rollout(text, {"rubrics": rubrics}, stopped=stopped) for text, stopped in group]
    whole = compute_rewards(items, reward, honest)
    assume(honest.asked)
    victim = honest.asked[position % len(honest.asked)]
    failing = ScriptedJudge(lambda r: None if r == victim else honest.script(r))
    results = compute_rewards(items, reward, failing)

    lost = {i for i, item in enumerate(items) if victim in _asked_by(item, reward)}
    assert {i for i, r in enumerate(results) if r.total is None} == lost
    assert [r.total for i, r in enumerate(results) if i not in lost] == [
        r.total for i, r in enumerate(whole) if i not in lost
    ]
    advantages = group_advantages([r.total for r in results], how)
    without = group_advantages([r.total for i, r in enumerate(whole) if i not in lost], how)
    assert all(advantages.values[i] is None for i in lost)
    assert [a for i, a in enumerate(advantages.values) if i not in lost] == list(without.values)


def _asked_by(item: RewardInput, reward: RewardConfig) -> list[JudgeRequest]:
    judge = hashed_judge(0)
    compute_rewards([item], reward, judge)
    return judge.asked


# ---------------------------------------------------------------- stored rollouts


@settings(deadline=None, max_examples=60)
@given(
    st.one_of(TEXTS, st.sampled_from(["<answer>cut", "<answer></answer>", "words"])),
    st.sampled_from([EVIDENCE, "Only a question."]),
    RUBRICS, SETTINGS, SETTINGS, st.booleans(), st.sampled_from([0.0, -2.0]), st.booleans(), SEEDS,
)  # fmt: skip
def test_stored_components_give_the_total_under_other_settings(
    text: str, prompt: str, rubrics: list[Any], first: RewardConfig, second: RewardConfig,
    penalty: bool, value: float, stopped: bool, seed: int,
) -> None:  # fmt: skip
    """Scale, citation term, gate and penalty change; the rubrics are the same."""
    second = replace(
        second,
        rubric_source=first.rubric_source,
        instance_rubrics_only=first.instance_rubrics_only,
        rubric_aggregation=first.rubric_aggregation,
        penalties=first.penalties,
        non_stop_penalty=penalty,
        non_stop_penalty_value=value,
    )
    item = rollout(text, {"rubrics": rubrics}, prompt, stopped)
    (before,) = compute_rewards([item], first, hashed_judge(seed))
    (after,) = compute_rewards([item], second, hashed_judge(seed))
    stored = json.loads(json.dumps(dict(before.components)))
    assert total_of_components(stored, first, stopped) == before.total == stored["total"]
    assert total_of_components(stored, second, stopped) == after.total


def test_an_unscored_rollout_has_no_total_under_any_setting() -> None:
    item = rollout("<answer><snippet id=a>one</snippet></answer>")
    result = reward_of(item, ScriptedJudge(lambda r: None))
    assert result.total is None
    padded = {**result.components, "rubric": None, "citation": float("nan")}  # as in tables
    for components in (result.components, padded):
        with pytest.raises(DataError, match=r"rubric, citation.*unscored"):
            total_of_components(components, RewardConfig(), True)
