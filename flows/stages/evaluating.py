"""``evaluate``: weights and a protocol to per-sample results and metrics."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from flows.stages.judging import judge_for
from flows.stages.work import StageWork, as_planned
from infra.external.exports import require_whole
from refiner_core.contract.protocols import protocol_name


def run_evaluate(work: StageWork) -> dict[str, Any]:
    """Weights and a protocol to per-sample results and metrics. For an agent no judge is asked,
    except by the environment."""
    from refiner_core.evaluation.run import evaluate_model

    if work.spec.model == "command":
        require_whole(work.inputs["weights"] / "model", "evaluation")
    common: dict[str, Any] = {
        "data_dir": work.inputs["data"],
        "data_digest": work.spec.input_fingerprints["data"],
        "model_ref": work.model_ref,
        "model_name": work.spec.model,
        "output_dir": work.output_dir,
        "protocol_file": protocol_name(work.spec.name),
        "open_servers": work.sampling_servers("evaluate"),
    }
    environment = work.config.environment
    if not environment.name:
        mark = _first_attempt(work)
        with judge_for(work) as (judge, io):
            return evaluate_model(work.config, **common, io=io, judge=judge, mark=mark)
    from refiner_core.evaluation.episodes import evaluate_episodes

    as_planned(work.spec.sources, work.config)
    asks = environment.nl_assertions == "judge"
    with judge_for(work) if asks else nullcontext((None, work.io)) as (judge, io):
        return evaluate_episodes(work.config, **common, io=io, judge=judge)


def _first_attempt(work: StageWork) -> str:
    """Id that distinguishes this making of a stage from all others, also from one whose record was
    deleted; the same in all of its attempts."""
    record = work.workspace.read_record(work.stage_id)
    return record.attempts[0].comment if record is not None and record.attempts else ""
