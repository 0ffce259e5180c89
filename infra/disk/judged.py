"""How much judges will say: samples, and by how much the store of judgements grows.

In: planned stages and their configuration. Out: counts, and bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from infra.judgements.segments import RECORD_BYTES, summarise
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.plan import Plan, PlannedStage
from refiner_core.contract.services import asks_judge

#: Judgements of a rollout: its rubrics, and its claims with their evidence.
_JUDGEMENTS = 16
#: Prompts where nothing says how many there are.
_PROMPTS = 1000


def judgement_bytes(stages: Iterable[PlannedStage], plans: Sequence[Plan], folder: Path) -> int:
    """What judges will say in these stages, as far as the store still takes it.

    The store is kept within its limit by what is already in it, so that is not counted again.
    """
    total = limit = 0
    of = {stage.id: plan.config_of(stage) for plan in plans for stage in plan.stages}
    for stage in stages:
        config = of[stage.id]
        if config.judge.kind == "lexical" or not asks_judge(config, stage.kind):
            continue
        limit = max(limit, int(config.judge.cache_gb * 2**30))
        rollouts = evaluation_samples(config)
        if stage.kind == "grpo":
            rollouts = config.grpo.num_training_steps * rollouts_of_step(config)
        elif stage.kind == "sample":
            rollouts = training_prompts(config) * config.sample.attempts
        total += rollouts * _JUDGEMENTS * RECORD_BYTES
    held = summarise(folder).bytes if total else 0
    return max(0, min(total, limit - held))


def rollouts_of_step(config: RecipeConfig) -> int:
    """Rollouts that a step of GRPO samples, at most: active sampling may go on for some rounds."""
    grpo = config.grpo
    rounds = grpo.active_sampling_max_rounds if grpo.active_sampling else 1
    return rounds * grpo.num_unique_prompts_rollout * grpo.num_samples_per_prompt_rollout


def training_prompts(config: RecipeConfig) -> int:
    """Training prompts or tasks, at most, where only the data will tell."""
    data = config.data
    if config.environment.name:
        return config.environment.max_train_tasks or _PROMPTS
    if data.rl_path == "builtin:synthetic":
        return min(data.synthetic_rl_rows, data.max_rl_rows or data.synthetic_rl_rows)
    return data.max_rl_rows or _PROMPTS


def evaluation_samples(config: RecipeConfig) -> int:
    """Answers that an evaluation samples, greedy ones included."""
    evaluate = config.evaluate
    prompts = evaluate.max_prompts or config.data.max_rl_rows or 1000
    return prompts * (evaluate.num_samples + 1)
