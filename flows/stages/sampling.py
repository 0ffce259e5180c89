"""``sample``: a model's attempts at the training prompts, and the selected ones."""

from __future__ import annotations

from typing import Any

from flows.stages.judging import judge_for
from flows.stages.work import StageWork, as_planned


def run_sample(work: StageWork) -> dict[str, Any]:
    """Sample a model's attempts at the training prompts, and select those worth learning."""
    from refiner_core.rejection.stage import sample_attempts

    as_planned(work.spec.sources, work.config)
    with judge_for(work) as (judge, io):
        return sample_attempts(
            work.config,
            data_dir=work.inputs["data"],
            model_ref=work.model_ref,
            output_dir=work.output_dir,
            io=io,
            judge=judge,
            open_servers=work.sampling_servers("sample"),
        )
