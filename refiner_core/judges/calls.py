"""Calls to a judge's server, and parsing of its replies. Independent of HTTP.

In: judge requests and the judge's configuration. Out: :class:`ChatCall` values, each one chat
request for one judgement or several (all rubrics of an answer, with ``judge.form=batched``); and
from the reply's body the judgements, or the reason for a retry.

Every judgement has a key: 16 bytes of SHA-256 over everything that decides it (model, revision,
sampling, the schema of the reply, the verbatim messages, and its place in the call). The same
question to the same judge has the same key in every run; the server's address is not part of it.

A reply is scored as score/2, or failed with a reason; a text without a valid score never becomes a
number. Parsing takes linear time for any text: a text that is longer than any judgement, nested
deeper than Python's limit, or that needs too many restarts, is a failure.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.fingerprint import canonical_json
from refiner_core.contract.types import CUT_SHORT, REASONING, UNPARSABLE, Judgement, JudgeRequest
from refiner_core.judges.prompting import JudgePrompts, load_judge_prompts

#: The scale is 0 to 2, so that "in part" has its own integer.
MAX_SCORE = 2.0

#: Limit after the reasoning. A judgement is a short object.
_MAX_CHARACTERS = 100_000
#: Limits on failed parsing: characters as a multiple of the text's length, and starts.
_MOST_REREAD = 16
_MOST_BEGUN = 1000
#: Possible start of a JSON object; does not match the braces of a formula.
_BEGINS = re.compile(r'\{(?=\s*["}])')
_ABSENT = object()


class _Unreadable(Exception):
    """The text is not a judgement; the message says why."""


def parse_judgement(text: str, allowed: tuple[float, ...] | None = None) -> Judgement:
    """Read ``{"score": x}``, 0 <= x <= 2, out of a judge's reply.

    A judge's own reasoning (up to the last ``</think>``) is skipped. The object may be surrounded
    by text or a code fence, nested in another one, or have doubled or surplus braces; of several
    objects with a score the last one counts. Anything else is a failure: no object, a score that is
    no number or out of range (``{"score": 10}`` is not 5.0), or unfinished reasoning.

    Parameters
    ----------
    text
        The completion. The caller must check the finish reason: a text cut by length is a failure.
    allowed
        The allowed scores of the question (``(0, 2)`` for yes or no); None allows the range.
    """
    score: Any = _ABSENT
    try:
        for value in _values(text):
            found = _score_in(value)
            score = score if found is _ABSENT else found
        if score is _ABSENT:
            raise _Unreadable(f"no object with a score{_quoted(text)}")
        return Judgement("scored", _read_score(score, allowed))
    except _Unreadable as error:
        return Judgement("failed", None, f"{UNPARSABLE}, {error}")


def parse_batch(
    text: str, count: int, allowed: tuple[float, ...] | None = None
) -> tuple[Judgement, ...] | str:
    """Read the scores of criteria 1 to ``count`` out of a judge's reply,
    ``{"scores": [{"criterion": 1, "score": x}, …]}``; returns a text if it is invalid.

    Surroundings of the object: see :func:`parse_judgement`; of several the last one counts.
    Wrong numbering (a criterion missing, repeated or unknown) fails the whole batch: a miscount
    may affect every criterion.
    """
    try:
        listed: list[Any] = []
        for value in _values(text):
            scores = value.get("scores") if isinstance(value, dict) else None
            listed = scores if isinstance(scores, list) and scores else listed
        if not listed:
            raise _Unreadable(f"no list of scores{_quoted(text)}")
        entries = [entry if isinstance(entry, dict) else {} for entry in listed]
        found = {str(entry.get("criterion")): entry.get("score") for entry in entries}
        wanted = list(map(str, range(1, count + 1)))
        if len(entries) != count or found.keys() != set(wanted):
            raise _Unreadable(f"{len(entries)} scores for criteria 1 to {count}{_quoted(text)}")
        return tuple(Judgement("scored", _read_score(found[n], allowed)) for n in wanted)
    except _Unreadable as error:
        return f"{UNPARSABLE}, {error}"


# ---------------------------------------------------------------- scores


def _read_score(value: Any, allowed: tuple[float, ...] | None) -> float:
    """A score on the judge's scale, mapped to [0, 1]."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise _Unreadable(f"the score is no number{_quoted(value)}") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise _Unreadable(f"the score is no number{_quoted(value)}")
    if not 0 <= value <= MAX_SCORE:
        raise _Unreadable(f"the score is out of range{_quoted(value)}")
    if allowed is not None and value not in allowed:
        raise _Unreadable(f"the score is none of {allowed}{_quoted(value)}")
    return float(value) / MAX_SCORE


