"""Streams of rewards: results of the batch, early judging, failures, and usage."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from infra.jobs.failures import budget_left, classify
from refiner_core.contract.config import JudgeConfig, RetryConfig, RewardConfig
from refiner_core.contract.errors import JudgeOutage, JudgeUnusable
from refiner_core.contract.records import Attempt
from refiner_core.contract.types import Judgement, JudgeRequest, JudgeUsage, PromptRow, RewardResult
from refiner_core.data.synthetic import generate_rows
from refiner_core.judges import LexicalJudge
from refiner_core.judges.calls import plan_calls, read_reply
from refiner_core.judges.context import (
    usage_between,
    usage_from_json,
    usage_metrics,
    usage_sum,
    usage_to_json,
)
from refiner_core.rewards import RewardInput, RewardStream, compute_rewards, require_scored
from tests.support.rewarding import ScriptedJudge
from tests.support.threaded_judge import ThreadedJudge

REWARD = RewardConfig(rubric_source="instance")
MALFORMED = "no answer at all"


def rollouts(n: int = 40) -> list[RewardInput]:
    """Answers of the embedded world, sound and flawed, a few of them malformed."""
    items = []
    for i, row in enumerate(generate_rows("sft", n, seed=5)):
        prompt, answer = (turn["content"] for turn in row["conversations"])
        text = MALFORMED if i % 9 == 4 else answer
        items.append(
            RewardInput(PromptRow(f"row-{i}", "q?", prompt, (), row["rubrics"]), text, True)
        )
    return items


def streamed(items: Sequence[RewardInput], judge: Any, order: Sequence[int]) -> list[RewardResult]:
    """Rewards of items that finish in another order than they stand in."""
    stream = RewardStream(REWARD, judge)
    for place in order:
        stream.add(place, items[place])
    return stream.results()


@pytest.fixture
def shuffled() -> list[int]:
    order = list(range(40))
    random.Random(3).shuffle(order)
    return order


@pytest.mark.parametrize("make_judge", [LexicalJudge, ThreadedJudge])
def test_the_order_in_which_rollouts_finish_changes_no_result(make_judge, shuffled):
    items = rollouts()
    expected = compute_rewards(items, REWARD, LexicalJudge())
    assert {r.status for r in expected} == {"scored", "malformed"}
    assert streamed(items, make_judge(), shuffled) == expected


def test_a_batch_is_one_call_for_any_judge_and_a_stream_for_one_that_cannot_stream(shuffled):
    items = rollouts()
    batch, stream = (ScriptedJudge(lambda request: 1.0) for _ in range(2))
    compute_rewards(items, REWARD, batch)
    streamed(items, stream, shuffled)
    assert stream.calls == batch.calls
    assert len(batch.calls) == 1
    judge = ThreadedJudge()
    compute_rewards(items, REWARD, judge)
    assert (judge.at_once, judge.submitted) == (1, [])


def test_a_judge_that_streams_has_each_rollout_before_the_next_is_there():
    judge, items = ThreadedJudge(), rollouts(4)
    judge.gate.clear()  # it has answered nothing yet: adding waits for no judge
    stream = RewardStream(REWARD, judge)
    assert stream.streams
    assert not RewardStream(REWARD, LexicalJudge()).streams
    for place, item in enumerate(items):
        stream.add(place, item)
        stream.add(place, item)  # once is enough
        assert len(judge.submitted) == place + 1
    judge.gate.set()
    assert stream.results() == compute_rewards(items, REWARD, LexicalJudge())
    assert judge.at_once == 0


def test_a_judge_that_loses_a_judgement_is_a_bug_and_no_reward():
    class Short:
        def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
            return LexicalJudge().judge(requests)[1:]

    for judge in (Short(), ThreadedJudge(Short())):
        with pytest.raises(RuntimeError, match=r"\d+ judgements for \d+ requests"):
            streamed(rollouts(2), judge, [0, 1])


# ---------------------------------------------------------------- too many failures


def unscored(*details: str) -> RewardResult:
    judgements = [{"status": "failed", "detail": detail} for detail in details]
    return RewardResult("unscored", None, {}, [{"status": "scored", "detail": ""}, *judgements])


def test_an_outage_names_its_failures_and_the_setting():
    results = [
        unscored("HTTP 500", "HTTP 500"),
        unscored("HTTP 500", "the score 7 is out of range"),
        *[RewardResult("scored", 1.0, {})] * 2,
    ]
    with pytest.raises(JudgeOutage, match=r"2 of 4 rollouts .*HTTP 500 \(3 times\); the score 7"):
        require_scored(results, 0.25, of="rollouts of a step")


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices": [{"message": {"content": "{\\"score\\": 0.5}"}, "finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"content": "Fully supported."}, "finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"content": "<think>Let me"}, "finish_reason": "length"}]}',
    ],
)
def test_a_judge_with_unusable_replies_is_no_outage(body: bytes):
    """A wait is of no use: the replies stay the same."""
    (call,) = plan_calls([JudgeRequest("citation_recall", "q", "t", "r")], JudgeConfig())
    reply = read_reply(body, call)
    assert reply.judgements is None
    said = f"gave up after 6 tries, last: {reply.detail}"
    with pytest.raises(
        JudgeUnusable, match=r"are no judgements: .*, on 2 of 2.*judge ask"
    ) as error:
        require_scored([unscored(said, said, "HTTP 500"), unscored(said)], 0.25, of="answers")
    assert ("enable_thinking" in error.value.fix) == (b"<think>" in body), "the cause has its fix"
    with pytest.raises(JudgeOutage) as outage:
        require_scored([unscored(said), unscored("HTTP 500")], 0.25, of="answers")
    assert not isinstance(outage.value, JudgeUnusable)


def test_unusable_replies_end_a_stage_after_two_attempts():
    attempts = [
        Attempt(n, "", "local", "", "", started_at="", resumed_from_step=10 * n,
                outcome=classify(JudgeUnusable("the score is none of (0, 2): 1")))
        for n in range(2)
    ]  # fmt: skip
    assert budget_left(attempts[:1], RetryConfig())
    assert not budget_left(attempts, RetryConfig())


# ---------------------------------------------------------------- what judging took


def test_usage_of_a_time_is_the_difference_and_times_add_up():
    before = JudgeUsage(asked=3, calls=4, answers={200: 3, 500: 1}, latency_s=2.0)
    now = JudgeUsage(
        asked=8, calls=10, answers={200: 8, 500: 1, 429: 1}, lost={"timeout": 2}, latency_s=5.0
    )
    between = usage_between(before, now)
    assert (between.asked, between.calls, between.latency_s) == (5, 6, 3.0)
    assert between.answers == {200: 5, 429: 1}
    assert usage_sum(before, between) == now
    assert usage_metrics(between)["judge/latency_mean_s"] == 0.5
    assert usage_metrics(JudgeUsage())["judge/latency_mean_s"] == 0.0


def test_usage_survives_a_checkpoint_and_one_that_counted_less():
    usage = JudgeUsage(asked=8, answers={200: 8, 500: 1}, unusable={"length": 2}, paused_s=1.5)
    kept = json.loads(json.dumps(usage_to_json(usage)))
    assert usage_from_json(kept) == usage
    del kept["paused_s"], kept["answers"]
    assert usage_from_json(kept) == JudgeUsage(asked=8, unusable={"length": 2})
    assert usage_from_json({}) == JudgeUsage()
