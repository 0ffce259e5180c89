"""The configuration of a run: pydantic dataclasses, frozen, every field marked and documented.

One section per stage (`data`, `sft`, `grpo`, `publish`, `evaluate`) plus those shared by several
stages (`model`, `reward`, `judge`) and those that only control the run (`tracking`, `dispatch`,
`disk`, `notify`). Field names of training are those of the reference trainer (open-instruct's
GRPO), so that a seed card's flags read the same here. Values at class level are the defaults of a
full-size run; recipes set the rest.

Sections are in :mod:`refiner_core.contract.sections`, each with the checks of its own fields;
checks across sections in :mod:`refiner_core.contract.checks`.
:mod:`refiner_core.contract.loading` turns YAML and overrides into these classes and refuses what
does not fit.
"""

from __future__ import annotations

import os
from typing import Literal

from pydantic.dataclasses import dataclass

from refiner_core.contract.marks import STRICT, added, execution, identity, section
from refiner_core.contract.sections.command import PLACEHOLDER as PLACEHOLDER
from refiner_core.contract.sections.command import CommandConfig as CommandConfig
from refiner_core.contract.sections.command import placeholders as placeholders
from refiner_core.contract.sections.command import uses as uses
from refiner_core.contract.sections.data import DataConfig as DataConfig
from refiner_core.contract.sections.data import ModelConfig as ModelConfig
from refiner_core.contract.sections.environment import EnvironmentConfig as EnvironmentConfig
from refiner_core.contract.sections.environment import UserConfig as UserConfig
from refiner_core.contract.sections.judging import LEXICAL_MODELS as LEXICAL_MODELS
from refiner_core.contract.sections.judging import JudgeConfig as JudgeConfig
from refiner_core.contract.sections.judging import PenaltiesConfig as PenaltiesConfig
from refiner_core.contract.sections.judging import RewardConfig as RewardConfig
from refiner_core.contract.sections.judging import ServeConfig as ServeConfig
from refiner_core.contract.sections.publish import PublishConfig as PublishConfig
from refiner_core.contract.sections.steering import DiskConfig as DiskConfig
from refiner_core.contract.sections.steering import DispatchConfig as DispatchConfig
from refiner_core.contract.sections.steering import NotifyConfig as NotifyConfig
from refiner_core.contract.sections.steering import Resources as Resources
from refiner_core.contract.sections.steering import RetryConfig as RetryConfig
from refiner_core.contract.sections.steering import TrackingConfig as TrackingConfig
from refiner_core.contract.sections.training import GrpoConfig as GrpoConfig
from refiner_core.contract.sections.training import MonitorConfig as MonitorConfig
from refiner_core.contract.sections.training import RolloutServerConfig as RolloutServerConfig
from refiner_core.contract.sections.training import SampleConfig as SampleConfig
from refiner_core.contract.sections.training import SftConfig as SftConfig


