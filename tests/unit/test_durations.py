"""The forecast of a plan's time: judge calls, what hides what, and the sources of figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.durations import StageTime, forecast_times, judge_use
from flows.running.calls import make_recipe_plan
from infra.store.provenance import write_certificate
from infra.store.workspace import Workspace
from refiner_core.contract.proofs import Certificate, CertifiedCheck
from tests.support.disk import finish

LARGE = "refiner-gpt54"


def forecast(folder: Path, *overrides: str, gpu: str | None = None) -> dict[str, StageTime]:
    words = [f"workspace={folder / 'ws'}", *overrides]
    return {one.stage: one for one in forecast_times(make_recipe_plan(LARGE, words), gpu)}


def certify(folder: Path, gpu: str, model: str, **rates: float) -> None:
    """A certificate with tokens per second by check, of a model of 4 billion parameters."""
    names = {"grpo": "GRPO update", "sft": "SFT throughput"}
    checks = tuple(
        CertifiedCheck(names[n], "pass", "", {"tokens_per_s": rate, "parameters": 4_000_000_000})
        for n, rate in rates.items()
    )
    workspace = Workspace.open(folder / "ws")
    made = Certificate("2026-01-01", {"name": "gpu07"}, (gpu,), {}, model, "bfloat16", 1.0, checks)
    write_certificate(workspace, made)


@pytest.mark.parametrize(
    ("source", "form", "calls"),
    [
        ("instance", "per_rubric", 18.7),
        ("instance+static", "per_rubric", 21.7),
        ("static", "batched", 15.3),
        ("instance+static", "batched", 15.3),
        ("none", "per_rubric", 14.3),
    ],
)
def test_an_answer_costs_a_call_for_each_question_and_one_for_all_rubrics_if_batched(
    tmp_path, source, form, calls
):
    words = [f"workspace={tmp_path}", f"reward.rubric_source={source}", f"judge.form={form}"]
    found, prompt, reply = judge_use(make_recipe_plan(LARGE, words).config)
    assert found == pytest.approx(calls)
    assert prompt > 700 * calls
    assert reply >= 60 * calls - 1


def test_a_step_agrees_with_the_arithmetic_on_real_rows(tmp_path):
    """5,550 calls and 4.2 M prompt tokens a step; 53 to 128 s, one after the other."""
    words = ("judge.form=per_rubric", "grpo.async_steps=0", "grpo.num_training_steps=100")
    words += ("publish.which=final", "judge.resources.gpus=2", "judge.serve.args=[]")
    found = forecast(tmp_path, *words)["grpo"]
    assert found.seconds is not None
    assert found.judge_calls
    assert found.judge_prompt_tokens
    fast, likely, slow = found.seconds
    assert 30 < fast / 100 < likely / 100 < slow / 100 < 200
    assert 53 < likely / 100 < 128
    assert found.judge_calls == pytest.approx(555_000, rel=0.01)
    assert found.judge_prompt_tokens == pytest.approx(420e6, rel=0.01)
    assert found.busy is not None
    assert found.busy["judges"] > found.busy["samplers"]


def test_sampling_is_hidden_by_older_policies(tmp_path):
    straight, ahead = (forecast(tmp_path, f"grpo.async_steps={n}")["grpo"] for n in (0, 2))
    assert straight.seconds
    assert ahead.seconds
    assert ahead.seconds[1] < straight.seconds[1]


def test_what_is_unknown_has_no_figure(tmp_path):
    assert forecast(tmp_path)["evaluate-grpo"].per == "100 prompts"
    assert forecast(tmp_path, "evaluate.max_prompts=50")["evaluate-grpo"].per == "stage"
    strange = forecast(tmp_path, gpu="MI300X")["grpo"]
    assert strange.seconds is None
    assert "MI300X" in strange.why
    on_cpus = {one.seconds for one in forecast_times(make_recipe_plan("tiny", []))}
    assert on_cpus == {None}
    hosted = forecast(tmp_path, "judge.base_url=http://127.0.0.1:1/v1")["grpo"]
    assert hosted.seconds
    assert hosted.judge_calls
    assert "without the judge's time" in hosted.why


def test_a_certificate_replaces_assumptions(tmp_path):
    assumed = forecast(tmp_path, "judge.kind=lexical", "judge.model=lexical-1")["grpo"]
    certify(tmp_path, "NVIDIA H200", "4B", grpo=100.0)
    slow = forecast(tmp_path, "judge.kind=lexical", "judge.model=lexical-1")["grpo"]
    assert (assumed.device, slow.device) == ("H100", "H200")
    assert slow.basis == "certificate of gpu07"
    assert assumed.seconds
    assert slow.seconds
    assert slow.seconds[1] > 10 * assumed.seconds[1]
    other = forecast(tmp_path, "judge.kind=lexical", "judge.model=lexical-1", gpu="A100")["grpo"]
    assert (other.device, other.basis) == ("A100", "assumed")


def test_prepared_rows_give_the_number_of_steps_and_prompts(tmp_path):
    """2,847 rows of 136 tokens at four epochs in packs of 3,072, as `tiny` has them."""
    words = [f"workspace={tmp_path / 'ws'}", "sft.resources.gpus=1", "sft.max_train_steps=null"]
    plan = make_recipe_plan("tiny", [*words, "evaluate.resources.gpus=1"])
    before = {one.stage: one.per for one in forecast_times(plan)}
    assert (before["sft"], before["evaluate-sft"]) == ("step", "100 prompts")
    sizes = {"sft_train.parquet": {"rows": 2847}, "rl_test.parquet": {"rows": 200}}
    lengths = {"prompt_tokens": {"p50": 100}, "loss_tokens": {"p50": 36}}
    report: dict[str, object] = {
        "files": sizes,
        "sft": lengths,
        "rl": {"prompt_tokens": {"p50": 110}},
    }
    finish(Workspace.open(tmp_path / "ws"), plan.by_name["data"].id, report=report)
    after = {one.stage: one for one in forecast_times(plan)}
    assert (after["sft"].per, after["evaluate-sft"].per) == ("stage", "stage")
    shorter = make_recipe_plan("tiny", [*words, "sft.num_train_epochs=2"])
    (half,) = (one for one in forecast_times(shorter) if one.stage == "sft")
    start = 120.0
    assert after["sft"].seconds
    assert half.seconds
    assert after["sft"].seconds[1] - start == pytest.approx(2 * (half.seconds[1] - start))
