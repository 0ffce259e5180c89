"""Facts of runs as cards are made from them, with every kind of value that records hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from refiner_core.cards.build import marked_card
from refiner_core.cards.evidence import facts_from_json, facts_to_json
from refiner_core.cards.facts import AttemptNote, CardFacts, numbers_in, record_of, unmarked
from refiner_core.cards.results import own_entries
from refiner_core.contract.config import (
    DataConfig,
    GrpoConfig,
    JudgeConfig,
    ModelConfig,
    PublishConfig,
    RecipeConfig,
    RewardConfig,
)

#: Two protocols.
ONE, OTHER = "a1" * 32, "b2" * 32

#: A run with everything in it: SFT, then GRPO with a hybrid reward.
CONFIG = RecipeConfig(
    model=ModelConfig(name_or_path="Qwen/Qwen3-4B", revision="0123abcd"),
    data=DataConfig(
        sft_path="somebody/demonstrations",
        sft_revision="11aa",
        rl_path="somebody/prompts",
        rl_revision="22bb",
    ),
    grpo=GrpoConfig(deepspeed_stage=3, num_training_steps=100),
    reward=RewardConfig(rubric_source="instance+static"),
    judge=JudgeConfig(kind="openai", model="Qwen/Qwen3.5-35B-A3B", revision="33cc"),
    publish=PublishConfig(target="hub", which="every-save"),
)


def evaluation(stage: str, metric: str, value: Any, **changes: Any) -> dict[str, Any]:
    """One entry as evaluations have it, with an interval of 0.05 to both sides."""
    entry = {
        "stage": stage,
        "protocol": ONE,
        "protocol_name": "held-out questions",
        "decoding": "greedy",
        "metric": metric,
        "value": value,
        "low": None if value is None else value - 0.05,
        "high": None if value is None else value + 0.05,
        "n": 64,
        "numerator": 7,
        "denominator": 64,
        "interval": "wilson",
        "samples_file": "samples-greedy.parquet",
    }
    return {**entry, **changes}


def protocol(**changes: Any) -> dict[str, Any]:
    """What a protocol's fingerprint stands for, as ``results.json`` has it."""
    known = {
        "version": 1,
        "data": "e8" * 32,
        "split": "held-out",
        "prompts": "41" * 32,
        "num_prompts": 64,
        "decoding": "greedy",
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 1024},
        "samples_per_prompt": 1,
        "judge": {"kind": "openai", "model": "judge-1", "prompt": "v1", "temperature": 0.0},
        "rubrics": {"source": "instance+static", "static": "v3", "aggregation": "weighted_mean"},
        "reward": {
            "combination": "convex",
            "verification_reward": 10.0,
            "paper_citation_weight": 0.2,
        },
    }
    return {**known, **changes}


def reports() -> dict[str, dict[str, Any]]:
    """Reports of the stages behind a GRPO checkpoint."""

    def rows(read: int, dropped: dict[str, int]) -> dict[str, Any]:
        kept = read - sum(dropped.values())
        known = {"read": read, "kept": kept, "dropped": dropped, "digest": f"hub:{read}"}
        return {**known, "modes": {"answer_only": kept}, "source": "/home/me/rows.jsonl"}

    points = range(1, 13)
    return {
        "data": {
            "rl": rows(880, {"prompt_too_long": 27, "duplicate": 3}),
            "sft": rows(1600, {"wrong_mode": 11}),
            "split": {"questions": 56, "held_out_questions": 6, "rl_without_rubrics": 2},
        },
        "sft": {
            **{"steps": 40, "epochs": 2, "demonstrations": 1589, "tokens": 99000},
            **{"loss_tokens": 5100, "train_loss": {"first": 3.5, "final": 1.25, "curve": []}},
        },
        "grpo": {
            **{"steps": 50, "episodes": 12800, "tokens": 7300000, "prompts": 850, "epoch": 1},
            "counts": {
                **{"groups/kept": 1500, "groups/dropped_zero_std": 90},
                **{"groups/dropped_too_few_scored": 10, "samples/unscored": 17},
                **{"samples/malformed": 130, "samples/truncated_masked": 21},
                "optimizer_steps": 49,
            },
            "judge": {
                **{"asked": 61200, "calls": 54873, "stored": 4100, "shared": 2270, "failed": 43},
                **{"prompt_tokens": 31415926, "completion_tokens": 438984},
            },
            "curves": {
                "scores": [[4 * i, 2.0 + i / 7] for i in points],
                "objective/kl3_avg": [[4 * i, i / 1300] for i in points],
                "val/sequence_lengths": [[4 * i, 400.0 - 3.3 * i] for i in points],
                "val/stop_rate": [[4 * i, 0.5 + i / 31] for i in points],
            },
        },
    }


