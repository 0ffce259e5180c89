"""Checks of stages that run a model: what cannot be trained is refused when the plan is made.

In: a recipe's configuration. Out: nothing, or a refusal with the numbers and the field to change.
Sizes that belong together (packs, batches, processes, GPUs, rollout servers) and options that
exclude each other. Nothing here looks at the world: what is wrong with a model's files is found by
:mod:`flows.checking.models`, and what a machine lacks at run time.
"""

from __future__ import annotations

from typing import Any

from refiner_core.contract.config import RecipeConfig, SftConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.kinds import KINDS, kinds_of
from refiner_core.contract.placement import (
    STAGES,
    Placement,
    TrainingStage,
    placement_of,
    sampling_servers,
    section_of,
)
from refiner_core.contract.protocols import configs_under
from refiner_core.contract.services import asks_judge


def check_training(config: RecipeConfig) -> None:
    """Refuse stages with a model that cannot work, naming the field.

    Raises
    ------
    ConfigurationError
        With the numbers that do not fit together.
    """
    for stage in STAGES:
        if stage != "grpo" and stage in config.stages:
            _check_placed(config, stage)
            _check_sft(config, stage)
    if "grpo" in config.stages:
        _check_samples(config)
        _check_episodes(config)
        placement = _check_placed(config, "grpo")
        _check_batch(config, placement)
        _check_off_policy(config)
        _check_servers(config)
    if "evaluate" in config.stages:
        check_flash(config, "evaluate", config.evaluate.resources.gpus)


def training_notes(config: RecipeConfig) -> list[str]:
    """Give what works, and is hardly meant: said when a plan is made, and by nobody refused."""
    notes = []
    for stage in STAGES:
        if stage not in config.stages:
            continue
        section, found = getattr(config, stage), placement_of(config, stage)
        if stage != "grpo":
            notes += _idle_checks(config, stage)
        threads = found.nproc_per_node * config.model.cpu_threads
        if section.deepspeed_stage and found.world == 1:
            notes.append(
                f"{stage}.deepspeed_stage is {section.deepspeed_stage} with one process: there is "
                f"nobody to share with; {stage}.deepspeed_stage=null does the same with less."
            )
        if not section.resources.gpus and found.nproc_per_node > 1:
            cpus = section.resources.cpus
            if threads > cpus:
                notes.append(
                    f"{found.nproc_per_node} processes with {config.model.cpu_threads} threads "
                    f"each (model.cpu_threads) share {cpus} CPU cores: "
                    f"{stage}.resources.cpus={threads} gives each its own."
                )
        if found.idle_gpus:
            notes.append(
                f"{found.idle_gpus} of the {section.resources.gpus * found.nodes} GPUs of {stage} "
                f"stay idle: {found.nproc_per_node} processes on each of {found.nodes} nodes, and "
                f"{found.servers} rollout servers on the first."
            )
    return notes + _training_judge(config)


def _training_judge(config: RecipeConfig) -> list[str]:
    """A policy learns to please the judge that pays it: what that one says of it alone is no gain
    yet. The lexical judge reads words and is named a stand-in everywhere."""
    judge = config.judge
    asked = asks_judge(config, "grpo") and judge.kind == "openai"
    if not asked or not {"grpo", "evaluate"} <= {*config.stages}:
        return []
    others = (under.judge for under in configs_under(config).values())
    if any(
        (j.kind, j.model, j.revision) != (judge.kind, judge.model, judge.revision) for j in others
    ):
        return []
    return [
        f"{judge.model} (judge.model) trains the policy, and nobody else judges what comes of it: "
        "evaluate.protocols=[held-out-judge-v1] adds a judge that trains nobody."
    ]


#: Checks of samples and rewards, which SFT has not.
_GRPO_ALONE = ("entropy_collapse", "zero_reward_variance", "length_explosion", "kl_blow_up")


def _idle_checks(config: RecipeConfig, stage: TrainingStage) -> list[str]:
    """Health checks that somebody counts on, and that never look at anything."""
    health = section_of(config, stage).health
    policies = ((name, getattr(health, name)) for name in _GRPO_ALONE)
    return [
        f"{stage}.health.{name} is {policy}, and {stage.upper()} has nothing that it looks at: it "
        f"stops and skips nothing; grpo.health.{name} does."
        for name, policy in policies
        if policy in ("skip", "stop")
    ]


# ---------------------------------------------------------------- both stages


