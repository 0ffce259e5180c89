"""Sections of the stages that sample and train: `sft`, `rft`, `sample`, `grpo`; and `monitor`.

Names are those of the reference trainer (open-instruct's GRPO) where it has one, and of torchrun
and DeepSpeed for their settings.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic.dataclasses import dataclass

from refiner_core.contract.marks import OFF, STRICT, added, execution, identity, section
from refiner_core.contract.sections.steering import Resources

#: Reaction to a finding: a line in the log and the metrics; the update is skipped; the stage
#: ends, and can be resumed from the checkpoint before the step.
HealthPolicy = Annotated[Literal["off", "warn", "skip", "stop"], OFF]
#: Share of the judged answers that the monitor adds by default: less than 5 % of the calls, if gold
#: asks up to half more questions than the training reward.
MONITOR_SHARE = 0.04


@dataclass(frozen=True, config=STRICT)
class HealthConfig:
    """Checks of every step, and their reaction: `off`, `warn`, `skip` (the update is skipped),
    `stop` (resumable). A check's policy and limits are part of a stage's identity only if the
    policy is `skip`: a skipped update changes the result, a warning or a stop does not.
    """

    not_finite: Literal["skip", "stop"] = added(
        "stop", doc="a loss or gradient norm is NaN or infinite"
    )
    loss_spike: HealthPolicy = added(
        "warn",
        doc="the gradient norm (SFT: or the loss) exceeds its running mean by `spike_factor`",
    )
    spike_factor: float = added(
        10.0, gt=1, doc="with loss_spike: times the mean of the last 20 updates"
    )
    entropy_collapse: HealthPolicy = added(
        "warn", doc="mean entropy per token falls below `min_entropy` (GRPO)"
    )
    min_entropy: float = added(0.01, ge=0, doc="with entropy_collapse: nats")
    zero_reward_variance: HealthPolicy = added(
        "warn", doc="no group of a step has any spread of rewards (GRPO)"
    )
    length_explosion: HealthPolicy = added(
        "warn", doc="more than `max_truncated_share` of the samples hit the length limit (GRPO)"
    )
    max_truncated_share: float = added(
        0.9, ge=0, le=1, doc="with length_explosion: share of a step's samples"
    )
    kl_blow_up: HealthPolicy = added("warn", doc="mean KL to the reference exceeds `max_kl` (GRPO)")
    max_kl: float = added(10.0, gt=0, doc="with kl_blow_up: nats per token (kl3)")
    patience: int = added(
        3,
        ge=1,
        doc="steps in a row before a collapsed entropy, lengths, KL or missing spread counts",
    )


@dataclass(frozen=True, config=STRICT)
class RolloutServerConfig:
    """vLLM servers that a GRPO stage starts on its own nodes, as children of its attempt.

    They are reached over HTTP and have an environment of their own; they get new weights at every
    step. `grpo.vllm_num_engines` is their number on each node.
    """

    python: str | None = execution(
        None,
        doc="interpreter of vLLM's environment; default: the first `vllm` command on "
        "PATH after `setup`",
    )
    setup: tuple[str, ...] = execution(
        (), doc="shell lines before one starts, e.g. `module load vllm/0.33`"
    )
    container: str | None = execution(
        None, doc="words before the command, e.g. `apptainer exec --nv vllm.sif`"
    )
    args: tuple[str, ...] = execution(
        (), doc="further arguments of `vllm serve`, e.g. `--gpu-memory-utilization 0.8`"
    )
    weight_transfer: Literal["auto", "reload", "nccl", "ipc"] = execution(
        "auto", doc="ignored (older recipes): weights go by files in memory (`weights_dir`)"
    )
    weights_dir: str = execution(
        "/dev/shm", doc="folder in memory for the transfer of weights, not on the quota"
    )
    colocate: bool = execution(
        False, doc="servers share the GPUs of the trainer instead of having their own"
    )
    start_timeout_s: float = execution(
        1800.0, gt=0, doc="limit from a server's start to its first answer, seconds"
    )
    request_timeout_s: float = execution(
        1800.0, gt=0, doc="limit of one batch of requests before its server counts as hung, seconds"
    )
    canary_tolerance: float | None = execution(
        None,
        gt=0,
        doc="largest difference of a fixed prompt's log-probabilities between server and trainer "
        "after new weights; default: 1e-3 in float32 and 0.1 in bfloat16",
    )
    max_restarts: int = execution(
        3,
        ge=0,
        doc="replacements of a node's dead or poisoned servers before the stage fails",
    )


#: Fields shared by several sections.
_FIRST_SAVE = execution(
    None,
    ge=1,
    doc="also save after this step: a sweep's first trial shows the size of a save early",
)
_KEEP = execution(2, ge=1, doc="resume checkpoints kept; always includes the newest complete one")
_ZERO_STAGE = execution(
    None, doc="ZeRO stage; none trains with plain torch (several processes share gradients)"
)
_PROCESSES = execution(
    None,
    ge=1,
    doc="training processes per node (torchrun); default: one per GPU without a rollout server, "
    "and one on the CPU",
)
_OFFLOAD = execution(False, doc="keep optimiser state in host memory (ZeRO-1 to 3)")
_ASYNC_SAVE = execution(
    True, doc="write checkpoints during training; costs their size in host memory"
)
_ADAM_BETA2 = added(0.999, ge=0, lt=1, doc="beta2 of AdamW: decay of its mean of squared gradients")
_TOGETHER = identity(
    256, ge=1, doc="samples decoded together; another number changes the order of sums"
)


@dataclass(frozen=True, config=STRICT)
class SftConfig:
    """Supervised fine-tuning on assistant tokens only."""

    learning_rate: float = identity(1e-5, ge=0, doc="peak learning rate of AdamW")
    muon_learning_rate: float = identity(
        0.01, ge=0, doc="peak learning rate of Muon on matrices (with optimizer=muon only)"
    )
    optimizer: Literal["adamw", "muon"] = identity(
        "adamw", doc="`muon`: Muon on hidden matrices, AdamW on the rest"
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = identity(
        "cosine", doc="schedule after the warm-up"
    )
    warmup_ratio: float = identity(0.03, ge=0, le=1, doc="share of steps in linear warm-up")
    num_train_epochs: float = identity(2.0, gt=0, doc="passes over the demonstrations")
    max_train_steps: int | None = identity(None, ge=1, doc="stop after this many optimiser steps")
    pack_length: int = identity(8192, ge=1, doc="tokens in one pack")
    per_device_train_batch_size: int = identity(1, ge=1, doc="packs in one forward pass")
    gradient_accumulation_steps: int = identity(1, ge=1, doc="forward passes per optimiser step")
    weight_decay: float = identity(0.0, ge=0, doc="AdamW weight decay")
    adam_beta2: float = _ADAM_BETA2
    max_grad_norm: float = identity(1.0, doc="gradient clipping (global 2-norm)")
    eval_freq: int = execution(50, ge=1, doc="steps between validation losses")
    save_freq: int = execution(200, ge=1, doc="steps between checkpoints")
    first_save: int | None = _FIRST_SAVE
    keep: int = _KEEP
    deepspeed_stage: Literal[0, 1, 2, 3] | None = _ZERO_STAGE
    nproc_per_node: int | None = _PROCESSES
    offload_optimizer: bool = _OFFLOAD
    offload_param: bool = execution(False, doc="keep weights in host memory (ZeRO-3)")
    async_save: bool = _ASYNC_SAVE
    health: HealthConfig = section(HealthConfig, doc="checks of every step, and their reaction")
    resources: Resources = section(Resources, doc="resources of the SFT job")


@dataclass(frozen=True, config=STRICT)
class SampleConfig:
    """Rejection sampling: attempts at each training prompt or task, and which of them are kept."""

    attempts: int = identity(8, ge=1, doc="attempts per prompt or task")
    temperature: float = identity(0.8, ge=0, doc="sampling temperature")
    top_p: float = identity(1.0, gt=0, le=1, doc="nucleus sampling; 1 is off")
    top_k: int = identity(0, ge=0, doc="top-k sampling; 0 is off")
    success: float = identity(
        1.0,
        gt=0,
        le=1,
        doc="least reward of a full success, as a share of the highest possible reward",
    )
    min_partial: float = identity(
        0.6,
        ge=0,
        doc="least score of the best attempt that is kept for a prompt without a full success (the "
        "partial score of an episode, the share of the reward of an answer); above 1: none",
    )
    max_kept: int | None = identity(None, ge=1, doc="keep at most this many attempts of one prompt")
    distinct: Literal["none", "text", "tools"] = identity(
        "tools",
        doc="keep one of a prompt's successes with the same `tools` (sequence of called tools; for "
        "answers the same as `text`) or the same sampled `text`; `none` keeps all",
    )
    generation_backend: Literal["transformers", "vllm"] = identity(
        "transformers", doc="sampling backend; servers are those of grpo.rollout_server"
    )
    generation_batch_size: int = _TOGETHER
    save_freq: int = execution(
        1, ge=1, doc="batches between checkpoints; finished attempts are kept"
    )
    keep: int = _KEEP
    resources: Resources = section(Resources, doc="resources of the sampling job")


@dataclass(frozen=True, config=STRICT)
class CurriculumConfig:
    """Lower weights for the advantages of tasks that teach little, by their success so far."""

    enabled: bool = added(False, doc="weigh tasks by their success rate")
    min_attempts: int = added(5, ge=1, doc="attempts at a task before it is weighed")
    high: float = added(0.75, doc="success rate above which a task is easy")
    low: float = added(0.25, doc="success rate below which it is hard")
    high_weight: float = added(0.1, ge=0, doc="factor on the advantages of easy tasks")
    low_weight: float = added(0.5, ge=0, doc="factor on the advantages of hard tasks")


@dataclass(frozen=True, config=STRICT)
class GrpoConfig:
    """Group-relative policy optimisation; names and seed values of the reference trainer."""

    num_training_steps: int = identity(1000, ge=1, doc="optimiser steps of the whole run")
    num_unique_prompts_rollout: int = identity(32, ge=1, doc="prompts per step")
    num_samples_per_prompt_rollout: int = identity(
        8, ge=2, doc="samples per prompt: the group size"
    )
    temperature: float = identity(
        1.0, gt=0, doc="sampling temperature; logits are divided by it in the loss too"
    )
    top_p: float = identity(1.0, gt=0, le=1, doc="nucleus sampling; 1 is off")
    response_length: int = identity(1024, ge=1, doc="largest number of sampled tokens")
    max_token_length: int = identity(
        8192,
        ge=1,
        doc="prompt and response together (tokens); the reference's flag bounds prompt and labels",
    )
    pack_length: int = identity(8192, ge=1, doc="tokens in one pack")
    stop_strings: tuple[str, ...] = identity(
        (), doc="sampling ends after one of these; they stay in the text"
    )
    learning_rate: float = identity(5e-6, ge=0, doc="peak learning rate of AdamW")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = identity(
        "constant", doc="schedule after the warm-up"
    )
    warmup_ratio: float = identity(0.0, ge=0, le=1, doc="share of steps in linear warm-up")
    weight_decay: float = identity(0.0, ge=0, doc="AdamW weight decay")
    adam_beta2: float = _ADAM_BETA2
    max_grad_norm: float = identity(1.0, doc="gradient clipping (global 2-norm)")
    per_device_train_batch_size: int = identity(1, ge=1, doc="packs in one forward pass")
    num_mini_batches: int = identity(1, ge=1, doc="optimiser steps per batch of rollouts")
    num_epochs: int = identity(1, ge=1, doc="passes over one batch of rollouts")
    beta: float = identity(0.001, ge=0, doc="KL coefficient; 0 keeps no reference model in memory")
    kl_estimator: Literal["kl1", "kl2", "kl3", "kl4"] = identity(
        "kl3", doc="per-token KL estimator"
    )
    clip_lower: float = identity(0.2, ge=0, doc="ratio is clipped below at 1 - clip_lower")
    clip_higher: float = identity(0.2, ge=0, doc="ratio is clipped above at 1 + clip_higher")
    loss_aggregation: Literal["token", "sequence", "pack", "constant"] = identity(
        "token",
        doc="mean over all tokens of a step, per sample or per pack then mean, or over a constant",
    )
    advantage_normalization_type: Literal["standard", "centered", "sample_std"] = identity(
        "standard", doc="group mean and population std; mean only; mean and sample std"
    )
    credit: Literal["trajectory", "turn_rewards"] = added(
        "trajectory", doc="credit of the tokens of an episode: the advantage of the whole"
    )
    mask_truncated_completions: bool = identity(
        False, doc="completions that hit the length limit carry no loss (after group statistics)"
    )
    entropy_coefficient: float = identity(0.0, doc="loss - c * entropy")
    truncated_importance_sampling_ratio_cap: float = identity(
        2.0,
        ge=0,
        doc="upper clamp of trainer/sampler probability ratio; 0 turns the correction off",
    )
    old_logprobs: Literal["recomputed", "sampler"] = added(
        "recomputed",
        doc="denominator of the ratio: the trainer's own log-probabilities before the update (with "
        "importance sampling to correct for the sampler), or the sampler's",
    )
    async_steps: int = added(
        0,
        ge=0,
        doc="age of the sampling policy in steps: batches are sampled while earlier steps train; 0 "
        "samples with the newest weights",
    )
    active_sampling: bool = added(
        False, doc="sample further prompts until a step has its number of groups with spread"
    )
    active_sampling_max_rounds: int = added(
        3,
        ge=2,
        doc="with active_sampling: rounds of a step, the first included; then it trains on less",
    )
    curriculum: CurriculumConfig = section(
        CurriculumConfig, doc="weights of tasks by their success so far"
    )
    generation_backend: Literal["transformers", "vllm"] = identity(
        "transformers", doc="sampling backend of rollouts"
    )
    generation_batch_size: int = _TOGETHER
    save_freq: int = execution(50, ge=1, doc="steps between checkpoints")
    first_save: int | None = _FIRST_SAVE
    keep: int = _KEEP
    deepspeed_stage: Literal[0, 1, 2, 3] | None = _ZERO_STAGE
    nproc_per_node: int | None = _PROCESSES
    offload_optimizer: bool = _OFFLOAD
    offload_param: bool = execution(False, doc="keep weights in host memory (ZeRO-3)")
    async_save: bool = _ASYNC_SAVE
    vllm_num_engines: int = execution(1, ge=1, doc="rollout servers of each node (vllm)")
    vllm_tensor_parallel_size: int = execution(1, ge=1, doc="GPUs per rollout server")
    rollout_server: RolloutServerConfig = section(
        RolloutServerConfig, doc="servers of the vllm backend"
    )
    health: HealthConfig = section(HealthConfig, doc="checks of every step, and their reaction")
    resources: Resources = section(Resources, doc="resources of the GRPO job")


@dataclass(frozen=True, config=STRICT)
class MonitorConfig:
    """Gold reward on fixed prompts during GRPO, and a sequential test against the training reward.

    Training is the same with and without it, unless it stops the run: with `action: stop` its
    fields are part of the stage's identity, otherwise none is.
    """

    every: int = added(0, ge=0, doc="steps between two looks; 0 is off")
    gold: tuple[str, ...] = added(
        (), doc="protocol files whose `reward` and `judge` score the same answers; the mean counts"
    )
    rows: int | None = added(
        None, ge=1, doc="held-out prompts that no evaluation reads; default: 4 % more answers"
    )
    alpha: float = added(0.05, gt=0, lt=1, doc="largest probability of a false alarm in a run")
    keep: float = added(0.25, ge=0, le=1, doc="share of the proxy's rise that gold must keep")
    action: Literal["warn", "pause", "stop"] = added(
        "warn", doc="on an alarm: warn; pause until the same command; stop with gold's best weights"
    )
