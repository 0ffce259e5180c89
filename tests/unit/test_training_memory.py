"""Plans estimate the memory of a training, by arithmetic that can be checked."""

from typing import Any

import pytest

from flows.api import make_recipe_plan
from flows.checking.resources import memory_json, memory_needs, planning_notes
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.placement import MemoryNeed, ModelShape, training_memory

BILLION = 10**9
ONE = ModelShape(BILLION)
LARGE = load_recipe("refiner-gpt54")  # bfloat16, 4 processes and 4 servers on 8 GPUs
TINY = load_recipe("tiny")


def large(**fields: Any) -> MemoryNeed:
    return training_memory(replace_fields(LARGE, fields), "grpo", ONE)


@pytest.mark.parametrize(
    ("stage", "bytes_each"),
    [  # weights 2, gradients 4, two moments and masters 12; shared by 4 from ZeRO 3, 2, 1 up
        (None, 2 + 4 + 12),
        (1, 2 + 4 + 12 / 4),
        (2, 2 + 4 / 4 + 12 / 4),
        (3, (2 + 4 + 12) / 4),
    ],
)
def test_zero_shares_what_it_shares(stage: int | None, bytes_each: float) -> None:
    found = large(**{"grpo.deepspeed_stage": stage}).on_gpu
    assert found["weights"] + found["gradients"] + found["optimizer"] == bytes_each * BILLION
    assert found["reference"] == (0.5 if stage == 3 else 2) * BILLION
    assert "reference" not in large(**{"grpo.beta": 0.0}).on_gpu


def test_offloading_moves_to_the_host() -> None:
    plain, moved = large(), large(**{"grpo.offload_optimizer": True, "grpo.offload_param": True})
    assert moved.on_host["optimizer"] == plain.on_gpu["optimizer"] == 3 * BILLION
    assert moved.on_host["weights"] == plain.on_gpu["weights"]
    assert not {"optimizer", "weights"} & set(moved.on_gpu)


def test_an_asynchronous_save_takes_host_memory() -> None:
    states, weights = "states being saved", "weights being saved"
    for stage in (None, 3):  # each process writes its share, with any engine
        found = large(**{"grpo.deepspeed_stage": stage})
        assert found.on_host[states] * 4 + found.shared[weights] == (12 + 2) * BILLION
    at_once = large(**{"grpo.async_save": False})
    assert not {states, weights} & {*at_once.on_host, *at_once.shared}


@pytest.mark.parametrize(("checkpointing", "measured_gib"), [(False, 2.59), (True, 1.98)])
def test_an_estimate_is_near_what_was_measured(checkpointing: bool, measured_gib: float) -> None:
    """Peaks of two SFT steps (50M parameters, packs of 2048, AdamW, no save) on a CPU."""
    fields = {"sft.optimizer": "adamw", "sft.pack_length": 2048, "sft.async_save": False}
    config = replace_fields(TINY, {**fields, "model.gradient_checkpointing": checkpointing})
    shape = ModelShape(49_948_160, hidden=512, inner=2048, layers=8, pairs=512, words=32_000)
    estimate = training_memory(config, "sft", shape).host_bytes / 2**30
    assert measured_gib <= estimate <= 1.25 * measured_gib


# ---------------------------------------------------------------- plans


def test_the_shape_is_read_from_the_models_files() -> None:
    found = {need.stage: need for need in memory_needs(make_recipe_plan("tiny"))}
    assert set(found) == {"sft", "grpo"}
    assert found["sft"].on_host["weights"] == 4 * 1_026_048  # of the shipped model, float32
    assert found["grpo"].on_host["key/value cache"] > 0
    assert planning_notes(make_recipe_plan("tiny")) == []
    unknown = make_recipe_plan("tiny", ["model.name_or_path=somebody/something"])
    assert memory_json(unknown) == []


def test_a_plan_notes_more_memory_than_the_job_asks_for() -> None:
    [note] = planning_notes(make_recipe_plan("tiny", ["sft.per_device_train_batch_size=64"]))
    assert note.startswith("sft will take about ")
    assert "asks for 4.0 GiB (sft.resources.memory_gb): activations" in note


def test_an_evaluation_by_the_training_judge_alone_gets_a_note() -> None:
    served = ["judge.kind=openai", "judge.model=big", "judge.base_url=http://127.0.0.1:1/v1"]

    def said(*words: str) -> list[str]:
        notes = planning_notes(make_recipe_plan("tiny", [*served, *words]))
        return [note for note in notes if "trains the policy" in note]

    assert "held-out-judge-v1" in said()[0]
    assert not said("evaluate.protocols=[held-out-judge-v1]")
    assert not said("stages=[data,sft,evaluate]")
