"""A training stage, in the worker itself or in ranks of its own.

In: the work of an ``sft``, ``rft`` or ``grpo`` stage. Out: its report, with its hardware and engine
(``ranks``, ``nodes``, ``engine``), and under ``resumed_on`` the earlier parts on something else.

One process without DeepSpeed is the worker itself. Otherwise ranks are launched, and only they
import torch: the worker keeps the heartbeat, the fence and the outcome.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from flows.stages.work import StageWork, as_planned
from infra.jobs.signals import job_of
from infra.store import atomic
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.placement import (
    Placement,
    placement_of,
    section_of,
)
from refiner_core.contract.types import Progress

if TYPE_CHECKING:
    from refiner_core.training.engines.protocol import Engine
    from refiner_core.training.ranks import Ranks

#: File of an attempt with its ranks, nodes and engine.
_FILE = "ranks.json"


def run_training(work: StageWork) -> dict[str, Any]:
    """Train, if the recipe has this training.

    Raises
    ------
    RefinerError, Exception
        The error that ended any of the ranks.
    """
    if "environment" in KINDS[work.spec.kind].sources:
        as_planned(work.spec.sources, work.config)
    stage = work.spec.kind
    placement = placement_of(work.config, stage)
    used = {
        "ranks": placement.world,
        "nodes": placement.nodes,
        "engine": engine_name(work.config, stage),
    }
    paths = work.workspace.layout.attempt(work.stage_id, work.attempt)
    atomic.write_json(paths.control / _FILE, used)
    report = (
        train(work, stage) if in_worker(work.config, stage) else _train_in_ranks(work, placement)
    )
    return {**report, **used, "resumed_on": resumed_on(work, used)}


def in_worker(config: RecipeConfig, stage: str) -> bool:
    """True if a training stage needs no process beside the worker."""
    section = section_of(config, stage)
    return placement_of(config, stage).world == 1 and not section.deepspeed_stage


def engine_name(config: RecipeConfig, stage: str) -> str:
    """Name of the engine in cards and reports."""
    zero = section_of(config, stage).deepspeed_stage
    return f"DeepSpeed ZeRO-{zero}" if zero else "torch"


def train(work: StageWork, stage: str, ranks: Ranks | None = None) -> dict[str, Any]:
    """Train a stage in this process, as one of several ranks or alone."""
    if ranks is None:
        work.io.progress(Progress(0, 0, "loading"))
    if stage != "grpo":
        from refiner_core.training.sft import train_sft

        return train_sft(
            work.config,
            data_dir=work.inputs["data"],
            model_ref=work.model_ref,
            output_dir=work.output_dir,
            io=work.io,
            ranks=ranks,
            stage=stage,
        )
    from flows.stages.judging import gold_judges, judge_for
    from refiner_core.training.grpo import train_grpo

    first, on_nodes = ranks is None or ranks.rank == 0, placement_of(work.config, stage).nodes > 1
    monitored: AbstractContextManager[Any] = gold_judges(work) if first else nullcontext(())
    with (
        judge_for(work) if first else nullcontext((None, None)) as (judge, io),
        monitored as golds,
    ):
        return train_grpo(
            work.config,
            data_dir=work.inputs["data"],
            model_ref=work.model_ref,
            output_dir=work.output_dir,
            io=io,
            judge=judge,
            open_servers=partial(_rollout_servers, work) if first or on_nodes else None,
            ranks=ranks,
            golds=golds,
        )


def _rollout_servers(work: StageWork, engine: Engine) -> AbstractContextManager[Any]:
    """The stage's own vLLM servers, as children of this process; with several nodes, of the first
    rank on each, and all ranks call it together."""
    from infra.rollouts.nodes import open_on_nodes
    from infra.rollouts.servers import open_vllm

    control = work.workspace.layout.stage(work.stage_id).control  # the same in every attempt
    given: dict[str, Any] = {}
    if engine.ranks.rank == 0:
        tell = work.starts("starting rollout servers")
        given = {"should_stop": work.io.should_stop, "tell": tell}
    if placement_of(work.config, "grpo").nodes > 1:
        return open_on_nodes(work.config, engine.tokenizer, control, engine.ranks, **given)
    return open_vllm(work.config, engine.tokenizer, control, **given)


def _train_in_ranks(work: StageWork, placement: Placement) -> dict[str, Any]:
    from infra.ranks.launch import OtherNodes, run_ranks

    layout = work.workspace.layout

    nodes = None
    if placement.nodes > 1:
        job = job_of(work.workspace, work.stage_id, work.attempt)
        if job is None:
            raise UnsupportedError(
                f"{work.stage_id} is to train on {placement.nodes} nodes, and this job has one",
                expected="a Slurm job with several nodes",
                fix="set dispatch.executor=slurm, or resources.nodes=1",
            )
        control = layout.attempt(work.stage_id, work.attempt).control
        nodes = OtherNodes(control, job, placement.nodes - 1)
    return run_ranks(
        placement,
        "flows.ranks.rank",
        {
            "workspace": str(work.workspace.root),
            "stage_id": work.stage_id,
            "attempt": work.attempt,
            "inputs": {role: str(path) for role, path in work.inputs.items()},
            "input_stages": dict(work.input_stages),
            "output_dir": str(work.output_dir),
        },
        work.io,
        layout.stage(work.stage_id).data,
        check_fence=partial(work.check_fence, "ranks end"),
        nodes=nodes,
        watch=getattr(work.io, "ranks", None),
    )


def resumed_on(work: StageWork, used: dict[str, Any]) -> list[dict[str, Any]]:
    """Earlier parts of this training that ran on something else, oldest first, with their last
    steps. Empty if all of it ran on the same."""
    stage = work.workspace.layout.stage(work.stage_id)
    found: list[dict[str, Any]] = []
    number = work.attempt
    while note := work.workspace.part(stage.attempt(number), "resumed"):
        if int(note["from_attempt"]) >= number:
            break
        number = int(note["from_attempt"])
        before = work.workspace.read_control(stage.attempt(number).control / _FILE)
        found.insert(0, {**(before or {}), "attempt": number, "up_to_step": int(note["step"])})
    same = all({k: v for k, v in part.items() if k in used} == used for part in found)
    return [] if same else found
