"""Numerics of one device: attention kernels, bfloat16 against float32, sampling against scoring.

In: an order, and the built-in model (trained, so that its distributions have peaks). Out: checks.

Every kernel scores packs as training does, and is held against the plainest thing there is: each
sequence in a row of its own, padded, eager attention in float32. In bfloat16 a kernel may be off by
twice what eager attention over such rows is off in bfloat16. The same holds for gradients: a kernel
whose backward pass is wrong trains, and wrongly. Responses are the model's own samples, since what
is trained on is likely under the policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers.utils import is_flash_attn_2_available

from flows.certify.work import Order, absent, check, recipe
from refiner_core.contract.certificates import CertifiedCheck
from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.seeds import derive_seed
from refiner_core.contract.types import GenerationRequest, SamplingParams
from refiner_core.generation.load import load_model, load_tokenizer
from refiner_core.generation.transformers_backend import TransformersGenerator
from refiner_core.training.batches.packing import Sample, collate, pack_samples, to_device
from refiner_core.training.model.loading import Loaded, load_for_training
from refiner_core.training.model.logprobs import token_scores

KERNELS = ("eager", "sdpa", "flex_attention", "flash_attention_2")
MODEL = "builtin:tiny"
#: Differences of log-probabilities (nats) that are float sums in another order.
EXACT = {"gap_max": 1e-3, "gap_mean": 1e-4, "gradient_gap": 1e-3}
#: The same with the 8 bits of bfloat16 in between, against float32.
COARSE = {"gap_max": 1.0, "gap_mean": 0.02, "gradient_gap": 0.1}
#: How many times as far off as eager attention over rows a kernel may be, in bfloat16.
ALLOWANCE = 2.0


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of all F targets, sample after sample, and the gradient of their mean as
    one vector; None where none was taken."""

    logprob_F: torch.Tensor
    gradient_P: torch.Tensor | None


def numeric_checks(order: Order, kernels: Sequence[str] = KERNELS) -> Iterator[CertifiedCheck]:
    """All checks of numerics, one by one."""
    dtypes = list(dict.fromkeys(("float32", order.dtype)))
    samples, sampled = own_samples(order)
    yield sampled
    exact = score_rows(_load(order, "eager", "float32"), samples)
    coarse = score_rows(_load(order, "eager", "bfloat16"), samples)
    allowed = {name: ALLOWANCE * gap for name, gap in gaps(coarse, exact).items()}
    yield _compared("bfloat16 against float32, padded rows", coarse, exact, COARSE)
    for kernel in kernels:
        for dtype in dtypes:
            limits = EXACT if dtype == "float32" else allowed
            yield kernel_check(order, kernel, dtype, samples, exact, limits)


def own_samples(order: Order) -> tuple[list[Sample], CertifiedCheck]:
    """Samples of the model for prompts of several lengths; and whether what the sampler says of
    their tokens is what one forward pass says."""
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
    scored = Scored(torch.tensor(said), None)
    limits = EXACT if order.dtype == "float32" else COARSE
    name = f"sampling against one forward pass, {order.dtype}"
    return samples, _compared(name, scored, score_packs(loaded, samples), limits)


def kernel_check(
    order: Order,
    kernel: str,
    dtype: str,
    samples: Sequence[Sample],
    exact: Scored,
    limits: Mapping[str, float],
) -> CertifiedCheck:
    """A kernel over packs, against padded rows under eager attention in float32."""
    name = f"kernel {kernel}, {dtype}"
    if kernel == "flex_attention" and not order.gpus:
        return absent(name, "it has no backward pass on a CPU")
    if kernel == "flash_attention_2" and dtype == "float32":
        return absent(name, "it computes in 16 bits alone")
    try:
        found = score_packs(_load(order, kernel, dtype), samples)
    except UnsupportedError as error:
        there = kernel != "flash_attention_2" or is_flash_attn_2_available()
        return check(name, False, error.what) if there else absent(name, error.what)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return check(name, False, f"{type(error).__name__}: {error}".splitlines()[0])
    return _compared(name, found, exact, limits)


def gaps(found: Scored, exact: Scored) -> dict[str, float]:
    """How far off, by the names of :data:`EXACT`."""
    gap_F = (found.logprob_F - exact.logprob_F).abs()
    figures = {"gap_max": float(gap_F.max()), "gap_mean": float(gap_F.mean())}
    if found.gradient_P is not None and exact.gradient_P is not None:
        distance = (found.gradient_P - exact.gradient_P).norm()
        figures["gradient_gap"] = float(distance / exact.gradient_P.norm())
    return figures


def _compared(
    name: str, found: Scored, exact: Scored, limits: Mapping[str, float]
) -> CertifiedCheck:
    figures = gaps(found, exact)
    off = [n for n, gap in figures.items() if not gap <= limits[n]]
    said = ", ".join(f"{n} {gap:.2g} (at most {limits[n]:.2g})" for n, gap in figures.items())
    tokens = len(exact.logprob_F)
    return check(name, not off, f"{tokens} tokens: {said}", **figures)


def score_packs(loaded: Loaded, samples: Sequence[Sample]) -> Scored:
    """What training computes of these samples."""
    packs = pack_samples(
        *(samples, 512), share_prompts=loaded.share_prompts, balance=loaded.balance
    )
    total = sum(len(s.response_ids) for s in samples)
    logprob_F = torch.zeros(total)
    for pack in packs:
        batch = to_device(collate([pack], balance=loaded.balance), loaded.device)
        scores = token_scores(loaded.model, batch).logprob_T
        (scores.sum() / total).backward()
        logprob_F[batch.flat_T.cpu()] = scores.detach().float().cpu()
    return Scored(logprob_F, _gradient(loaded.model))


def score_rows(loaded: Loaded, samples: Sequence[Sample]) -> Scored:
    """Each sample in a row of its own, through the model's plain forward pass."""
    model, device = loaded.model, loaded.device
    total = sum(len(s.response_ids) for s in samples)
    width = max(s.length for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, s in enumerate(samples):
        ids[row, : s.length] = torch.tensor([*s.prompt_ids, *s.response_ids])
        mask[row, : s.length] = 1
    logits = model(
        input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False
    ).logits.float()
    logp = torch.log_softmax(logits[:, :-1], -1)
    picked = logp.gather(-1, ids[:, 1:].to(device)[..., None])[..., 0]
    flat = torch.cat(
        [picked[row, len(s.prompt_ids) - 1 : s.length - 1] for row, s in enumerate(samples)]
    )
    (flat.sum() / total).backward()
    return Scored(flat.detach().cpu(), _gradient(model))


def _load(order: Order, kernel: str, dtype: str) -> Loaded:
    config = replace(recipe(order, attention=kernel).model, dtype=dtype)  # type: ignore[arg-type]
    config = replace(config, gradient_checkpointing=False)
    if kernel == "eager":  # the yardstick is loaded as plainly as can be
        model = load_model(MODEL, config).to(order.device)
        return Loaded(model, load_tokenizer(MODEL, config), share_prompts=False, balance=None)
    return load_for_training(MODEL, config, torch.device(order.device))


def _gradient(model: Any) -> torch.Tensor | None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found = [gradient.detach().float().flatten().cpu() for gradient in gradients]
    model.zero_grad()
    return torch.cat(found) if found else None
