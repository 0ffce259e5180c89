"""vLLM as a rollout server: its start, every way of weight transfer, and the key of its routes.

In: an order with an environment that has vLLM. Out: checks. Weights are changed between two
transfers, and a fixed prompt is scored on both sides: what a server has has to be the new weights,
not those before.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flows.certify.work import Order, absent, check, recipe
from infra.rollouts import servers as opening
from refiner_core.contract.config import RecipeConfig, RolloutServerConfig
from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.proofs import CertifiedCheck
from refiner_core.contract.types import Endpoint, GenerationRequest, SamplingParams
from refiner_core.generation.load import load_model, load_tokenizer
from refiner_core.generation.vllm.admin import Admin, make_canary, tolerance_of

_MODEL = "builtin:tiny"
_WINDOW = 512
#: How much the weights are changed by before the second transfer.
_CHANGE = 1.05
#: A route that changes a server; vLLM leaves it open.
_CONTROL = "/pause"


def server_checks(order: Order, folder: Path) -> Iterator[CertifiedCheck]:
    """Every way of weight transfer; absent without an environment that has vLLM."""
    for way in ("reload", "nccl", "ipc"):
        name = f"vLLM, weights by {way}"
        if not order.vllm:
            yield absent(name, "no environment with vLLM is given (grpo.rollout_server.python=…)")
        elif way == "nccl" and order.gpus < 2:
            yield absent(name, "it takes two GPUs: one trains, the other serves")
        elif way == "ipc" and not order.gpus:
            yield absent(name, "it shares the memory of a GPU, and there is none")
        else:
            yield from _served(order, way, folder / way)


def _served(order: Order, way: str, folder: Path) -> Iterator[CertifiedCheck]:
    config = _config(order, way)
    model = load_model(_MODEL, config.model)
    model.to("cuda:0" if order.gpus else "cpu")
    tokenizer = load_tokenizer(_MODEL, config.model)
    tolerance = tolerance_of(None, config.model.dtype)

    @contextmanager
    def whole() -> Iterator[Any]:
        yield model

    try:
        with opening.open_vllm(config, tokenizer, folder) as rollouts:
            began = time.monotonic()
            rollouts.sync(whole(), "before")
            start_s, began = time.monotonic() - began, time.monotonic()
            old = make_canary(model, tokenizer, _WINDOW)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(_CHANGE)
            rollouts.sync(whole(), "after")
            seconds = time.monotonic() - began
            [endpoint] = rollouts.weights.endpoints()
            admin = Admin(endpoint, 60.0)
            gap = admin.difference(make_canary(model, tokenizer, _WINDOW), "after")
            stale = admin.difference(old, "after")
            yield check(
                *(f"vLLM, weights by {way}", gap <= tolerance < stale),
                f"up in {start_s:.0f} s; new weights in {seconds:.2g} s, log-probabilities off by "
                f"{gap:.2g} (at most {tolerance:g}), from the old ones by {stale:.2g}",
                start_s=start_s,
                seconds=seconds,
                gap=gap,
            )
            yield _keyed(endpoint, way)
            yield _sampling(rollouts.generator, way)
    except UnsupportedError as error:
        yield absent(f"vLLM, weights by {way}", error.what)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        yield check(f"vLLM, weights by {way}", False, why)


def _config(order: Order, way: str) -> RecipeConfig:
    apart = way == "nccl"
    config = recipe(replace(order, checkpointing=False), ranks=1)
    server = RolloutServerConfig(
        **{**order.vllm, "weight_transfer": way, "colocate": bool(order.gpus) and not apart}
    )
    resources = replace(config.grpo.resources, gpus=(2 if apart else 1) if order.gpus else 0)
    grpo = replace(
        config.grpo,
        generation_backend="vllm",
        max_token_length=_WINDOW,
        response_length=64,
        rollout_server=server,
        resources=resources,
    )
    return replace(config, grpo=grpo)


def _keyed(endpoint: Endpoint, way: str) -> CertifiedCheck:
    """Whether a route that changes the server turns away who has no key."""
    name = f"vLLM, key of its control routes ({way})"
    request = urllib.request.Request(endpoint.url.removesuffix("/v1") + _CONTROL, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    return check(name, status in (401, 403), f"{_CONTROL} without the key: HTTP {status}")


def _sampling(generator: Any, way: str) -> CertifiedCheck:
    requests = [GenerationRequest(tuple(range(20, 60 + i % 4)), i) for i in range(64)]
    began = time.monotonic()
    done = generator.generate(requests, SamplingParams(max_new_tokens=64))
    tokens = sum(len(one.token_ids) for one in done)
    per_s = tokens / (time.monotonic() - began)
    return check(
        *(f"sampling by vLLM ({way})", tokens > 0),
        f"{per_s:,.0f} tokens/s of {len(requests)} samples at once",
        tokens_per_s=per_s,
    )
