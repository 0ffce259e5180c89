"""Checks of stages that run a model: impossible settings are refused when the plan is made.

In: a recipe's configuration. Out: nothing, or a refusal with the numbers and the field to change.
Covers sizes that belong together (packs, batches, processes, GPUs, rollout servers) and options
that exclude each other. Errors in a model's files are found by :mod:`flows.checking.models`, and
limits of a machine at run time.
"""

from __future__ import annotations

import functools

from refiner_core.contract.config import RecipeConfig, SftConfig
from refiner_core.contract.fields import refuse_fields
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.kinds import KINDS, kinds_of
from refiner_core.contract.monitoring import monitor_notes
from refiner_core.contract.placement import (
    STAGES,
    judge_numbers,
    placement_of,
    sampling_section,
    sampling_servers,
    section_of,
    starts_servers,
)
from refiner_core.contract.protocols import all_under
from refiner_core.contract.services import asks_judge


def check_training(config: RecipeConfig) -> None:
    """Refuse impossible stages with a model, naming the field.

    Raises
    ------
    ConfigurationError
        Has the numbers that do not fit together.
    """
    for stage in STAGES:
        if stage in config.stages:
            _check_shared(config, stage)
            if stage != "grpo":
                _check_sft(config, stage)
    if "grpo" in config.stages:
        _check_samples(config)
        _check_batch(config)
        _check_off_policy(config)
    _check_servers(config)
    if "evaluate" in config.stages:
        _check_sampler(config, "evaluate")
    if KINDS["sample"] in kinds_of(config.stages):
        _check_sampling(config)


def training_notes(config: RecipeConfig) -> list[str]:
    """Notes on settings that work but are probably unintended; shown with the plan."""
    notes = []
    for stage in STAGES:
        if stage not in config.stages:
            continue
        section, found = section_of(config, stage), placement_of(config, stage)
        threads, cpus = found.nproc_per_node * config.model.cpu_threads, section.resources.cpus
        if not section.resources.gpus and found.nproc_per_node > 1 and threads > cpus:
            notes.append(
                f"{found.nproc_per_node} processes with {config.model.cpu_threads} threads each "
                f"(model.cpu_threads) share {cpus} CPU cores: {stage}.resources.cpus={threads} "
                "gives each process its own cores."
            )
        if found.idle_gpus:
            notes.append(
                f"{found.idle_gpus} of the {section.resources.gpus * found.nodes} GPUs of {stage} "
                f"stay idle: each of {found.nodes} nodes has {found.nproc_per_node} processes and "
                f"{len(found.server_gpus)} rollout servers."
            )
    for stage in ("sample", "evaluate"):
        if KINDS[stage] in kinds_of(config.stages):
            notes += _idle_samplers(config, stage)
    return notes + _uncorrected(config) + _training_judge(config) + monitor_notes(config)


def _uncorrected(config: RecipeConfig) -> list[str]:
    """Note on samples of older weights without a correction, as in the reference trainer."""
    grpo = config.grpo
    corrected = grpo.truncated_importance_sampling_ratio_cap or grpo.old_logprobs == "sampler"
    if "grpo" not in config.stages or not grpo.async_steps or corrected:
        return []
    age = "one step old" if grpo.async_steps == 1 else f"up to {grpo.async_steps} steps old"
    return [
        f"Samples are {age} (grpo.async_steps) and count as new ones: "
        "grpo.truncated_importance_sampling_ratio_cap=2.0 corrects for their age."
    ]


def _idle_samplers(config: RecipeConfig, stage: str) -> list[str]:
    section = sampling_section(config, stage)
    gpus, vllm = section.resources.gpus, section.generation_backend == "vllm"
    used = sum(map(len, sampling_servers(config, stage))) if vllm else 1
    used += len(judge_numbers(config, stage))
    if used >= gpus:
        return []
    how = (
        f"a server takes {config.grpo.vllm_tensor_parallel_size}"
        if vllm
        else f"transformers use one, {stage}.generation_backend=vllm uses all"
    )
    return [f"{gpus - used} of the {gpus} GPUs of {stage} stay idle: {how}."]


def _training_judge(config: RecipeConfig) -> list[str]:
    """Note that only the training judge evaluates: a policy learns to please its judge, so its
    score alone is no evidence of a gain. The lexical judge is a stand-in and gets no note."""
    judge = config.judge
    asked = asks_judge(config, "grpo") and judge.kind == "openai"
    if not asked or not {"grpo", "evaluate"} <= {*config.stages}:
        return []
    others = (under.judge for under in all_under(config).values())
    if any(
        (j.kind, j.model, j.revision) != (judge.kind, judge.model, judge.revision) for j in others
    ):
        return []
    return [
        f"{judge.model} (judge.model) trains the policy, and no other judge evaluates it: "
        "evaluate.protocols=[held-out-judge-v1] adds a judge that is not used in training."
    ]


