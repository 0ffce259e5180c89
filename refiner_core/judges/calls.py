"""What a server is asked, and what its replies mean. Knows nothing of HTTP.

In: judge requests and the judge's configuration. Out: :class:`Call` values, each one chat request
that gives one judgement or several (all rubrics of an answer, with ``judge.form=batched``); and
from the reply's body the judgements, or why another try may mend it.

Every judgement has a key: 16 bytes of SHA-256 over all that decides it (model, revision, sampling,
the form of the reply, the messages word for word, and its place among those of the call). The same
question to the same judge has the same key in every run; where the server stands has no part in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.fingerprint import canonical_json
from refiner_core.contract.types import Judgement, JudgeRequest
from refiner_core.judges.parsing import parse_judgement
from refiner_core.judges.prompting import Message, render_prompt

KEY_BYTES = 16

#: The scores that a kind allows on the judge's scale; other kinds take the whole range.
_ALLOWED: dict[str, tuple[float, ...]] = {
    "citation_recall": (0.0, 1.0, 2.0),
    "citation_precision": (0.0, 2.0),
    "citation_needed": (0.0, 2.0),
}


@dataclass(frozen=True)
class Call:
    """One chat request. ``requests`` are what it asks, ``keys`` one for each of them.

    ``schema`` is the JSON schema of the reply, for servers that can be held to one.
    """

    requests: tuple[JudgeRequest, ...]
    messages: tuple[Message, ...]
    keys: tuple[bytes, ...]
    schema: Mapping[str, Any] | None = None


class Unusable(NamedTuple):
    """A reply without usable judgements: in one word for counts, and in words for people.

    ``final``: another try gives the same. ``partial`` holds what could be read (None elsewhere), to
    be used if no try gives all.
    """

    reason: str
    detail: str
    final: bool = False
    partial: tuple[Judgement | None, ...] = ()


class Reply(NamedTuple):
    """A reply that could be read: one judgement per request of the call, all scored."""

    judgements: tuple[Judgement, ...]
    prompt_tokens: int = 0
    completion_tokens: int = 0


def plan_calls(requests: Sequence[JudgeRequest], config: JudgeConfig) -> list[Call]:
    """The calls that answer ``requests``, each asked once however often it stands there."""
    base = identity_digest(config)
    return [_single(request, config, base) for request in dict.fromkeys(requests)]


def request_body(call: Call, config: JudgeConfig, *, structured: bool) -> dict[str, Any]:
    """The body of the chat request."""
    body: dict[str, Any] = {"model": config.model, "messages": list(call.messages)}
    if config.temperature is not None:
        body["temperature"] = config.temperature
    body[config.max_tokens_field] = config.max_tokens
    if structured and call.schema is not None:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "judgement", "strict": True, "schema": call.schema},
        }
    if config.extra_body.strip():
        body |= json.loads(config.extra_body)
    return body


def read_reply(raw: bytes, call: Call) -> Reply | Unusable:
    """The judgements in a chat completion."""
    try:
        completion = json.loads(raw)
        choice = completion["choices"][0]
        text, finish = choice["message"]["content"] or "", choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Unusable("garbage", "the reply is no chat completion")
    if finish == "abort":
        return Unusable("aborted", "the server aborted the judgement")
    if finish not in (None, "stop"):
        return Unusable("length", f"the judgement ended by {finish!r:.40}", final=True)
    if not isinstance(text, str):
        return Unusable("garbage", "the reply is no chat completion")
    judgement = parse_judgement(text, _ALLOWED.get(call.requests[0].kind))
    if judgement.status != "scored":
        return Unusable("unparsable", judgement.detail)
    usage = completion.get("usage") if isinstance(completion, dict) else None
    return Reply((judgement,), *_tokens(usage))


def identity_digest(config: JudgeConfig) -> bytes:
    """What is the same for all questions to one judge."""
    values = [
        config.model,
        config.revision,
        config.temperature,
        config.max_tokens,
        config.structured_output,
        config.extra_body,
    ]
    return hashlib.sha256(canonical_json(values).encode()).digest()


def _single(request: JudgeRequest, config: JudgeConfig, base: bytes) -> Call:
    messages = tuple(render_prompt(config.prompt, request))
    return Call((request,), messages, (_key(base, messages, 0),))


def _key(base: bytes, messages: Sequence[Message], place: int) -> bytes:
    whole = hashlib.sha256(base)
    for message in messages:
        text = message["content"].encode("utf-8", "replace")
        whole.update(f"\x1e{message['role']}\x1f{len(text)}\x1f".encode())
        whole.update(text)
    whole.update(f"\x1e{place}".encode())
    return whole.digest()[:KEY_BYTES]


def _tokens(usage: Any) -> tuple[int, int]:
    if not isinstance(usage, dict):
        return 0, 0
    found = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    prompt, completion = (n if isinstance(n, int) and n >= 0 else 0 for n in found)
    return prompt, completion
