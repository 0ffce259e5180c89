"""What is said to a vLLM server, and what its answers mean. Pure.

In: one request and its sampling parameters. Out: the body of ``POST /v1/completions``; from an
answer, a completion, or why it cannot be used. Nothing that a server would fill in by itself is
left unsaid, and nothing that it should have done is taken on trust: a server ignores fields that it
does not know, so each of them has an effect that is looked for in the answer.

One request is one sample with a seed of its own. (``n`` samples of one request take the seeds from
``seed`` on, and the same seed for several prompts draws the same numbers for all of them.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from refiner_core.contract.types import Completion, Endpoint, GenerationRequest, SamplingParams

#: The name that a rollout server serves its model under.
MODEL = "policy"
#: Fields of every request.
_ALWAYS = {
    "model": MODEL,
    "n": 1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "add_special_tokens": False,
    "logprobs": 0,
    "return_token_ids": True,
}
#: Not 1, so that log-probabilities from before the temperature are found out.
SCORING_TEMPERATURE = 0.5
#: Seeds are signed 64-bit numbers over there, and never negative here.
_SEEDS = 1 << 63
#: A log-probability may exceed 0 by what rounding does.
_ROUNDING = 1e-3


class Unusable(Exception):
    """An answer of status 200 that breaks the contract: asking again would not mend it."""


class Question(NamedTuple):
    """One sample that is wanted, and how: ``stop_ids`` are tokens that end a text, ``version`` is
    that of the weights; the prefix cache of other versions is never read."""

    request: GenerationRequest
    params: SamplingParams
    stop_ids: frozenset[int]
    version: str


def said(raw: bytes, endpoint: Endpoint, most: int = 300) -> str:
    """Text of a server, to be quoted: one line, without the key."""
    text = " ".join(raw[: 4 * most].decode(errors="replace").split())
    if endpoint.key:
        text = text.replace(endpoint.key, "***")
    return text[:most]


def completion_body(asked: Question) -> bytes:
    """The body for one sample, with every sampling parameter said."""
    request, params = asked.request, asked.params
    return _encoded(
        {
            **_ALWAYS,
            "prompt": list(request.prompt_ids),
            "max_tokens": params.max_new_tokens,
            "min_tokens": 0,
            "seed": request.seed % _SEEDS,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "stop": list(params.stop_strings),
            "stop_token_ids": sorted(asked.stop_ids),
            "ignore_eos": False,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": True,
            "echo": False,
            "stream": False,
            "cache_salt": f"refiner-{asked.version}",
        }
    )


def read_completion(raw: bytes, asked: Question) -> Completion | Literal["abort"]:
    """The sample in an answer; ``abort`` where the server gave it up half-way.

    Raises
    ------
    Unusable
        It is not what was asked for; says what is wrong with it.
    """
    choice = _only_choice(raw)
    if choice.get("finish_reason") == "abort":
        return "abort"
    _check_prompt(choice, asked.request.prompt_ids)
    tokens = _integers(choice.get("token_ids"), "token_ids")
    logprobs = _logprobs(choice.get("logprobs"), len(tokens))
    reason = choice.get("finish_reason")
    if reason == "stop":
        _check_stop(tokens, choice.get("stop_reason"), asked)
        return Completion(tokens, logprobs, "stop")
    if reason == "length":
        if len(tokens) != asked.params.max_new_tokens:
            raise Unusable(
                f"it ended by length with {len(tokens)} of {asked.params.max_new_tokens} tokens "
                "(max_tokens)"
            )
        return Completion(tokens, logprobs, "length")
    raise Unusable(f"finish_reason is {reason!r}, not `stop`, `length` or `abort`")


def scoring_body(prompt_ids: Sequence[int], version: str) -> bytes:
    """The body that asks for the log-probabilities of a prompt's own tokens, and of the next."""
    return _encoded(
        {
            **_ALWAYS,
            "prompt": list(prompt_ids),
            "max_tokens": 1,
            "seed": 0,
            "temperature": SCORING_TEMPERATURE,
            "top_p": 1.0,
            "top_k": 0,
            "prompt_logprobs": 0,
            "cache_salt": f"refiner-canary-{version}",
        }
    )


def read_scores(raw: bytes, prompt_ids: Sequence[int]) -> tuple[list[float], int, float]:
    """What a server makes of a prompt: log-probabilities of its tokens but the first, and a next
    token with its own, at :data:`SCORING_TEMPERATURE`.

    Raises
    ------
    Unusable
        It is not what was asked for.
    """
    choice = _only_choice(raw)
    _check_prompt(choice, prompt_ids)
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(prompt_ids):
        raise Unusable("prompt_logprobs has not one entry per token of the prompt")
    scores = []
    for token, entry in zip(prompt_ids[1:], entries[1:], strict=True):
        found = entry.get(str(token)) if isinstance(entry, Mapping) else None
        value = found.get("logprob") if isinstance(found, Mapping) else None
        scores.append(_finite(value, "prompt_logprobs"))
    tokens = _integers(choice.get("token_ids"), "token_ids")
    (logprob,) = _logprobs(choice.get("logprobs"), 1)
    return scores, tokens[0], logprob


def _encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _only_choice(raw: bytes) -> Mapping[str, Any]:
    try:
        choices = json.loads(raw)["choices"]
        (choice,) = choices
    except (ValueError, LookupError, TypeError) as error:
        raise Unusable("it is no completion with one choice") from error
    if not isinstance(choice, dict):
        raise Unusable("its choice is no object")
    return choice


def _check_prompt(choice: Mapping[str, Any], prompt_ids: Sequence[int]) -> None:
    if "prompt_token_ids" not in choice or choice["prompt_token_ids"] is None:
        raise Unusable("it has no prompt_token_ids (return_token_ids was ignored: an older vLLM?)")
    echoed = choice["prompt_token_ids"]
    if echoed != list(prompt_ids):
        raise Unusable(
            f"it is of another prompt: {len(echoed)} tokens echoed, {len(prompt_ids)} sent, "
            "and they differ"
        )


def _check_stop(tokens: Sequence[int], reason: object, asked: Question) -> None:
    by_token = bool(tokens) and tokens[-1] in asked.stop_ids
    by_string = isinstance(reason, str) and reason in asked.params.stop_strings
    if not (by_token or by_string):
        raise Unusable(
            f"it stopped (stop_reason {reason!r}) at none of the stop tokens "
            f"{_few(asked.stop_ids)} or stop strings that were sent"
        )


def _integers(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(v) is int for v in value):
        raise Unusable(f"{name} is no list of tokens")
    return tuple(value)


def _logprobs(value: object, count: int) -> tuple[float, ...]:
    found = value.get("token_logprobs") if isinstance(value, Mapping) else None
    if not isinstance(found, list):
        raise Unusable("it has no token_logprobs")
    if len(found) != count:
        raise Unusable(f"{count} tokens have {len(found)} log-probabilities")
    return tuple(_finite(v, "token_logprobs") for v in found)


def _finite(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unusable(f"{name} has {value!r} where a number should be")
    if not math.isfinite(value) or value > _ROUNDING:
        raise Unusable(f"{name} has {value!r}, which is no log-probability")
    return float(value)


def _few(values: Collection[int]) -> str:
    shown = ", ".join(str(v) for v in sorted(values)[:8])
    return f"{shown}, …" if len(values) > 8 else shown
