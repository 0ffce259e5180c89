"""Attributes of tau2's tasks and simulations, and values derived from them.

In: values of the package. Out: plain values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from refiner_core.contract.errors import Interrupted, RefinerError
from refiner_core.contract.types import Judge, JudgeRequest
from refiner_core.environments.protocol import Check, Failure, InfrastructureError, Message

NL_BASIS = "NL_ASSERTION"
_COMPONENTS = {
    "DB": "db",
    "ENV_ASSERTION": "env_assertions",
    "ACTION": "action",
    "COMMUNICATE": "communicate",
    NL_BASIS: "nl",
}
HANDING_OVER = "transfer_to_human_agents"
_QUESTION = "A conversation of a service agent with a customer, and with tools."


@dataclass(frozen=True)
class EpisodeWorth:
    """Measured value of an episode."""

    reward: float
    components: Mapping[str, float]
    checks: tuple[Check, ...]
    excluded: tuple[str, ...] = ()


def read_reward_info(reward_info: Mapping[str, Any] | str) -> EpisodeWorth:
    """Components and checks.

    Raises
    ------
    InfrastructureError
        It has another shape (kind ``unreadable_reward``): no number is invented for it.
    """
    try:
        values = json.loads(reward_info) if isinstance(reward_info, str) else reward_info
        reward = _number(values["reward"])
        parts = values.get("reward_breakdown") or {}
        components = {_COMPONENTS[name]: _number(part) for name, part in parts.items()}
        return EpisodeWorth(reward, components, tuple(_checks(values)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InfrastructureError(
            f"The reward_info of tau2-bench cannot be read ({type(error).__name__}: {error}).",
            kind="unreadable_reward",
            expected="a reward, reward_breakdown, and lists of checks, as version 1.0 has them",
            fix="install a version that this adapter was tested with (1.0)",
        ) from error


def _number(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(f"{value!r} is no number")
    return number


def _checks(values: Mapping[str, Any]) -> list[Check]:
    checks = []
    for one in values.get("action_checks") or ():
        action = one["action"]
        name, met = str(action.get("action_id") or action["name"]), _truth(one["action_match"])
        checks.append(Check("action", name, met, _call_text(action)))
    for one in values.get("communicate_checks") or ():
        checks.append(Check("communicate", str(one["info"]), _truth(one["met"])))
    for one in values.get("env_assertions") or ():
        assertion = one["env_assertion"]
        name = f"{assertion['func_name']}({_json(assertion.get('arguments') or {})})"
        checks.append(Check("environment", name, _truth(one["met"])))
    if values.get("db_check") is not None:
        checks.append(Check("db", "database", _truth(values["db_check"]["db_match"])))
    for one in values.get("nl_assertions") or ():
        checks.append(Check("nl", str(one["nl_assertion"]), _truth(one["met"])))
    return checks


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _call_text(action: Mapping[str, Any]) -> str:
    by = "the user: " if action.get("requestor") == "user" else ""
    return f"{by}{action['name']}({_json(action.get('arguments') or {})})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def with_judged(
    measured: EpisodeWorth, assertions: Sequence[str], transcript: str, judge: Judge
) -> EpisodeWorth:
    """Add assertions in plain language, each put to the judge: an assertion holds if
    the judge gives the full score.

    Raises
    ------
    InfrastructureError
        A judgement failed, or the judge is unreachable (kind ``judge_failed``).
    Interrupted
        A stop was requested while waiting for the judge's servers.
    """
    requests = [JudgeRequest("rubric", _QUESTION, transcript, text) for text in assertions]
    try:
        judgements = judge.judge(requests)
    except Interrupted:
        raise
    except RefinerError as error:
        raise _judge_failed(str(error)) from error
    checks = []
    for text, judgement in zip(assertions, judgements, strict=True):
        if judgement.score is None:
            raise _judge_failed(judgement.detail or "a judgement failed")
        checks.append(Check("nl", text, judgement.score >= 1.0 - 1e-9, f"{judgement.score:g}"))
    holds = float(all(check.passed for check in checks))
    return replace(
        measured,
        reward=measured.reward * holds,
        components={**measured.components, "nl": holds},
        checks=(*measured.checks, *checks),
    )


def _judge_failed(why: str) -> InfrastructureError:
    return InfrastructureError(
        f"The judge did not say whether an assertion holds: {why}",
        kind="judge_failed",
        expected="a score for each assertion",
        fix="check the judge's log, or set environment.nl_assertions=exclude",
    )


def failure_of(
    measured: EpisodeWorth, *, reason: str, tools: Sequence[str], errors: Sequence[str]
) -> Failure | None:
    """Reason why an episode failed, None if it did not; the first applicable one of
    :data:`~refiner_core.environments.protocol.FAILURES`.

    ``reason`` is tau2-bench's reason for the end (empty: it was interrupted); ``tools`` are the
    agent's calls in order, ``errors`` the refusals of tools (``wrong_tool``, ``wrong_argument``).
    A refusal because of content counts as a wrong argument: tau2-bench does not distinguish rules
    from values.
    """
    if measured.reward >= 1.0 - 1e-9:
        return None
    if reason not in ("agent_stop", "user_stop"):
        return "limit"
    if "wrong_tool" in errors:
        return "wrong_tool"
    if "wrong_argument" in errors:
        return "wrong_argument"
    actions = [check for check in measured.checks if check.kind == "action"]
    wanted = any(HANDING_OVER in check.detail for check in actions)
    if HANDING_OVER in tools and not wanted:
        return "gave_up"
    if reason == "agent_stop" and actions and not any(check.passed for check in actions):
        return "gave_up"
    return "incomplete"


#: Fields of its messages that its own tools read.
_KEPT = frozenset(
    {
        *("role", "content", "tool_calls", "id", "requestor", "error", "turn_idx", "timestamp"),
        *("cost", "usage", "generation_time_seconds"),
    }
)


def basis_of(task: Any) -> tuple[str, ...]:
    """Factors of a task's reward, by tau2's names."""
    criteria = task.evaluation_criteria
    if criteria is None:
        return ()
    return tuple(str(getattr(basis, "value", basis)) for basis in criteria.reward_basis or ())


def assertions_of(task: Any) -> tuple[str, ...]:
    """A task's assertions in plain language."""
    criteria = task.evaluation_criteria
    return () if criteria is None else tuple(criteria.nl_assertions or ())


