"""What is read off a task and a simulation of tau2, and what is made of them.

In: values of the package. Out: plain ones of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from refiner_core.environments.protocol import Message
from refiner_core.environments.tau2.reward import (
    NL_BASIS,
)

#: Of its messages, what its own tools read.
_KEPT = frozenset(
    {
        *("role", "content", "tool_calls", "id", "requestor", "error", "turn_idx", "timestamp"),
        *("cost", "usage", "generation_time_seconds"),
    }
)


def basis_of(task: Any) -> tuple[str, ...]:
    """What a task's reward is the product of, in its words."""
    criteria = task.evaluation_criteria
    if criteria is None:
        return ()
    return tuple(str(getattr(basis, "value", basis)) for basis in criteria.reward_basis or ())


def assertions_of(task: Any) -> tuple[str, ...]:
    """A task's assertions in plain language."""
    criteria = task.evaluation_criteria
    return () if criteria is None else tuple(criteria.nl_assertions or ())


def without_assertions(task: Any) -> Any:
    """The task with a basis that names none."""
    copy = task.model_copy(deep=True)
    criteria = copy.evaluation_criteria
    criteria.reward_basis = [
        basis for basis in criteria.reward_basis if getattr(basis, "value", basis) != NL_BASIS
    ]
    return copy


def said_before(task: Any) -> tuple[Message, ...]:
    """A conversation that a task begins in the middle of, as one message: an agent can be told
    things, but not that it has said something."""
    state = task.initial_state
    history = [] if state is None else list(state.message_history or ())
    if not history:
        return ()
    said = "\n".join(lines_of(history[:-1]))
    return (Message("user", f"What was said before you took over:\n{said}"),)


def lines_of(messages: Sequence[Any]) -> list[str]:
    """Who said what, a line for each message."""
    lines = []
    for message in messages:
        for call in getattr(message, "tool_calls", None) or ():
            lines.append(f"{message.role} calls {call.name}({call.arguments})")
        if message.content:
            lines.append(f"{message.role}: {message.content}")
    return lines


def slim(simulation: dict[str, Any]) -> dict[str, Any]:
    """A simulation with what tau2's own tools read, and no more."""
    messages = simulation.get("messages", [])
    kept = [{k: v for k, v in message.items() if k in _KEPT} for message in messages]
    return {**simulation, "messages": kept}
