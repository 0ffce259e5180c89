"""Tasks."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, Field

from tau2.data_model.message import Message


class RewardType(StrEnum):
    DB = "DB"
    ENV_ASSERTION = "ENV_ASSERTION"
    NL_ASSERTION = "NL_ASSERTION"
    ACTION = "ACTION"
    COMMUNICATE = "COMMUNICATE"


class Action(BaseModel):
    action_id: str
    requestor: str = "assistant"
    name: str
    arguments: dict[str, Any]
    compare_args: list[str] | None = None


class EnvAssertion(BaseModel):
    env_type: str
    func_name: str
    arguments: dict[str, Any]
    assert_value: bool = True


class EvaluationCriteria(BaseModel):
    actions: list[Action] | None = None
    env_assertions: list[EnvAssertion] | None = None
    communicate_info: list[str] | None = None
    nl_assertions: list[str] | None = None
    reward_basis: list[RewardType] = Field(
        default_factory=lambda: [RewardType.DB, RewardType.COMMUNICATE]
    )


class Instructions(BaseModel):
    domain: str
    reason_for_call: str
    known_info: str | None = None
    task_instructions: str


class UserScenario(BaseModel):
    persona: str | None = None
    instructions: Instructions | str


class Description(BaseModel):
    purpose: str | None = None


class InitialState(BaseModel):
    message_history: list[Message] | None = None


class Task(BaseModel):
    id: str
    description: Description | None = None
    user_scenario: UserScenario
    initial_state: InitialState | None = None
    evaluation_criteria: EvaluationCriteria | None = None
    user_tools: list[str] | None = None
