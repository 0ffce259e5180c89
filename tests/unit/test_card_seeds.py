"""Fact by fact: what hand-written cards say of published runs, and where our cards say it.

The cards are those of the runs behind the shipped recipes. Each row of a table pairs words of the
hand-written card with words of the card that refiner makes of the same run; what has no counterpart
stands in a list of its own, with the reason. Together they cover the hand-written card: without
them no number and no name in code quotes is left in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from refiner_core.cards import AttemptNote, CardFacts, build_card, lint_card
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.marks import walk
from refiner_core.rubrics import load_rubric_set
from tests.support.card_facts import evaluation
from tests.support.require import require

SEEDS = Path(__file__).resolve().parents[3] / "shared" / "seeds"
LATER = ("reward.instance_rubrics_only",)
STATIC = load_rubric_set("v3").rubrics


class Row(NamedTuple):
    """A fact: in the words of the hand-written card, and of ours."""

    theirs: str
    ours: str


def seed(name: str) -> str:
    path = SEEDS / name
    require("seeds", path.is_file(), f"the hand-written card {name} is not on this machine")
    return path.read_text(encoding="utf-8")


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


def uncovered(text: str, covered: Iterable[str]) -> list[str]:
    """Lines that still hold a number or a quoted name once what is covered is taken out."""
    for words in sorted(covered, key=len, reverse=True):
        text = text.replace(words, "")
    return [line for line in text.splitlines() if re.search(r"\d|`[^`]+`|https?:", line)]


# ---------------------------------------------------------------- 000: the refiner at step 50

BASE_000 = "lihaoxin2020/qwen3-4b-refiner-gpt54-ep2"
REPO_000 = "lihaoxin2020/qwen3-4b-refiner-gpt54-instance-rubric-gpt54-grpo-step50"
TABLE_000 = [
    Row("license: apache-2.0", "license: apache-2.0"),
    Row(f"base_model: {BASE_000}", f"base_model: {BASE_000}"),
    Row("pipeline_tag: text-generation", "pipeline_tag: text-generation"),
    Row("library_name: transformers", "library_name: transformers"),
    Row("- grpo\n- rlhf\n- refiner\n", "- grpo\n- rlhf\n- refiner\n"),
    Row("- qwen3\n", "- qwen3\n"),
    Row(f"# {REPO_000.partition('/')[2]}", f"# {REPO_000.partition('/')[2]}"),
    Row("GRPO checkpoint (step 50)", "GRPO checkpoint (step 50) of a research-refiner policy"),
    Row("of a 4B research-refiner policy", "GRPO of a 4B research refiner"),
    Row(
        f"[`{BASE_000}`](https://huggingface.co/{BASE_000})",
        f"- **Base model:** [`{BASE_000}`](https://huggingface.co/{BASE_000}) at `main`",
    ),
    Row("**Algorithm:** GRPO", "**Algorithm:** Group-relative policy optimisation (GRPO)"),
    Row("**Training step:** 50", "**Training step:** 50 of 200 planned"),
    Row(
        "Given an agent's reasoning + search-tool output, produce a concise, citation-grounded",
        "given an agent's reasoning, a question and raw search-tool output, write a concise answer "
        "whose claims cite that output",
    ),
    Row(
        "`lihaoxin2020/rl_hard_gpt5_sft_gpt54rubric` (train split)",
        "[`lihaoxin2020/rl_hard_gpt5_sft_gpt54rubric`](https://huggingface.co/datasets/"
        "lihaoxin2020/rl_hard_gpt5_sft_gpt54rubric) at `main` (train split)",
    ),
    Row("per-instance `positive_rubrics` / `negative_rubrics`", "the row's own rubrics"),
    Row(
        "**Reward = LLM rubric judge + paper-citation quality.**",
        "**Reward = rubric judge + citation quality.**",
    ),
    Row("a static V3 rubric set", "and the static set `v3` ("),
    Row("`Citation Discipline`", "`Citation Discipline`, weight 1.0"),
    Row("`Off-Query Padding`", "`Off-Query Padding`, weight -1.0"),
    Row("`Wrong-Entity Confabulation`", "`Wrong-Entity Confabulation`, weight -1.0"),
    Row(
        "Positive rubric scores enter as-is; negative rubrics are flipped (`1 - s`)",
        "Positive rubric scores enter as they are, negative ones as `1 - s`",
    ),
    Row("**Judge:** `Qwen/Qwen3.5-35B-A3B`", "**Judge:** `Qwen/Qwen3.5-35B-A3B`"),
    Row("**Citation reward:** enabled, weight 0.2", "**Citation reward:** enabled, weight 0.2"),
    Row("precision/recall/F1", "mean F1 of the judge's recall and precision per claim"),
    Row("`kl3` estimator, `beta = 0.001`", "**KL:** `kl3` estimator, `beta = 0.001`"),
    Row("AdamW (offload off), `lr = 5e-6` constant", "AdamW (offload off), `lr = 5e-6` constant"),
    Row("`per_device_train_batch_size = 1`", "`per_device_train_batch_size = 1`"),
    Row("DeepSpeed ZeRO-3, FlashAttn", "ZeRO-3, `flash_attention_2` attention"),
    Row(
        "32 unique prompts × 8 samples per prompt (group size 8)",
        "**Rollouts:** 32 unique prompts × 8 samples per prompt",
    ),
    Row("`temperature = 1.0`", "`temperature = 1.0`"),
    Row("`max_prompt_token_length = 6144`", "`max_prompt_token_length = 6144`"),
    Row("`response_length = 1024`", "`response_length = 1024`"),
    Row("`max_token_length = 8192`", "`max_token_length = 8192`"),
    Row("`pack_length = 8192`", "`pack_length = 8192`"),
    Row("**Seed:** 42.", "**Seed:** 42."),
    Row("single `<answer>...</answer>` block", "writes a single `<answer>…</answer>` block"),
    Row(
        "`<snippet id=ID1,ID2,...>claim</snippet>`, citing only IDs that appear in the raw tool",
        "`<snippet id=ID1,ID2,…>claim</snippet>`, citing only ids that occur in the tool output",
    ),
    Row(
        "**step-50 intermediate** checkpoint, useful as an early-training baseline for ablations "
        "on rubric design, citation weighting, or judge choice",
        "**step-50 intermediate** checkpoint, useful as an early baseline in ablations of rubrics, "
        "citation weight or judge",
    ),
    Row("prefer a later step from the same run", "prefer a later step of the same run"),
    Row("--verification_reward 10.0", "--verification_reward 10.0"),
    Row("--non_stop_penalty false", "--non_stop_penalty false"),
    Row(
        "--refiner_reward_gate_judge_score_with_format_bonus false",
        "--refiner_reward_gate_judge_score_with_format_bonus false",
    ),
    Row(
        "--refiner_reward_apply_paper_citation_reward true",
        "--refiner_reward_apply_paper_citation_reward true",
    ),
    Row("--refiner_reward_paper_citation_weight 0.2", "--refiner_reward_paper_citation_weight 0.2"),
    Row("--kl_estimator kl3 --beta 0.001", "--kl_estimator kl3 --beta 0.001"),
    Row(
        "--num_unique_prompts_rollout 32 --num_samples_per_prompt_rollout 8",
        "--num_unique_prompts_rollout 32 --num_samples_per_prompt_rollout 8",
    ),
    Row(
        "--learning_rate 5e-6 --lr_scheduler_type constant",
        "--learning_rate 5e-6 --lr_scheduler_type constant",
    ),
    Row(
        "--max_prompt_token_length 6144 --response_length 1024",
        "--max_prompt_token_length 6144 --response_length 1024",
    ),
    Row("--pack_length 8192", "--pack_length 8192"),
    Row("--temperature 1.0 --seed 42", "--temperature 1.0 --seed 42"),
    Row("--deepspeed_stage 3", "--deepspeed_stage 3"),
    Row(
        "terminated before completion at step ~100 due to a disk-quota issue on the training host; "
        "step 50",
        "after step 100 because the disk or its quota was full; the stage was not taken up again. "
        "This checkpoint is step 50.",
    ),
    Row(
        "introduced a `--refiner_reward_instance_rubrics_only` flag that drops the static V3 "
        "rubrics from both reward and logging. **This checkpoint was produced before that flag "
        "existed**",
        "introduced `--refiner_reward_instance_rubrics_only` (drop static rubrics from the reward "
        "and from logging). **This checkpoint was produced before it existed**; the value in "
        "effect was `false`",
    ),
    Row("so both per-instance and static V3 rubrics shaped its reward", "and the static set `v3`"),
]
NOT_OURS_000 = {
    "- open-instruct\n": "the tag of another trainer",
    "(SFT on GPT-5.4 rubric-grounded refiner data)": "how the base model came about is its card's",
    "(`grpo_fast_refiner_rubric.py` in [`dr-tulu/rl/open-instruct`](https://github.com/))": "a "
    "link that leads nowhere; ours names the command",
    "generated by GPT-5.4": "who wrote a data set's rubrics is not in its rows",
    "served via local vLLM": "how a server was run changes no number; ours names its protocol",
    "[`train_dr_tulu_refiner-rubric.sh`](https://github.com/)": "a link that leads nowhere",
}


@pytest.fixture(scope="module")
def card_000() -> str:
    return build_card(recipe_facts("refiner-gpt54", REPO_000))


@pytest.mark.parametrize("row", TABLE_000, ids=[r.theirs[:40] for r in TABLE_000])
def test_what_the_card_of_the_refiner_says_ours_says_too(row: Row, card_000: str) -> None:
    assert row.theirs in seed("cards/seed-000.md")
    assert row.ours in card_000


def test_nothing_of_the_refiners_card_is_left_out_without_a_reason(card_000: str) -> None:
    text = seed("cards/seed-000.md")
    for words in NOT_OURS_000:
        assert words in text
    assert uncovered(text, [*(r.theirs for r in TABLE_000), *NOT_OURS_000]) == []
    assert lint_card(card_000) == []


# ---------------------------------------------------------------- 001 and 002: listings of others

TABLE_001 = [
    Row(
        "lihaoxin2020/qwen3-4B-refiner-sft-step-3201", "lihaoxin2020/qwen3-4B-refiner-sft-step-3201"
    ),
    Row("4 billion parameter", "GRPO of a 4B refiner in answer-only mode"),
    Row("Group Relative Policy Optimization (GRPO)", "Group-relative policy optimisation (GRPO)"),
    Row("per-instance rubric rewards", "the judge sees the row's own rubrics; the score"),
    Row("a 10.0 verification reward", "--verification_reward 10.0"),
    Row("a 0.2 weight for paper citation", "--refiner_reward_paper_citation_weight 0.2"),
    Row('"answer_only" mode', "data.refiner_mode=answer_only"),
    Row("DeepSpeed Stage 3", "--deepspeed_stage 3"),
    Row("a constant learning rate of 5e-6", "--learning_rate 5e-6 --lr_scheduler_type constant"),
    Row("a KL penalty of 0.001", "--kl_estimator kl3 --beta 0.001"),
    Row("a maximum prompt token length of 6144", "`max_prompt_token_length = 6144`"),
    Row("step 50", "**Training step:** 50"),
]
TABLE_002 = [
    Row("4 billion parameter", "GRPO of a 4B research refiner"),
    Row("License:apache-2.0", "license: apache-2.0"),
    Row("lihaoxin2020/rl_hard_gpt5_sft_gpt54rubric", "`lihaoxin2020/rl_hard_gpt5_sft_gpt54rubric`"),
    Row("Qwen3.5-35B-A3B", "**Judge:** `Qwen/Qwen3.5-35B-A3B`"),
    Row("0.2 weight", "**Citation reward:** enabled, weight 0.2"),
    Row("max_prompt_token_length of 6144", "`max_prompt_token_length = 6144`"),
    Row("response_length of 1024", "`response_length = 1024`"),
    Row("max_token_length of 8192", "`max_token_length = 8192`"),
    Row("step-50 intermediate checkpoint", "**step-50 intermediate** checkpoint"),
    Row("both per-instance and static V3 rubrics", "the row's own rubrics and the static set `v3`"),
    Row("later steps from the same training run", "prefer a later step of the same run"),
]
LISTINGS = [
    *(("001_a494ca8b1df21b30.txt", "refiner-answer-only", row) for row in TABLE_001),
    *(("002_3d2b15a8324c95e4.txt", "refiner-gpt54", row) for row in TABLE_002),
]


@pytest.mark.parametrize(("name", "recipe", "row"), LISTINGS, ids=[r.theirs for *_, r in LISTINGS])
def test_what_a_listing_says_of_a_refiner_our_card_says_too(
    name: str, recipe: str, row: Row
) -> None:
    assert row.theirs in seed(name)
    assert row.ours in build_card(recipe_facts(recipe, "somebody/refiner-step50"))


def test_the_successor_run_says_that_static_rubrics_are_out() -> None:
    card = build_card(recipe_facts("refiner-instance-only", "a/b", recorded_fields=None))
    assert "--refiner_reward_instance_rubrics_only true" in card
    assert "static set" not in card


# ---------------------------------------------------------------- 004: a tool-use agent

REPO_004 = "Jarrodbarnes/Qwen3-4B-tau2-grpo-v1"
TABLE_004 = [
    Row("library_name: transformers", "library_name: transformers"),
    Row("license: apache-2.0", "license: apache-2.0"),
    Row("base_model: Qwen/Qwen3-4B-Instruct-2507", "base_model: Qwen/Qwen3-4B-Instruct-2507"),
    Row("- grpo\n", "- grpo\n"),
    Row("pipeline_tag: text-generation", "pipeline_tag: text-generation"),
    Row("datasets:\n- Jarrodbarnes/tau2-sft-seed-v3", "datasets:\n- Jarrodbarnes/tau2-sft-seed-v3"),
    Row(
        "model-index:\n- name: Qwen3-4B-tau2-grpo-v1\n  results:\n  - task:",
        "model-index:\n- name: Qwen3-4B-tau2-grpo-v1\n  results:\n  - task:",
    ),
    Row("# Qwen3-4B-tau2-grpo-v1", "# Qwen3-4B-tau2-grpo-v1"),
    Row(
        "[Qwen/Qwen3-4B-Instruct-2507](https://huggingface.co/Qwen/Qwen3-4B-Instruct-2507)",
        "[`Qwen/Qwen3-4B-Instruct-2507`](https://huggingface.co/Qwen/Qwen3-4B-Instruct-2507)",
    ),
    Row(
        "[tau2-sft-seed-v3](https://huggingface.co/datasets/Jarrodbarnes/tau2-sft-seed-v3)",
        "[`Jarrodbarnes/tau2-sft-seed-v3`](https://huggingface.co/datasets/"
        "Jarrodbarnes/tau2-sft-seed-v3)",
    ),
    Row("**GRPO steps**: 21 optimizer steps", "**Training step:** 21 (final)"),
    Row(
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        'model_name = "Jarrodbarnes/Qwen3-4B-tau2-grpo-v1"',
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'name = "Jarrodbarnes/Qwen3-4B-tau2-grpo-v1"',
    ),
    Row(
        "GRPO run: [pkeu9kck](https://wandb.ai/jbarnes850-near-protocol/tau2-cookbook/runs/pkeu9kck)",
        "`grpo`: [pkeu9kck](https://wandb.ai/jbarnes850-near-protocol/tau2-cookbook/runs/pkeu9kck)",
    ),
    Row(
        "SFT run: [b7d80rfe](https://wandb.ai/jbarnes850-near-protocol/tau2-cookbook/runs/b7d80rfe)",
        "`sft`: [b7d80rfe](https://wandb.ai/jbarnes850-near-protocol/tau2-cookbook/runs/b7d80rfe)",
    ),
    Row("### Training Progression", "### Training progression"),
    Row("**GRPO steps**: 21", "| **step 21 (this model)** |"),
    Row("## Usage", "## Usage"),
]
#: What a card of ours says once there are tool-use environments and RFT.
NOT_YET_004 = [
    "- tool-use\n- multi-turn\n- agents\n",
    "tau2-bench\n",
    "type: multi-turn-tool-use\n",
    "name: tau2-bench (test split)",
    "type: tau2-bench",
    "type: pass@1\n      value: 36.0\n      name: Pass@1 (Overall)",
    "type: pass@4\n      value: 59.0\n      name: Pass@4 (Overall)",
    "| Domain | Pass@1 | Pass@4 | Tasks |",
    "| **Overall** | **36.0%** | **59.0%** | 100 |",
    "| Airline | 15.0% | 45.0% | 20 |",
    "| Retail | 55.0% | 85.0% | 40 |",
    "| Telecom | 27.5% | 40.0% | 40 |",
    "tau2-bench Test Split (Pass@4 evaluation)",
    "| Stage | Overall Pass@4 |",
    "| GRPO (this model) | **59.0%** |",
    "| SFT + RFT | 27.0% |",
    "1. **SFT (Supervised Fine-Tuning)**: Learning protocol and tool schemas",
    "2. **RFT (Rejection Fine-Tuning)**",
    "3. **GRPO (Group Relative Policy Optimization)**: Reinforcement learning with turn-level",
    "achieving **59% Pass@4** on tau2-bench (test split)",
    "`temperature=0.8`, `top_p=1.0`, `top_k=20`, `num_samples=4`",
    "`TAU2_USER_MODEL=gpt-4.1-mini`, `TAU2_USER_TEMPERATURE=0.7`, `TAU2_MAX_STEPS=100`",
    "This model uses Qwen3 native function calling format",
    "Include `</tool_call>` in stop sequences",
    "**User simulator (training)**: Local Qwen3-4B-Instruct on port 30001",
    "**User simulator (eval)**: GPT-4.1-mini via OpenAI API",
    "turn-level reward shaping",
    "Turn-level partial scores from tau2-bench reward_info",
    "**Telecom domain**: Dual-control tasks (where the agent must instruct rather than execute) "
    "remain challenging (40% Pass@4)",
    "GPT-4.1-mini recommended for reproducibility",
    "This model reports pass@k (any success in k attempts), not the pass^k metric used on the "
    "official tau2-bench leaderboard",
    "[SFT Checkpoint](https://huggingface.co/Jarrodbarnes/Qwen3-4B-tau2-sft1)",
]
#: What no card of ours says, ever, or not in these words.
NOT_OURS_004 = {
    "- reinforcement-learning\n": "another name of the tag grpo",
    "A 4B parameter model": "the recipe's own words, or the base model's name, say the size",
    "| Baseline (Qwen3-4B-Instruct) | 14.3% |": "no share of 100 tasks is 14.3 %",
    "This represents a **4x improvement** over the base model": "it compares two protocols",
    "[tau2 training cookbook](https://github.com/THUDM/slime": "another trainer's pages",
    "[Training Cookbook](https://github.com/THUDM/slime": "the same",
    "/blob/main/examples/tau-bench/training_cookbook.md": "the same",
    "https://github.com/THUDM/slime": "the same",
    "https://github.com/QwenLM/Qwen3": "thanks are for people to give",
    "[tau2-bench](https://github.com/sierra-research/tau2-bench)": "the benchmark's own page",
    "https://github.com/sierra-research/tau2-bench": "thanks are for people to give",
    "[Training Dataset](https://huggingface.co/datasets/Jarrodbarnes/tau2-sft-seed-v3)": "twice",
    "--model-path Jarrodbarnes/Qwen3-4B-tau2-grpo-v1 \\\n--host 0.0.0.0 --port 30000 --tp 2 "
    "--mem-fraction-static 0.70": "a server that listens on every interface is nobody's default",
    "(use --tp 1 for single GPU)": "the same",
    "title={Qwen3-4B-tau2-grpo-v1: ": "how to cite a model is for people to say",
    "@misc{qwen3-tau2-grpo": "the same",
    "year={2025}": "the same",
    "url={https://huggingface.co/Jarrodbarnes/Qwen3-4B-tau2-grpo-v1}": "the same",
}


@pytest.fixture(scope="module")
def card_004() -> str:
    """The parts of that run that a refiner run has, too."""
    log = "https://wandb.ai/jbarnes850-near-protocol/tau2-cookbook/runs/"
    config = load_recipe(
        "tiny",
        [
            "model.name_or_path=Qwen/Qwen3-4B-Instruct-2507",
            "data.sft_path=Jarrodbarnes/tau2-sft-seed-v3",
            "data.sft_revision=0123abcd",
            "grpo.num_training_steps=21",
        ],
    )
    return build_card(
        CardFacts(
            REPO_004,
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


@pytest.mark.parametrize("row", TABLE_004, ids=[r.theirs[:40] for r in TABLE_004])
def test_what_the_card_of_the_agent_says_of_any_run_ours_says_too(row: Row, card_004: str) -> None:
    assert row.theirs in re.sub(r"\n+", "\n", seed("cards/seed-004.md"))
    assert row.ours in card_004


def test_the_results_of_the_agents_card_are_in_the_form_that_ours_have(card_004: str) -> None:
    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(inner) for key, inner in sorted(value.items())}
        return [shape(value[0])] if isinstance(value, list) else "…"

    theirs = yaml.safe_load(seed("cards/seed-004.md").split("---\n")[1])
    ours = yaml.safe_load(card_004.split("---\n")[1])
    assert shape(ours["model-index"]) == shape(theirs["model-index"])


def test_what_is_not_yet_in_a_card_of_ours_is_listed_and_nothing_else_is_missing() -> None:
    text = seed("cards/seed-004.md")
    listed = [*NOT_YET_004, *NOT_OURS_004]
    assert [words for words in listed if words not in text] == []
    assert uncovered(text, [*(r.theirs for r in TABLE_004), *listed]) == []