def _check_placed(config: RecipeConfig, stage: TrainingStage) -> Placement:
    """Processes, GPUs, sharding and precision of a stage."""
    section = section_of(config, stage)
    nodes, gpus, zero = section.resources.nodes, section.resources.gpus, section.deepspeed_stage
    if nodes > 1 and config.dispatch.executor == "local":
        raise ConfigurationError(
            f"{stage}.resources.nodes is {nodes}, but dispatch.executor=local has one machine.",
            expected=f"{stage}.resources.nodes=1 on this machine, or a cluster",
            fix=f"set {stage}.resources.nodes=1, or dispatch.executor=slurm",
        )
    if section.offload_optimizer and zero not in (1, 2, 3):
        raise ConfigurationError(
            f"{stage}.offload_optimizer is true, but {stage}.deepspeed_stage is {_shown(zero)}: "
            "optimiser state is kept in host memory by ZeRO-1 to 3 alone.",
            expected=f"{stage}.deepspeed_stage of 1, 2 or 3",
            fix=f"set {stage}.deepspeed_stage=2, or {stage}.offload_optimizer=false",
        )
    if section.offload_param and zero != 3:
        raise ConfigurationError(
            f"{stage}.offload_param is true, but {stage}.deepspeed_stage is {_shown(zero)}: "
            "weights are kept in host memory by ZeRO-3 alone.",
            expected=f"{stage}.deepspeed_stage=3",
            fix=f"set {stage}.deepspeed_stage=3, or {stage}.offload_param=false",
        )
    check_flash(config, stage, gpus)
    return placement_of(config, stage)


def check_flash(config: RecipeConfig, stage: str, gpus: int) -> None:
    """Refuse FlashAttention and FlexAttention where a stage that runs the model cannot have it."""
    kernel = config.model.attn_implementation
    if kernel not in ("flash_attention_2", "flex_attention"):
        return
    if gpus == 0:
        raise ConfigurationError(
            f"model.attn_implementation is {kernel}, which needs a GPU, but "
            f"{stage}.resources.gpus is 0.",
            expected="a GPU, or an attention kernel that a CPU has",
            fix=f"set {stage}.resources.gpus, or model.attn_implementation=sdpa",
        )
    if kernel == "flash_attention_2" and config.model.dtype == "float32":
        raise ConfigurationError(
            "model.attn_implementation is flash_attention_2, which computes in 16 bits, but "
            "model.dtype is float32.",
            expected="model.dtype=bfloat16 with FlashAttention",
            fix="set model.dtype=bfloat16, or model.attn_implementation=sdpa",
        )


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


# ---------------------------------------------------------------- SFT


def _check_sft(config: RecipeConfig, stage: TrainingStage) -> None:
    """SFT, on demonstrations or on attempts that were kept."""
    sft, longest = section_of(config, stage), config.data.max_prompt_token_length
    assert isinstance(sft, SftConfig)
    if sft.pack_length <= longest:
        raise ConfigurationError(
            f"A pack of {sft.pack_length} tokens ({stage}.pack_length) has no room for an answer "
            f"after a prompt of {longest} (data.max_prompt_token_length).",
            expected=f"{stage}.pack_length > data.max_prompt_token_length; what is longer than a "
            "pack is dropped and counted",
            fix=f"raise {stage}.pack_length, or lower data.max_prompt_token_length",
        )
    if sft.optimizer == "muon" and sft.deepspeed_stage:
        raise ConfigurationError(
            f"{stage}.optimizer is muon, and {stage}.deepspeed_stage is {sft.deepspeed_stage}: "
            "Muon needs whole matrices, and ZeRO-1 to 3 cut them up.",
            expected=f"{stage}.optimizer=adamw with ZeRO-1 to 3",
            fix=f"set {stage}.optimizer=adamw (and {stage}.learning_rate for it), or "
            f"{stage}.deepspeed_stage=null: plain torch shares gradients between processes, too",
        )
    packs = sft.per_device_train_batch_size * sft.gradient_accumulation_steps
    world = placement_of(config, stage).world
    if packs < world:
        raise ConfigurationError(
            f"A step has {packs} packs ({stage}.per_device_train_batch_size "
            f"{sft.per_device_train_batch_size} x {stage}.gradient_accumulation_steps "
            f"{sft.gradient_accumulation_steps}) for {world} processes ({stage}.nproc_per_node x "
            f"{stage}.resources.nodes): {world - packs} would never have work. A step's packs are "
            "spread over the processes, so that their number changes no result.",
            expected=f"at least {world} packs a step",
            fix=f"set {stage}.gradient_accumulation_steps="
            f"{-(-world // sft.per_device_train_batch_size)}, or fewer {stage}.nproc_per_node",
        )


