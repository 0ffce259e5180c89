"""Plans of the large recipes, value by value: what runs on many GPUs is what the cards and their
trainers state. Sources: the two cards of the refiner, `grpo_fast_rubric.py` of dr-tulu at 531cc4f,
and the tau2 scripts of slime at 10f5405."""

from __future__ import annotations

import pytest

from flows.running.calls import make_recipe_plan
from refiner_core.contract.plan import Plan

REFINER = {
    "seed": 42,
    "model.dtype": "bfloat16",
    "model.attn_implementation": "flash_attention_2",
    "grpo.num_unique_prompts_rollout": 32,
    "grpo.num_samples_per_prompt_rollout": 8,
    "grpo.temperature": 1.0,
    "grpo.top_p": 1.0,
    "grpo.response_length": 1024,
    "grpo.max_token_length": 8192,
    "grpo.pack_length": 8192,
    "grpo.learning_rate": 5e-6,
    "grpo.lr_scheduler_type": "constant",
    "grpo.warmup_ratio": 0.0,
    "grpo.weight_decay": 0.0,
    "grpo.max_grad_norm": 1.0,
    "grpo.per_device_train_batch_size": 1,
    "grpo.num_mini_batches": 1,
    "grpo.num_epochs": 1,
    "grpo.beta": 0.001,
    "grpo.kl_estimator": "kl3",
    "grpo.clip_lower": 0.2,
    "grpo.clip_higher": 0.2,
    "grpo.loss_aggregation": "pack",
    "grpo.advantage_normalization_type": "standard",
    "grpo.mask_truncated_completions": False,
    "grpo.entropy_coefficient": 0.0,
    "grpo.truncated_importance_sampling_ratio_cap": 0.0,
    "grpo.async_steps": 1,
    "reward.verification_reward": 10.0,
    "reward.apply_paper_citation_reward": True,
    "reward.paper_citation_weight": 0.2,
    "reward.gate_judge_score_with_format_bonus": False,
    "reward.non_stop_penalty": False,
    "judge.kind": "openai",
    "judge.model": "Qwen/Qwen3.5-35B-A3B",
    "judge.form": "batched",
    "judge.extra_body": '{"chat_template_kwargs": {"enable_thinking": false}}',
}
#: With the default of a new field left out: adam_beta2 0.999, old_logprobs recomputed.
ABSENT = ("grpo.adam_beta2", "grpo.old_logprobs", "grpo.credit", "grpo.active_sampling")
BASES = {
    "refiner-gpt54": "lihaoxin2020/qwen3-4b-refiner-gpt54-ep2",
    "refiner-instance-only": "lihaoxin2020/qwen3-4b-refiner-gpt54-ep2",
    "refiner-answer-only": "lihaoxin2020/qwen3-4B-refiner-sft-step-3201",
}


def planned(recipe: str) -> Plan:
    return make_recipe_plan(recipe, ["workspace=/nonexistent/refiner"])


@pytest.mark.parametrize("recipe", BASES)
def test_grpo_of_the_refiner_has_the_values_of_card_and_trainer(recipe: str) -> None:
    plan = planned(recipe)
    identity = plan.by_name["grpo"].identity
    assert {path: identity.get(path) for path in REFINER} == REFINER
    assert not set(ABSENT) & identity.keys()
    assert plan.config.model.name_or_path == BASES[recipe]
    assert plan.config.data.max_prompt_token_length == 6144
    assert plan.config.grpo.deepspeed_stage == 3
    assert plan.by_name["data"].identity["data.refiner_mode"] == (
        "answer_only" if recipe == "refiner-answer-only" else None
    )
    rubrics = (identity["reward.rubric_source"], identity.get("reward.instance_rubrics_only"))
    assert (
        rubrics
        == {
            "refiner-gpt54": ("instance+static", None),
            "refiner-instance-only": ("instance+static", True),
            "refiner-answer-only": ("instance", None),
        }[recipe]
    )


def test_tau2_has_the_values_of_its_scripts() -> None:
    plan = planned("tau2")
    sft, rft, grpo = (plan.by_name[name].identity for name in ("sft", "rft", "grpo"))
    for stage, identity in (("sft", sft), ("rft", rft)):
        values = {"learning_rate": 1e-5, "weight_decay": 0.01, "adam_beta2": 0.98}
        assert {name: identity[f"{stage}.{name}"] for name in values} == values
        packs = (identity[f"{stage}.gradient_accumulation_steps"], identity[f"{stage}.pack_length"])
        assert packs == (4, 20480)
    values = {
        "num_training_steps": 21,
        "num_unique_prompts_rollout": 16,
        "num_samples_per_prompt_rollout": 4,
        "temperature": 0.7,
        "response_length": 4096,
        "max_token_length": 20480,
        "learning_rate": 1e-6,
        "weight_decay": 0.1,
        "adam_beta2": 0.98,
        "beta": 0.01,
        "clip_lower": 0.2,
        "clip_higher": 0.28,
        "entropy_coefficient": 0.001,
        "advantage_normalization_type": "sample_std",
        "loss_aggregation": "sequence",
        "truncated_importance_sampling_ratio_cap": 0.0,
    }
    assert {name: grpo[f"grpo.{name}"] for name in values} == values
