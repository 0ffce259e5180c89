"""Transfer of new weights to running servers: complete, and verified.

In: a model that hands over its weights, one at a time, and a version. Out: servers with
these weights, verified by a canary.

::

    sync ── trainer scores the canary, weights are written to a folder in memory
      │        each server: pause ─ load ─ version ─ drop prefixes ─ resume ─ canary
      │                       └────── anything fails ──────┘            │
      │                                     v                           v wrong
      └── nobody samples before      another server in its place, on the same weights; canary

The fleet's lock is held throughout, so no rollout is requested between the first step and the last
canary; rollouts wait for that. The server's own pause is lifted just before the canary, because a
paused server answers nothing. A server whose load failed is never resumed, since it may answer 200
with wrong weights. It is ended, and another one is started in its place.

The folder of the current version stays, since servers may have to be started from it.

The administrative routes exist only with ``VLLM_SERVER_DEV_MODE=1``; the key is sent with all of
them, though vLLM itself ignores it.
"""

from __future__ import annotations

import errno
import logging
import math
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urljoin

import httpx
import torch
from safetensors import SafetensorError
from torch import Tensor

from refiner_core.contract.errors import KilledError, NoSpaceError, StageFailed
from refiner_core.contract.types import Endpoint, RolloutServers
from refiner_core.generation.completions import stop_ids
from refiner_core.generation.saving import HandOver, Weights, save_model, whole_shape
from refiner_core.generation.vllm.wire import (
    SCORING_TEMPERATURE,
    InvalidResponse,
    read_scores,
    said,
    scoring_body,
)

log = logging.getLogger(__name__)
#: Accept no request from now on. None is running: the fleet's lock ensures that.
_PAUSE = "/pause?mode=keep"
#: Largest file of weights; host memory holds one besides the written ones.
_PART_BYTES = 2 * 10**9
#: Allowance for configuration and tokenizer beside the weights, bytes.
_SMALL_FILES = 64 << 20


class WeightSync:
    """A trainer's fleet: servers and their weights.

    Parameters
    ----------
    servers
        Starts, replaces and ends the servers.
    folder
        A private folder of this trainer, in memory.
    tokenizer
        Stored in the servers' folder, for stop strings.
    tolerance
        Largest allowed difference of a canary.
    window
        Tokens that the servers were started with.
    timeout_s
        Limit of one step of a server: loading, or compiling before its first answer.

    Attributes
    ----------
    busy
        Held while rollouts are sampled or weights are sent.
    version
        Version of the weights on all servers; empty if unknown.
    stop_ids, canary
        Tokens that end a text, and scores of a fixed prompt, of the model that was sent last.
    """

    def __init__(
        self,
        servers: RolloutServers,
        folder: Path,
        tokenizer: Any,
        *,
        tolerance: float,
        window: int,
        timeout_s: float = 1800.0,
    ) -> None:
        self.busy = threading.Lock()
        self.version = self._coming = ""
        self.stop_ids: frozenset[int] = frozenset()
        self._servers, self._folder, self._tokenizer = servers, folder, tokenizer
        self._tolerance, self._window, self._timeout_s = tolerance, window, timeout_s
        self._endpoints: list[Endpoint] = []
        self._written = 0
        self._current = folder / weights_name(0)
        self.canary: Canary

    def endpoints(self) -> Sequence[Endpoint]:
        """The servers' addresses, in order.

        Raises
        ------
        RuntimeError
            No weights were sent yet, or sending the last ones failed.
        """
        if not self.version:
            raise RuntimeError("no weights are known: rollouts need a successful sync() first")
        return list(self._endpoints)

    def revive(self, index: int, why: str) -> Endpoint:
        """Replace a server by a new one with the current weights.

        Raises
        ------
        KilledError
            Servers had to be replaced too often.
        """
        log.warning("rollout server %d is replaced: %s", index, why)
        self._endpoints[index] = self._servers.replace(index, self._current, why)
        self._require(index)
        return self._endpoints[index]

    def sync(self, hand_over: HandOver, version: str) -> None:
        """Send all servers a model's weights; the first call starts the servers.

        Waits for a running call of the generator. ``hand_over`` is called once.

        Raises
        ------
        NoSpaceError
            The weights do not fit into memory.
        StageFailed
            A server started from these weights scores differently from the trainer.
        KilledError
            Servers had to be replaced more often than the recipe allows.
        """
        with self.busy:
            self.version, self._coming = "", version
            self._written += 1
            before, current = self._current, self._folder / weights_name(self._written)
            prompt: tuple[int, ...] = ()

            def prompt_of(model: Any) -> tuple[int, ...]:
                nonlocal prompt
                self.stop_ids = stop_ids(model, self._tokenizer)
                prompt = canary_ids(model, self._tokenizer)[: self._window - 1]
                return prompt

            def save(model: Any, weights: Weights) -> None:
                write_folder(model, self._tokenizer, current, weights)

            logits_TV = hand_over(prompt_of, save)
            self.canary, self._current = make_canary(prompt, logits_TV), current
            if self._endpoints:
                with ThreadPoolExecutor(len(self._endpoints)) as pool:
                    failures = list(pool.map(self._reload, range(len(self._endpoints))))
                for index, why in enumerate(failures):
                    if why:
                        self.revive(index, why)
            else:
                self._endpoints = self._servers.start(current)
                for index in range(len(self._endpoints)):
                    self._require(index)
            shutil.rmtree(before, ignore_errors=True)
            self.version = version

    def _reload(self, index: int) -> str:
        """Load the current weights, activate them, lift the pause, and verify: the reason of a
        failure, or an empty string."""
        admin = self._admin(index)
        try:
            admin.post(_PAUSE)
            admin.load(self._servers.weights_of(index, self._current))
            admin.post("/update_weight_version", {"new_version": self._coming})
            admin.forget_prefixes()
            admin.post("/resume")
            return self._wrong(admin)
        except _AdminError as error:
            return str(error)

    def _require(self, index: int) -> None:
        """Raise if a newly started server is wrong."""
        try:
            wrong = self._wrong(self._admin(index))
        except _AdminError as error:
            raise KilledError(
                f"Rollout server {index} was started and then failed: {error}",
                fix="none needed if it was killed from outside; else check its output",
            ) from error
        if wrong:
            raise StageFailed(
                f"Rollout server {index} was started on the trainer's weights, but {wrong}",
                expected="the same log-probabilities on both sides, but for rounding",
                fix="check that model.dtype and grpo.rollout_server.args (quantisation, another "
                "--dtype) mean the same; grpo.rollout_server.canary_tolerance is the tolerance "
                "for rounding",
            )

    def _wrong(self, admin: Admin) -> str:
        difference = admin.difference(self.canary, self._coming)
        if difference <= self._tolerance:
            return ""
        return (
            f"its log-probabilities of a fixed prompt differ from the trainer's by up to "
            f"{difference:.2g}, more than {self._tolerance:g}"
        )

    def _admin(self, index: int) -> Admin:
        return Admin(self._endpoints[index], self._timeout_s)


