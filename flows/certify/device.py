"""Checks of one device: numerics, speed, memory.

In: an order. Out: checks, each as soon as it is finished.

Numerics, with the built-in model (trained, so that its distributions have peaks): every attention
kernel scores packs as in training, and is compared with the simplest reference: each sequence in a
row of its own, padded, eager attention in float32. In bfloat16 a kernel's error may be twice that
of eager attention over such rows. The same holds for gradients: a kernel with a wrong backward pass
trains, but wrongly. Responses are the model's own samples, since training data are likely under the
policy.

Speed: SFT and the GRPO update, with tokens per second and MFU, and sampling. The model has the
order's shape and random weights; rows fill packs of 8,192 tokens on a GPU, and small ones on a CPU.
MFU is model floating-point operations over seconds x the peak of the device: 6 x parameters per
token (the output head's at targets only) and 12 x layers x width x mean context for attention;
recomputed activations are not counted, a prompt that samples share counts once per sample. The peak
is from the maker's data sheet (dense bfloat16), or for an unknown device the measured rate of a
large matrix product.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from flows.certify.work import (
    SHAPES,
    STEPS,
    WorkOrder,
    absent,
    check,
    metrics_of,
    open_io,
    random_model,
    recipe,
    sft_recipe,
    shape_of,
    write_rows,
)
from flows.durations import GPUS, known_gpu
from infra.attempt.stage_io import AttemptIO
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.placement import training_memory
from refiner_core.contract.proofs import CertifiedCheck
from refiner_core.contract.types import GenerationRequest, SamplingParams
from refiner_core.generation.load import load_model, load_tokenizer
from refiner_core.generation.transformers_backend import TransformersGenerator
from refiner_core.training.batches import Sample, collate, pack_samples, to_device
from refiner_core.training.engines.plain import open_engine
from refiner_core.training.engines.protocol import Engine
from refiner_core.training.model.loading import FLASH, LoadedModel, load_for_training
from refiner_core.training.model.logprobs import token_scores
from refiner_core.training.rollouts.rollout import TrainSample
from refiner_core.training.sft import train_sft
from refiner_core.training.updates import GrpoUpdate

KERNELS = ("eager", "sdpa", "flex_attention", "flash_attention_2")
MODEL = "builtin:tiny"
#: Differences of log-probabilities (nats) between float sums in different orders.
EXACT = {"gap_max": 1e-3, "gap_mean": 1e-4, "gradient_gap": 1e-3}
#: The same for bfloat16 (8 bits) against float32.
COARSE = {"gap_max": 1.0, "gap_mean": 0.02, "gradient_gap": 0.1}
#: Allowed error of a kernel in bfloat16, as a multiple of that of eager attention over rows.
ALLOWANCE = 2.0


@dataclass(frozen=True)
class _Scored:
    """Log-probabilities of all F targets, sample after sample, and the gradient of their mean as
    one vector; None if it was not computed."""

    logprob_F: torch.Tensor
    gradient_P: torch.Tensor | None


def numeric_checks(order: WorkOrder, _: Path) -> Iterator[CertifiedCheck]:
    """All checks of numerics, one by one."""
    dtypes = list(dict.fromkeys(("float32", order.dtype)))
    samples, sampled = own_samples(order)
    yield sampled
    exact = score_rows(_load(order, "eager", "float32"), samples)
    coarse = score_rows(_load(order, "eager", "bfloat16"), samples)
    allowed = {name: ALLOWANCE * gap for name, gap in gaps(coarse, exact).items()}
    yield _compared("bfloat16 against float32, padded rows", coarse, exact, COARSE)
    for kernel in KERNELS:
        for dtype in dtypes:
            limits = EXACT if dtype == "float32" else allowed
            yield kernel_check(order, kernel, dtype, samples, exact, limits)
    yield kernel_check(order, FLASH, "bfloat16", samples, exact, allowed, shared=True)


def own_samples(order: WorkOrder) -> tuple[list[Sample], CertifiedCheck]:
    """Samples of the model for prompts of several lengths; and whether the sampler's
    log-probabilities of their tokens agree with one forward pass."""
    loaded = _load(order, "sdpa", order.dtype)
    rng = np.random.default_rng(0)
    generator = TransformersGenerator(loaded.model, loaded.tokenizer, batch_size=16)
    requests = [
        GenerationRequest(prompt, derive_seed(0, "certify", len(prompt), n))
        for prompt in (
            tuple(map(int, rng.integers(10, 700, length))) for length in (5, 17, 64, 130)
        )
        for n in range(3)
    ]
    done = generator.generate(requests, SamplingParams(max_new_tokens=40))
    samples, said = list[Sample](), list[float]()
    for request, completion in zip(requests, done, strict=True):
        ids = completion.token_ids
        samples.append(Sample(request.prompt_ids, ids, (True,) * len(ids), len(said)))
        said += completion.logprobs
    scored = _Scored(torch.tensor(said), None)
    limits = EXACT if order.dtype == "float32" else COARSE
    name = f"sampling against one forward pass, {order.dtype}"
    return samples, _compared(name, scored, score_packs(loaded, samples), limits)


def kernel_check(
    order: WorkOrder,
    kernel: str,
    dtype: str,
    samples: Sequence[Sample],
    exact: _Scored,
    limits: Mapping[str, float],
    *,
    shared: bool = False,
) -> CertifiedCheck:
    """A kernel over packs, compared with padded rows under eager attention in float32; ``shared``
    tries the prompts that FlexAttention shares beside FlashAttention."""
    name = f"kernel {kernel}, {dtype}" + ", shared prompts" * shared
    if kernel == "flex_attention" and not order.gpus:
        return absent(name, "it has no backward pass on a CPU")
    if kernel == "flash_attention_2" and dtype == "float32":
        return absent(name, "it only computes in 16 bits")
    try:
        loaded = _load(order, kernel, dtype)
        if shared and loaded.flex_balance is None:
            return absent(name, "FlexAttention cannot be used here")
        if loaded.flex_balance is not None:
            loaded = replace(loaded, share_prompts=shared)
        found = score_packs(loaded, samples)
    except UnsupportedError as error:
        return absent(name, error.what)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return check(name, False, f"{type(error).__name__}: {error}".splitlines()[0])
    return _compared(name, found, exact, limits)


def gaps(found: _Scored, exact: _Scored) -> dict[str, float]:
    """Differences by the names of :data:`EXACT`."""
    gap_F = (found.logprob_F - exact.logprob_F).abs()
    figures = {"gap_max": float(gap_F.max()), "gap_mean": float(gap_F.mean())}
    if found.gradient_P is not None and exact.gradient_P is not None:
        distance = (found.gradient_P - exact.gradient_P).norm()
        figures["gradient_gap"] = float(distance / exact.gradient_P.norm())
    return figures


def _compared(
    name: str, found: _Scored, exact: _Scored, limits: Mapping[str, float]
) -> CertifiedCheck:
    figures = gaps(found, exact)
    off = [n for n, gap in figures.items() if not gap <= limits[n]]
    said = ", ".join(f"{n} {gap:.2g} (at most {limits[n]:.2g})" for n, gap in figures.items())
    tokens = len(exact.logprob_F)
    return check(name, not off, f"{tokens} tokens: {said}", **figures)


def score_packs(loaded: LoadedModel, samples: Sequence[Sample]) -> _Scored:
    """Scores of these samples, computed as in training."""
    packs = pack_samples(
        *(samples, 512), share_prompts=loaded.share_prompts, balance=loaded.balance
    )
    total = sum(len(s.response_ids) for s in samples)
    logprob_F = torch.zeros(total)
    for pack in packs:
        flex = loaded.flex_balance is not None
        batch = to_device(collate([pack], balance=loaded.balance, flex=flex), loaded.device)
        scores = token_scores(loaded.model, batch).logprob_T
        (scores.sum() / total).backward()
        logprob_F[batch.flat_T.cpu()] = scores.detach().float().cpu()
    return _Scored(logprob_F, _gradient(loaded.model))


def score_rows(loaded: LoadedModel, samples: Sequence[Sample]) -> _Scored:
    """Each sample in a row of its own, through the model's plain forward pass."""
    model, device = loaded.model, loaded.device
    sequences = [torch.tensor([*s.prompt_ids, *s.response_ids]) for s in samples]
    ids = pad_sequence(sequences, batch_first=True)
    mask = pad_sequence([torch.ones_like(s) for s in sequences], batch_first=True)
    logits = model(
        input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False
    ).logits.float()
    logp = torch.log_softmax(logits[:, :-1], -1)
    picked = logp.gather(-1, ids[:, 1:].to(device)[..., None])[..., 0]
    flat = torch.cat(
        [picked[row, len(s.prompt_ids) - 1 : s.length - 1] for row, s in enumerate(samples)]
    )
    flat.mean().backward()
    return _Scored(flat.detach().cpu(), _gradient(model))


