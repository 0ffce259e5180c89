"""``sample``: a model's attempts at the training prompts, and the selected ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from flows.stages.judging import judge_for
from flows.stages.work import StageWork, as_planned
from refiner_core.contract.types import Generator


def run_sample(work: StageWork) -> dict[str, Any]:
    """Sample a model's attempts at the training prompts, and select those worth learning."""
    from refiner_core.rejection.stage import sample_attempts

    as_planned(work.spec.sources, work.config)
    servers = work.config.sample.generation_backend == "vllm"
    with judge_for(work) as (judge, io):
        return sample_attempts(
            work.config,
            data_dir=work.inputs["data"],
            model_ref=work.model_ref,
            output_dir=work.output_dir,
            io=io,
            judge=judge,
            open_generator=partial(_sampling_servers, work) if servers else None,
        )


def _sampling_servers(
    work: StageWork, tokenizer: Any, on_step: Callable[[int, int], None]
) -> AbstractContextManager[Generator]:
    """The stage's own vLLM servers, as children of this process, with a fixed model."""
    from infra.rollouts.servers import open_sampler

    return open_sampler(
        work.config,
        work.model_ref,
        tokenizer,
        work.workspace.layout.stage(work.stage_id).control,  # the same in every attempt
        should_stop=work.io.should_stop,
        tell=work.starts("starting rollout servers"),
        on_step=on_step,
    )
