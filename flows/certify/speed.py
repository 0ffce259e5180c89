"""Speed and memory of one device: SFT, the GRPO update, sampling, a save; and what limits them.

In: an order. Out: checks, with tokens per second and MFU. The model has the order's shape and
random weights; rows fill packs of 8,192 tokens on a GPU, and small ones on a CPU.

MFU is model floating-point operations over seconds x the peak of the device: 6 x parameters per
token (the output head's at targets only) and 12 x layers x width x mean context for attention;
recomputed activations are not counted, a prompt that samples share counts once per sample. The peak
is that of the maker's data sheet (dense bfloat16), or where the device is not known there the rate
of a large product of matrices, measured here.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flows.certify.work import (
    ON_CPU,
    SHAPES,
    STEPS,
    EnoughSteps,
    Load,
    Order,
    check,
    load_of,
    measuring_io,
    metrics_of,
    random_model,
    recipe,
    sft_recipe,
    shape_of,
    write_rows,
)
from refiner_core.contract.certificates import CertifiedCheck
from refiner_core.contract.checks.memory import training_memory
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.seeds import derive_seed
from refiner_core.contract.types import GenerationRequest, SamplingParams
from refiner_core.generation.transformers_backend import TransformersGenerator
from refiner_core.training.engines.choose import open_engine
from refiner_core.training.engines.protocol import Engine
from refiner_core.training.model.tensors import model_tensors
from refiner_core.training.rollouts.rollout import TrainSample
from refiner_core.training.sft import train_sft
from refiner_core.training.updates.grpo_update import GrpoUpdate

#: Dense bfloat16 operations per second, without sparsity, by the makers' data sheets.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
}
#: How far the most memory may be above the plan's forecast, which is a rule of thumb.
MEMORY_ALLOWANCE = 1.25
_GIB = 2**30


def speed_checks(order: Order, folder: Path) -> Iterator[CertifiedCheck]:
    """All of them, with the one model."""
    load = load_of(order)
    model = random_model(order, folder / "model")
    peak, of = peak_flops(order)
    yield _sft(order, load, model, folder, peak, of)
    _free_memory(order)
    config = _grpo_recipe(order, load)
    engine = open_engine(config, "grpo", str(model))
    yield _grpo(order, config, load, engine, peak, of)
    yield _sampling(order, load, engine)
    del engine
    _free_memory(order)
    yield _save(order, folder)


# ---------------------------------------------------------------- floating-point operations


def peak_flops(order: Order) -> tuple[float, str]:
    """Operations per second to measure by, and where the number is from."""
    if order.gpus and order.dtype == "bfloat16":
        name = torch.cuda.get_device_name(0)
        for known, peak in PEAK_FLOPS.items():
            if known in name:
                return peak, f"data sheet of {known}"
    size = 8192 if order.gpus else 768
    a = torch.randn(size, size, device=order.device, dtype=getattr(torch, order.dtype))
    seconds = [timed(order, lambda: a @ a) for _ in range(6)][1:]
    return 2 * size**3 / statistics.median(seconds), "a measured product of matrices"


def model_flops(model: str, lengths: Sequence[tuple[int, int]]) -> float:
    """Operations of forward and backward over sequences of ``(tokens, targets)``, each alone."""
    s, sizes = SHAPES[model], shape_of(model)
    head = s["vocab_size"] * s["hidden_size"]
    width = s["num_attention_heads"] * s["head_dim"]
    return sum(
        6.0 * (sizes.parameters - head) * tokens
        + 6.0 * head * targets
        + 12.0 * s["num_hidden_layers"] * width * tokens * (tokens / 2)
        for tokens, targets in lengths
    )


def timed(order: Order, act: Callable[[], object]) -> float:
    """Seconds, with what was left to the GPU."""
    if order.gpus:
        torch.cuda.synchronize()
    began = time.perf_counter()
    act()
    if order.gpus:
        torch.cuda.synchronize()
    return time.perf_counter() - began


# ---------------------------------------------------------------- SFT


def _sft(
    order: Order, load: Load, model: Path, folder: Path, peak: float, of: str
) -> CertifiedCheck:
    write_rows(folder / "rows", list(load.lengths))
    config = sft_recipe(order, load)
    place = folder / "sft"
    if order.gpus:
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(EnoughSteps):
        train_sft(
            config,
            data_dir=folder / "rows",
            model_ref=str(model),
            output_dir=place / "output",
            io=measuring_io(place),
        )
    rows = metrics_of(place)[1:]
    per_s = statistics.median(row["tokens_per_second"] for row in rows)
    tokens = sum(load.lengths)
    flops = model_flops(order.model, [(n, n - n // 4) for n in load.lengths])
    mfu = per_s * flops / tokens / peak
    figures = _memory(config, order, rows[-1])
    held = figures["memory_ratio"] <= MEMORY_ALLOWANCE
    return check(
        *("SFT throughput", held and all(np.isfinite(row["loss/train_avg"]) for row in rows)),
        f"{per_s:,.0f} tokens/s, MFU {mfu:.1%} of {of}; {figures['peak_gib']:.1f} GiB, "
        f"{figures['memory_ratio']:.2f} of the forecast (at most {MEMORY_ALLOWANCE:g})",
        tokens_per_s=per_s,
        mfu=mfu,
        parameters=shape_of(order.model).parameters,
        pack_length=load.pack,
        **figures,
    )


def _memory(config: RecipeConfig, order: Order, row: dict[str, Any]) -> dict[str, float]:
    """The most memory, against what a plan would have said."""
    need = training_memory(config, "sft", shape_of(order.model))
    if order.gpus:
        peak, forecast = row["memory/gpu_peak_gib"], need.gpu_bytes / _GIB
    else:
        peak, forecast = row["memory/host_peak_gib"], need.host_bytes / _GIB
    return {"peak_gib": peak, "forecast_gib": forecast, "memory_ratio": peak / forecast}


# ---------------------------------------------------------------- GRPO


def _grpo_recipe(order: Order, load: Load) -> RecipeConfig:
    config = recipe(order)
    grpo = replace(
        config.grpo,
        pack_length=load.pack,
        num_unique_prompts_rollout=load.prompts,
        num_samples_per_prompt_rollout=load.samples,
        response_length=load.response,
        max_token_length=load.prompt + load.response,
    )
    return replace(config, grpo=grpo)


def _rollouts(load: Load) -> list[TrainSample]:
    rng = np.random.default_rng(1)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(map(int, rng.integers(10, 700, count)))

    prompts = [ids(load.prompt) for _ in range(load.prompts)]
    return [
        TrainSample(prompt, ids(load.response), (-6.0,) * load.response, (-1.0) ** n)
        for prompt in prompts
        for n in range(load.samples)
    ]


def _grpo(
    order: Order, config: RecipeConfig, load: Load, engine: Engine, peak: float, of: str
) -> CertifiedCheck:
    samples, update = _rollouts(load), GrpoUpdate(engine, None, config.grpo, 0)
    found: list[dict[str, float]] = []

    def act() -> None:
        found.append(update.run(samples, step=len(found) + 1, factor=1.0))

    seconds = statistics.median([timed(order, act) for _ in range(STEPS + 1)][1:])
    split = time_split(order, act)
    length = load.prompt + load.response
    flops = model_flops(order.model, [(length, load.response)] * len(samples))
    per_s = len(samples) * length / seconds
    mfu = flops / seconds / peak
    most = max(split, key=lambda part: split[part])
    return check(
        *("GRPO update", all(np.isfinite(one["loss/total_avg"]) for one in found)),
        f"{per_s:,.0f} tokens/s, MFU {mfu:.1%} of {of}; {split[most]:.0%} of the time is {most}",
        tokens_per_s=per_s,
        mfu=mfu,
        parameters=shape_of(order.model).parameters,
        seconds=seconds,
        time_split=split,
    )


_KINDS = {
    "attention": ("flash", "attention", "fmha", "flex"),
    "matrix products": ("gemm", "mm", "matmul", "linear", "cutlass", "cublas", "nvjet"),
    "optimizer": ("adam", "foreach", "multi_tensor", "lerp", "addcdiv", "addcmul"),
}


def time_split(order: Order, act: Callable[[], None]) -> dict[str, float]:
    """Shares of one call's time, by what the device does: attention, matrix products, optimiser,
    the rest (norms, activations, softmax, copies), and on a GPU how long it waits for the host."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if order.gpus else [])]
    with profile(activities=activities) as profiler:
        wall = timed(order, act)
    spent = dict.fromkeys((*_KINDS, "other"), 0.0)
    for event in profiler.key_averages():
        on_device = str(getattr(event, "device_type", "")).endswith("CUDA")
        if order.gpus != 0 and not on_device:
            continue
        name = event.key.lower()
        kind = next((k for k, words in _KINDS.items() if any(w in name for w in words)), "other")
        spent[kind] += _own_time(event, bool(order.gpus)) / 1e6
    busy = sum(spent.values())
    if order.gpus:
        spent["waiting for the host"] = max(0.0, wall - busy)
    whole = sum(spent.values()) or 1.0
    return {kind: seconds / whole for kind, seconds in spent.items()}


