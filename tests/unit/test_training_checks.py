"""Plans refuse trainings that cannot work; memory; the values of the large recipes."""

from typing import Any

import pytest

from flows.api import make_recipe_plan
from flows.checking.resources import memory_json, memory_needs, planning_notes
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.checks.training import training_notes
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.placement import (
    MemoryNeed,
    ModelShape,
    Placement,
    placement_of,
    sampling_servers,
    training_memory,
)
from refiner_core.contract.plan import Plan

TINY = load_recipe("tiny")
VLLM = {"grpo.generation_backend": "vllm"}
FLASH = {"model.attn_implementation": "flash_attention_2"}


#: A judge of two GPUs within the jobs that ask it.
BESIDE = {
    **{
        "judge.kind": "openai",
        "judge.model": "m",
        "judge.serve.engine": "vllm",
        "judge.serve.where": "beside",
    },
    "judge.resources.gpus": 2,
}


def tiny(fields: dict[str, Any]) -> RecipeConfig:
    return replace_fields(TINY, fields)


EIGHT_GPUS = {**VLLM, "grpo.resources.gpus": 8}
COLOCATED = {**VLLM, "grpo.resources.gpus": 4, "grpo.rollout_server.colocate": True}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        # sizes
        ({"sft.pack_length": 256}, r"raise sft\.pack_length"),
        ({"grpo.pack_length": 303}, "pack_length=304"),
        ({"grpo.pack_length": 304, "grpo.stop_strings": ("</answer>",)}, "pack_length=305"),
        ({"grpo.max_token_length": 300}, "longest response"),
        ({"grpo.num_samples_per_prompt_rollout": 1}, "at least 2"),
        ({"grpo.temperature": 0.0}, "above zero"),
        ({"grpo.stop_strings": ("",)}, "empty text"),
        ({"grpo.num_mini_batches": 7}, "divisor of 64"),
        ({"grpo.num_mini_batches": 16}, "mini_batches=8"),
        # batches over processes
        ({"sft.nproc_per_node": 2}, "accumulation_steps=2"),
        ({"sft.nproc_per_node": 6, "sft.per_device_train_batch_size": 4}, "accumulation_steps=2"),
        ({"grpo.nproc_per_node": 9}, "nproc_per_node=8"),
        ({**VLLM, "grpo.nproc_per_node": 12, "grpo.num_mini_batches": 8}, "12 processes"),
        # sharding
        ({"sft.optimizer": "adamw", "sft.offload_optimizer": True}, "ZeRO-1 to 3"),
        ({"grpo.offload_optimizer": True, "grpo.deepspeed_stage": 0}, "deepspeed_stage` is 0"),
        ({"grpo.offload_param": True, "grpo.deepspeed_stage": 2}, "ZeRO-3"),
        ({"sft.optimizer": "muon", "sft.deepspeed_stage": 1}, "=adamw"),
        # kernels and machines
        (FLASH, r"sft\.resources\.gpus` is 0"),
        ({**FLASH, "sft.resources.gpus": 1, "grpo.resources.gpus": 1}, r"model\.dtype"),
        ({**FLASH, "stages": ("data", "evaluate")}, r"evaluate\.resources\.gpus"),
        ({"grpo.resources.nodes": 2}, r"dispatch\.executor"),
        ({"evaluate.resources.nodes": 2}, r"evaluate\.resources\.nodes=1"),
        (
            {"evaluate.generation_backend": "vllm", "grpo.vllm_tensor_parallel_size": 2},
            r"evaluate\.resources\.gpus=2",
        ),
        # GPUs of processes and servers
        ({"grpo.resources.gpus": 2, "grpo.nproc_per_node": 4}, "nproc_per_node=2"),
        ({**EIGHT_GPUS, "grpo.vllm_num_engines": 4, "grpo.nproc_per_node": 6}, "at most 4"),
        ({**EIGHT_GPUS, "grpo.vllm_num_engines": 8}, "left for training"),
        (
            {**COLOCATED, "grpo.vllm_num_engines": 3, "grpo.vllm_tensor_parallel_size": 2},
            "engines` is 3, .*size` is 2, .*gpus` is 4 ",
        ),
        ({**VLLM, "grpo.vllm_tensor_parallel_size": 2}, "one process per server"),
        # GPUs of a judge beside the stage
        ({**BESIDE, "grpo.resources.gpus": 2}, r"grpo\.resources\.gpus=3 or more"),
        ({**BESIDE, "grpo.resources.gpus": 8}, r"evaluate\.resources\.gpus=3 or more"),
        # older policies
        ({"grpo.async_steps": 70}, "is 70"),
        ({"grpo.old_logprobs": "sampler", "grpo.top_p": 0.9}, "top_p"),
        ({"grpo.active_sampling": True, "grpo.active_sampling_max_rounds": 1}, "at least 2"),
        # rollout servers
        ({**VLLM, "grpo.rollout_server.weights_dir": "shm"}, "absolute path"),
    ],
    ids=str,
)
def test_a_training_that_cannot_work_is_refused_with_the_numbers(
    fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says) as refused:
        check_config(tiny(fields))
    assert all((refused.value.expected, refused.value.fix)), "the expected value and the fix"