def _quoted(what: Any) -> str:
    if isinstance(what, int) and not -(10**9) < what < 10**9:
        return ": a number of many digits"  # Python refuses to print the longest of them
    return f": {what[:200] if isinstance(what, str) else what!r:.120}" if what != "" else ""


def _score_in(value: Any) -> Any:
    """The score in a decoded value: its own key, else the last nested one."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if "score" in value:
                return value["score"]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return _ABSENT


# ---------------------------------------------------------------- JSON in text


def _values(text: str) -> Iterator[Any]:
    """The JSON objects in a reply, in order."""
    whole = text.strip()
    if whole[:1] in ("{", "[") and len(whole) <= _MAX_CHARACTERS:
        try:  # with a schema it is only JSON, and may quote any tag
            value = json.loads(whole)
        except (ValueError, RecursionError):
            pass
        else:
            yield value
            return
    yield from _embedded(_without_reasoning(text))


def _without_reasoning(text: str) -> str:
    _, closed, tail = text.rpartition("</think>")
    if not closed and "<think>" in text:
        raise _Unreadable("the reasoning did not end")
    if len(tail) > _MAX_CHARACTERS:
        raise _Unreadable(f"it has {len(tail):,} characters")
    return tail


def _embedded(text: str) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    characters, times = _MOST_REREAD * len(text), _MOST_BEGUN
    match = _BEGINS.search(text)
    while match is not None:
        start = match.start()
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            end, times, characters = start + 1, times - 1, characters - (error.pos - start)
        except (ValueError, RecursionError) as error:
            raise _Unreadable(f"it is nested or long beyond reading{_quoted(text)}") from error
        else:
            yield value
        if characters < 0 or times < 0:
            raise _Unreadable(f"too much of it begins and does not end{_quoted(text)}")
        match = _BEGINS.search(text, end)


KEY_BYTES = 16

#: Allowed scores of a kind on the judge's scale; other kinds allow the whole range.
_ALLOWED: dict[str, tuple[float, ...]] = {
    "citation_recall": (0.0, 1.0, 2.0),
    "citation_precision": (0.0, 2.0),
    "citation_needed": (0.0, 2.0),
}
#: More tokens than this in one reply is a server's counting error.
_MOST_TOKENS = 2**31
_LONGEST_NAME = 200
_Schema = Mapping[str, Any]


@dataclass(frozen=True)
class ChatCall:
    """One chat request. ``requests`` are its questions, ``keys`` one for each of them.

    ``schema`` is the JSON schema of the reply, for servers that support one. A ``batched``
    call asks for a list of scores, even with a single question.
    """

    requests: tuple[JudgeRequest, ...]
    messages: tuple[dict[str, str], ...]
    keys: tuple[bytes, ...]
    schema: _Schema | None = None
    batched: bool = False


class Reply(NamedTuple):
    """Content of a chat completion: one judgement per request of the call, all scored; or None.

    If None, ``reason`` is the reason in one word for counts, and ``detail`` in words.
    ``final``: a retry would give the same. ``tokens`` were read and written, and are paid for in
    any case. ``served`` is the server's own identification: model, and system fingerprint if it
    has one. ``reasoned``: the judge reasoned before its answer.
    """

    judgements: tuple[Judgement, ...] | None = None
    reason: str = ""
    detail: str = ""
    final: bool = False
    tokens: tuple[int, int] = (0, 0)
    served: str = ""
    reasoned: bool = False


def plan_calls(
    requests: Sequence[JudgeRequest], config: JudgeConfig, prompts: JudgePrompts | None = None
) -> list[ChatCall]:
    """The calls that answer ``requests``; repeated requests are asked once.

    With ``judge.form=batched`` all rubrics of one answer to one question are one call, in their
    order; citations are always asked one by one.

    Parameters
    ----------
    prompts
        Prompts of ``config`` if already read; None reads them now.

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


def request_body(call: ChatCall, config: JudgeConfig, *, structured: bool) -> dict[str, Any]:
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


