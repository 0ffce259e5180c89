"""Requests to a vLLM server and the meaning of its answers. Pure.

In: one request and its sampling parameters. Out: the body of ``POST /v1/completions``; from an
answer, a completion, or the reason why it is unusable. Every field with a server default is sent
explicitly, and every requested effect is verified in the answer, since a server ignores fields that
it does not know.

One request is one sample with its own seed. (``n`` samples of one request use consecutive seeds
from ``seed`` on, and the same seed for several prompts draws the same numbers for all of them.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from refiner_core.contract.types import Completion, Endpoint, GenerationRequest, SamplingParams

#: The served name of a rollout server's model.
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
#: Not 1, to detect log-probabilities computed before the temperature.
SCORING_TEMPERATURE = 0.5
#: Seeds are signed 64-bit numbers in vLLM, and never negative here.
_SEEDS = 1 << 63
#: Rounding may raise a log-probability above 0 by this much.
_ROUNDING = 1e-3


class InvalidResponse(Exception):
    """An answer of status 200 that breaks the contract, so that a retry would not help."""


class SampleQuery(NamedTuple):
    """One requested sample: ``stop_ids`` are tokens that end a text, ``version`` is that of the
    weights; the prefix cache of other versions is never read."""

    request: GenerationRequest
    params: SamplingParams
    stop_ids: frozenset[int]
    version: str


def said(raw: bytes, endpoint: Endpoint) -> str:
    """A server's text for quoting: one line, without the key."""
    text = " ".join(raw[:1200].decode(errors="replace").split())
    if endpoint.key:
        text = text.replace(endpoint.key, "***")
    return text[:300]


def completion_body(asked: SampleQuery) -> bytes:
    """The body for one sample, with every sampling parameter explicit."""
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


def read_completion(raw: bytes, asked: SampleQuery) -> Completion | Literal["abort"]:
    """The sample in an answer; ``abort`` if the server aborted it.

    Raises
    ------
    InvalidResponse
        It does not match the request; the message says how.
    """
    choice = _only_choice(raw, asked.request.prompt_ids)
    if isinstance(choice, _Abort):
        return "abort"
    tokens, most = tuple(choice.token_ids), asked.params.max_new_tokens
    if choice.finish_reason == "length" and len(tokens) != most:
        raise InvalidResponse(
            f"it ended by length with {len(tokens)} of {most} tokens (max_tokens)"
        )
    by_string = choice.stop_reason in asked.params.stop_strings
    if choice.finish_reason == "stop" and not (by_string or tokens[-1] in asked.stop_ids):
        raise InvalidResponse(
            f"it stopped (stop_reason {choice.stop_reason!r}) at none of the stop tokens "
            f"{sorted(asked.stop_ids)[:8]} or stop strings that were sent"
        )
    return Completion(tokens, tuple(choice.logprobs.token_logprobs), choice.finish_reason)


def scoring_body(prompt_ids: Sequence[int], version: str) -> bytes:
    """The body that requests the log-probabilities of a prompt's own tokens, and of the next."""
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
    """A server's scores of a prompt: log-probabilities of its tokens except the first, and a next
    token with its own, at :data:`SCORING_TEMPERATURE`.

    Raises
    ------
    InvalidResponse
        It does not match the request.
    """
    choice = _only_choice(raw, prompt_ids)
    entries = choice.prompt_logprobs if isinstance(choice, _Choice) else None
    try:
        pairs = zip(prompt_ids, entries or (), strict=True)
        scores = [entry[str(token)].logprob for token, entry in [*pairs][1:] if entry is not None]
    except (KeyError, ValueError) as error:
        raise InvalidResponse(
            "prompt_logprobs has not one entry per token of the prompt"
        ) from error
    assert isinstance(choice, _Choice)
    return scores, choice.token_ids[0], choice.logprobs.token_logprobs[0]


def _encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


_Logprob = Annotated[float, Field(le=_ROUNDING, allow_inf_nan=False)]


class _Answer(BaseModel):
    model_config = ConfigDict(strict=True)


class _Scored(_Answer):
    logprob: _Logprob


class _Logprobs(_Answer):
    token_logprobs: list[_Logprob]


class _Abort(_Answer):
    finish_reason: Literal["abort"]


class _Choice(_Answer):
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None
    token_ids: list[int] = Field(min_length=1)
    prompt_token_ids: list[int]  # missing if an older vLLM ignored return_token_ids
    logprobs: _Logprobs
    prompt_logprobs: list[dict[str, _Scored] | None] | None = None


class _Completions(_Answer):
    choices: list[Annotated[_Abort | _Choice, Field(discriminator="finish_reason")]] = Field(
        min_length=1, max_length=1
    )


def _only_choice(raw: bytes, prompt_ids: Sequence[int]) -> _Abort | _Choice:
    """The one choice of an answer, complete and for this prompt."""
    try:
        [choice] = _Completions.model_validate_json(raw).choices
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InvalidResponse(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if isinstance(choice, _Choice):
        if choice.prompt_token_ids != list(prompt_ids):
            raise InvalidResponse(f"it is of another prompt than the {len(prompt_ids)} tokens sent")
        if len(choice.logprobs.token_logprobs) != len(choice.token_ids):
            raise InvalidResponse(
                f"not every one of {len(choice.token_ids)} tokens has a log-probability"
            )
    return choice
