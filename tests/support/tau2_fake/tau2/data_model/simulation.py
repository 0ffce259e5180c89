"""Runs, rewards and results."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from tau2.data_model.message import Message
from tau2.data_model.tasks import Action, EnvAssertion, RewardType


class DBCheck(BaseModel):
    db_match: bool
    db_reward: float


class ActionCheck(BaseModel):
    action: Action
    action_match: bool
    action_reward: float


class EnvAssertionCheck(BaseModel):
    env_assertion: EnvAssertion
    met: bool
    reward: float


class SaidCheck(BaseModel):
    info: str
    met: bool
    justification: str


class NLAssertionCheck(BaseModel):
    nl_assertion: str
    met: bool
    justification: str


class RewardInfo(BaseModel):
    reward: float
    db_check: DBCheck | None = None
    env_assertions: list[EnvAssertionCheck] | None = None
    action_checks: list[ActionCheck] | None = None
    nl_assertions: list[NLAssertionCheck] | None = None
    communicate_checks: list[SaidCheck] | None = None
    reward_basis: list[RewardType] | None = None
    reward_breakdown: dict[RewardType, float] | None = None
    info: dict[str, Any] | None = None


class TerminationReason(StrEnum):
    USER_STOP = "user_stop"
    AGENT_STOP = "agent_stop"
    MAX_STEPS = "max_steps"
    TOO_MANY_ERRORS = "too_many_errors"
    AGENT_ERROR = "agent_error"
    INFRASTRUCTURE_ERROR = "infrastructure_error"


class SimulationRun(BaseModel):
    id: str
    task_id: str
    start_time: str
    end_time: str
    duration: float
    termination_reason: TerminationReason
    reward_info: RewardInfo | None = None
    messages: list[Message] | None = None
    trial: int | None = None
    seed: int | None = None
    info: dict[str, Any] | None = None