# ---------------------------------------------------------------- GRPO


def _check_samples(config: RecipeConfig) -> None:
    """Check one sample and one group."""
    grpo, longest = config.grpo, config.data.max_prompt_token_length
    if grpo.num_samples_per_prompt_rollout < 2:
        raise ConfigurationError(
            "`grpo.num_samples_per_prompt_rollout` is "
            f"{grpo.num_samples_per_prompt_rollout}: a group of one has no advantage.",
            expected="at least 2 samples per prompt",
            fix="set grpo.num_samples_per_prompt_rollout=8",
        )
    if grpo.temperature <= 0:
        raise ConfigurationError(
            "`grpo.temperature` is 0: all samples of a group would be the same.",
            expected="a temperature above 0",
            fix="set grpo.temperature=1.0",
        )
    if any(not text for text in grpo.stop_strings):
        raise ConfigurationError(
            "`grpo.stop_strings` holds an empty text, which every response begins with.",
            expected="texts of at least one character",
            fix="correct grpo.stop_strings",
        )
    _require_pack(config, "grpo", longest + grpo.response_length)
    if grpo.max_token_length < longest + grpo.response_length:
        raise ConfigurationError(
            f"grpo.max_token_length {grpo.max_token_length} is below "
            f"{longest} + {grpo.response_length} "
            "(data.max_prompt_token_length + grpo.response_length).",
            expected="room for the longest prompt with the longest response",
            fix="raise grpo.max_token_length, or lower one of the other two",
        )


def _require_pack(config: RecipeConfig, stage: TrainingStage, length: int) -> None:
    """A prompt and what was sampled after it, so many tokens, are never cut."""
    grpo, pack = config.grpo, section_of(config, stage).pack_length
    closing = 1 if grpo.stop_strings else 0  # a token may be appended after a stop string
    if pack >= length + closing:
        return
    more = f" and {closing} token that closes a stop string" if closing else ""
    raise ConfigurationError(
        f"A pack of {pack} tokens ({stage}.pack_length) cannot hold a prompt of "
        f"{config.data.max_prompt_token_length} (data.max_prompt_token_length) and a response of "
        f"{grpo.response_length} (grpo.response_length){more}.",
        expected=f"{stage}.pack_length >= {length + closing}: what is sampled is never cut",
        fix=f"set {stage}.pack_length={length + closing} or more, or lower one of the other two",
    )


def _require_pack_of_episodes(config: RecipeConfig, stage: TrainingStage) -> None:
    pack, longest = section_of(config, stage).pack_length, config.grpo.max_token_length
    if pack < longest:
        raise ConfigurationError(
            f"A pack of {pack} tokens ({stage}.pack_length) cannot hold an episode of {longest} "
            "(grpo.max_token_length).",
            expected=f"{stage}.pack_length >= grpo.max_token_length: an episode is never cut",
            fix=f"set {stage}.pack_length={longest} or more, or lower grpo.max_token_length",
        )


def _check_episodes(config: RecipeConfig) -> None:
    """Check what an episode is trained on."""
    grpo, name = config.grpo, config.environment.name
    if name:
        _require_pack_of_episodes(config, "grpo")
    if name == "tau2" and grpo.credit == "turn_rewards":
        raise ConfigurationError(
            "grpo.credit is turn_rewards, and tau2-bench says only at the end of an episode how "
            "much of it is done.",
            expected="an environment that tells progress between turns, as `desk` does",
            fix="set grpo.credit=trajectory",
        )


