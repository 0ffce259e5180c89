"""Stages that ask a judge, with a model of a few thousand parameters, in processes of their own.

python -m tests.support.judged_life: for each line ``ROOT URL grpo|evaluate`` on its input, forks a
process that runs the stage, and prints its number, and then how it ended. (To fork is quicker than
to import torch for each.)

What a stage reads and writes lies below ROOT, the store of judgements in the workspace ROOT/ws.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from flows.stages.judging import judge_for
from flows.stages.work import StageWork
from infra.store.workspace import Workspace
from refiner_core.contract.config import EvaluateConfig, JudgeConfig, RecipeConfig, RewardConfig
from refiner_core.evaluation.run import evaluate_model
from refiner_core.training.grpo import train_grpo
from tests.support.stage_io import FolderStageIO
from tests.support.tiny_training import (
    AnsweringSampler,
    following,
    recipe,
    save_answering_inputs,
    tiny_model,
)


def prepare(root: Path) -> None:
    """Model and prompts."""
    save_answering_inputs(root)
    shutil.copy(root / "data" / "rl_train.parquet", root / "data" / "rl_test.parquet")


def config_of(url: str, **judge: Any) -> RecipeConfig:
    """One step of GRPO, or an evaluation of few samples, judged at ``url``."""
    served = JudgeConfig(kind="openai", model="m", base_url=url, concurrency=8, timeout_s=20.0)
    return replace(
        recipe(grpo={"num_training_steps": 1, "save_freq": 10}),
        judge=replace(served, **judge),
        reward=RewardConfig(rubric_source="instance"),
        evaluate=EvaluateConfig(decoding=("sampled",), num_samples=4, bootstrap_samples=50),
    )


def work_of(root: Path, kind: str, config: RecipeConfig, stage: str = "") -> StageWork:
    """What the stage may use. ``stage``: another one of the same kind."""
    return StageWork(
        spec=cast(Any, SimpleNamespace(kind=kind)),  # all that is read of it here
        config=config,
        inputs={},
        input_stages={},
        output_dir=root / f"{kind}{stage}-out",
        io=FolderStageIO(root / f"{kind}{stage}"),
        stage_id=f"{kind}{stage}-0123456789ab",
        workspace=Workspace.open(root / "ws"),
    )


def live(root: Path, kind: str, config: RecipeConfig, stage: str = "") -> dict[str, Any]:
    """Run the stage to its end; what it reports."""
    work = work_of(root, kind, config, stage)
    sampler = AnsweringSampler()
    where: dict[str, Any] = {
        "data_dir": root / "data",
        "model_ref": str(root / "model"),
        "output_dir": work.output_dir,
        "generator": sampler,
    }
    with judge_for(work) as (judge, io):
        if kind == "evaluate":
            sampler.model = tiny_model()
            return evaluate_model(
                config, **where, data_digest="d", model_name="sft", io=io, judge=judge
            )
        with following(sampler):
            return train_grpo(config, **where, io=io, judge=judge)


if __name__ == "__main__":
    for line in sys.stdin:
        root, url, kind = line.split()
        if not (child := os.fork()):
            live(Path(root), kind, config_of(url))
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
