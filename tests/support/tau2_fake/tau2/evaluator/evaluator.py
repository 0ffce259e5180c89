"""Rewards of runs: the conversation is played again on a fresh domain."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from tau2.data_model.message import AssistantMessage, ToolMessage
from tau2.data_model.simulation import Check, RewardInfo, TerminationReason
from tau2.data_model.tasks import RewardType
from tau2.registry import registry


class EvaluationType(StrEnum):
    ALL = "all"


def evaluate_simulation(
    simulation: Any, task: Any, evaluation_type: EvaluationType, solo_mode: bool, domain: str
) -> RewardInfo:
    stopped = (TerminationReason.AGENT_STOP, TerminationReason.USER_STOP)
    if simulation.termination_reason not in stopped:
        note = f"Simulation terminated prematurely: {simulation.termination_reason.value}"
        return RewardInfo(reward=0.0, info={"note": note})
    criteria = task.evaluation_criteria
    if RewardType.NL_ASSERTION in criteria.reward_basis:
        raise RuntimeError("the package would now ask a model of its own choice")
    calls = [c for m in simulation.messages for c in getattr(m, "tool_calls", None) or ()]
    answers = [m for m in simulation.messages if isinstance(m, ToolMessage)]
    played = registry.get_env_constructor(domain)(solo_mode=solo_mode)
    for call, answer in zip(calls, answers, strict=True):
        assert played.get_response(call).content == answer.content
    wanted = registry.get_env_constructor(domain)(solo_mode=solo_mode)
    for action in criteria.actions or ():
        wanted.use(action.name, action.requestor, **action.arguments)
    actions = [_action(action, calls) for action in criteria.actions or ()]
    said = [
        m.content.lower().replace(",", "")
        for m in simulation.messages
        if isinstance(m, AssistantMessage) and m.content
    ]
    told = [_told(info, said) for info in criteria.communicate_info or ()]
    held = [
        {"env_assertion": a, "met": played.holds(a), "reward": float(played.holds(a))}
        for a in criteria.env_assertions or ()
    ]
    same = played.state() == wanted.state()
    parts = {
        RewardType.DB: float(same),
        RewardType.ENV_ASSERTION: float(all(check["met"] for check in held)),
        RewardType.ACTION: float(all(check["action_match"] for check in actions)),
        RewardType.COMMUNICATE: float(all(check["met"] for check in told)),
    }
    breakdown = {name: parts[name] for name in criteria.reward_basis}
    reward = 1.0
    for part in breakdown.values():
        reward *= part
    return RewardInfo(
        reward=reward,
        db_check={"db_match": same, "db_reward": float(same)},
        env_assertions=held,
        action_checks=actions,
        communicate_checks=told,
        reward_basis=criteria.reward_basis,
        reward_breakdown=breakdown,
    )


def _action(action: Any, calls: list[Any]) -> Check:
    match = any(
        (c.name, c.arguments, c.requestor) == (action.name, action.arguments, action.requestor)
        for c in calls
    )
    return {"action": action, "action_match": match, "action_reward": float(match)}


def _told(info: str, said: list[str]) -> Check:
    met = any(info.lower() in text for text in said)
    return {"info": info, "met": met, "justification": "looked for in the words"}