def _check_batch(config: RecipeConfig, placement: Placement) -> None:
    """Check how a step's rollouts are cut into mini-batches and spread over processes."""
    grpo, world = config.grpo, placement.world
    prompts, group = grpo.num_unique_prompts_rollout, grpo.num_samples_per_prompt_rollout
    rollouts, parts = prompts * group, grpo.num_mini_batches
    if rollouts % parts:
        raise ConfigurationError(
            f"A batch of {prompts} x {group} rollouts cannot be split into "
            f"{parts} equal mini-batches.",
            expected="a divisor of the number of rollouts",
            fix="change grpo.num_mini_batches",
        )
    if parts > prompts:
        raise ConfigurationError(
            f"{prompts} prompts a step (grpo.num_unique_prompts_rollout) cannot be split into "
            f"{parts} mini-batches (grpo.num_mini_batches): a group is never taken apart.",
            expected=f"grpo.num_mini_batches <= {prompts}",
            fix=f"set grpo.num_mini_batches={prompts} or a divisor of it",
        )
    if rollouts // parts < world:
        raise ConfigurationError(
            f"A mini-batch of {rollouts // parts} rollouts ({prompts} prompts x {group} samples / "
            f"{parts} grpo.num_mini_batches) cannot give {world} processes (grpo.nproc_per_node x "
            f"grpo.resources.nodes) one each: {world - rollouts // parts} would never have work.",
            expected=f"at least {world} rollouts in a mini-batch",
            fix="lower grpo.nproc_per_node or grpo.num_mini_batches, or raise "
            "grpo.num_unique_prompts_rollout",
        )
    if grpo.generation_backend == "transformers" and prompts < world:
        raise ConfigurationError(
            f"{prompts} prompts a step (grpo.num_unique_prompts_rollout) are sampled by {world} "
            f"processes (grpo.nproc_per_node x grpo.resources.nodes): {world - prompts} of them "
            "would sample nothing.",
            expected=f"at least {world} prompts a step",
            fix=f"set grpo.nproc_per_node={max(1, prompts // placement.nodes)}, or "
            f"grpo.num_unique_prompts_rollout={world}",
        )


def _check_off_policy(config: RecipeConfig) -> None:
    """Samples of older policies, and what corrects for them."""
    grpo = config.grpo
    if grpo.async_steps and grpo.async_steps >= grpo.num_training_steps:
        raise ConfigurationError(
            f"grpo.async_steps is {grpo.async_steps}, and grpo.num_training_steps "
            f"{grpo.num_training_steps}: no trained weights would ever be sampled from.",
            expected="grpo.async_steps < grpo.num_training_steps",
            fix="lower grpo.async_steps (1 overlaps sampling and training already)",
        )
    cap, recomputed = grpo.truncated_importance_sampling_ratio_cap, "recomputed"
    if grpo.async_steps and grpo.old_logprobs == recomputed and cap == 0:
        raise ConfigurationError(
            f"Samples are {grpo.async_steps} steps old (grpo.async_steps), and nothing corrects "
            "for it: grpo.truncated_importance_sampling_ratio_cap is 0 and grpo.old_logprobs is "
            "recomputed.",
            expected="importance sampling, or ratios against the sampler's own log-probabilities",
            fix="set grpo.truncated_importance_sampling_ratio_cap=2.0, or "
            "grpo.old_logprobs=sampler",
        )
    if grpo.old_logprobs == "sampler" and grpo.top_p < 1:
        raise ConfigurationError(
            f"grpo.old_logprobs is sampler, and grpo.top_p {grpo.top_p}: a sampler's "
            "log-probabilities are those of the nucleus, the trainer's those of all tokens, so "
            f"that ratios would begin at {grpo.top_p:g} to 1 and be clipped there.",
            expected="grpo.top_p=1 with the sampler's log-probabilities",
            fix="set grpo.top_p=1, or grpo.old_logprobs=recomputed",
        )
    if grpo.active_sampling and grpo.active_sampling_max_rounds < 2:
        raise ConfigurationError(
            "grpo.active_sampling is true, but grpo.active_sampling_max_rounds is "
            f"{grpo.active_sampling_max_rounds}, the first round included: no further prompt "
            "would be sampled.",
            expected="at least 2 rounds",
            fix="set grpo.active_sampling_max_rounds=3, or grpo.active_sampling=false",
        )


