"""The agent of the gym: an outside caller decides its messages."""

from __future__ import annotations

from typing import Any


class GymAgent:
    STOP_TOKEN = "###STOP###"

    def __init__(self, tools: list[Any], domain_policy: str) -> None:
        self.tools, self.domain_policy = tools, domain_policy

    def get_init_state(self, message_history: list[Any] | None = None) -> list[Any]:
        return list(message_history or ())

    def set_seed(self, seed: int) -> None:
        raise NotImplementedError("an agent of the gym has no seed")

    @classmethod
    def is_stop(cls, message: Any) -> bool:
        return message.content is not None and cls.STOP_TOKEN in message.content

    def generate_next_message(self, message: Any, state: Any) -> Any:
        raise NotImplementedError("waits for an action from another thread")
