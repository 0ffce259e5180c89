"""Checks of several processes: ranks, rollout servers, planted faults.

In: an order and a scratch folder. Out: checks.

Ranks: plain torch and ZeRO-1 to 3 on 1 to N of them, compared with one process; collectives. Each
number of ranks is one start, through the launcher of training stages (:mod:`infra.ranks.launch`),
with every engine in turn.

Servers, if an environment has vLLM: the start, new weights, and the key of the control routes.
Weights are changed between two loads, and a fixed prompt is scored on both sides: the server must
have the new weights, not the old ones.

Faults: a worker that is killed with SIGKILL and resumes, as a real run, with an orchestrator and a
worker of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from flows.certify.rank import train
from flows.certify.work import WorkOrder, absent, check, open_io, recipe, write_rows
from flows.proving.runs import plan_resume_proofs, prove_resume
from infra.ranks.launch import run_ranks
from infra.rollouts import servers as opening
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.placement import Placement
from refiner_core.contract.proofs import CertifiedCheck
from refiner_core.contract.types import Endpoint
from refiner_core.generation.load import load_model, load_tokenizer
from refiner_core.generation.saving import hand_over_of
from refiner_core.generation.vllm.sync import Admin, tolerance_of
from refiner_core.training.ranks import Ranks

#: Allowed relative difference of a loss or norm from one process in plain torch: sums over packs
#: and ranks have another order, and bfloat16 weights round the rest.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
_RANK_LENGTHS = [20, 33, 47, 60, 75, 90, 120, 150] * 8


def rank_checks(order: WorkOrder, folder: Path) -> Iterator[CertifiedCheck]:
    """Checks of ranks; one process comes first, as the reference."""
    write_rows(folder / "rows", _RANK_LENGTHS)
    expected = train(order, folder, Ranks(), 0, "alone")
    asked = folder / "order.json"
    order.write(asked)
    for world in order.worlds:
        gpus = tuple(range(world)) if order.gpus else ()
        place = folder / f"ranks-{world}"
        write_rows(place / "rows", _RANK_LENGTHS)
        told = {"order": str(asked), "folder": str(place)}
        placement = Placement(1, world, gpus)
        try:
            found = run_ranks(placement, order.rank_module, told, open_io(place), place)
        except Exception as error:
            yield check(f"{world} ranks", False, f"{type(error).__name__}: {error}")
            continue
        yield from engine_checks(order, world, found, expected)
        if "all_reduce" in found:
            rate, wrong = found["all_reduce"]
            why = f"{rate:.3g} GB/s per rank"
            why += f"; wrong on {wrong} ranks" if wrong else ", every element right"
            yield check(f"all_reduce on {world} ranks", not wrong, why, gb_per_s=rate)


def engine_checks(
    order: WorkOrder, world: int, found: Mapping[str, Any], expected: Mapping[str, Sequence[float]]
) -> Iterator[CertifiedCheck]:
    """Each engine on a number of ranks, compared with one process."""
    for zero in order.zero:
        name = f"{'plain torch' if zero == 0 else f'ZeRO-{zero}'} on {world} ranks"
        if (why := found["missing"].get(str(zero))) is not None:
            yield absent(name, why)
            continue
        one = found["engines"][str(zero)]
        off = {what: _furthest(one[what], expected[what]) for what in ("loss", "norm")}
        limit = TOLERANCE[order.dtype]
        why = ", ".join(f"{what} off by {gap:.2g}" for what, gap in off.items())
        yield check(
            *(name, all(gap <= limit for gap in off.values())),
            f"{len(one['loss'])} steps, relative to one process: {why} (at most {limit:g})",
            **{f"{what}_gap": gap for what, gap in off.items()},
        )


def _furthest(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference; infinite if steps are missing or not finite."""
    if len(found) != len(expected):
        return math.inf
    gaps = [abs(a - b) / max(abs(b), 1e-9) for a, b in zip(found, expected, strict=True)]
    return max(gaps) if all(math.isfinite(gap) for gap in gaps) else math.inf


