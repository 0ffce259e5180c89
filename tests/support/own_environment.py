"""An environment as a user of ours would write one in a file: a lamp that is to be switched on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refiner_core.contract.config import EnvironmentConfig, UserConfig
from refiner_core.environments.protocol import (
    Check,
    Message,
    Outcome,
    Step,
    Task,
    ToolCall,
    ToolSpec,
)


class LampEpisode:
    """Switch on the lamp that the user names."""

    def __init__(self, task: Task) -> None:
        self.task, self.lit, self.done = task, "", False

    def reset(self, seed: int) -> tuple[Message, ...]:
        self.lit, self.done = "", False
        return (Message("user", f"switch on the {self.task.data['lamp']} lamp"),)

    def step(self, call: ToolCall) -> Step:
        if call.name == "finish":
            self.done = True
            return Step((), done=True)
        if call.name == "respond":
            return Step((Message("user", "ok"),))
        if call.name != "switch":
            return Step((Message("tool", "no such tool"),), tool_error="wrong_tool")
        lamp = call.arguments.get("lamp")
        if not isinstance(lamp, str):
            return Step((Message("tool", "lamp is a text"),), tool_error="wrong_argument")
        self.lit = lamp
        return Step((Message("tool", f"the {lamp} lamp is on"),))

    def outcome(self) -> Outcome:
        done = self.lit == self.task.data["lamp"]
        check = Check("environment", "lamp", done)
        return Outcome(float(done), (check,), failure=None if done else "incomplete")

    def checks(self) -> tuple[Check, ...]:
        return self.outcome().checks

    def close(self) -> None:
        self.done = True


class Lamps:
    """Two lamps to train on, one to be tested with."""

    name, version, deterministic, speak, finish = "lamps", "1", True, "respond", "finish"

    def __init__(self, config: EnvironmentConfig, user: UserConfig) -> None:
        self.config = config

    def domains(self) -> tuple[str, ...]:
        return ("lamps",)

    def tasks(self, split: str) -> tuple[Task, ...]:
        lamps = {"train": ("red", "blue"), "test": ("green",)}.get(split, ())
        return tuple(Task(f"t-{lamp}", "lamps", split, f"{lamp} lamp", {"lamp": lamp})
                     for lamp in lamps)  # fmt: skip

    def policy(self, domain: str) -> str:
        return "switch on what the user wants, then finish."

    def tools(self, domain: str) -> tuple[ToolSpec, ...]:
        lamp = {"type": "object", "properties": {"lamp": {"type": "string"}}, "required": ["lamp"]}
        text = {"type": "object", "properties": {"content": {"type": "string"}},
                "required": ["content"]}  # fmt: skip
        none: dict[str, Any] = {"type": "object", "properties": {}}
        return (
            ToolSpec("switch", "switch on a lamp", lamp),
            ToolSpec("respond", "say it to the user", text),
            ToolSpec("finish", "end", none),
        )

    def episode(self, task: Task) -> LampEpisode:
        return LampEpisode(task)

    def describe(self) -> Mapping[str, Any]:
        return {"name": self.name, "version": self.version}
