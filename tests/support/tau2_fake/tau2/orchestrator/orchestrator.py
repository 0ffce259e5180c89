"""Carries messages between agent, user and tools."""

from __future__ import annotations

from copy import deepcopy
from enum import StrEnum
from typing import Any

from tau2.data_model.message import AssistantMessage, ToolMessage, UserMessage, now
from tau2.data_model.simulation import TerminationReason


class Role(StrEnum):
    AGENT = "agent"
    USER = "user"
    ENV = "env"


class Orchestrator:
    def __init__(
        self,
        domain: str,
        agent: Any,
        user: Any,
        environment: Any,
        task: Any,
        max_steps: int = 100,
        max_errors: int = 10,
        seed: int | None = None,
        solo_mode: bool = False,
    ) -> None:
        self.domain, self.agent, self.user = domain, agent, user
        self.environment, self.task = environment, task
        self.max_steps, self.max_errors, self.seed = max_steps, max_errors, seed
        self.done, self.step_count, self.num_errors = False, 0, 0
        self.termination_reason: TerminationReason | None = None
        self.trajectory: list[Any] = []
        self.message: Any = None
        self.from_role, self.to_role = Role.AGENT, Role.USER
        self.agent_state: Any = None
        self.user_state: Any = None

    def initialize(self) -> None:
        state = self.task.initial_state
        history = deepcopy(state.message_history or []) if state is not None else []
        calls = [c for m in history for c in getattr(m, "tool_calls", None) or ()]
        for call in calls:
            self.environment.get_response(call)
        if self.seed is not None:
            self.agent.set_seed(self.seed)
            self.user.set_seed(self.seed)
        if not history:
            greeting = "Hi! How can I help you today?"
            history = [AssistantMessage(role="assistant", content=greeting, cost=0.0)]
        self.trajectory, self.message = history, history[-1]
        self.agent_state = self.agent.get_init_state(history)
        self.user_state = self.user.get_init_state(history[:-1])
        if isinstance(self.message, AssistantMessage):
            self.from_role, self.to_role = Role.AGENT, Role.USER
            self._ends(self.agent.is_stop(self.message), TerminationReason.AGENT_STOP)
        elif isinstance(self.message, UserMessage):
            self.from_role, self.to_role = Role.USER, Role.AGENT
            self._ends(self.user.is_stop(self.message), TerminationReason.USER_STOP)
        else:
            self.from_role, self.to_role = Role.ENV, Role.AGENT

    def _ends(self, ends: bool, reason: TerminationReason) -> None:
        if ends:
            self.done, self.termination_reason = True, reason

    def step(self) -> None:
        if self.done:
            raise ValueError("Simulation is done")
        if self.to_role == Role.ENV:
            results = [self.environment.get_response(call) for call in self.message.tool_calls]
            self.num_errors += sum(result.error for result in results)
            self.trajectory += results
            self.message, self.from_role, self.to_role = results[-1], Role.ENV, self.from_role
        elif self.to_role == Role.USER:
            said, self.user_state = self.user.generate_next_message(self.message, self.user_state)
            said.check()
            self._ends(self.user.is_stop(said), TerminationReason.USER_STOP)
            self._sent(said, Role.USER, Role.AGENT)
        else:
            said, self.agent_state = self.agent.generate_next_message(
                self.message, self.agent_state
            )
            said.check()
            self._ends(self.agent.is_stop(said), TerminationReason.AGENT_STOP)
            self._sent(said, Role.AGENT, Role.USER)
        self.step_count += 1

    def _sent(self, said: Any, by: Role, to: Role) -> None:
        said.timestamp = said.timestamp or now()
        self.trajectory.append(said)
        self.message, self.from_role = said, by
        self.to_role = Role.ENV if said.is_tool_call() else to

    def get_trajectory(self) -> list[Any]:
        ordered = sorted(deepcopy(self.trajectory), key=lambda message: message.timestamp)
        for number, message in enumerate(ordered):
            message.turn_idx = number
        assert all(isinstance(m, AssistantMessage | UserMessage | ToolMessage) for m in ordered)
        return ordered