def without_assertions(task: Any) -> Any:
    """The task without assertions in its reward's basis."""
    copy = task.model_copy(deep=True)
    criteria = copy.evaluation_criteria
    criteria.reward_basis = [
        basis for basis in criteria.reward_basis if getattr(basis, "value", basis) != NL_BASIS
    ]
    return copy


def earlier_messages(task: Any) -> tuple[Message, ...]:
    """The conversation before a task that starts in the middle, as one message: an agent cannot be
    given words of its own."""
    state = task.initial_state
    history = [] if state is None else list(state.message_history or ())
    if not history:
        return ()
    said = "\n".join(lines_of(history[:-1]))
    return (Message("user", f"What was said before you took over:\n{said}"),)


def lines_of(messages: Sequence[Any]) -> list[str]:
    """Lines of a conversation, one for each message."""
    lines = []
    for message in messages:
        for call in getattr(message, "tool_calls", None) or ():
            lines.append(f"{message.role} calls {call.name}({call.arguments})")
        if message.content:
            lines.append(f"{message.role}: {message.content}")
    return lines


def slim(simulation: dict[str, Any]) -> dict[str, Any]:
    """A simulation reduced to the fields that tau2's own tools read."""
    messages = simulation.get("messages", [])
    kept = [{k: v for k, v in message.items() if k in _KEPT} for message in messages]
    return {**simulation, "messages": kept}
