"""Model cards: every value stands in them, every number has its evidence, and nothing leaks."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from refiner_core.cards.build import build_card
from refiner_core.cards.facts import UNKNOWN, AttemptNote, CardFacts, attempt_notes
from refiner_core.cards.lint import lint_card
from refiner_core.contract.config import (
    CommandConfig,
    DataConfig,
    GrpoConfig,
    JudgeConfig,
    ModelConfig,
    RecipeConfig,
    RewardConfig,
)
from refiner_core.contract.errors import DataError
from refiner_core.contract.marks import walk
from refiner_core.contract.records import Attempt, Outcome

ONE, OTHER = "a" * 64, "b" * 64

#: The run behind the seed card of step 50.
SEED = RecipeConfig(
    model=ModelConfig(name_or_path="lihaoxin2020/qwen3-4b-refiner-gpt54-ep2"),
    data=DataConfig(
        sft_path=None,
        rl_path="lihaoxin2020/rl_hard_gpt5_sft_gpt54rubric",
        rl_revision="0123abcd",
    ),
    grpo=GrpoConfig(deepspeed_stage=3, num_training_steps=100),
    reward=RewardConfig(rubric_source="instance+static"),
    judge=JudgeConfig(kind="openai", model="Qwen/Qwen3.5-35B-A3B"),
)
TINY = RecipeConfig()


def evaluation(stage: str, metric: str, value: float, **changes: Any) -> dict[str, Any]:
    entry = {
        "stage": stage,
        "protocol": ONE,
        "protocol_name": "held-out questions",
        "decoding": "greedy",
        "metric": metric,
        "value": value,
        "low": value - 0.05,
        "high": value + 0.05,
        "n": 64,
    }
    return {**entry, **changes}


def facts(config: RecipeConfig = SEED, **changes: Any) -> CardFacts:
    given: dict[str, Any] = {
        "repo_id": "somebody/qwen3-4b-refiner-step50",
        "config": config,
        "stage": "grpo",
        "step": 50,
        "final": False,
        "command": "refiner run seed-000 seed=42",
    }
    return CardFacts(**{**given, **changes})


def front_matter(card: str) -> dict[str, Any]:
    matter: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return matter


def section(card: str, title: str) -> str:
    return card.split(f"## {title}\n")[1].split("\n## ")[0]


# ---------------------------------------------------------------- what stands in a card


def test_a_card_carries_every_flag_of_the_seed_card_with_its_value():
    card = build_card(facts())
    for flags in (
        "--verification_reward 10.0",
        "--non_stop_penalty false",
        "--refiner_reward_gate_judge_score_with_format_bonus false",
        "--refiner_reward_apply_paper_citation_reward true",
        "--refiner_reward_paper_citation_weight 0.2",
        "--kl_estimator kl3 --beta 0.001",
        "--num_unique_prompts_rollout 32 --num_samples_per_prompt_rollout 8",
        "--learning_rate 5e-6 --lr_scheduler_type constant",
        "--max_prompt_token_length 6144 --response_length 1024",
        "--max_token_length 8192 --pack_length 8192",
        "--temperature 1.0 --seed 42",
        "--deepspeed_stage 3",
    ):
        assert flags in section(card, "Reproduction")
    assert "refiner run seed-000 seed=42" in section(card, "Reproduction")


def test_every_identity_setting_of_a_run_stands_in_its_card():
    reproduction = section(build_card(facts()), "Reproduction")
    for path, info in walk(RecipeConfig):
        part, _, name = path.rpartition(".")
        unset = path.endswith(("_path", "_revision", "revision", "_rows", "_template", "_mode"))
        if info.mark == "identity" and part in ("grpo", "reward", "judge", "model", "data"):
            known = f"{name} " in reproduction or f"{path}=" in reproduction
            assert known or unset, f"{path} is missing"


def test_front_matter_is_what_the_hub_reads():
    matter = front_matter(build_card(facts()))
    assert matter["license"] == "apache-2.0"
    assert matter["base_model"] == "lihaoxin2020/qwen3-4b-refiner-gpt54-ep2"
    assert matter["pipeline_tag"] == "text-generation"
    assert matter["library_name"] == "transformers"
    assert {"grpo", "refiner", "qwen3"} <= set(matter["tags"])
    assert matter["datasets"] == ["lihaoxin2020/rl_hard_gpt5_sft_gpt54rubric"]
    assert "model-index" not in matter
    assert "datasets" not in front_matter(build_card(facts(TINY)))


def test_the_reward_is_told_in_words_that_follow_the_configuration():
    words = section(build_card(facts(static_rubric_titles=("Padding",))), "Training set-up")
    assert "the row's own rubrics and the static set `v3` (`Padding`)" in words
    assert "10.0 · [(1 − 0.2) · judge + 0.2 · citation]" in words
    assert "`Qwen/Qwen3.5-35B-A3B`" in words
    changed = replace(
        SEED,
        reward=RewardConfig(
            apply_paper_citation_reward=False,
            gate_judge_score_with_format_bonus=True,
            non_stop_penalty=True,
            rubric_source="instance",
        ),
    )
    words = section(build_card(facts(changed)), "Training set-up")
    assert "static" not in words
    assert "**Citation reward:** disabled" in words
    assert "(1 − 0.0) · judge" in words
    assert "multiplied by the format bonus" in words
    assert "does not stop scores 0.0" in words


def test_instance_rubrics_only_takes_the_static_set_out_of_the_words():
    reward = RewardConfig(rubric_source="instance+static", instance_rubrics_only=True)
    card = build_card(facts(replace(SEED, reward=reward)))
    assert "static set" not in section(card, "Training set-up")


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ({"rubric_source": "none"}, "10.0 · citation."),
        ({"rubric_source": "none", "apply_paper_citation_reward": False}, "10.0 · 0."),
        ({"combination": "additive"}, "10.0 · [judge + 0.2 · citation]."),
    ],
)
def test_the_total_is_told_as_it_is_computed(reward: dict[str, Any], told: str):
    card = build_card(facts(replace(SEED, reward=RewardConfig(**reward))))
    assert f"Total = {told}" in section(card, "Training set-up")


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ({}, "3 prompts have no rubrics; their reward is the citation term alone."),
        (
            {"rubric_source": "instance+static", "instance_rubrics_only": True},
            "3 prompts have no rubrics; their reward is the citation term alone.",
        ),
        ({"apply_paper_citation_reward": False}, "3 prompts have no rubrics; their reward is 0."),
        ({"rubric_source": "instance+static"}, None),
    ],
)
def test_prompts_without_rubrics_are_told_with_what_their_reward_is(
    reward: dict[str, Any], told: str | None
):
    reports = {
        "data": {"split": {"rl_without_rubrics": 3, "questions": 9, "held_out_questions": 1}}
    }
    config = replace(SEED, reward=RewardConfig(**reward))
    notes = section(build_card(facts(config, reports=reports)), "Known notes")
    assert (told in notes) if told else ("no rubrics" not in notes)


def test_a_lexical_judge_is_never_passed_off_as_a_language_model():
    words = section(build_card(facts(TINY)), "Training set-up")
    assert "no language model" in words


def test_an_intermediate_checkpoint_says_so_and_a_final_one_too():
    assert "**step-50 intermediate**" in build_card(facts())
    assert "50 of 100 planned" in build_card(facts())
    final = build_card(facts(step=100, final=True))
    assert "**final** checkpoint" in final
    assert "intermediate" not in final


def test_an_sft_card_tells_of_sft_and_of_no_reward():
    card = build_card(facts(TINY, stage="sft", step=120, final=True))
    assert "assistant tokens only" in card
    assert "sft.learning_rate=1e-5" in card
    assert "judge" not in section(card, "Training set-up").lower()
    assert "--kl_estimator" not in card


def test_the_same_facts_give_the_same_bytes():
    given = facts(evaluations=[evaluation("grpo", "reward", 1.0)])
    assert build_card(given) == build_card(replace(given))


# ---------------------------------------------------------------- numbers


def test_numbers_stand_side_by_side_only_under_one_protocol():
    card = build_card(
        facts(
            evaluations=[
                evaluation("base", "citation_f1", 0.2),
                evaluation("random_copier", "citation_f1", 0.39),
                evaluation("grpo", "citation_f1", 0.5),
                evaluation("sft", "citation_f1", 0.9, protocol=OTHER),
            ]
        )
    )
    results = section(card, "Results")
    row = next(line for line in results.splitlines() if line.startswith("| `citation_f1`"))
    assert row == (
        "| `citation_f1` | 0.200 [0.150, 0.250] | 0.390 [0.340, 0.440] | 0.500 [0.450, 0.550] |"
    )
    assert "greedy decoding, n = 64 (protocol" in results
    assert "| metric | base | random copier (floor) | **GRPO (this model)** |" in results
    assert results.count("### ") == 2
    assert "numbers of different tables are not comparable" in results


def test_the_model_index_holds_this_models_numbers_only():
    card = build_card(
        facts(evaluations=[evaluation("base", "reward", 1.0), evaluation("grpo", "reward", 2.0)])
    )
    index = front_matter(card)["model-index"]
    metrics = [m for result in index[0]["results"] for m in result["metrics"]]
    assert [metric["value"] for metric in metrics] == [2.0]
    for key in ("task", "dataset", "metrics"):
        assert key in index[0]["results"][0]


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_number_that_was_not_computed_is_neither_nan_nor_zero(value: Any):
    missing = evaluation("grpo", "reward", 0.0) | {
        "value": value,
        "low": value,
        "high": value,
        "n": 3,
    }
    card = build_card(facts(evaluations=[missing]))
    assert "model-index" not in front_matter(card)
    assert "| — |" in card
    assert "Not computed, and not counted as 0: `reward` of grpo (greedy)." in card
    assert lint_card(card) == []


@pytest.mark.parametrize("missing", ["protocol", "n", "decoding"])
def test_a_number_without_its_evidence_is_refused(missing: str):
    with pytest.raises(DataError, match=missing):
        facts(evaluations=[evaluation("grpo", "reward", 1.0, **{missing: None})])


def test_two_claims_to_the_same_number_are_refused_unless_they_agree():
    floor = evaluation("random_copier", "reward", 1.0)
    assert len(facts(evaluations=[floor, dict(floor)]).evaluations) == 1
    with pytest.raises(DataError, match="Two evaluations claim"):
        facts(evaluations=[evaluation("grpo", "reward", 1.0), evaluation("grpo", "reward", 2.0)])


# ---------------------------------------------------------------- notes from records


def test_a_note_of_an_interruption_says_when_and_what_was_done_again():
    """The run behind seed 000 ended at step 100 on a quota; its card had to be told by hand."""
    full = Outcome("disk_full", "resume", "Disk quota exceeded", step=100, errno=122)
    first = Attempt(1, "c", "slurm", "o", "t", ended_at="2026-11-21T03:12:41.123+00:00")
    second = Attempt(
        2, "c", "slurm", "o", "t", resumed_from_step=50, outcome=Outcome("none", "finish")
    )
    attempts = attempt_notes("grpo", [replace(first, outcome=full), second])
    notes = section(build_card(facts(attempts=attempts)), "Known notes")
    assert "ended on 2026-11-21 03:12 UTC after step 100 because the disk or its quota" in notes
    assert "went on from the checkpoint of step 50" in notes
    assert "50 steps were done again" in notes


def test_interruptions_are_told_with_how_they_ended_and_without_their_messages():
    def attempt(number: int, failure: Any, resumed: int | None = None) -> Attempt:
        outcome = Outcome(failure, "resume", "/home/me/run: Disk quota exceeded on node17")
        return Attempt(number, "c", "slurm", "o", "t", resumed_from_step=resumed, outcome=outcome)

    attempts = attempt_notes("grpo", [attempt(1, "preempted"), attempt(2, "disk_full", 25)])
    notes = section(build_card(facts(attempts=attempts)), "Known notes")
    assert "its job was preempted; attempt 2 went on from the checkpoint of step 25" in notes
    assert "the disk or its quota was full; the stage was not taken up again" in notes
    assert "node17" not in notes
    assert "/home" not in notes


def test_an_attempt_that_succeeded_is_no_note():
    notes = section(build_card(facts(TINY, attempts=[AttemptNote("grpo", 1)])), "Known notes")
    assert "Nothing unusual" in notes


def test_dropped_rows_and_judge_failures_are_told_with_their_counts():
    reports = {
        "data": {
            "rl": {"read": 88, "kept": 60, "dropped": {"prompt_too_long": 27, "duplicate": 1}},
            "sft": {"read": 0, "kept": 0, "dropped": {}},
            "split": {"questions": 56, "held_out_questions": 6, "rl_without_rubrics": 0},
        },
        "grpo": {"episodes": 12800, "counts": {"samples/unscored": 17}},
    }
    notes = section(build_card(facts(reports=reports)), "Known notes")
    assert "28 of 88 prompts were dropped" in notes
    assert "27 `prompt_too_long`" in notes
    assert "The judge failed on 17 of 12800 rollouts" in notes


def test_an_option_that_came_after_the_run_is_named_with_the_value_in_effect():
    recorded = tuple(p for p, _ in walk(RecipeConfig) if p != "reward.instance_rubrics_only")
    card = build_card(facts(recorded_fields=recorded))
    notes = section(card, "Known notes")
    assert "`--refiner_reward_instance_rubrics_only`" in notes
    assert "produced before it existed**; the value in effect was `false`" in notes
    assert "instance_rubrics_only" not in section(card, "Reproduction")
    assert "instance_rubrics_only" not in section(build_card(facts()), "Known notes")


def test_provenance_says_when_the_code_had_uncommitted_changes():
    provenance = {
        "commit": "0123abc",
        "dirty": True,
        "packages": {"torch": "2.13.0"},
        "host": "8 x H200",
        "durations": {"grpo": 7322.4},
    }
    card = build_card(facts(provenance=provenance))
    told = section(card, "Provenance")
    assert "commit `0123abc` with uncommitted changes" in told
    assert "torch 2.13.0" in told
    assert "8 x H200" in section(card, "Hardware and cost")
    assert "grpo 2 h 02 min" in section(card, "Hardware and cost")


def test_provenance_does_not_call_code_clean_of_which_git_did_not_say():
    told = {
        dirty: section(
            build_card(facts(provenance={"commit": "012", "dirty": dirty})), "Provenance"
        )
        for dirty in (False, None)
    }
    assert "commit `012`." in told[False]
    assert "commit `012` (whether with uncommitted changes, git did not say)." in told[None]


# ---------------------------------------------------------------- leaks and lint


def test_no_path_of_the_users_machine_stands_in_a_card():
    config = RecipeConfig(
        model=ModelConfig(name_or_path="/home/me/models/qwen3-mine"),
        data=DataConfig(sft_path="~/data/demos.jsonl", rl_path="/scratch/me/rl.jsonl"),
        reward=RewardConfig(rubric_source="static", static_rubrics="/home/me/strict.yaml"),
    )
    command = "refiner run tiny data.rl_path=/scratch/me/rl.jsonl"
    card = build_card(
        facts(config, command=command, reports={"sft": {"steps": 3}}, provenance={"host": "/x/y"})
    )
    assert "refiner run tiny data.rl_path=rl.jsonl\n" in card
    assert "/home" not in card
    assert "/scratch" not in card
    assert "~/" not in card
    assert "/x" not in card
    assert front_matter(card)["base_model"] == "qwen3-mine"
    assert lint_card(card) == []


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (("license: apache-2.0\n", ""), "no license"),
        (("base_model: lihaoxin2020/qwen3-4b-refiner-gpt54-ep2\n", ""), "no base_model"),
        (("license: apache-2.0", "license: [apache"), "not YAML"),
        (("## Results", "From /home/me/run7.\n\n## Results"), "is a local path"),
        (("## Results", "hf_abcdefghijklmnopqrstuvwxyz\n\n## Results"), "access token"),
        (("---\nlicense", "license"), "no front matter"),
    ],
)
def test_lint_finds_what_makes_a_card_unfit(damage: tuple[str, str], problem: str):
    card = build_card(facts(evaluations=[evaluation("grpo", "reward", 0.5)]))
    assert lint_card(card) == []
    assert damage[0] in card
    found = lint_card(card.replace(*damage, 1))
    assert any(problem in line for line in found), found


def test_lint_lets_real_links_pass():
    card = build_card(facts()) + "\nSee https://github.com/owner/repo and [x](https://hf.co/a/b).\n"
    assert lint_card(card) == []


numbers = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.integers(0, 5))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["base", "random_copier", "sft", "grpo", "other"]),
            st.sampled_from(["reward", "citation_f1"]),
            st.sampled_from([ONE, OTHER]),
            st.sampled_from(["greedy", "sampled"]),
            numbers,
        ),
        unique_by=lambda entry: entry[:4],
    ),
    st.sampled_from([SEED, TINY]),
    st.sampled_from(["sft", "grpo"]),
    st.booleans(),
)
def test_whatever_was_measured_the_card_is_clean_and_parses(
    entries: list[Any], config: RecipeConfig, stage: str, final: bool
):
    evaluations = [
        evaluation(model, metric, 0.0)
        | {"protocol": protocol, "decoding": decoding, "value": value, "low": value, "high": value}
        for model, metric, protocol, decoding, value in entries
    ]
    card = build_card(facts(config, stage=stage, final=final, evaluations=evaluations))
    assert lint_card(card) == []
    for result in front_matter(card).get("model-index", [{"results": []}])[0]["results"]:
        assert all(math.isfinite(metric["value"]) for metric in result["metrics"])


def test_cards_load_without_torch():
    code = "import sys, refiner_core.cards; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# ---------------------------------------------------------------- another trainer's model


def test_a_card_of_another_trainers_model_claims_nothing_that_is_not_recorded() -> None:
    command = CommandConfig(run="torchrun /home/me/train.py --out {output}", version="v2")
    card = build_card(
        facts(
            replace(TINY, command=command),
            stage="command",
            base_model=UNKNOWN,
            reports={"command": {"steps": 50, "final": {"loss": 0.25}}},
        )
    )
    assert "base_model" not in front_matter(card)
    assert "datasets" not in front_matter(card)
    assert "`torchrun train.py --out {output}` (version v2)" in section(card, "Training set-up")
    assert "loss 0.25" in section(card, "Training set-up")
    assert "/home" not in card
    assert "not recorded: another trainer chose it" in card
    assert "none of them is in the training data" not in card
    assert "builtin:tiny" not in card


def test_a_card_of_an_adopted_checkpoint_says_so() -> None:
    config = replace(TINY, command=CommandConfig(adopted="ab" * 32))
    report = {"steps": 50, "adopted": True, "source": "/scratch/me/run/checkpoint-50"}
    card = build_card(
        facts(config, stage="command", base_model="Qwen/Qwen3-4B", reports={"command": report})
    )
    assert front_matter(card)["base_model"] == "Qwen/Qwen3-4B"
    assert "adopted from the folder of a run that had ended" in card
    assert "`checkpoint-50`" in card
    assert "/scratch" not in card
    assert lint_card(card) == []
