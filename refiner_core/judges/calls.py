"""What a server is asked, and what its replies mean. Knows nothing of HTTP.

In: judge requests and the judge's configuration. Out: :class:`Call` values, each one chat request
that gives one judgement or several (all rubrics of an answer, with ``judge.form=batched``); and
from the reply's body the judgements, or why another try may mend it.

Every judgement has a key: 16 bytes of SHA-256 over all that decides it (model, revision, sampling,
the schema of the reply, the messages word for word, and its place among those of the call). The
same question to the same judge has the same key in every run; where the server stands has no part
in it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.fingerprint import canonical_json
from refiner_core.contract.types import CUT_SHORT, Judgement, JudgeRequest
from refiner_core.judges.parsing import MAX_SCORE, parse_batch, parse_judgement
from refiner_core.judges.prompting import JudgePrompts, Message, load_judge_prompts

KEY_BYTES = 16

#: The scores that a kind allows on the judge's scale; other kinds take the whole range.
_ALLOWED: dict[str, tuple[float, ...]] = {
    "citation_recall": (0.0, 1.0, 2.0),
    "citation_precision": (0.0, 2.0),
    "citation_needed": (0.0, 2.0),
}
#: A server that says more of one reply has miscounted.
_MOST_TOKENS = 2**31
_LONGEST_NAME = 200
_Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """One chat request. ``requests`` are what it asks, ``keys`` one for each of them.

    ``schema`` is the JSON schema of the reply, for servers that can be held to one. A ``batched``
    call asks for a list of scores, also where it asks for one alone.
    """

    requests: tuple[JudgeRequest, ...]
    messages: tuple[Message, ...]
    keys: tuple[bytes, ...]
    schema: _Schema | None = None
    batched: bool = False


class Unusable(NamedTuple):
    """A reply without usable judgements: in one word for counts, and in words for people.

    ``final``: another try gives the same. ``partial`` holds what could be read (None elsewhere), to
    be used if no try gives all. What it took is paid for all the same.
    """

    reason: str
    detail: str
    final: bool = False
    partial: tuple[Judgement | None, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Reply(NamedTuple):
    """A reply that could be read: one judgement per request of the call, all scored.

    ``served`` is what the server says that it is: model, and system fingerprint if it has one.
    """

    judgements: tuple[Judgement, ...]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    served: str = ""


def plan_calls(
    requests: Sequence[JudgeRequest], config: JudgeConfig, prompts: JudgePrompts | None = None
) -> list[Call]:
    """The calls that answer ``requests``, each asked once however often it stands there.

    With ``judge.form=batched`` all rubrics of one answer to one question are one call, in the order
    in which they stand; citations are always asked one by one.

    Parameters
    ----------
    prompts
        Those of ``config``, read before; none reads them now.

    Raises
    ------
    ConfigurationError
        The prompts cannot be read.
    """
    prompts = prompts or load_judge_prompts(config.prompt, config.form)
    base = identity_digest(config)
    together: dict[tuple[Any, ...], list[JudgeRequest]] = {}
    for number, request in enumerate(dict.fromkeys(requests)):
        batched = config.form == "batched" and request.kind == "rubric"
        place = (request.question, request.text) if batched else (number,)
        together.setdefault(place, []).append(request)
    return [_call(tuple(asked), config, prompts, base) for asked in together.values()]


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
    """The judgements in a chat completion, and what it took."""
    try:
        completion = json.loads(raw)
        choice = completion["choices"][0]
        text, finish = choice["message"]["content"] or "", choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Unusable("garbage", "the reply is no chat completion")
    prompt, completed = _tokens(completion.get("usage"))
    read = _read(text, finish, call)
    if isinstance(read, Unusable):
        return read._replace(prompt_tokens=prompt, completion_tokens=completed)
    return Reply(read, prompt, completed, _served(completion))


def _read(text: Any, finish: Any, call: Call) -> tuple[Judgement, ...] | Unusable:
    if finish == "abort":
        return Unusable("aborted", "the server aborted the judgement")
    if finish == "length":
        why = f"{CUT_SHORT} length; judge.max_tokens is too small for it"
        return Unusable("length", why, final=True)
    if finish not in (None, "stop"):
        return Unusable("ended", f"{CUT_SHORT} {finish!r:.40}", final=True)
    if not isinstance(text, str):
        return Unusable("garbage", "the reply is no chat completion")
    return _judgements(text, call)


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


def _judgements(text: str, call: Call) -> tuple[Judgement, ...] | Unusable:
    allowed = _ALLOWED.get(call.requests[0].kind)
    if not call.batched:
        judgement = parse_judgement(text, allowed)
        if judgement.status != "scored":
            return Unusable("unparsable", judgement.detail)
        return (judgement,)
    found, problem = parse_batch(text, len(call.requests), allowed)
    known = tuple(judgement for judgement in found if judgement is not None)
    if problem or len(known) != len(found):
        return Unusable("incomplete" if known else "unparsable", problem, partial=found)
    return known


def _call(
    requests: tuple[JudgeRequest, ...], config: JudgeConfig, prompts: JudgePrompts, base: bytes
) -> Call:
    batched = config.form == "batched" and requests[0].kind == "rubric"
    messages = prompts.render_batch(requests) if batched else prompts.render(requests[0])
    schema, digest = None, b""
    if config.structured_output != "none":
        count = len(requests) if batched else None
        schema, digest = _schema(requests[0].kind, count, only_whole=prompts.shipped)
    keys = _keys(base + digest, messages, len(requests))
    return Call(requests, tuple(messages), keys, schema, batched)


@functools.lru_cache(maxsize=1024)
def _schema(kind: str, count: int | None, *, only_whole: bool) -> tuple[_Schema, bytes]:
    """What a reply may be, ``count`` scores in a list, and its digest. Prompts of the user's own
    may ask for halves."""
    schema = _schema_of(kind, count, only_whole=only_whole)
    return schema, hashlib.sha256(canonical_json(schema).encode()).digest()


def _schema_of(kind: str, count: int | None, *, only_whole: bool) -> _Schema:
    allowed = _ALLOWED.get(kind, (0.0, 1.0, 2.0) if only_whole else None)
    score: _Schema = {"type": "number", "minimum": 0, "maximum": MAX_SCORE}
    if allowed is not None:
        score = {"type": "integer", "enum": [int(value) for value in allowed]}
    if count is None:
        return _object({"score": score})
    criterion = {"type": "integer", "enum": list(range(1, count + 1))}
    entry = _object({"criterion": criterion, "score": score})
    listed = {"type": "array", "items": entry, "minItems": count, "maxItems": count}
    return _object({"scores": listed})


def _object(properties: _Schema) -> _Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def marked(calls: Sequence[Call], mark: str) -> list[Call]:
    """The same questions with keys of their own: nothing that was asked without the mark, or under
    another, answers them, and their answers answer nothing else."""
    whole = hashlib.sha256(mark.encode()).digest()

    def key_of(key: bytes) -> bytes:
        return hashlib.sha256(b"\x1e".join((whole, key))).digest()[:KEY_BYTES]

    return [replace(call, keys=tuple(map(key_of, call.keys))) for call in calls]


def _keys(base: bytes, messages: Sequence[Message], count: int) -> tuple[bytes, ...]:
    whole = hashlib.sha256(base)
    for message in messages:
        text = message["content"].encode("utf-8", "replace")
        whole.update(f"\x1e{message['role']}\x1f{len(text)}\x1f".encode())
        whole.update(text)
    keys = []
    for place in range(count):
        one = whole.copy()
        one.update(f"\x1e{place}".encode())
        keys.append(one.digest()[:KEY_BYTES])
    return tuple(keys)


def _served(completion: Mapping[str, Any]) -> str:
    words = [completion.get("model"), completion.get("system_fingerprint")]
    return " ".join(w[:_LONGEST_NAME] for w in words if isinstance(w, str) and w)


def _tokens(usage: Any) -> tuple[int, int]:
    if not isinstance(usage, dict):
        return 0, 0
    found = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    prompt, completion = (n if type(n) is int and 0 <= n < _MOST_TOKENS else 0 for n in found)
    return prompt, completion