def read_reply(raw: bytes, call: ChatCall) -> Reply:
    """The judgements in a chat completion, with its tokens."""
    try:
        completion = json.loads(raw)
        choice = completion["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        text = message.get("content") or ""
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Reply(None, "garbage", "the reply is no chat completion")
    tokens, reasoned = _tokens(completion.get("usage")), _reasoned(message, text)
    reply = _read(text, finish, call, reasoned=reasoned)
    return reply._replace(tokens=tokens, served=_served(completion), reasoned=reasoned)


def _reasoned(message: Mapping[str, Any], text: Any) -> bool:
    """True if a reply has reasoning: in a field of its own, or in its text up to ``</think>``."""
    if message.get("reasoning_content") or message.get("reasoning"):
        return True
    if not isinstance(text, str) or text.lstrip().startswith("{"):
        return False
    before, closed, _ = text.partition("</think>")
    opened = before.lstrip().startswith("<think>")
    return bool(closed or opened) and bool(before.replace("<think>", "").strip())


def _read(text: Any, finish: Any, call: ChatCall, *, reasoned: bool) -> Reply:
    if finish == "abort":
        return Reply(None, "aborted", "the server aborted the judgement")
    if finish == "length":
        # Where the prompt opens the reasoning, a cut reply has its words and no tag.
        if reasoned or (isinstance(text, str) and text.strip() and "{" not in text):
            why = f"{CUT_SHORT} length, {REASONING}"
            return Reply(None, "reasoning", why, final=True)
        why = f"{CUT_SHORT} length; judge.max_tokens is too small for it"
        return Reply(None, "length", why, final=True)
    if finish not in (None, "stop"):
        return Reply(None, "ended", f"{CUT_SHORT} {finish!r:.40}", final=True)
    if not isinstance(text, str):
        return Reply(None, "garbage", "the reply is no chat completion")
    if reasoned and not text.strip():
        return Reply(None, "reasoning", f"{UNPARSABLE}, {REASONING}")
    allowed = _ALLOWED.get(call.requests[0].kind)
    if not call.batched:
        judgement = parse_judgement(text, allowed)
        if judgement.status != "scored":
            return Reply(None, "unparsable", judgement.detail)
        return Reply((judgement,))
    found = parse_batch(text, len(call.requests), allowed)
    return Reply(None, "unparsable", found) if isinstance(found, str) else Reply(found)


def identity_digest(config: JudgeConfig) -> bytes:
    """The part of the key shared by all questions to one judge."""
    values = [
        config.model,
        config.revision,
        config.temperature,
        config.max_tokens,
        config.structured_output,
        config.extra_body,
    ]
    return hashlib.sha256(canonical_json(values).encode()).digest()


def _call(
    requests: tuple[JudgeRequest, ...], config: JudgeConfig, prompts: JudgePrompts, base: bytes
) -> ChatCall:
    batched = config.form == "batched" and requests[0].kind == "rubric"
    messages = prompts.render_batch(requests) if batched else prompts.render(requests[0])
    schema, digest = None, b""
    if config.structured_output != "none":
        count = len(requests) if batched else None
        schema, digest = _schema(requests[0].kind, count, only_whole=prompts.shipped)
    keys = _keys(base + digest, messages, len(requests))
    return ChatCall(requests, tuple(messages), keys, schema, batched)


@functools.lru_cache(maxsize=1024)
def _schema(kind: str, count: int | None, *, only_whole: bool) -> tuple[_Schema, bytes]:
    """Schema of a reply, with ``count`` scores in a list, and its digest. Custom prompts may ask
    for half scores."""
    allowed = _ALLOWED.get(kind, (0.0, 1.0, 2.0) if only_whole else None)
    score: _Schema = {"type": "number", "minimum": 0, "maximum": MAX_SCORE}
    if allowed is not None:
        score = {"type": "integer", "enum": [int(value) for value in allowed]}
    schema = _object({"score": score})
    if count is not None:
        criterion = {"type": "integer", "enum": list(range(1, count + 1))}
        entry = _object({"criterion": criterion, "score": score})
        listed = {"type": "array", "items": entry, "minItems": count, "maxItems": count}
        schema = _object({"scores": listed})
    return schema, hashlib.sha256(canonical_json(schema).encode()).digest()


def _object(properties: _Schema) -> _Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def marked(calls: Sequence[ChatCall], mark: str) -> list[ChatCall]:
    """The same questions with separate keys: stored answers without this mark do not apply, and
    answers with it apply to nothing else."""
    whole = hashlib.sha256(mark.encode()).digest()

    def key_of(key: bytes) -> bytes:
        return hashlib.sha256(b"\x1e".join((whole, key))).digest()[:KEY_BYTES]

    return [replace(call, keys=tuple(map(key_of, call.keys))) for call in calls]


def _keys(base: bytes, messages: Sequence[Mapping[str, str]], count: int) -> tuple[bytes, ...]:
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