def _load(order: WorkOrder, kernel: str, dtype: str) -> LoadedModel:
    fields = {"attn_implementation": kernel, "dtype": dtype, "gradient_checkpointing": False}
    config = recipe(order, model=fields).model
    if kernel == "eager":  # the reference is loaded in the simplest way
        model = load_model(MODEL, config).to(order.device)
        return LoadedModel(model, load_tokenizer(MODEL, config), share_prompts=False, balance=None)
    return load_for_training(MODEL, config, torch.device(order.device))


def _gradient(model: Any) -> torch.Tensor | None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found = [gradient.detach().float().flatten().cpu() for gradient in gradients]
    model.zero_grad()
    return torch.cat(found) if found else None


#: Allowed ratio of measured peak memory to the plan's forecast, which is a rule of thumb.
MEMORY_ALLOWANCE = 1.25
_GIB = 2**30


def speed_checks(order: WorkOrder, folder: Path) -> Iterator[CertifiedCheck]:
    """All speed checks, with the same model."""
    load, model = order.load, random_model(order, folder / "model")
    peak, of = peak_flops(order)
    yield _sft(order, model, folder, peak, of)
    gc.collect()
    if order.gpus:  # memory of the first training
        torch.cuda.empty_cache()
    sizes = {
        "pack_length": load.pack,
        "num_unique_prompts_rollout": load.prompts,
        "num_samples_per_prompt_rollout": load.samples,
        "response_length": load.response,
        "max_token_length": load.prompt + load.response,
    }
    config = recipe(order, grpo=sizes)
    engine = open_engine(config, "grpo", str(model))
    yield _grpo(order, GrpoUpdate(engine, None, config.grpo, 0), peak, of)
    yield _sampling(order, engine)