def _check_shared(config: RecipeConfig, stage: str) -> None:
    """Check processes, GPUs, sharding and precision of a stage."""
    refuse = functools.partial(refuse_fields, config)
    section = section_of(config, stage)
    nodes, zero = f"{stage}.resources.nodes", f"{stage}.deepspeed_stage"
    refuse(
        section.resources.nodes > 1 and config.dispatch.executor == "local",
        f"{nodes} dispatch.executor",
        "one node on this machine, or a cluster",
        f"set {nodes}=1, or dispatch.executor=slurm",
    )
    refuse(
        section.offload_optimizer and section.deepspeed_stage not in (1, 2, 3),
        f"{stage}.offload_optimizer {zero}",
        "ZeRO-1 to 3, which are required for optimiser state in host memory",
        f"set {zero}=2, or {stage}.offload_optimizer=false",
    )
    refuse(
        section.offload_param and section.deepspeed_stage != 3,
        f"{stage}.offload_param {zero}",
        "ZeRO-3, which is required for weights in host memory",
        f"set {zero}=3, or {stage}.offload_param=false",
    )
    _check_kernel(config, stage)


def _check_kernel(config: RecipeConfig, stage: str) -> None:
    """Refuse FlashAttention and FlexAttention in stages that cannot use them."""
    refuse = functools.partial(refuse_fields, config)
    kernel, gpus = config.model.attn_implementation, f"{stage}.resources.gpus"
    refuse(
        kernel in ("flash_attention_2", "flex_attention") and not get_field(config, gpus),
        f"model.attn_implementation {gpus}",
        "a GPU for that attention kernel, or one that a CPU has",
        f"set {gpus}, or model.attn_implementation=sdpa",
    )
    refuse(
        kernel == "flash_attention_2" and config.model.dtype == "float32",
        "model.attn_implementation model.dtype",
        "bfloat16, because FlashAttention computes in 16 bits",
        "set model.dtype=bfloat16, or model.attn_implementation=sdpa",
    )


def _check_pack(config: RecipeConfig, stage: str) -> None:
    """Check that samples fit into a pack: they are never cut."""
    refuse = functools.partial(refuse_fields, config)
    grpo, longest = config.grpo, config.data.max_prompt_token_length
    pack, tokens = f"{stage}.pack_length", grpo.max_token_length
    if not config.environment.name:
        # a token may be appended after a stop string
        tokens = min(longest + grpo.response_length, tokens) + bool(grpo.stop_strings)
    lengths = "data.max_prompt_token_length grpo.response_length grpo.max_token_length"
    refuse(
        get_field(config, pack) < tokens,
        f"{pack} {lengths} grpo.stop_strings",
        f"{pack} >= {tokens}: a sample (and a token that closes a stop string) is never cut",
        f"set {pack}={tokens} or more, or lower one of the others",
    )


def _check_sft(config: RecipeConfig, stage: str) -> None:
    """Check SFT, on demonstrations or on kept attempts."""
    refuse = functools.partial(refuse_fields, config)
    sft, world = section_of(config, stage), placement_of(config, stage).world
    assert isinstance(sft, SftConfig)
    packs, zero = sft.per_device_train_batch_size, f"{stage}.deepspeed_stage"
    refuse(
        sft.pack_length <= config.data.max_prompt_token_length,
        f"{stage}.pack_length data.max_prompt_token_length",
        "room for an answer after the longest prompt; what is longer than a pack is dropped and "
        "counted",
        f"raise {stage}.pack_length, or lower data.max_prompt_token_length",
    )
    refuse(
        sft.optimizer == "muon" and sft.deepspeed_stage,
        f"{stage}.optimizer {zero}",
        "adamw with ZeRO-1 to 3: Muon needs whole matrices, which they split",
        f"set {stage}.optimizer=adamw (and {stage}.learning_rate for it), or {zero}=null: plain "
        "torch shares gradients between processes, too",
    )
    refuse(
        packs * sft.gradient_accumulation_steps < world,
        f"{stage}.per_device_train_batch_size {stage}.gradient_accumulation_steps "
        f"{stage}.nproc_per_node {stage}.resources.nodes",
        f"at least {world} packs a step for {world} processes: they are spread over them, so that "
        "their number changes no result",
        f"set {stage}.gradient_accumulation_steps={-(-world // packs)}, or fewer "
        f"{stage}.nproc_per_node",
    )


def _check_samples(config: RecipeConfig) -> None:
    """Check one sample and one episode."""
    refuse = functools.partial(refuse_fields, config)
    grpo, lengths = config.grpo, "data.max_prompt_token_length grpo.response_length"
    refuse(
        "" in grpo.stop_strings,
        "grpo.stop_strings",
        "no empty text, the beginning of every response",
    )
    refuse(
        grpo.max_token_length < config.data.max_prompt_token_length + grpo.response_length,
        f"grpo.max_token_length {lengths}",
        "room for the longest prompt with the longest response",
        "raise grpo.max_token_length, or lower one of the other two",
    )
    _check_pack(config, "grpo")
    refuse(
        grpo.credit == "turn_rewards",
        "grpo.credit",
        "credit by whole episodes: credit by turns was removed",
        "set grpo.credit=trajectory",
    )


