"""Time that a plan's training will take, by what `refiner certify` has measured.

In: a plan, and the newest certificate of its workspace. Out: forecasts by stage; none without a
certificate. Speed is taken to fall with the number of parameters, and to grow with that of
processes: a rule of thumb for what is left out of it (communication, validation, saves) too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.checking.memory import memory_needs, model_parameters
from infra.store.proofs import read_certificates
from infra.store.workspace import Workspace
from refiner_core.contract.certificates import Certificate
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.placement import placement_of
from refiner_core.contract.plan import Plan

#: Checks of a certificate that measure what a stage does most, by kind of stage.
_SFT, _GRPO, _SAMPLING = "SFT throughput", "GRPO update", "sampling by transformers"


@dataclass(frozen=True)
class TimeForecast:
    """How long a training stage takes at most, seconds; ``by`` says what that is taken from."""

    stage: str
    seconds: float
    by: str


def time_forecasts(plan: Plan) -> list[TimeForecast]:
    """Forecasts of the training stages of a plan whose number of steps is known.

    Raises
    ------
    WorkspaceError
        A certificate in the workspace is damaged.
    """
    config = plan.config
    parameters = model_parameters(config)
    if parameters is None:
        return []
    kinds = {stage.kind for stage in plan.stages}
    found = []
    for kind, seconds_of in (("sft", _sft_s), ("grpo", _grpo_s)):
        newest = _newest(config, getattr(config, kind).resources.gpus)
        seconds = newest and kind in kinds and seconds_of(config, newest, parameters)
        if newest and seconds:
            by = f"the certificate of {newest.host['name']}, {newest.made_at[:10]}"
            found.append(TimeForecast(kind, seconds, by))
    return found


def time_json(plan: Plan) -> list[Mapping[str, Any]]:
    """The forecasts for scripts."""
    return [
        {"stage": f.stage, "seconds": round(f.seconds), "by": f.by} for f in time_forecasts(plan)
    ]


def time_notes(plan: Plan) -> list[str]:
    """The forecasts in words."""
    notes = [
        f"{found.stage} will take up to about {_span(found.seconds)}, by {found.by}."
        for found in time_forecasts(plan)
    ]
    newest = _newest(plan.config, 1)
    ratio = None if newest is None else newest.figure(_SFT, "memory_ratio")
    for need in memory_needs(plan) if ratio else ():
        if need.gpu_bytes:
            notes.append(
                f"{need.stage} will take about {need.gpu_bytes / 2**30:.0f} GiB on each GPU; a "
                f"certified training took {ratio:.0%} of such a forecast."
            )
    return notes


def _newest(config: RecipeConfig, gpus: int) -> Certificate | None:
    """The newest certificate of a node with GPUs, or for a stage that has none, without."""
    found = read_certificates(Workspace.read_only(config.workspace))
    return next((one for one in reversed(found) if bool(one.gpus) == bool(gpus)), None)


def _rate(certificate: Certificate, check: str, parameters: int) -> float | None:
    """Tokens per second of one process for a model of so many parameters."""
    per_s = certificate.figure(check, "tokens_per_s")
    size = certificate.figure(check, "parameters")
    return per_s * size / parameters if per_s and size else None


def _sft_s(config: RecipeConfig, certificate: Certificate, parameters: int) -> float | None:
    rate, sft = _rate(certificate, _SFT, parameters), config.sft
    if rate is None or sft.max_train_steps is None:
        return None
    packs = sft.per_device_train_batch_size * sft.gradient_accumulation_steps
    world = placement_of(config, "sft").world
    return sft.max_train_steps * packs * sft.pack_length / (rate * world)


def _grpo_s(config: RecipeConfig, certificate: Certificate, parameters: int) -> float | None:
    """Updates, and where transformers samples also that; judges are not in it."""
    rate, grpo = _rate(certificate, _GRPO, parameters), config.grpo
    if rate is None:
        return None
    world = placement_of(config, "grpo").world
    samples = grpo.num_unique_prompts_rollout * grpo.num_samples_per_prompt_rollout
    step_s = samples * grpo.max_token_length * grpo.num_epochs / (rate * world)
    sampled = _rate(certificate, _SAMPLING, parameters)
    if grpo.generation_backend == "transformers" and sampled is not None:
        step_s += samples * grpo.response_length / (sampled * world)
    return grpo.num_training_steps * step_s


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