@pytest.mark.parametrize(
    "fields",
    [
        {"sft.optimizer": "adamw", "sft.deepspeed_stage": 3},  # one process: slow, not wrong
        {"sft.deepspeed_stage": 0},  # ZeRO-0 keeps matrices whole, so that Muon works
        {"sft.nproc_per_node": 2, "sft.gradient_accumulation_steps": 3},  # the odd one is neutral
        {"model.dtype": "bfloat16"},
        {"model.gradient_checkpointing": True},
        {"grpo.async_steps": 1, "grpo.num_mini_batches": 2, "grpo.num_epochs": 2},
        {"grpo.async_steps": 1, "grpo.active_sampling": True},
        {"grpo.async_steps": 1, "grpo.old_logprobs": "sampler"}
        | {"grpo.truncated_importance_sampling_ratio_cap": 0.0},
        {**VLLM, "grpo.vllm_num_engines": 2},  # servers on a CPU
        {**VLLM, "grpo.resources.gpus": 1, "grpo.rollout_server.colocate": True},
        {"grpo.offload_optimizer": True, "grpo.deepspeed_stage": 2, "grpo.nproc_per_node": 2},
        {"sft.health.loss_spike": "off", "grpo.health.max_truncated_share": 1.0},
        {"sft.nproc_per_node": 64, "stages": ("data", "grpo")},  # a stage that is not there
    ],
)
def test_a_training_that_works_is_not_refused(fields: dict[str, Any]) -> None:
    check_config(tiny(fields))


def test_odd_settings_get_a_note() -> None:
    assert training_notes(TINY) == []
    assert not training_notes(tiny({"grpo.nproc_per_node": 2, "grpo.resources.cpus": 2}))
    [few] = training_notes(tiny({"grpo.nproc_per_node": 2, "model.cpu_threads": 2}))
    assert "2 processes with 2 threads each" in few
    assert "grpo.resources.cpus=4" in few
    [older] = training_notes(
        tiny({"grpo.async_steps": 2, "grpo.truncated_importance_sampling_ratio_cap": 0.0})
    )
    assert "up to 2 steps old" in older
    [idle] = training_notes(
        tiny({"grpo.resources.gpus": 8, "grpo.resources.nodes": 2, "grpo.nproc_per_node": 3})
    )
    assert "10 of the 16 GPUs of grpo stay idle" in idle


def placed(fields: dict[str, Any], stage: Any = "grpo") -> Placement:
    return placement_of(tiny(fields), stage)


