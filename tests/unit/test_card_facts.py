"""Facts that readers look for in the card of a published run, and that the records hold.

Each is a piece of text that the card of such a run must have: what people write by hand about a run
of the shipped recipes, in the words of ours.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from refiner_core.cards.build import build_card
from refiner_core.cards.facts import AttemptNote, CardFacts
from refiner_core.cards.lint import lint_card
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.marks import walk
from refiner_core.rubrics import load_rubric_set
from tests.support.card_facts import evaluation

LATER = ("reward.instance_rubrics_only",)
STATIC = load_rubric_set("v3").rubrics


def recipe_facts(recipe: str, repo_id: str, **changes: Any) -> CardFacts:
    config = load_recipe(recipe)
    static = "static" in config.reward.rubric_source and not config.reward.instance_rubrics_only
    given: dict[str, Any] = {
        "repo_id": repo_id,
        "config": config,
        "stage": "grpo",
        "step": 50,
        "final": False,
        "command": f"refiner run {recipe}",
        "description": config.description,
        "static_rubric_titles": tuple(r.title for r in STATIC) if static else (),
        "static_rubric_weights": tuple(r.signed_weight for r in STATIC) if static else (),
        "recorded_fields": tuple(p for p, _ in walk(RecipeConfig) if p not in LATER),
        "attempts": [AttemptNote("grpo", 1, "disk_full", None, 100)],
    }
    return CardFacts(**{**given, **changes})


# ---------------------------------------------------------------- the refiner at step 50

REFINER = "lihaoxin2020/qwen3-4b-refiner-gpt54-instance-rubric-gpt54-grpo-step50"
REFINER_FACTS = [
    "license: apache-2.0",
    "base_model: lihaoxin2020/qwen3-4b-refiner-gpt54-ep2",
    "pipeline_tag: text-generation",
    "library_name: transformers",
    "- grpo\n- rlhf\n- refiner\n",
    "- qwen3\n",
    "# qwen3-4b-refiner-gpt54-instance-rubric-gpt54-grpo-step50",
    "GRPO checkpoint (step 50) of a research-refiner policy",
    "GRPO of a 4B research refiner",
    (
        "- **Base model:** [`lihaoxin2020/qwen3-4b-refiner-gpt54-ep2`](https://huggingfac"
        "e.co/lihaoxin2020/qwen3-4b-refiner-gpt54-ep2) at `main`"
    ),
    "**Algorithm:** Group-relative policy optimisation (GRPO)",
    "**Training step:** 50 of 200 planned",
    (
        "given an agent's reasoning, a question and raw search-tool output, write a "
        "concise answer whose claims cite that output"
    ),
    (
        "[`lihaoxin2020/rl_hard_gpt5_sft_gpt54rubric`](https://huggingface.co/datasets/li"
        "haoxin2020/rl_hard_gpt5_sft_gpt54rubric) at `main` (train split)"
    ),
    "the row's own rubrics",
    "**Reward = rubric judge + citation quality.**",
    "and the static set `v3` (",
    "`Citation Discipline`, weight 1.0",
    "`Off-Query Padding`, weight -1.0",
    "`Wrong-Entity Confabulation`, weight -1.0",
    "Positive rubric scores enter as they are, negative ones as `1 - s`",
    "**Judge:** `Qwen/Qwen3.5-35B-A3B`",
    "**Citation reward:** enabled, weight 0.2",
    "mean F1 of the judge's recall and precision per claim",
    "**KL:** `kl3` estimator, `beta = 0.001`",
    "AdamW (offload off), `lr = 5e-6` constant",
    "`per_device_train_batch_size = 1`",
    "ZeRO-3, `flash_attention_2` attention",
    "**Rollouts:** 32 unique prompts × 8 samples per prompt",
    "`temperature = 1.0`",
    "`max_prompt_token_length = 6144`",
    "`response_length = 1024`",
    "`max_token_length = 8192`",
    "`pack_length = 8192`",
    "**Seed:** 42.",
    "writes a single `<answer>…</answer>` block",
    "`<snippet id=ID1,ID2,…>claim</snippet>`, citing only ids that occur in the tool output",
    (
        "**step-50 intermediate** checkpoint, useful as an early baseline in ablations "
        "of rubrics, citation weight or judge"
    ),
    "prefer a later step of the same run",
    "--verification_reward 10.0",
    "--non_stop_penalty false",
    "--refiner_reward_gate_judge_score_with_format_bonus false",
    "--refiner_reward_apply_paper_citation_reward true",
    "--refiner_reward_paper_citation_weight 0.2",
    "--kl_estimator kl3 --beta 0.001",
    "--num_unique_prompts_rollout 32 --num_samples_per_prompt_rollout 8",
    "--learning_rate 5e-6 --lr_scheduler_type constant",
    "--max_prompt_token_length 6144 --response_length 1024",
    "--pack_length 8192",
    "--temperature 1.0 --seed 42",
    "--deepspeed_stage 3",
    (
        "after step 100 because the disk or its quota was full; the stage was not taken "
        "up again. This checkpoint is step 50."
    ),
    (
        "introduced `--refiner_reward_instance_rubrics_only` (drop static rubrics from "
        "the reward and from logging). **This checkpoint was produced before it "
        "existed**; the value in effect was `false`"
    ),
    "and the static set `v3`",
    "`lihaoxin2020/rl_hard_gpt5_sft_gpt54rubric`",
    "**step-50 intermediate** checkpoint",
    "the row's own rubrics and the static set `v3`",
]


@pytest.fixture(scope="module")
def refiner_card() -> str:
    return build_card(recipe_facts("refiner-gpt54", REFINER))


@pytest.mark.parametrize("fact", REFINER_FACTS, ids=[f[:40] for f in REFINER_FACTS])
def test_the_card_of_a_refiner_says_what_its_readers_look_for(fact: str, refiner_card: str) -> None:
    assert fact in refiner_card


def test_the_card_of_a_refiner_is_sound(refiner_card: str) -> None:
    assert lint_card(refiner_card) == []


ANSWER_ONLY_FACTS = [
    "lihaoxin2020/qwen3-4B-refiner-sft-step-3201",
    "GRPO of a 4B refiner in answer-only mode",
    "Group-relative policy optimisation (GRPO)",
    "the judge sees the row's own rubrics; the score",
    "--verification_reward 10.0",
    "--refiner_reward_paper_citation_weight 0.2",
    "data.refiner_mode=answer_only",
    "--deepspeed_stage 3",
    "--learning_rate 5e-6 --lr_scheduler_type constant",
    "--kl_estimator kl3 --beta 0.001",
    "`max_prompt_token_length = 6144`",
    "**Training step:** 50",
]


@pytest.fixture(scope="module")
def answer_only_card() -> str:
    return build_card(recipe_facts("refiner-answer-only", "somebody/refiner-step50"))


@pytest.mark.parametrize("fact", ANSWER_ONLY_FACTS, ids=[f[:40] for f in ANSWER_ONLY_FACTS])
def test_the_card_of_the_answer_only_recipe_says_what_is_its_own(
    fact: str, answer_only_card: str
) -> None:
    assert fact in answer_only_card


def test_the_successor_run_says_that_static_rubrics_are_out() -> None:
    card = build_card(recipe_facts("refiner-instance-only", "a/b", recorded_fields=None))
    assert "--refiner_reward_instance_rubrics_only true" in card
    assert "static set" not in card


# ---------------------------------------------------------------- an agent with tools

AGENT = "some-lab/4b-desk-grpo"
AGENT_FACTS = [
    "library_name: transformers",
    "license: apache-2.0",
    "base_model: Qwen/Qwen3-4B-Instruct-2507",
    "- grpo\n",
    "pipeline_tag: text-generation",
    "datasets:\n- some-lab/desk-demonstrations",
    "model-index:\n- name: 4b-desk-grpo\n  results:\n  - task:",
    "# 4b-desk-grpo",
    "[`Qwen/Qwen3-4B-Instruct-2507`](https://huggingface.co/Qwen/Qwen3-4B-Instruct-2507)",
    (
        "[`some-lab/desk-demonstrations`](https://huggingface.co/datasets/some-lab/desk-d"
        "emonstrations)"
    ),
    "**Training step:** 21 (final)",
    "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
    'name = "some-lab/4b-desk-grpo"',
    "`grpo`: [pkeu9kck](https://wandb.ai/some-lab/agents/runs/pkeu9kck)",
    "`sft`: [b7d80rfe](https://wandb.ai/some-lab/agents/runs/b7d80rfe)",
    "### Training progression",
    "| **step 21 (this model)** |",
    "## Usage",
]


@pytest.fixture(scope="module")
def agent_card() -> str:
    """The parts that a refiner's run has, too."""
    log = "https://wandb.ai/some-lab/agents/runs/"
    config = load_recipe(
        "tiny",
        [
            "model.name_or_path=Qwen/Qwen3-4B-Instruct-2507",
            "data.sft_path=some-lab/desk-demonstrations",
            "data.sft_revision=0123abcd",
            "grpo.num_training_steps=21",
        ],
    )
    return build_card(
        CardFacts(
            AGENT,
            config,
            "grpo",
            21,
            True,
            "refiner run tiny",
            reports={"sft": {"steps": 9}},
            evaluations=[
                evaluation("grpo", "oracle", 0.59, n=100),
                evaluation("grpo-step10", "oracle", 0.36, n=100),
            ],
            tracking={"sft": f"{log}b7d80rfe", "grpo": f"{log}pkeu9kck"},
        )
    )


@pytest.mark.parametrize("fact", AGENT_FACTS, ids=[f[:40] for f in AGENT_FACTS])
def test_the_card_of_an_agent_says_what_its_readers_look_for(fact: str, agent_card: str) -> None:
    assert fact in agent_card


def test_results_stand_in_the_form_that_the_hub_reads(agent_card: str) -> None:
    front = yaml.safe_load(agent_card.split("---\n")[1])
    (model,) = front["model-index"]
    (result,) = model["results"]
    assert set(result) == {"task", "dataset", "metrics"}
    assert {key for metric in result["metrics"] for key in metric} == {"type", "value", "name"}