def full_facts(**changes: Any) -> CardFacts:
    """A step in the middle of a run of which everything is recorded."""
    given: dict[str, Any] = {
        "repo_id": "somebody/qwen3-4b-refiner",
        "config": CONFIG,
        "stage": "grpo",
        "step": 50,
        "final": False,
        "command": "refiner run recipe.yaml seed=42",
        "reports": reports(),
        "evaluations": [
            evaluation("base", "citation_f1", 0.211),
            evaluation("random_copier", "citation_f1", 0.391),
            evaluation("sft", "citation_f1", 0.452),
            evaluation("grpo-step25", "citation_f1", 0.487, n=63),
            evaluation("grpo-step50", "citation_f1", 0.533),
            evaluation("grpo-step25", "reward", 4.13, protocol=OTHER),
            evaluation("grpo-step50", "reward", 4.87, protocol=OTHER),
            evaluation("grpo-step75", "reward", 5.06, protocol=OTHER),
            evaluation("grpo-step50", "judge_failed", 0.031),
        ],
        "protocols": {ONE: protocol(reward=None), OTHER: protocol()},
        "attempts": [
            AttemptNote("sft", 1),
            AttemptNote("grpo", 1, "preempted", None, 31, "2026-11-21T03:12:41.123+00:00"),
            AttemptNote("grpo", 2, "hub_outage", 25, 47, "2026-11-21T09:40:00.000+00:00"),
            AttemptNote("grpo", 3, "none", 45),
        ],
        "provenance": {
            **{"commit": "0123abc", "dirty": True, "host": "8 x H200"},
            "packages": {"refiner": "0.1.0", "torch": "2.13.0"},
            "durations": {"data": 4.1, "sft": 605.0, "grpo": 7322.0},
        },
        "static_rubric_titles": ("Citation Discipline", "Off-Query Padding"),
        "static_rubric_weights": (1.0, -0.5),
        "recorded_fields": None,
        "description": "A refiner with a hybrid reward.",
        "measured_as": "grpo-step50",
        "fingerprint": "c9" * 32,
        "recipe_file": "include: tiny\n",
        "sources": {"rl.jsonl": "ab" * 32},
        "cost": {
            **{"gpu_hours": 17.25, "lost_gpu_hours": 1.5, "price": 3.1, "currency": "USD"},
            "seconds": {"data": 4.1, "sft": 605.0, "grpo": 9100.0},
        },
        "tracking": {"grpo": "https://wandb.ai/somebody/refiner/runs/b7d80rfe"},
        "revision": "step-50",
        "stopped": {
            **{"failure": "disk_full", "step": 103},
            "ended_at": "2026-11-22T01:07:00.000+00:00",
        },
        "records": {
            "config": "runs/1/run.json#config",
            "reports.grpo": "stages/grpo-1/result.json#report",
            "attempts": "stages/grpo-1/attempts",
            "stopped": "stages/grpo-1/attempts",
            **{f"evaluations.{i}": f"stages/evaluate-{i}/results.json" for i in range(9)},
        },
    }
    return CardFacts(**{**given, **changes})


def sft_facts(**changes: Any) -> CardFacts:
    """The last checkpoint of an SFT stage."""
    training = {
        **{"steps": 4, "epochs": 1, "demonstrations": 152, "tokens": 12102, "loss_tokens": 2758},
        "train_loss": {"first": 3.83, "final": 3.07, "curve": [[1, 3.83], [2, 3.62], [4, 3.07]]},
        "validation_loss": {"final": 2.81, "best": 2.76, "best_step": 3, "curve": [[2, 3.1]]},
    }
    given: dict[str, Any] = {
        **{"repo_id": "somebody/refiner-sft", "stage": "sft", "step": 4, "final": True},
        "config": replace(CONFIG, stages=("data", "sft", "publish")),
        "command": "refiner run tiny",
        "reports": {"data": reports()["data"], "sft": training},
        "evaluations": [evaluation("sft", "citation_f1", 0.452)],
    }
    return CardFacts(**{**given, **changes})


class CardNumber(NamedTuple):
    """A number of a card: as it is printed, in which section, of which fact and record."""

    text: str
    section: str
    fact: str
    record: str | None


def published_facts(facts: CardFacts) -> CardFacts:
    """The facts as the evidence has them; a card is made from these and no others."""
    return facts_from_json(facts_to_json(facts))


def card_numbers(facts: CardFacts) -> list[CardNumber]:
    """All numbers of facts in a card of the shipped template, in its order."""
    facts = published_facts(facts)
    found = [(text, "front matter", fact) for text, fact in index_numbers(facts)]
    section = ""
    for line in marked_card(facts).split("\n"):
        text = unmarked(line)
        section = text[3:] if text.startswith("## ") else section
        found += [(text[start:end], section, fact) for start, end, fact in numbers_in(line)]
    return [CardNumber(*number, record_of(facts, number[2])) for number in found]


def index_numbers(facts: CardFacts) -> list[tuple[str, str]]:
    """The numbers of ``model-index``, in order, each with its fact."""
    found = []
    for entry in own_entries(facts):
        if entry.value is None:
            continue
        parts = [("n", str(entry.values["n"]))]
        if entry.interval is not None:
            parts += zip(("low", "high"), (f"{end:.3f}" for end in entry.interval), strict=True)
        parts.append(("value", str(round(entry.value, 6))))
        found += [(text, f"evaluations.{entry.place}.{part}") for part, text in parts]
    return found
