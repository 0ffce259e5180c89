"""Checks of several processes: ranks, rollout servers, planted faults.

In: an order and a scratch folder. Out: checks.

Ranks: plain torch and ZeRO-1 to 3 on 1 to N of them, against one process; collectives. Each number
of ranks is one start, through the launcher that training stages use
(:mod:`infra.ranks.launch`), with every engine in turn.

Servers, where an environment has vLLM: the start, every way of weight transfer, and the key of the
routes. Weights are changed between two transfers, and a fixed prompt is scored on both sides: what
a server has has to be the new weights, not those before.

Faults: a loss that is not finite, memory that runs out, a rank that hangs, a worker that is killed
with SIGKILL and goes on; each has to be named rightly, and none may cost what was saved. NaN and
memory end a real training in this process, and the error is classified as a worker would. The hang
and the kill are real runs: an orchestrator, a worker and ranks of their own. One rank is stopped
(SIGSTOP), as one that waits for ever in a collective; the orchestrator has to find it hung, and to
bring the stage to its end with another attempt.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file

from flows.certify.rank import short_sft, train
from flows.certify.work import Order, absent, check, open_io, random_model, recipe, write_rows
from flows.proving.planning import Asked, plan_proofs
from flows.proving.runs import Room, prove_resume, run_recipe_in
from infra.jobs.failures import classify
from infra.ranks.launch import run_ranks
from infra.ranks.protocol import ORDER
from infra.rollouts import servers as opening
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig, RolloutServerConfig
from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.fields import typed
from refiner_core.contract.placement import Placement
from refiner_core.contract.proofs import CertifiedCheck
from refiner_core.contract.types import Endpoint
from refiner_core.generation.load import load_model, load_tokenizer
from refiner_core.generation.vllm.admin import Admin, make_canary, tolerance_of
from refiner_core.training.ranks import Ranks
from refiner_core.training.sft import train_sft

#: Largest relative difference of a loss or norm to that of one process in plain torch: sums over
#: packs and ranks are taken in another order, and bfloat16 weights round what follows.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
_RANK_LENGTHS = [20, 33, 47, 60, 75, 90, 120, 150] * 8


def rank_checks(order: Order, folder: Path) -> Iterator[CertifiedCheck]:
    """One process first: what it finds is what ranks are held against."""
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
        yield from _collective_checks(world, found.get("collectives", {}))


def engine_checks(
    order: Order, world: int, found: Mapping[str, Any], expected: Mapping[str, Sequence[float]]
) -> Iterator[CertifiedCheck]:
    """Each engine on a number of ranks, against one process."""
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


def _collective_checks(world: int, found: Mapping[str, Any]) -> Iterator[CertifiedCheck]:
    for what, one in found.items():
        name = f"{what} on {world} ranks"
        if "missing" in one:
            yield absent(name, one["missing"])
            continue
        wrong = one["wrong_ranks"]
        why = f"{one['gb_per_s']:.3g} GB/s per rank"
        why += f"; wrong on {wrong} ranks" if wrong else ", every element right"
        yield check(name, not wrong, why, gb_per_s=one["gb_per_s"])


def _furthest(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference; infinite where steps are missing or not finite."""
    if len(found) != len(expected):
        return math.inf
    gaps = [abs(a - b) / max(abs(b), 1e-9) for a, b in zip(found, expected, strict=True)]
    return max(gaps) if all(math.isfinite(gap) for gap in gaps) else math.inf


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
            [endpoint] = rollouts.fleet.endpoints()
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
    except UnsupportedError as error:
        yield absent(f"vLLM, weights by {way}", error.what)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        yield check(f"vLLM, weights by {way}", False, why)


def _config(order: Order, way: str) -> RecipeConfig:
    apart = way == "nccl"
    config = recipe(replace(order, checkpointing=False), ranks=1)
    fields = {**order.vllm, "weight_transfer": way, "colocate": bool(order.gpus) and not apart}
    server = typed(RolloutServerConfig, fields)
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
    """True if a route that changes the server turns away who has no key."""
    name = f"vLLM, key of its control routes ({way})"
    request = urllib.request.Request(endpoint.url.removesuffix("/v1") + _CONTROL, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    return check(name, status in (401, 403), f"{_CONTROL} without the key: HTTP {status}")


#: The tiny recipe, as little of it as hangs and dies.
SMALL = (
    "seed=0",
    "data.synthetic_sft_rows=200",
    "data.synthetic_rl_rows=40",
    "sft.pack_length=512",
)
_GIB = 2**30
_FAULT_LENGTHS = [40, 60, 80, 100] * 8


def fault_checks(order: Order, folder: Path) -> Iterator[CertifiedCheck]:
    """Planted faults but for the hang, the quick ones first."""
    write_rows(folder / "rows", _FAULT_LENGTHS)
    yield _not_finite(order, folder)
    yield _out_of_memory(order, folder)
    yield _killed(order, folder)


def hang_checks(order: Order, folder: Path) -> Iterator[CertifiedCheck]:
    """The planted hang, which mostly waits."""
    yield _hang(order, folder)


def _named(name: str, wanted: str, act: Callable[[], object]) -> CertifiedCheck:
    try:
        act()
    except Exception as error:
        found = classify(error)
        return check(
            *(name, wanted in (found.failure, type(error).__name__)),
            f"planted, and named {found.failure}: {str(error).splitlines()[0][:160]}",
        )
    return check(name, False, f"planted, and the training ended as if nothing were: not {wanted}")


# ---------------------------------------------------------------- in this process


def _not_finite(order: Order, folder: Path) -> CertifiedCheck:
    small = replace(order, model="tiny", checkpointing=False)
    model = random_model(small, folder / "nan-model")
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if name.endswith("mlp.up_proj.weight"))
    weights[name][0, 0] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return _named(
        *("planted loss that is not finite", "NotFiniteError"),
        lambda: _train(small, folder / "nan", folder / "rows", str(model)),
    )