_MODEL = "builtin:tiny"
_WINDOW = 512
#: Factor of the change of weights before the second load.
_CHANGE = 1.05
_WEIGHTS = "vLLM, weights by reload"
#: A route that changes a server; without a key vLLM leaves it open.
_CONTROL = "/pause"


def server_checks(order: WorkOrder, folder: Path) -> Iterator[CertifiedCheck]:
    """A server, new weights for it, and its key; absent without an environment with vLLM."""
    if not order.vllm:
        why = "no environment with vLLM is given (grpo.rollout_server.python=…)"
        yield absent(_WEIGHTS, why)
        return
    config = _config(order)
    model = load_model(_MODEL, config.model)
    model.to("cuda:0" if order.gpus else "cpu")
    tokenizer = load_tokenizer(_MODEL, config.model)
    tolerance = tolerance_of(None, config.model.dtype)

    hand_over = hand_over_of(lambda: model)
    try:
        with opening.open_vllm(config, tokenizer, folder) as rollouts:
            began = time.monotonic()
            rollouts.sync(hand_over, "before")
            start_s, began = time.monotonic() - began, time.monotonic()
            old = rollouts.fleet.canary
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(_CHANGE)
            rollouts.sync(hand_over, "after")
            seconds = time.monotonic() - began
            [endpoint] = rollouts.fleet.endpoints()
            admin = Admin(endpoint, 60.0)
            gap = admin.difference(rollouts.fleet.canary, "after")
            stale = admin.difference(old, "after")
            yield check(
                *(_WEIGHTS, gap <= tolerance < stale),
                f"up in {start_s:.0f} s; new weights in {seconds:.2g} s, log-probabilities off by "
                f"{gap:.2g} (at most {tolerance:g}), from the old ones by {stale:.2g}",
                start_s=start_s,
                seconds=seconds,
                gap=gap,
            )
            yield _keyed(endpoint)
    except UnsupportedError as error:
        yield absent(_WEIGHTS, error.what)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        yield check(_WEIGHTS, False, why)


def _config(order: WorkOrder) -> RecipeConfig:
    server = {**order.vllm, "colocate": bool(order.gpus)}
    fields = {
        "generation_backend": "vllm",
        "max_token_length": _WINDOW,
        "response_length": 64,
        "resources.gpus": min(order.gpus, 1),
        **{f"rollout_server.{name}": value for name, value in server.items()},
    }
    return recipe(order, model={"gradient_checkpointing": False}, grpo=fields)


def _keyed(endpoint: Endpoint) -> CertifiedCheck:
    """Check that a route that changes the server refuses requests without the key."""
    name = "vLLM, key of its control routes (reload)"
    status = httpx.post(
        endpoint.url.removesuffix("/v1") + _CONTROL, timeout=20, trust_env=False
    ).status_code
    return check(name, status in (401, 403), f"{_CONTROL} without the key: HTTP {status}")


def fault_checks(order: WorkOrder, folder: Path) -> Iterator[CertifiedCheck]:
    """`refiner prove-resume` of SFT with one kill."""
    overrides = (
        *("seed=0", "data.synthetic_sft_rows=200", "data.synthetic_rl_rows=40"),
        "sft.pack_length=512",
        f"workspace={folder / 'killed'}",
        f"sft.resources.gpus={min(order.gpus, 1)}",
        f"model.dtype={order.dtype}",
        "dispatch.nice=0",
    )
    plans = plan_resume_proofs("tiny", overrides, stage="sft", steps=8, interruptions=1)
    [proof] = prove_resume(plans)
    largest = max((c.largest or 0.0 for c in proof.comparisons), default=0.0)
    differing = [c.quantity for c in proof.comparisons if c.differing]
    yield check(
        *("kill -9 and resume", proof.verdict != "diverged"),
        f"{proof.verdict}; {len(proof.comparisons)} quantities compared"
        + (f", {', '.join(differing)} differ by {largest:.2g} at most" if differing else "")
        + f" ({proof.tolerance:g} allowed)",
        largest=largest,
        tolerance=proof.tolerance,
    )
