"""Text to a tool call, or the reason why it is none.

In: the sampled text of a turn, without its final token. Out: :class:`ParsedTurn`.

A turn is exactly one ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` and nothing else:

- White space is allowed around the tags and around the JSON, and an *empty* ``<think></think>``
  before the call: Qwen3's template writes such a block with thinking off, and a model whose
  template does not will write it itself. Thoughts and words are not allowed.
- A turn ends at its first ``</tool_call>``, as sampling does (the tag is the stop string), so the
  same text is the same turn for any sampler. Inside a JSON string the tag is written
  ``<\\/tool_call>``, as by :func:`call_text`.
- ``name`` is a non-empty string, ``arguments`` an object, with nothing else beside them.
  Arguments as a *string* of JSON, as in OpenAI's wire format, are refused: one call would have
  two spellings, ambiguous for tools that take text.
- JSON is read strictly. Duplicate keys, ``NaN`` and ``Infinity``, numbers outside 64 bits,
  unpaired surrogates and nesting deeper than :data:`MAX_DEPTH` are errors, since tools, records
  and templates would each read them differently. The result does not depend on the caller's
  stack depth.

============== ==============================================================================
``ok``         a call
``no_call``    no call, or words beside it
``many_calls`` more than one
``bad_json``   the text between the tags is not one JSON value
``bad_shape``  JSON, but not an object of a name and arguments
``too_long``   the JSON between the tags is longer than ``max_argument_bytes``
``cut``        the text ends, or tokens ran out, before the end of the call
============== ==============================================================================

The environment checks whether the tool exists and accepts the arguments.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from refiner_core.environments.protocol import ToolCall, TurnStatus

OPEN, CLOSE = "<tool_call>", "</tool_call>"
#: Nesting depth of objects and arrays in a call, the outermost included.
MAX_DEPTH = 64
_TOO_DEEP = f"nested deeper than {MAX_DEPTH}"
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>")
_INTEGERS = range(-(2**63), 2**64)
#: More digits than any number in :data:`_INTEGERS`, the sign included.
_MAX_DIGITS = 24
_SHOWN = 40


@dataclass(frozen=True)
class ParsedTurn:
    """``call`` is None exactly if ``status`` is not ok; ``why`` then explains it for people."""

    status: TurnStatus
    call: ToolCall | None = None
    why: str = ""


class _JsonRefusal(ValueError):
    """JSON that Python would accept and this parser does not."""


def parse_turn(text: str, max_argument_bytes: int, *, ran_out: bool = False) -> ParsedTurn:
    """The call of a turn.

    Parameters
    ----------
    text
        The sampled text, with special tokens visible, without a final stop token.
    max_argument_bytes
        Limit on UTF-8 bytes of JSON between the tags, checked before parsing.
    ran_out
        Sampling ended at its token limit: a turn without a whole call is then ``cut``.
    """
    thought = _EMPTY_THOUGHT.match(text)
    body = (text[thought.end() :] if thought else text).strip()
    before, opened, rest = body.partition(OPEN)
    inner, closed, after = rest.partition(CLOSE)
    if ran_out and not closed:
        return ParsedTurn("cut", why="the tokens of the turn ran out before its call was complete")
    if not opened:
        return ParsedTurn("no_call", why=f"no {OPEN}: {_shown(body)}")
    if OPEN in after:
        return ParsedTurn("many_calls", why="a turn is one call, and this is more than one")
    if before or after.strip():
        return ParsedTurn("no_call", why=f"words beside the call: {_shown(before or after)}")
    if not closed:
        return ParsedTurn("cut", why=f"the call is not closed by {CLOSE}")
    length = len(inner.encode("utf-8", "replace"))
    if length > max_argument_bytes:
        why = f"the call has {length} bytes, and {max_argument_bytes} are the most"
        return ParsedTurn("too_long", why=why)
    return _parse_call(inner)


def _parse_call(inner: str) -> ParsedTurn:
    try:
        value = json.loads(
            inner,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_int=_integer,
            parse_float=_float,
        )
        _check_depth_and_text(value)
    except RecursionError:
        return ParsedTurn("bad_json", why=f"not JSON: {_TOO_DEEP}")
    except ValueError as error:
        if OPEN in inner and not isinstance(error, _JsonRefusal):
            return ParsedTurn("many_calls", why=f"{OPEN} appears within a call")
        return ParsedTurn("bad_json", why=f"not JSON: {error}")
    wrong = _wrong_shape(value)
    if wrong:
        return ParsedTurn("bad_shape", why=wrong)
    return ParsedTurn("ok", ToolCall(value["name"], value["arguments"]))


def _wrong_shape(value: Any) -> str:
    """Fault in the value of a call; empty if there is none."""
    if not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
        return f"a call is an object of a name and arguments, not {_shown(json.dumps(value))}"
    if not isinstance(value["name"], str) or not value["name"].strip():
        return f"`name` is the name of a tool, not {_shown(json.dumps(value['name']))}"
    if not isinstance(value["arguments"], dict):
        return f"`arguments` is an object, not {_shown(json.dumps(value['arguments']))}"
    return ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _JsonRefusal(f"{_shown(key)} appears twice in one object")
        values[key] = value
    return values


def _constant(name: str) -> Any:
    raise _JsonRefusal(f"{name} is no JSON")


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS or int(text) not in _INTEGERS:
        raise _JsonRefusal(f"the number {_shown(text)} is beyond 64 bits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _JsonRefusal(f"the number {_shown(text)} is beyond 64 bits")
    return value


def _check_depth_and_text(value: Any) -> None:
    """Walk without recursion, so that the answer does not depend on the caller's stack."""
    waiting = [(value, 1)]
    while waiting:
        one, depth = waiting.pop()
        if isinstance(one, str):
            try:
                one.encode()
            except UnicodeEncodeError:
                raise _JsonRefusal("a text contains half of a surrogate pair") from None
        elif isinstance(one, dict | list):
            if depth > MAX_DEPTH:
                raise _JsonRefusal(_TOO_DEEP)
            parts = [*one.keys(), *one.values()] if isinstance(one, dict) else one
            waiting += [(part, depth + 1) for part in parts]


def _shown(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")


def call_text(call: ToolCall) -> str:
    """A call as a model writes it, readable by :func:`parse_turn`, in the spelling of Qwen3's
    template. Used in demonstrations.

    Raises
    ------
    ValueError
        The arguments are not JSON (a value of another type, NaN).
    """
    text = json.dumps(call.as_json(), ensure_ascii=False, allow_nan=False)
    # A tag can occur only within strings; the escaped string is equal for a JSON parser.
    text = text.replace(CLOSE, CLOSE.replace("/", "\\/"))
    return f"{OPEN}\n{text}\n{CLOSE}"