def _own_time(event: Any, gpu: bool) -> float:
    """Microseconds; the name of the field differs between versions of torch."""
    if not gpu:
        return float(event.self_cpu_time_total)
    value = getattr(event, "self_device_time_total", None)
    return float(event.self_cuda_time_total if value is None else value)


# ---------------------------------------------------------------- sampling and saving


def _sampling(order: Order, load: Load, engine: Engine) -> CertifiedCheck:
    generator = TransformersGenerator(engine.model, engine.tokenizer, batch_size=64)
    prompts = [sample.prompt_ids for sample in _rollouts(load)]
    requests = [
        GenerationRequest(prompt, derive_seed(0, "certify", i)) for i, prompt in enumerate(prompts)
    ]
    params = SamplingParams(max_new_tokens=min(128, load.response))
    found: list[int] = []

    def act() -> None:
        found.append(sum(len(done.token_ids) for done in generator.generate(requests, params)))

    seconds = [timed(order, act) for _ in range(2)][-1]
    per_s = found[-1] / seconds
    return check(
        *("sampling by transformers", found[-1] > 0),
        f"{per_s:,.0f} tokens/s of {len(requests)} samples at once",
        tokens_per_s=per_s,
        parameters=shape_of(order.model).parameters,
    )


def _free_memory(order: Order) -> None:
    """Give back what a training has left."""
    gc.collect()
    if order.gpus:
        torch.cuda.empty_cache()


