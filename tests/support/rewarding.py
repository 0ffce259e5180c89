"""Rewards of single rollouts under scripted judges."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from refiner_core.contract.config import RewardConfig
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.types import Judgement, JudgeRequest, PromptRow, RewardResult
from refiner_core.rewards import RewardInput, compute_rewards

EVIDENCE = (
    "<query>q</query><tool_output>"
    "<snippet id=a>evidence a</snippet><snippet id=b>evidence b</snippet>"
    "</tool_output>"
)
POSITIVE = {"title": "P", "description": "says P"}
NEGATIVE = {"title": "N", "description": "says N"}
BOTH = {"positive_rubrics": [POSITIVE], "negative_rubrics": [NEGATIVE]}
GOOD = "<answer><snippet id=a>claim one</snippet></answer>"


class ScriptedJudge:
    """Scores by a function; None is a failure. Keeps its requests."""

    def __init__(self, script: Callable[[JudgeRequest], float | None]) -> None:
        self.script = script
        self.calls: list[list[JudgeRequest]] = []

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        self.calls.append(list(requests))
        scores = [self.script(r) for r in requests]
        return [Judgement("failed" if s is None else "scored", s) for s in scores]

    @property
    def asked(self) -> list[JudgeRequest]:
        """All requests, in order."""
        return [request for call in self.calls for request in call]


def by_kind(**scores: float | None) -> ScriptedJudge:
    """Scores by kind; rubrics by title letter (`P`, `N`), citations by `kind_lastword` or kind."""

    def script(request: JudgeRequest) -> float | None:
        if request.kind == "rubric":
            return scores.get(request.reference[-1], 1.0)
        kind = request.kind.removeprefix("citation_")
        return scores.get(f"{kind}_{request.text.split()[-1]}", scores.get(kind, 1.0))

    return ScriptedJudge(script)


def hashed_judge(seed: int) -> ScriptedJudge:
    """A pseudo-random score for each request, always the same one."""

    def script(request: JudgeRequest) -> float:
        steps = 2 if request.kind in ("rubric", "citation_recall") else 1
        drawn = derive_seed(seed, request.kind, request.text, request.reference)
        return drawn % (steps + 1) / steps

    return ScriptedJudge(script)


def rollout(
    text: str,
    rubrics: Any = BOTH,
    prompt: str = EVIDENCE,
    stopped: bool = True,
    mode: str = "answer_only",
) -> RewardInput:
    """One completion; ``rubrics`` as an object or as JSON text."""
    written = rubrics if isinstance(rubrics, str) else json.dumps(rubrics)
    return RewardInput(PromptRow("row-1", "q?", prompt, (), written, mode), text, stopped)


def reward_of(item: RewardInput, judge: ScriptedJudge | None = None, **config: Any) -> RewardResult:
    """The reward of a rollout; without a judge, one that says yes to everything."""
    (result,) = compute_rewards([item], replace(RewardConfig(), **config), judge or by_kind())
    return result
