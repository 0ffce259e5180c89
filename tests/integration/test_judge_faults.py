"""Rewards under a faulty judge: correct scores, advantages and counts.

Each test rewards a batch of rollouts over HTTP with a server that fails in its own way, and
compares it with a run without faults: every scored rollout has the total of that run, advantages
are those of that run over the same scored rollouts, exactly the rollouts with a failed judgement
are unscored, the judge's counts are those of the server, and nothing gets stuck.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from refiner_core.contract.config import JudgeConfig, RewardConfig
from refiner_core.contract.errors import JudgeOutage
from refiner_core.contract.types import JudgeRequest, JudgeUsage, PromptRow, RewardResult
from refiner_core.http.fleet import BreakerSettings
from refiner_core.judges.context import JudgeContext, MemoryStore
from refiner_core.judges.openai import OpenAIJudge
from refiner_core.rewards import RewardInput, compute_rewards
from refiner_core.training.rollouts.rollout import group_advantages
from tests.support.judge_server import (
    JudgeProcess,
    JudgeServer,
    Reply,
    completion,
    digest_of,
    verdict,
)
from tests.support.rewarding import ScriptedJudge

pytestmark = pytest.mark.timeout(300)

PROMPTS, SAMPLES = 16, 4
REWARD = RewardConfig(rubric_source="instance")
QUICK = BreakerSettings(first_cooldown_s=0.02, longest_cooldown_s=0.1)
Body = dict[str, Any]


# ---------------------------------------------------------------- rollouts


@functools.cache
def rollouts() -> tuple[RewardInput, ...]:
    """16 prompts x 4 samples with two rubrics, two cited claims and one uncited statement each."""
    made = []
    for p in range(PROMPTS):
        rubrics = {
            "positive_rubrics": [{"title": "a", "description": f"It names the crop of {p}"}],
            "negative_rubrics": [{"title": "b", "description": f"It pads {p}"}],
        }
        evidence = "".join(
            f"<snippet id=S_{n}>In {p} they grow crop {n}.</snippet>" for n in range(3)
        )
        prompt = PromptRow(
            sample_id=f"row-{p}",
            question=f"What grows in {p}?",
            prompt_text=f"<tool_output>{evidence}</tool_output>",
            prompt_ids=(1,),
            rubrics=json.dumps(rubrics),
        )
        for s in range(SAMPLES):
            text = (
                f"<answer>They say of {p} in {s} this. <snippet id=S_{s % 3}>Crop {s} grows"
                f"</snippet> and <snippet id=S_1,S_2>so does {s}</snippet></answer>"
            )
            made.append(RewardInput(prompt, text, stopped=True))
    return tuple(made)


@functools.cache
def faultless() -> tuple[RewardResult, ...]:
    with JudgeServer(lambda body, call: verdict(body)) as server, a_judge(server.base_url) as judge:
        results = compute_rewards(rollouts(), REWARD, judge)
        assert judge.usage().answers == {200: len(server.bodies)}
    assert {r.status for r in results} == {"scored"}
    assert len({r.total for r in results}) > 5, "scores differ, else nothing below is a test"
    return tuple(results)


def a_judge(base_url: str, around: JudgeContext | None = None, **changes: Any) -> OpenAIJudge:
    config = JudgeConfig(kind="openai", model="m", base_url=base_url, timeout_s=60.0)
    config = replace(config, **({"structured_output": "none", "concurrency": 64} | changes))
    return OpenAIJudge(config, around, first_backoff_s=0.01, breaker=QUICK)


def hold_to_a_faultless_run(results: list[RewardResult]) -> int:
    """Check the promises of any step; return the number of unscored rollouts."""
    truth = faultless()
    for result, true in zip(results, truth, strict=True):
        failed = any(judgement["status"] == "failed" for judgement in result.judgements)
        assert (result.status == "unscored") == failed
        assert result.total == (None if failed else true.total)
    for p in range(PROMPTS):
        group = slice(p * SAMPLES, (p + 1) * SAMPLES)
        masked = [
            None if r.total is None else t.total
            for r, t in zip(results[group], truth[group], strict=True)
        ]
        ours = group_advantages([r.total for r in results[group]])
        assert ours == group_advantages(masked)
    return sum(result.status == "unscored" for result in results)


def hold_to_the_server(usage: JudgeUsage, *servers: JudgeServer) -> None:
    """Check that judge and servers count the same answers, lost connections and hung calls."""
    kinds: Counter[str] = Counter()
    for server in servers:
        kinds += server.kinds
    answers = {int(kind): n for kind, n in kinds.items() if kind.isdigit()}
    lost = {"connection": kinds["dropped"], "timeout": kinds["hung"] + kinds["dripped"]}
    lost["truncated"] = kinds["truncated"]
    assert usage.answers == answers
    assert usage.lost == {reason: n for reason, n in lost.items() if n}
    assert usage.calls == kinds.total()
    scored_by_calls = usage.asked - usage.stored - usage.shared - usage.failed
    assert scored_by_calls == answers.get(200, 0) - sum(usage.unusable.values())


# ---------------------------------------------------------------- a faulty server


class Faults:
    """Bad replies to some tries of some questions; the question decides which."""

    def __init__(self, bad: Sequence[Reply], share: float, *, always: bool = False) -> None:
        self.bad, self.share, self.always = bad, share, always
        self.tries: Counter[int] = Counter()

    def __call__(self, body: Body, call: int) -> Reply:
        question = digest_of(body)
        number = 0 if self.always else self.tries[question]
        self.tries[question] += 1
        drawn = digest_of(body, "fault", number)
        if drawn % 1000 < 1000 * self.share:
            return self.bad[drawn // 1000 % len(self.bad)]
        return verdict(body)


PASSING = (
    Reply(status=500, body="a traceback"),
    Reply(status=503, body="busy"),
    Reply(status=429),
    Reply(status=429, headers={"Retry-After": "0"}),
    Reply(status=429, headers={"Retry-After": formatdate(0, usegmt=True)}),
    Reply(drop=True),
    Reply(truncate=True),
    Reply(body="<html>not what you wanted</html>"),
    completion('{"score": 10}'),
)


def test_bad_replies_to_thirty_percent_of_tries_cost_no_score() -> None:
    faults = Faults(PASSING, 0.3)
    with JudgeServer(faults) as server, a_judge(server.base_url, max_retries=9) as judge:
        unscored = hold_to_a_faultless_run(compute_rewards(rollouts(), REWARD, judge))
        usage = judge.usage()
        hold_to_the_server(usage, server)
    assert len(server.kinds) == 6, "every kind of fault occurred"
    assert unscored == 0
    assert usage.retries > 50
    assert usage.failed == 0


@pytest.mark.parametrize("share", [0.03, 0.1])
def test_items_that_always_fail_take_no_other_with_them(share: float) -> None:
    """More items than open a breaker fail every try, each in its own way."""
    bad = (
        *(Reply(status=500), Reply(status=503), Reply(status=400), Reply(drop=True)),
        completion('{"score": 10}'),
        completion('{"score": 2}', finish_reason="length"),
    )
    with (
        JudgeServer(Faults(bad, share, always=True)) as server,
        a_judge(server.base_url, max_retries=2, outage_patience_s=20.0) as judge,
    ):
        unscored = hold_to_a_faultless_run(compute_rewards(rollouts(), REWARD, judge))
        hold_to_the_server(judge.usage(), server)
    assert 0 < unscored < 1000 * share
    assert judge.usage().failed >= 5


# ---------------------------------------------------------------- servers that come and go


@dataclass
class Later:
    """An action in its own thread, once a condition holds."""

    when: Callable[[], bool]
    what: Callable[[], None]

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.when():
            time.sleep(0.002)
        self.what()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[JudgeProcess]:
    with JudgeProcess(tmp_path, delay_s=0.02) as running:
        yield running


def test_a_server_killed_and_restarted_during_a_batch_costs_only_time(
    process: JudgeProcess,
) -> None:
    told: list[str] = []
    around = JudgeContext(on_pause=told.append)
    with a_judge(process.base_url, around, concurrency=16) as judge:

        def restart() -> None:
            process.kill()
            time.sleep(0.5)
            process.start()

        later = Later(lambda: process.received > 80, restart)
        assert hold_to_a_faultless_run(compute_rewards(rollouts(), REWARD, judge)) == 0
        later.thread.join()
        usage = judge.usage()
    assert usage.calls == sum(usage.answers.values()) + sum(usage.lost.values())
    assert process.received - 16 <= usage.answers[200] <= process.received
    assert usage.failed == 0
    assert usage.paused_s > 0.2
    assert [bool(text) for text in told] == [True, False]


def test_one_of_two_servers_dies_and_comes_back(process: JudgeProcess) -> None:
    told: list[str] = []
    with JudgeServer(lambda body, call: verdict(body, 0.02)) as other:
        around = JudgeContext(on_pause=told.append)
        judge = a_judge(other.base_url, around, base_urls=(process.base_url,), concurrency=16)
        with judge:
            later = Later(lambda: process.received > 20, process.kill)
            assert hold_to_a_faultless_run(compute_rewards(rollouts(), REWARD, judge)) == 0
            later.thread.join()
            assert not told, "one that answers is enough"
            before, alone = process.received, len(other.bodies)
            process.start()
            other_rows = [
                item._replace(prompt=replace(item.prompt, question="Another?"))
                for item in rollouts()
            ]
            results = compute_rewards(other_rows, REWARD, judge)
            assert {r.status for r in results} == {"scored"}
        assert process.received - before > 50, "it is asked again"
        assert len(other.bodies) - alone > 50


def test_after_an_outage_the_next_attempt_asks_only_the_rest(process: JudgeProcess) -> None:
    store = MemoryStore()
    with a_judge(
        process.base_url, JudgeContext(store=store), outage_patience_s=0.5, concurrency=16
    ) as judge:
        later = Later(lambda: process.received > 100, process.kill)
        with pytest.raises(JudgeOutage, match=f"127.0.0.1:{process.port}"):
            compute_rewards(rollouts(), REWARD, judge)
        later.thread.join()
        scored = judge.usage().answers[200]
    before = process.received
    process.start()
    with a_judge(process.base_url, JudgeContext(store=store)) as judge:
        assert hold_to_a_faultless_run(compute_rewards(rollouts(), REWARD, judge)) == 0
        usage = judge.usage()
    assert scored > 50
    assert usage.calls == process.received - before
    assert usage.calls + scored == len({d for r in rollouts() for d in _questions(r)})


def test_a_gateway_whose_backend_is_dead_is_an_outage_and_no_score() -> None:
    """It answers /models, so that only calls tell; no item is failed for it."""
    gone = threading.Event()

    def script(body: Body, call: int) -> Reply:
        if call > 100:
            gone.set()
        return Reply(status=503) if gone.is_set() else verdict(body, 0.005)

    store = MemoryStore()
    with (
        JudgeServer(script) as server,
        a_judge(server.base_url, JudgeContext(store=store), outage_patience_s=0.6) as judge,
        pytest.raises(JudgeOutage, match="HTTP 503"),
    ):
        compute_rewards(rollouts(), REWARD, judge)
    assert server.probes > 1
    assert judge.usage().failed == 0


def _questions(item: RewardInput) -> list[JudgeRequest]:
    judge = ScriptedJudge(lambda request: 1.0)
    compute_rewards([item], REWARD, judge)
    return judge.asked