def _save(order: Order, folder: Path) -> CertifiedCheck:
    """A checkpoint by the engine, read back bitwise; how long training stands still for one, and
    what torch.save takes of the same weights and moments. The model is no larger than 0.6B, and
    tiny where that has no room on the disk."""
    small = replace(order, model="tiny")
    if order.model != "tiny":
        larger = replace(order, model="0.6B")
        if shutil.disk_usage(folder).free > 100 * shape_of(larger.model).parameters:
            small = larger
    load = ON_CPU
    config = _grpo_recipe(small, load)
    model = random_model(small, folder / f"model-{small.model}")
    engine = open_engine(config, "grpo", str(model))
    GrpoUpdate(engine, None, config.grpo, 0).run(_rollouts(load), step=1, factor=1.0)
    place, plain = folder / "saved", folder / "plain.pt"
    place.mkdir()
    engine.snapshot({})  # the first one also gets its memory
    snapshots: list[Any] = []
    stall = timed(order, lambda: snapshots.append(engine.snapshot({"step": 1})))
    write = timed(order, lambda: snapshots[0].write(place))
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    before = {n: t.detach().clone() for n, t in model_tensors(engine.model).items()}
    state = {"model": before, "optimizer": engine.updater.state_dict()}  # type: ignore[attr-defined]

    def rival() -> None:
        with plain.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    rival_s = timed(order, rival)
    plain.unlink()
    with torch.no_grad():
        for tensor in model_tensors(engine.model).values():
            tensor.zero_()
    engine.restore(place)
    same = all(
        torch.equal(before[name], tensor) for name, tensor in model_tensors(engine.model).items()
    )
    shutil.rmtree(place)
    return check(
        *("save and restore", same),
        f"{small.model}, {size / _GIB:.2f} GiB: training stands still for {stall:.2g} s "
        f"(torch.save: {rival_s:.2g} s), {write:.2g} s beside it; read back "
        + ("bitwise" if same else "DIFFERENT"),
        bytes=size,
        stall_s=stall,
        write_s=write,
        torch_save_s=rival_s,
    )