TWO_SERVERS = {**VLLM, "grpo.vllm_num_engines": 2}
EIGHT = {**EIGHT_GPUS, **TWO_SERVERS}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Placement(1, 1, (), ())),
        ({**TWO_SERVERS, "grpo.nproc_per_node": 2}, Placement(1, 2, (), ((), ()))),
        # Processes take the first GPUs, servers the last.
        (
            {**EIGHT, "grpo.vllm_tensor_parallel_size": 2},
            Placement(1, 4, (0, 1, 2, 3), ((4, 5), (6, 7))),
        ),
        (
            {**EIGHT, "grpo.nproc_per_node": 3},
            Placement(1, 3, (0, 1, 2), ((6,), (7,)), idle_gpus=3),
        ),
        # The transformers backend has no servers, however many engines are configured.
        (
            {**EIGHT, "grpo.generation_backend": "transformers"},
            Placement(1, 8, tuple(range(8)), ()),
        ),
        # Every node has as many processes and servers, and as many idle GPUs.
        (
            {**TWO_SERVERS, "grpo.resources.gpus": 4, "grpo.resources.nodes": 2},
            Placement(2, 2, (0, 1), ((2,), (3,))),
        ),
        (
            {**EIGHT, "grpo.nproc_per_node": 3, "grpo.resources.nodes": 4},
            Placement(4, 3, (0, 1, 2), ((6,), (7,)), idle_gpus=12),
        ),
        (
            {**COLOCATED, "grpo.vllm_num_engines": 2, "grpo.vllm_tensor_parallel_size": 2},
            Placement(1, 4, (0, 1, 2, 3), ((0, 1), (2, 3))),
        ),
        (
            {**COLOCATED, "grpo.vllm_num_engines": 3, "grpo.nproc_per_node": 1},
            Placement(1, 1, (0,), ((0,), (1,), (2,)), idle_gpus=1),
        ),
        # A judge beside the stage takes the last ones.
        ({**EIGHT, **BESIDE}, Placement(1, 4, (0, 1, 2, 3), ((4,), (5,)), 0, (6, 7))),
        (
            {**BESIDE, "grpo.resources.gpus": 4, "grpo.resources.nodes": 2},
            Placement(2, 2, (0, 1), (), idle_gpus=2, judge_gpus=(2, 3)),
        ),
    ],
)
def test_processes_and_servers_get_their_gpus(fields: dict[str, Any], expected: Placement) -> None:
    assert placed(fields) == expected


def test_rollout_servers_are_of_grpo_alone() -> None:
    fields = {"sft.resources.gpus": 8, **VLLM, "grpo.vllm_num_engines": 4}
    assert placed(fields, "sft") == Placement(1, 8, tuple(range(8)), ())


def test_sampling_servers_leave_gpus_to_a_judge_beside_them() -> None:
    fields = {**BESIDE, "sample.generation_backend": "vllm", "sample.resources.gpus": 5}
    assert sampling_servers(tiny(fields), "sample") == ((0,), (1,), (2,))


def test_no_gpu_is_given_twice() -> None:
    for gpus in range(1, 9):
        for engines in range(1, 9):
            for width in (1, 2, 4):
                fields = {"grpo.resources.gpus": gpus, "grpo.vllm_num_engines": engines, **VLLM}
                try:
                    found = placed(fields | {"grpo.vllm_tensor_parallel_size": width})
                except ConfigurationError:
                    assert engines * width >= gpus, "it would have fitted"
                    continue
                taken = [*found.trainer_gpus, *(g for one in found.server_gpus for g in one)]
                assert sorted(taken) == list(range(gpus)), "each GPU once, none idle"


# ---------------------------------------------------------------- memory


BILLION = 10**9
ONE = ModelShape(BILLION)
LARGE = load_recipe("refiner-gpt54")  # bfloat16, 4 processes and 4 servers on 8 GPUs


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


# ---------------------------------------------------------------- the large recipes


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