def weights_name(number: int) -> str:
    """Name of the folder of the weights that were sent as number ``number``, on every node."""
    return f"weights-{number}"


def write_folder(model: Any, tokenizer: Any, folder: Path, weights: Weights) -> None:
    """Write model, configuration and tokenizer; after an error the folder does not exist.

    Raises
    ------
    NoSpaceError
        It does not fit; the message has the size.
    """
    size = sum(math.prod(whole_shape(p)) * p.element_size() for p in model.parameters())
    free = shutil.disk_usage(folder.parent).free
    try:
        if free < size + _SMALL_FILES:
            raise OSError(errno.ENOSPC, f"{free / 2**30:.1f} GiB are free")
        save_model(model, tokenizer, folder, weights, shard_bytes=_PART_BYTES)
    except (OSError, SafetensorError) as error:
        raise NoSpaceError(
            f"New weights for the rollout servers ({size / 2**30:.2f} GiB) cannot be written to "
            f"{folder.parent}: {error}",
            expected="memory for two versions of the weights",
            fix="set grpo.rollout_server.weights_dir to a folder with more space, or give the job "
            "more memory (resources.memory_gb): files in /dev/shm count as memory",
        ) from error


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


class _AdminError(Exception):
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
            raise _AdminError(
                f"its workers said {results!r} after loading (is the extension there?)"
            )

    def forget_prefixes(self) -> None:
        """Drop the prefix cache of other weights."""
        if self.post("/reset_prefix_cache").get("success") is False:
            raise _AdminError(
                "it could not drop its prefix cache: something still holds blocks of it"
            )

    def difference(self, canary: Canary, version: str) -> float:
        """Distance of its canary log-probabilities from the trainer's."""
        answer = self._ask("/v1/completions", content=scoring_body(canary.prompt_ids, version))
        try:
            return canary.difference(*read_scores(answer.content, canary.prompt_ids))
        except InvalidResponse as error:
            raise _AdminError(f"its answer to the canary cannot be used: {error}") from error

    def post(self, route: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer of a route."""
        answer = self._ask(route) if body is None else self._ask(route, json=body)
        try:
            found = answer.json() if answer.content else {}
        except ValueError as error:
            raise _AdminError(f"{route} answered {said(answer.content, self.endpoint)}") from error
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
            raise _AdminError(f"no answer to {route}: {error or type(error).__name__}") from error
        if answer.status_code != 200:
            raise _AdminError(
                f"HTTP {answer.status_code} for {route}: {said(answer.content, self.endpoint)}"
            )
        return answer
