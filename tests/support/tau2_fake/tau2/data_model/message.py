"""Messages, as they go between agent, user and tools."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field


def now() -> str:
    return datetime.now().isoformat()  # noqa: DTZ005 - as the package has it


class ToolCall(BaseModel):
    id: str = ""
    name: str
    arguments: dict[str, Any]
    requestor: Literal["user", "assistant"] = "assistant"


class ParticipantMessage(BaseModel):
    role: str
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    turn_idx: int | None = None
    timestamp: str | None = Field(default_factory=now)
    cost: float | None = None
    usage: dict[str, Any] | None = None
    raw_data: dict[str, Any] | None = None
    contains_speech: bool = True

    def is_tool_call(self) -> bool:
        return self.tool_calls is not None

    def has_text(self) -> bool:
        return bool(self.content and self.content.strip())

    def check(self) -> None:
        if not (self.has_text() or self.is_tool_call()):
            raise ValueError(f"{type(self).__name__} must have either content or tool_calls")


class AssistantMessage(ParticipantMessage):
    role: Literal["assistant"]


class UserMessage(ParticipantMessage):
    role: Literal["user"]


class ToolMessage(BaseModel):
    id: str
    role: Literal["tool"]
    content: str | None = None
    requestor: Literal["user", "assistant"] = "assistant"
    error: bool = False
    turn_idx: int | None = None
    timestamp: str | None = Field(default_factory=now)


Message = AssistantMessage | UserMessage | ToolMessage
