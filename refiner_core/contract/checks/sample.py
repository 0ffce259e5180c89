"""Checks of rejection sampling, made when a plan is made.

What a number by itself may be is checked with all others (:mod:`.checks`).

In: a configuration. Out: nothing, or the first refusal.
"""

from __future__ import annotations

from refiner_core.contract.checks.training import check_flash
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.kinds import KINDS, kinds_of
from refiner_core.contract.placement import sampling_servers


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
    """What works, and is hardly meant."""
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
    """What is kept must fit into a pack: nothing of it is cut."""
    grpo, pack = config.grpo, config.rft.pack_length
    if config.environment.name:
        if pack < grpo.max_token_length:
            raise ConfigurationError(
                f"A pack of {pack} tokens (rft.pack_length) cannot hold an episode of up to "
                f"{grpo.max_token_length} (grpo.max_token_length).",
                expected="rft.pack_length >= grpo.max_token_length",
                fix=f"set rft.pack_length={grpo.max_token_length} or more, or lower "
                "grpo.max_token_length",
            )
        return
    longest = config.data.max_prompt_token_length
    if grpo.max_token_length <= longest:
        raise ConfigurationError(
            f"grpo.max_token_length {grpo.max_token_length} leaves no room for an answer after a "
            f"prompt of {longest} (data.max_prompt_token_length).",
            expected="room for the longest prompt and an answer",
            fix="raise grpo.max_token_length, or lower data.max_prompt_token_length",
        )
    closing = 1 if grpo.stop_strings else 0  # a token may be appended after a stop string
    needed = min(longest + grpo.response_length, grpo.max_token_length) + closing
    if pack < needed:
        raise ConfigurationError(
            f"A pack of {pack} tokens (rft.pack_length) cannot hold a prompt of {longest} "
            f"(data.max_prompt_token_length) and an answer of {grpo.response_length} "
            "(grpo.response_length).",
            expected=f"rft.pack_length >= {needed}: what is kept is never cut",
            fix=f"set rft.pack_length={needed} or more, or lower one of the other two",
        )


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