def _check_batch(config: RecipeConfig) -> None:
    """Check how a step's rollouts are split into mini-batches and over processes."""
    refuse = functools.partial(refuse_fields, config)
    grpo, placement = config.grpo, placement_of(config, "grpo")
    prompts, parts, world = grpo.num_unique_prompts_rollout, grpo.num_mini_batches, placement.world
    rollouts = prompts * grpo.num_samples_per_prompt_rollout
    batch = "grpo.num_unique_prompts_rollout grpo.num_samples_per_prompt_rollout"
    processes = "grpo.nproc_per_node grpo.resources.nodes"
    refuse(
        rollouts % parts or parts > prompts,
        f"{batch} grpo.num_mini_batches",
        f"a divisor of {rollouts} rollouts that is at most {prompts}: mini-batches are equal, and "
        "no group is split",
        f"set grpo.num_mini_batches={prompts} or a divisor of it",
    )
    refuse(
        rollouts // parts < world,
        f"{batch} grpo.num_mini_batches {processes}",
        f"one or more of a mini-batch's {rollouts // parts} rollouts for each of {world} processes",
        "lower grpo.nproc_per_node or grpo.num_mini_batches, or raise "
        "grpo.num_unique_prompts_rollout",
    )
    refuse(
        grpo.generation_backend == "transformers" and prompts < world,
        f"grpo.num_unique_prompts_rollout {processes}",
        f"at least one prompt a step for each of {world} processes, which sample them",
        f"set grpo.nproc_per_node={max(1, prompts // placement.nodes)}, or "
        f"grpo.num_unique_prompts_rollout={world}",
    )


def _check_off_policy(config: RecipeConfig) -> None:
    """Check off-policy samples and their correction."""
    refuse = functools.partial(refuse_fields, config)
    grpo = config.grpo
    refuse(
        grpo.async_steps and grpo.async_steps >= grpo.num_training_steps,
        "grpo.async_steps grpo.num_training_steps",
        "grpo.async_steps < grpo.num_training_steps, so that samples come from trained weights",
        "lower grpo.async_steps (1 overlaps sampling and training already)",
    )
    refuse(
        grpo.old_logprobs == "sampler" and grpo.top_p < 1,
        "grpo.old_logprobs grpo.top_p",
        "grpo.top_p=1 with the sampler's log-probabilities: those of a nucleus are larger than the "
        "trainer's, and all ratios would be clipped",
        "set grpo.top_p=1, or grpo.old_logprobs=recomputed",
    )


def _check_servers(config: RecipeConfig) -> None:
    """Check the folder of the rollout servers' weights."""
    used = any(starts_servers(config, kind.name) for kind in kinds_of(config.stages))
    refuse_fields(
        config,
        used and not config.grpo.rollout_server.weights_dir.startswith("/"),
        "grpo.rollout_server.weights_dir",
        "an absolute path in memory, valid for server and trainer",
        "set grpo.rollout_server.weights_dir=/dev/shm",
    )


def _check_sampling(config: RecipeConfig) -> None:
    """Refuse impossible sampling, or sampling without anything to learn from."""
    refuse = functools.partial(refuse_fields, config)
    rule = config.sample
    refuse(
        rule.temperature == 0 and rule.attempts > 1,
        "sample.temperature sample.attempts",
        "a temperature above 0, or one attempt: all attempts would be the same",
        "set sample.temperature=0.8",
    )
    partial = config.environment.shaping.weights or not config.environment.name
    refuse(
        rule.min_partial <= 1 and not partial,
        "sample.min_partial environment.shaping.weights",
        "weights, without which no episode has a partial score, or sample.min_partial above 1, "
        "which keeps only full successes",
        "set environment.shaping.weights, or sample.min_partial=2",
    )
    refuse(
        config.grpo.max_token_length <= config.data.max_prompt_token_length
        and not config.environment.name,
        "grpo.max_token_length data.max_prompt_token_length",
        "room for the longest prompt and an answer",
    )
    _check_pack(config, "rft")
    _check_sampler(config, "sample")


def _check_sampler(config: RecipeConfig, stage: str) -> None:
    """Check the GPUs of a stage that samples and does not train."""
    section, nodes = sampling_section(config, stage), f"{stage}.resources.nodes"
    refuse_fields(config, section.resources.nodes > 1, nodes, "one node", f"set {nodes}=1")
    judge_numbers(config, stage)
    if section.generation_backend == "vllm":
        sampling_servers(config, stage)
    else:
        _check_kernel(config, stage)
