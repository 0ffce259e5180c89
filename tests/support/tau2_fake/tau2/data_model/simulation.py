"""Runs, rewards and results."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from tau2.data_model.message import Message
from tau2.data_model.tasks import RewardType

#: One class per kind in the real package.
Check = dict[str, Any]


class RewardInfo(BaseModel):
    reward: float
    db_check: Check | None = None
    env_assertions: list[Check] | None = None
    action_checks: list[Check] | None = None
    nl_assertions: list[Check] | None = None
    communicate_checks: list[Check] | None = None
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
