"""Rows of conversations with tools: custom demonstrations.

In: ``data.sft_path`` (JSON Lines, Parquet, a `datasets` folder or a Hub data set). Out: token ids
with a loss mask, or the reason for dropping a row.

A row has ``messages`` (or ``conversations``, or ``prompt`` if that is a list) of ``role`` and
``content``: an optional system turn, then turns of the user, the assistant and tools, the last of
them the assistant's or a tool's answer to it. Each assistant turn is one tool call:
written as ``<tool_call>{…}</tool_call>`` in its content, or in OpenAI's ``tool_calls``.
``tools`` (OpenAI's form, as a list or as JSON text) may be in the row; else the system turn is
assumed to name them. ``task_id`` (in the row or its ``metadata``), or ``tau2_task_id`` as in
published rows of tau2-bench, identifies held-out tasks; an id that is unique only within a domain
needs ``domain``. Rows without an id cannot be identified.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.types import DemonstrationRow
from refiner_core.data.rows import plain_name, turns_of
from refiner_core.data.sources import RawRow, read_rows, resolve_source
from refiner_core.environments.conversation import demonstration, prompt_ids
from refiner_core.environments.protocol import Message, ToolCall, ToolSpec
from refiner_core.environments.turns import call_text, parse_turn


class _Conversation(NamedTuple):
    """A kept row. ``named``: it names its task, so that held-out tasks are
    recognised."""

    row: DemonstrationRow
    prompt_length: int
    domain: str
    named: bool


def read_conversations(
    config: RecipeConfig, tokenizer: Any, held_out: set[str]
) -> Iterator[_Conversation | str]:
    """The conversations of ``data.sft_path``, each encoded, or the reason for dropping it;
    ``held_out`` names tasks that must not be trained on."""
    seen: set[str] = set()
    for raw in read_rows(resolve_source(config.data, "sft")):
        try:
            messages = _messages_of(raw)
            content = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()
            made: _Conversation | str = "duplicate"
            if content not in seen:
                made = _encoded(config, tokenizer, held_out, raw, messages)
        except RecursionError as error:
            raise raw.wrong("is nested too deeply", "a few levels of objects") from error
        seen.add(content)
        yield made


def _encoded(
    config: RecipeConfig,
    tokenizer: Any,
    held_out: set[str],
    raw: RawRow,
    messages: Sequence[Mapping[str, Any]],
) -> _Conversation | str:
    row, metadata = raw.row, _metadata_of(raw)
    domain = plain_name(raw, "domain", row.get("domain") or metadata.get("domain") or "unnamed")
    ids = (row.get("task_id"), metadata.get("task_id"), metadata.get("tau2_task_id"))
    named = [str(name) for name in ids if name is not None]
    own = [f"{domain}{between}{name}" for name in named for between in "-/"]
    if held_out.intersection((*named, *own)):
        return "held_out_task"
    system, first, turns = _parts(raw, messages)
    if any(parse_turn(t, config.environment.max_argument_bytes).call is None for t, _ in turns):
        return "no_call"
    prompt = prompt_ids(tokenizer, system, _tools_of(raw))
    tokens, mask = demonstration(tokenizer, prompt, first, turns)
    task = named[0] if named else f"row{raw.line}"
    made = DemonstrationRow(f"{domain}/{task}#{raw.line}", tuple(tokens), tuple(mask))
    return _Conversation(made, len(prompt), domain, bool(named))


def _metadata_of(raw: RawRow) -> Mapping[str, Any]:
    """A row's metadata, also if given as JSON text; other text counts as none."""
    value = raw.row.get("metadata")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, Mapping) else {}


def _messages_of(raw: RawRow) -> Sequence[Mapping[str, Any]]:
    names = ("messages", "conversations", "prompt")
    values = turns_of(raw, next((raw.row[name] for name in names if raw.row.get(name)), None))
    for number, value in enumerate(values, start=1):
        content = value.get("content")
        if not isinstance(content, str) and not (content is None and value.get("tool_calls")):
            raise raw.wrong(f"turn {number} has no content that is text", "a string")
    return values


Turns = list[tuple[str, tuple[Message, ...]]]


def _parts(
    raw: RawRow, messages: Sequence[Mapping[str, Any]]
) -> tuple[str, tuple[Message, ...], Turns]:
    """The system turn, the messages before the first assistant turn, and the turns."""
    system = ""
    if messages[0]["role"] == "system":
        system, messages = str(messages[0]["content"]), messages[1:]
    first: list[Message] = []
    turns: list[tuple[str, list[Message]]] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "assistant":
            turns.append((_turn_text(raw, message), []))
        elif role == "system":
            raise raw.wrong("has a system turn that is not the first", "one, at the beginning")
        else:
            (turns[-1][1] if turns else first).append(Message(role, content))
    if not turns or not first:
        raise raw.wrong(
            "has no turn of the assistant after the user's", "a conversation to learn from"
        )
    return system, tuple(first), [(text, tuple(after)) for text, after in turns]


def _turn_text(raw: RawRow, message: Mapping[str, Any]) -> str:
    """The assistant's text in its sampled form, with tool calls as text."""
    calls = message.get("tool_calls")
    if not calls:
        return str(message["content"])
    texts = [str(message.get("content") or "").strip()]
    for call in calls if isinstance(calls, Sequence) else (calls,):
        try:
            function = call.get("function", call)
            arguments = function.get("arguments", {})
            values = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
            texts.append(call_text(ToolCall(str(function["name"]), values)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise raw.wrong(
                f"has a tool call that cannot be read ({error})", "{name, arguments}"
            ) from error
    return "\n".join(text for text in texts if text)


def _tools_of(raw: RawRow) -> tuple[ToolSpec, ...]:
    """The tools in a row."""
    values = raw.row.get("tools")
    try:
        values = json.loads(values) if isinstance(values, str) else values
        functions = [value.get("function", value) for value in values or ()]
        empty = {"type": "object", "properties": {}}
        return tuple(
            ToolSpec(f["name"], str(f.get("description") or ""), dict(f.get("parameters") or empty))
            for f in functions
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise raw.wrong(
            f"has `tools` that cannot be read ({type(error).__name__}: {error})",
            "OpenAI's form of tools, as a list or as JSON text",
        ) from error
