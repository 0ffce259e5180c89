"""The agent that ends at once: what stands beside a model that uses tools.

In: an environment and a tokenizer. Out: a :class:`~refiner_core.contract.types.Generator` that
answers every prompt with the same call: the one that ends an episode. Its episodes run through the
same code as a model's, user and checks included. A task that it passes is one that asks for nothing
to be done (a request that must be refused), so that its pass@1 is the floor under every number.

In an environment without a tool that ends an episode it says goodbye once, and is broken off then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    OnCompletion,
    SamplingParams,
)
from refiner_core.environments.protocol import Environment, ToolCall
from refiner_core.environments.turns import call_text

DO_NOTHING = "do_nothing"
_GOODBYE = "Goodbye."
_EMPTY: Mapping[str, Any] = {
    "string": "",
    "integer": 0,
    "number": 0,
    "boolean": False,
    "array": [],
    "object": {},
    "null": None,
}


class DoNothing:
    """Samples nothing: every turn is the call that ends an episode of a domain."""

    def __init__(self, environment: Environment, domain: str, tokenizer: Any) -> None:
        text = call_text(ending_call(environment, domain))
        self._ids = tuple(int(i) for i in tokenizer.encode(text, add_special_tokens=False))

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        """The call, as often as it is asked for; as of a model that is sure of it."""
        made = Completion(self._ids, (0.0,) * len(self._ids), "stop")
        for index in range(len(requests)):
            if on_completion is not None:
                on_completion(index, made)
        return [made] * len(requests)


def ending_call(environment: Environment, domain: str) -> ToolCall:
    """The call that ends an episode, with the least that its schema asks for."""
    name = environment.finish or environment.speak
    text = "" if environment.finish else _GOODBYE
    schema = next((t.parameters for t in environment.tools(domain) if t.name == name), {})
    properties = schema.get("properties") or {}
    needed = schema.get("required") or ()
    return ToolCall(name, {one: _least(properties.get(one) or {}, text) for one in needed})


def _least(schema: Mapping[str, Any], text: str) -> Any:
    """A value that a simple schema takes."""
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    return (text or _EMPTY["string"]) if kind == "string" else _EMPTY.get(kind, text)
