"""A trial of the adapter to tau2-bench: whole conversations over HTTP on the importable `tau2`.

In: a domain and the user's words. Out: facts as JSON. Unit tests run it on the small double in
``tests/support/tau2_fake``; ``python -m tests.support.tau2_contract DOMAIN...`` runs it on the
package that a contributor has installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from refiner_core.contract.config import EnvironmentConfig, UserConfig
from refiner_core.contract.types import Judgement, JudgeRequest, JudgeUsage
from refiner_core.environments.protocol import Outcome, Step, Task, ToolCall
from refiner_core.environments.tau2 import Tau2Environment
from refiner_core.environments.tau2.episode import Tau2Episode
from tests.support.judge_server import JudgeServer, Reply

STOP = "###STOP###"
KEY_ENV = "TAU2_TEST_KEY"


def said(text: str | None, calls: Sequence[Mapping[str, Any]] = (), delay_s: float = 0.0) -> Reply:
    """A chat completion of a simulated user: words, or calls of tools."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": f"user_call_{number}", "type": "function", "function": dict(call)}
            for number, call in enumerate(calls)
        ]
    reason = "tool_calls" if calls else "stop"
    choice = {"index": 0, "message": message, "finish_reason": reason}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "user"}
    return Reply(body=json.dumps(body | {"choices": [choice]}), delay_s=delay_s)


class Talk:
    """A user with one reply per request; the last one repeats."""

    def __init__(self, *replies: Reply | str) -> None:
        self.replies = [r if isinstance(r, Reply) else said(r) for r in replies]
        self.asked = 0

    def __call__(self, body: Mapping[str, Any], number: int) -> Reply:
        self.asked += 1
        return self.replies[min(self.asked, len(self.replies)) - 1]


class YesJudge:
    """A judge with one score for every assertion; it keeps its requests."""

    def __init__(self, score: float | None = 1.0) -> None:
        self.score, self.requests = score, list[JudgeRequest]()

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        self.requests += requests
        status = "failed" if self.score is None else "scored"
        return [Judgement(status, self.score, "made up") for _ in requests]

    def usage(self) -> JudgeUsage:
        return JudgeUsage()


def user_at(url: str, **changes: Any) -> UserConfig:
    """A user of a server; no patience."""
    values = {"timeout_s": 20.0, "max_retries": 0, "api_key_env": KEY_ENV, **changes}
    return UserConfig(model="user", base_url=url, **values)


def environment_at(
    url: str, domain: str, judge: YesJudge | None = None, **changes: Any
) -> Tau2Environment:
    """The environment with a user at ``url``."""
    values = {"name": "tau2", "domains": (domain,), **changes}
    if judge is not None:
        values["nl_assertions"] = "judge"
    return Tau2Environment(EnvironmentConfig(**values), user_at(url), judge)


def gold_calls(task: Any) -> tuple[list[ToolCall], list[dict[str, Any]]]:
    """Calls of a task's reference: the agent's, and those of the user."""
    actions = list(task.evaluation_criteria.actions or ())
    agent = [ToolCall(a.name, dict(a.arguments)) for a in actions if a.requestor == "assistant"]
    user = [
        {"name": a.name, "arguments": json.dumps(a.arguments)}
        for a in actions
        if a.requestor == "user"
    ]
    return agent, user


def play(environment: Tau2Environment, task: Task, calls: Sequence[ToolCall]) -> Outcome:
    """The outcome of an episode of these calls."""
    episode = environment.episode(task)
    episode.reset(11)
    for call in calls:
        if episode.step(call).done:
            break
    outcome = episode.outcome()
    episode.close()
    return outcome


def try_domain(domain: str, split: str, most: int) -> dict[str, Any]:
    """Every task by its reference, and by doing nothing."""
    facts: dict[str, Any] = {"domain": domain, "tasks": 0, "solved": [], "idle": []}
    with JudgeServer(lambda b, n: talk(b, n)) as server:
        environment = environment_at(server.base_url, domain, train_split=split)
        for task in environment.tasks(split)[:most]:
            own = environment.episode(task).task
            agent, by_user = gold_calls(own)
            words = " ".join(own.evaluation_criteria.communicate_info or ()) or "It is done."
            calls = [*agent, ToolCall("respond", {"content": words}), ToolCall("done", {})]
            help_first = [ToolCall("respond", {"content": "Please do that on your side."})]
            for name, moves in (
                ("solved", [*(help_first if by_user else []), *calls]),
                ("idle", [ToolCall("done", {})]),
            ):
                helped = [said(None, [call]) for call in by_user]
                talk = Talk("Hello, I need help.", *helped, "I did that.", "Thank you.")
                facts[name].append(play(environment, task, moves).reward)
            facts["tasks"] += 1
        facts["version"] = environment.version
    return facts


def step_of(episode: Tau2Episode, name: str, **arguments: Any) -> Step:
    """One turn."""
    return episode.step(ToolCall(name, arguments))


if __name__ == "__main__":
    asked = [word.split(":") for word in sys.argv[1:]]
    print(json.dumps([try_domain(domain, split, int(most)) for domain, split, most in asked]))
