"""An invented domain: tickets whose seats can be changed, and a lamp at the user's kiosk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tau2.data_model.message import ToolCall, ToolMessage
from tau2.data_model.tasks import EnvAssertion, Task

POLICY = "Seats may be changed once. What happens at the kiosk, only the user can do."


class Tool:
    def __init__(self, name: str, about: str, arguments: tuple[str, ...]) -> None:
        self.name = name
        properties = {one: {"type": "string", "title": one} for one in arguments}
        schema = {"type": "object", "properties": properties, "required": list(arguments)}
        function = {"name": name, "description": about, "parameters": schema}
        self.openai_schema = {"type": "function", "function": function}


AGENT_TOOLS = (
    Tool("find_ticket", "Look a ticket up.", ("ticket_id",)),
    Tool("set_seat", "Give a ticket a seat.", ("ticket_id", "seat")),
    Tool("transfer_to_human_agents", "Hand over.", ("summary",)),
)
USER_TOOLS = (Tool("press_button", "Press a button of the kiosk.", ("button",)),)


class Environment:
    def __init__(self, solo_mode: bool = False) -> None:
        assert not solo_mode
        self.seats = {"T1": "3A", "T2": "9C"}
        self.lamp = "off"

    def get_policy(self) -> str:
        return POLICY

    def get_tools(self) -> list[Tool]:
        return list(AGENT_TOOLS)

    def get_user_tools(self, include: list[str] | None = None) -> list[Tool]:
        return [t for t in USER_TOOLS if include is None or t.name in include]

    def get_response(self, call: ToolCall) -> ToolMessage:
        try:
            text, error = self.use(call.name, call.requestor, **call.arguments), False
        except Exception as raised:
            text, error = f"Error: {raised}", True
        return ToolMessage(
            id=call.id, role="tool", content=text, requestor=call.requestor, error=error
        )

    def use(self, name: str, requestor: str, **arguments: Any) -> str:
        tools = AGENT_TOOLS if requestor == "assistant" else USER_TOOLS
        if name not in [tool.name for tool in tools]:
            raise ValueError(f"Tool '{name}' not found.")
        return str(getattr(self, name)(**arguments))

    def find_ticket(self, ticket_id: str) -> str:
        return json.dumps({"ticket_id": ticket_id, "seat": self.seats[ticket_id]})

    def set_seat(self, ticket_id: str, seat: str) -> str:
        if ticket_id not in self.seats:
            raise ValueError(f"No ticket {ticket_id}")
        self.seats[ticket_id] = seat
        return "done"

    def transfer_to_human_agents(self, summary: str) -> str:
        return "Transfer successful"

    def press_button(self, button: str) -> str:
        self.lamp = button
        return f"The lamp is {button}."

    def holds(self, assertion: EnvAssertion) -> bool:
        assert assertion.func_name == "assert_lamp"
        return (self.lamp == assertion.arguments["colour"]) is assertion.assert_value

    def state(self) -> str:
        return json.dumps([self.seats, self.lamp])


def data(name: str) -> Any:
    folder = Path(os.environ["TAU2_DATA_DIR"]) / "tau2" / "domains" / "kiosk"
    return json.loads((folder / name).read_text())


def get_tasks(split: str | None = "base") -> list[Task]:
    tasks = [Task.model_validate(task) for task in data("tasks.json")]
    return tasks if split is None else [t for t in tasks if t.id in get_splits()[split]]


def get_splits() -> dict[str, list[str]]:
    splits: dict[str, list[str]] = data("split_tasks.json")
    return splits