@dataclass(frozen=True, config=STRICT)
class EvaluateConfig:
    """The protocol of an evaluation, and which models it is applied to."""

    models: tuple[Literal["base", "sft", "rft", "grpo", "command"], ...] = identity(
        ("base", "sft", "rft", "grpo", "command"), doc="models evaluated, if the recipe makes them"
    )
    decoding: tuple[Literal["greedy", "sampled"], ...] = identity(
        ("greedy", "sampled"), doc="decodings evaluated, each a protocol of its own"
    )
    max_prompts: int | None = identity(
        None,
        ge=1,
        doc="use at most this many held-out prompts (the first; of tasks, the first of each domain "
        "by its share)",
    )
    num_samples: int = identity(4, ge=1, doc="samples per prompt of the sampled decoding")
    temperature: float = identity(1.0, ge=0, doc="temperature of the sampled decoding")
    top_p: float = identity(
        1.0, gt=0, le=1, doc="nucleus sampling of the sampled decoding; 1 is off"
    )
    top_k: int = added(0, ge=0, doc="top-k of the sampled decoding; 0 is off")
    user: UserConfig = section(
        UserConfig, doc="the user in evaluation, if it differs from that in training (has a model)"
    )
    bootstrap_samples: int = identity(2000, ge=1, doc="resamples behind each interval of a mean")
    seed: int = identity(1234, doc="sampling seed; the same for every run, so that arms pair up")
    generation_backend: Literal["transformers", "vllm"] = added(
        "transformers",
        doc="sampling backend, part of the protocol; servers are those of grpo.rollout_server",
    )
    batch_size: int = identity(
        256, ge=1, doc="samples decoded together; another number changes the order of sums"
    )
    occasion: str = added(
        "",
        doc="name of the occasion: with another, nothing is reused from earlier evaluations or "
        "from the store of judgements",
    )
    protocols: tuple[str, ...] = added(
        (),
        doc="protocol files (shipped names, or YAML files): each model is also evaluated under "
        "them; a configuration holds their contents, as JSON",
    )
    fresh_reference: bool = execution(
        True,
        doc="judge the random copier's answers again in every evaluation, without the store: the "
        "control against a served judge that drifts; one answer a prompt",
    )
    resources: Resources = section(Resources, doc="resources of the evaluation job")


@dataclass(frozen=True, config=STRICT)
class RecipeConfig:
    """A whole recipe."""

    recipe: str = execution("unnamed", doc="name of the recipe")
    description: str = execution("", doc="one paragraph for people")
    workspace: str = execution(
        os.environ.get("REFINER_WORKSPACE") or "runs",
        doc="folder of records, outputs, checkpoints, logs; default: REFINER_WORKSPACE, else runs",
    )
    log_level: Literal["debug", "info", "warning", "error"] = execution("info", doc="of stage logs")
    data_root: str | None = execution(
        None, doc="folder of the large files, if on another disk than `workspace`"
    )
    stages: tuple[Literal["data", "sft", "rft", "grpo", "command", "publish", "evaluate"], ...] = (
        execution(
            ("data", "sft", "grpo", "publish", "evaluate"),
            doc="stages of the recipe (execution: a stage's identity follows from its inputs); "
            "`rft` is two: `sample`, and SFT on the kept attempts",
        )
    )
    only: tuple[str, ...] = execution(
        (), doc="names of the stages to run in this call; the others must exist already"
    )
    seed: int = identity(42, doc="run seed: split, order, sampling")
    model: ModelConfig = section(ModelConfig, doc="the model that training starts from")
    data: DataConfig = section(DataConfig, doc="rows to tokens")
    sft: SftConfig = section(SftConfig, doc="supervised fine-tuning")
    sample: SampleConfig = section(
        SampleConfig, doc="attempts to fine-tune on, and their selection"
    )
    rft: SftConfig = section(SftConfig, doc="supervised fine-tuning on the kept attempts")
    grpo: GrpoConfig = section(GrpoConfig, doc="GRPO")
    command: CommandConfig = section(CommandConfig, doc="another trainer")
    reward: RewardConfig = section(RewardConfig, doc="the reward")
    judge: JudgeConfig = section(JudgeConfig, doc="the judge")
    monitor: MonitorConfig = section(MonitorConfig, doc="gold reward during GRPO")
    environment: EnvironmentConfig = section(
        EnvironmentConfig, doc="environment of an agent with tools"
    )
    publish: PublishConfig = section(PublishConfig, doc="publishing")
    evaluate: EvaluateConfig = section(EvaluateConfig, doc="evaluation")
    tracking: TrackingConfig = section(TrackingConfig, doc="experiment tracking")
    dispatch: DispatchConfig = section(DispatchConfig, doc="jobs")
    disk: DiskConfig = section(DiskConfig, doc="disk space")
    notify: NotifyConfig = section(NotifyConfig, doc="notifications")