# ---------------------------------------------------------------- floating-point operations


def peak_flops(order: WorkOrder) -> tuple[float, str]:
    """Reference operations per second, and its source."""
    if order.gpus and order.dtype == "bfloat16":
        name = torch.cuda.get_device_name(0)
        if (known := known_gpu(name)) is not None:
            return GPUS[known].flops, f"data sheet of {known}"
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


def timed(order: WorkOrder, act: Callable[[], object]) -> float:
    """Duration in seconds, including pending GPU work."""
    if order.gpus:
        torch.cuda.synchronize()
    began = time.perf_counter()
    act()
    if order.gpus:
        torch.cuda.synchronize()
    return time.perf_counter() - began


# ---------------------------------------------------------------- SFT


class _EnoughSteps(Exception):
    """Ends a training that has been measured."""


class _MeasuringIO(AttemptIO):
    """IO of an attempt that raises :class:`_EnoughSteps` after :data:`STEPS` steps and a warm-up
    step, before any save: the state of a large model would fill a quota."""

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step; the last measured one ends the training."""
        super().log_metrics(step, metrics)
        if step > STEPS:
            raise _EnoughSteps


def _sft(order: WorkOrder, model: Path, folder: Path, peak: float, of: str) -> CertifiedCheck:
    load = order.load
    write_rows(folder / "rows", list(load.lengths))
    config = sft_recipe(order)
    place = folder / "sft"
    if order.gpus:
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(_EnoughSteps):
        train_sft(
            config,
            data_dir=folder / "rows",
            model_ref=str(model),
            output_dir=place / "output",
            io=open_io(place, _MeasuringIO),
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


def _memory(config: RecipeConfig, order: WorkOrder, row: dict[str, Any]) -> dict[str, float]:
    """Peak memory, and its ratio to a plan's forecast."""
    need = training_memory(config, "sft", shape_of(order.model))
    if order.gpus:
        peak, forecast = row["memory/gpu_peak_gib"], need.gpu_bytes / _GIB
    else:
        peak, forecast = row["memory/host_peak_gib"], need.host_bytes / _GIB
    return {"peak_gib": peak, "forecast_gib": forecast, "memory_ratio": peak / forecast}


# ---------------------------------------------------------------- GRPO


def _rollouts(order: WorkOrder) -> list[TrainSample]:
    load, rng = order.load, np.random.default_rng(1)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(map(int, rng.integers(10, 700, count)))

    prompts = [ids(load.prompt) for _ in range(load.prompts)]
    return [
        TrainSample(prompt, ids(load.response), (-6.0,) * load.response, (-1.0) ** n)
        for prompt in prompts
        for n in range(load.samples)
    ]


def _grpo(order: WorkOrder, update: GrpoUpdate, peak: float, of: str) -> CertifiedCheck:
    load, samples = order.load, _rollouts(order)
    found: list[dict[str, float]] = []

    def act() -> None:
        found.append(update.run(samples, step=len(found) + 1, factor=1.0))

    seconds = statistics.median([timed(order, act) for _ in range(STEPS + 1)][1:])
    length = load.prompt + load.response
    flops = model_flops(order.model, [(length, load.response)] * len(samples))
    per_s = len(samples) * length / seconds
    mfu = flops / seconds / peak
    return check(
        *("GRPO update", all(np.isfinite(one["loss/total_avg"]) for one in found)),
        f"{per_s:,.0f} tokens/s, MFU {mfu:.1%} of {of}",
        tokens_per_s=per_s,
        mfu=mfu,
        parameters=shape_of(order.model).parameters,
        seconds=seconds,
    )


def _sampling(order: WorkOrder, engine: Engine) -> CertifiedCheck:
    """Tokens per second of sampling by transformers, the basis of a plan's time forecast."""
    generator = TransformersGenerator(engine.model, engine.tokenizer, batch_size=64)
    requests = [
        GenerationRequest(sample.prompt_ids, derive_seed(0, "certify", i))
        for i, sample in enumerate(_rollouts(order))
    ]
    params, tokens = SamplingParams(max_new_tokens=min(128, order.load.response)), list[int]()

    def act() -> None:
        tokens.append(sum(len(done.token_ids) for done in generator.generate(requests, params)))

    seconds = [timed(order, act) for _ in range(2)][-1]
    per_s = tokens[-1] / seconds
    return check(
        *("sampling by transformers", tokens[-1] > 0),
        f"{per_s:,.0f} tokens/s of {len(requests)} samples at once",
        tokens_per_s=per_s,
        parameters=shape_of(order.model).parameters,
    )