def _check_servers(config: RecipeConfig) -> None:
    """Rollout servers, and how weights get to them."""
    grpo, servers = config.grpo, config.grpo.rollout_server
    if grpo.generation_backend != "vllm":
        return
    how, gpus = servers.weight_transfer, grpo.resources.gpus
    if how in ("nccl", "ipc") and gpus == 0:
        raise ConfigurationError(
            f"grpo.rollout_server.weight_transfer is {how}, which goes from GPU to GPU, but "
            "grpo.resources.gpus is 0.",
            expected="`reload` (or `auto`) without GPUs",
            fix="set grpo.rollout_server.weight_transfer=auto, or grpo.resources.gpus",
        )
    if how == "nccl" and servers.colocate:
        raise ConfigurationError(
            "grpo.rollout_server.weight_transfer is nccl, and grpo.rollout_server.colocate true: "
            "NCCL takes no two processes of one GPU.",
            expected="`ipc` or `reload` where servers share the trainer's GPUs",
            fix="set grpo.rollout_server.weight_transfer=auto, or "
            "grpo.rollout_server.colocate=false",
        )
    if how == "ipc" and not servers.colocate:
        raise ConfigurationError(
            "grpo.rollout_server.weight_transfer is ipc, but grpo.rollout_server.colocate is "
            "false: CUDA IPC hands memory over within one GPU, and servers have their own.",
            expected="`nccl` or `reload` between GPUs",
            fix="set grpo.rollout_server.weight_transfer=auto, or "
            "grpo.rollout_server.colocate=true",
        )
    if not servers.weights_dir.startswith("/"):
        raise ConfigurationError(
            f"grpo.rollout_server.weights_dir is {servers.weights_dir!r}, which server and trainer "
            "would look for in different folders.",
            expected="an absolute path, in memory",
            fix="set grpo.rollout_server.weights_dir=/dev/shm",
        )


def check_sampling(config: RecipeConfig) -> None:
    """Refuse sampling that cannot work, or from which nothing could be learnt.

    Raises
    ------
    ConfigurationError
        With the numbers and the field.
    """
    if KINDS["sample"] not in kinds_of(config.stages):
        return
    _check_attempts(config)
    _check_lengths(config)
    _check_job(config)


def sampling_notes(config: RecipeConfig) -> list[str]:
    """Give what works, and is hardly meant."""
    if KINDS["sample"] not in kinds_of(config.stages):
        return []
    rule, notes = config.sample, list[str]()
    if rule.generation_backend == "transformers" and rule.resources.gpus > 1:
        notes.append(
            f"sample.resources.gpus is {rule.resources.gpus}, and sampling with transformers uses "
            "one; sample.generation_backend=vllm uses all."
        )
    if rule.generation_backend == "vllm" and rule.resources.gpus:
        used = sum(len(gpus) for gpus in sampling_servers(config))
        if used < rule.resources.gpus:
            notes.append(
                f"{rule.resources.gpus - used} of the {rule.resources.gpus} GPUs of sample stay "
                f"idle: a server takes {config.grpo.vllm_tensor_parallel_size}."
            )
    if rule.attempts > rule.generation_batch_size:
        notes.append(
            f"{rule.attempts} attempts at a prompt (sample.attempts) are decoded "
            f"{rule.generation_batch_size} at a time (sample.generation_batch_size), one prompt "
            "after the other."
        )
    return notes


def _check_attempts(config: RecipeConfig) -> None:
    rule = config.sample
    if rule.temperature == 0 and rule.attempts > 1:
        raise ConfigurationError(
            f"`sample.temperature` is 0: all {rule.attempts} attempts at a prompt would be the "
            "same.",
            expected="a temperature above 0, or one attempt",
            fix="set sample.temperature=0.8",
        )
    if config.environment.name and rule.min_partial <= 1 and not config.environment.shaping.weights:
        raise ConfigurationError(
            f"`sample.min_partial` is {rule.min_partial:g}, but no kind of check has a weight "
            "(environment.shaping.weights): no episode has a partial score.",
            expected="weights, or sample.min_partial above 1, which keeps full successes alone",
            fix="set environment.shaping.weights, or sample.min_partial=2",
        )


def _check_lengths(config: RecipeConfig) -> None:
    """Check that what is kept fits into a pack: nothing of it is cut."""
    if config.environment.name:
        _require_pack_of_episodes(config, "rft")
        return
    grpo = config.grpo
    longest = config.data.max_prompt_token_length
    if grpo.max_token_length <= longest:
        raise ConfigurationError(
            f"grpo.max_token_length {grpo.max_token_length} leaves no room for an answer after a "
            f"prompt of {longest} (data.max_prompt_token_length).",
            expected="room for the longest prompt and an answer",
            fix="raise grpo.max_token_length, or lower data.max_prompt_token_length",
        )
    _require_pack(config, "rft", min(longest + grpo.response_length, grpo.max_token_length))


def _check_job(config: RecipeConfig) -> None:
    rule = config.sample
    if rule.resources.nodes > 1:
        raise ConfigurationError(
            f"sample.resources.nodes is {rule.resources.nodes}, and attempts are sampled on one.",
            expected="one node",
            fix="set sample.resources.nodes=1",
        )
    if rule.generation_backend == "vllm":
        sampling_servers(config)
    else:
        check_flash(config, "sample", rule.resources.gpus)