def _out_of_memory(order: Order, folder: Path) -> CertifiedCheck:
    """Packs of many rows on a device that has next to nothing left."""
    small = replace(order, model="tiny", checkpointing=False)
    model = random_model(small, folder / "model")
    rows = write_rows(folder / "long-rows", [2048] * 32)

    def act() -> None:
        _train(small, folder / "oom", rows, str(model), pack=1 << 16)

    name = "planted out-of-memory"
    if order.gpus:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, _GIB / 2 / total))
        try:
            return _named(name, "gpu_out_of_memory", act)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + _GIB // 2, limits[1]))
    try:
        return _named(name, "out_of_memory", act)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _train(order: Order, place: Path, rows: Path, model: str, pack: int = 256) -> None:
    config = short_sft(recipe(order))
    config = replace(config, sft=replace(config.sft, pack_length=pack))
    train_sft(
        config, data_dir=rows, model_ref=model, output_dir=place / "output", io=open_io(place)
    )


# ---------------------------------------------------------------- as real runs


def _overrides(order: Order, folder: Path) -> tuple[str, ...]:
    return (
        *SMALL,
        f"workspace={folder}",
        f"sft.resources.gpus={min(order.gpus, 1)}",
        f"model.dtype={order.dtype}",
        "dispatch.nice=0",
    )


def _killed(order: Order, folder: Path) -> CertifiedCheck:
    """`refiner prove-resume` of SFT, once killed."""
    asked = Asked(
        "tiny",
        _overrides(order, folder / "killed"),
        stage="sft",
        steps=8,
        interruptions=1,
        how="kill",
    )
    [proof] = prove_resume(plan_proofs(asked))
    largest = max((c.largest or 0.0 for c in proof.comparisons), default=0.0)
    differing = [c.quantity for c in proof.comparisons if c.differing]
    return check(
        *("kill -9 and resume", proof.verdict != "diverged"),
        f"{proof.verdict}; {len(proof.comparisons)} quantities compared"
        + (f", {', '.join(differing)} differ by {largest:.2g} at most" if differing else "")
        + f" ({proof.tolerance:g} allowed)",
        largest=largest,
        tolerance=proof.tolerance,
    )


def _hang(order: Order, folder: Path) -> CertifiedCheck:
    """A rank that does nothing any more, under a real orchestrator. Ranks of a node with one GPU
    are on its CPU: two may not share a GPU."""
    on_gpus = order.gpus >= 2
    place = folder / "hung"
    overrides = (
        *_overrides(order, place),
        f"sft.resources.gpus={2 if on_gpus else 0}",
        f"model.dtype={order.dtype if on_gpus else 'float32'}",
        "sft.nproc_per_node=2",
        "sft.gradient_accumulation_steps=2",
        "sft.max_train_steps=60",
        "sft.save_freq=10",
        "stages=[data,sft]",
        "tracking.wandb=disabled",
        "dispatch.hung_after_s=20",
        "dispatch.retries.hung=5",  # a slow start may look like one, too
    )
    began, left = time.monotonic(), threading.Event()
    with ThreadPoolExecutor(1) as beside:
        stopper = beside.submit(_stop_a_rank, place / "runs", left)
        try:
            room, tell = Room.make(place / "runs"), lambda line: None
            run_recipe_in(room, Asked("tiny"), overrides, name="hang", tell=tell)
        finally:
            left.set()
    workspace = Workspace.read_only(place / "runs")
    [stage] = [i for i in workspace.stage_ids() if i.startswith("sft")]
    record = workspace.read_record(stage)
    attempts = record.attempts if record is not None else ()
    named = [a.outcome.failure for a in attempts if a.outcome is not None and a.outcome.failure]
    return check(
        *("planted hang", stopper.result() and "hung" in named and len(attempts) > 1),
        f"a stopped rank was named {named[0] if named else 'nothing'}; the stage ended with "
        f"attempt {len(attempts)} after {time.monotonic() - began:.0f} s",
        attempts=len(attempts),
    )


def _stop_a_rank(workspace: Path, left: threading.Event) -> bool:
    """Stop the last rank of the first attempt once it has trained a step; False if it was ``left``
    alone."""
    found = False
    while not found and not left.wait(0.05):
        trains = any(workspace.glob("stages/sft-*/attempts/*/metrics.jsonl"))
        for process in psutil.process_iter() if trains else ():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if process.uids().real != os.getuid():
                    continue
                given = process.environ()
                if given.get("RANK") == "1" and str(workspace) in given.get(ORDER, ""):
                    process.send_signal(signal.SIGSTOP)
                    found = True
    return found
