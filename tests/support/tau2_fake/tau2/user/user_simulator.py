"""A user who asks a model what to say. The package asks through LiteLLM, whose errors are those of
OpenAI's client, or derived from them."""

from __future__ import annotations

import functools
import json
from typing import Any

import openai

from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage

ENDS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")


@functools.cache
def client_of(base_url: str, key: str, timeout: float, retries: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key=key, timeout=timeout, max_retries=retries)


class UserSimulator:
    def __init__(
        self, tools: Any = None, instructions: Any = None, llm: str = "", llm_args: Any = None
    ) -> None:
        self.tools, self.instructions, self.llm = tools, instructions, llm
        self.llm_args = dict(llm_args)

    def set_seed(self, seed: int) -> None:
        self.llm_args["seed"] = seed

    def get_init_state(self, message_history: list[Any] | None = None) -> list[Any]:
        return list(message_history or ())

    @classmethod
    def is_stop(cls, message: UserMessage) -> bool:
        return not message.is_tool_call() and any(e in (message.content or "") for e in ENDS)

    def generate_next_message(self, message: Any, state: list[Any]) -> Any:
        state.append(message)
        args = dict(self.llm_args)
        provider, _, model = self.llm.partition("/")
        assert provider == "openai"
        names = ("api_base", "api_key", "timeout", "num_retries")
        client = client_of(*(args.pop(name) for name in names))
        if self.tools:
            args["tools"] = [tool.openai_schema for tool in self.tools]
        asked = [{"role": "system", "content": str(self.instructions)}]
        asked += [_flipped(one) for one in state]
        answer = client.chat.completions.create(model=model, messages=asked, **args)
        said = answer.choices[0].message
        assert said.role == "assistant", "The response should be an assistant message"
        calls = [
            ToolCall(
                id=c.id,
                name=c.function.name,
                arguments=json.loads(c.function.arguments),
                requestor="user",
            )
            for c in said.tool_calls or ()
        ]
        made = UserMessage(
            role="user",
            content=said.content,
            tool_calls=calls or None,
            cost=0.0,
            raw_data={"long": "as the server gave it"},
        )
        state.append(made)
        return made, state


def _flipped(message: Any) -> dict[str, Any]:
    role = "user" if isinstance(message, AssistantMessage) else "assistant"
    return {"role": role, "content": message.content or ""}
