"""The administrative routes of a rollout server: health, pause, new weights.

In: an endpoint. Out: its answers, or :class:`AdminError`. The routes exist only with
``VLLM_SERVER_DEV_MODE=1``; the key is sent with all of them, though vLLM itself ignores it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urljoin

import httpx
import torch
from torch import Tensor

from refiner_core.contract.types import Endpoint
from refiner_core.generation.vllm.wire import (
    SCORING_TEMPERATURE,
    InvalidResponse,
    read_scores,
    said,
    scoring_body,
)

_TEXT = (
    "The answer cites only what the search has found: two snippets agree that the bridge was "
    "opened in 1932, and a third one names the engineer."
)
_TOKENS = 32
_FEWEST = 8
#: Largest allowed difference by the type of the weights, if the recipe sets none.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


@dataclass(frozen=True, eq=False)
class Canary:
    """A prompt and the trainer's scores of it.

    ``expected`` are log-probabilities of its tokens except the first; ``next_logprobs_V`` those of
    all possible next tokens, at the temperature of the canary.
    """

    prompt_ids: tuple[int, ...]
    expected: tuple[float, ...]
    next_logprobs_V: Tensor

    def difference(self, scores: Sequence[float], token: int, logprob: float) -> float:
        """The largest difference from the trainer's scores; that of the next token as logits."""
        prompt = max(abs(a - b) for a, b in zip(self.expected, scores, strict=True))
        sampled = abs(float(self.next_logprobs_V[token]) - logprob)
        return max(prompt, sampled * SCORING_TEMPERATURE)


def tolerance_of(configured: float | None, dtype: Literal["float32", "bfloat16"]) -> float:
    """Largest allowed difference."""
    return TOLERANCE[dtype] if configured is None else configured


def make_canary(prompt_ids: Sequence[int], logits_TV: Tensor) -> Canary:
    """The canary of a prompt, from the trainer's logits."""
    chosen_T = torch.tensor(prompt_ids)[1:, None]
    logprobs_T = logits_TV[:-1].log_softmax(-1).gather(-1, chosen_T)[:, 0]
    next_V = (logits_TV[-1] / SCORING_TEMPERATURE).log_softmax(-1)
    return Canary(tuple(prompt_ids), tuple(logprobs_T.tolist()), next_V)


def canary_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """A sentence, or numbers if the tokenizer has too few distinct words for one."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = [i for i in tokenizer(_TEXT)["input_ids"][:_TOKENS] if i < vocabulary]
    if len(set(ids)) >= _FEWEST:
        return tuple(ids)
    return tuple((7 * place + 5) % vocabulary for place in range(_TOKENS))


class AdminError(Exception):
    """A server did not carry out a command; its state is now unknown."""


class Admin:
    """One server's control; each call uses its own connection.

    Parameters
    ----------
    endpoint
        The server.
    timeout_s
        Limit of one call, which may load weights, or compile before a first answer.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self.endpoint, self._timeout_s = endpoint, timeout_s

    def load(self, weights: str) -> None:
        """Load a complete folder in place."""
        body = {"method": "refiner_load_weights", "kwargs": {"weights_path": weights}}
        results = self.post("/collective_rpc", body).get("results")
        if not isinstance(results, list) or not all(isinstance(r, dict) for r in results):
            raise AdminError(
                f"its workers said {results!r} after loading (is the extension there?)"
            )

    def forget_prefixes(self) -> None:
        """Drop the prefix cache of other weights."""
        if self.post("/reset_prefix_cache").get("success") is False:
            raise AdminError(
                "it could not drop its prefix cache: something still holds blocks of it"
            )

    def difference(self, canary: Canary, version: str) -> float:
        """Distance of its canary log-probabilities from the trainer's."""
        answer = self._ask("/v1/completions", content=scoring_body(canary.prompt_ids, version))
        try:
            return canary.difference(*read_scores(answer.content, canary.prompt_ids))
        except InvalidResponse as error:
            raise AdminError(f"its answer to the canary cannot be used: {error}") from error

    def post(self, route: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer of a route."""
        answer = self._ask(route) if body is None else self._ask(route, json=body)
        try:
            found = answer.json() if answer.content else {}
        except ValueError as error:
            raise AdminError(f"{route} answered {said(answer.content, self.endpoint)}") from error
        return found if isinstance(found, dict) else {}

    def _ask(self, route: str, **body: Any) -> httpx.Response:
        key = self.endpoint.key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if "content" in body:
            headers["Content-Type"] = "application/json"
        body |= {"headers": headers, "timeout": self._timeout_s, "trust_env": False}
        try:
            answer = httpx.post(urljoin(self.endpoint.url, route), **body)
        except httpx.HTTPError as error:
            raise AdminError(f"no answer to {route}: {error or type(error).__name__}") from error
        if answer.status_code != 200:
            raise AdminError(
                f"HTTP {answer.status_code} for {route}: {said(answer.content, self.endpoint)}"
            )
        return answer
