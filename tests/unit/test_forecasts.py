"""Forecasts before a launch: time and cost, and the effects that a sweep detects."""

import functools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.durations import StageTime, forecast_times, judge_use
from flows.running.calls import make_recipe_plan
from flows.sweeping.forecasting import assumed_cost, forecast_json, forecast_lines
from flows.sweeping.planning import detectable_json, detectable_lines
from infra.store.provenance import write_certificate
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.proofs import Certificate, CertifiedCheck
from refiner_core.evaluation.power import (
    VarianceComponents,
    detectable_effect,
    likely_components,
    power_of,
    variance_components,
)
from sweeps.forecast import (
    CanaryMeasure,
    History,
    StageMeasure,
    SweepForecast,
    forecast_sweep,
    passed_limits,
    refuse_what_cannot_fit,
    shape_of,
    work_of,
)
from sweeps.power import SpreadEvidence, aim_of, assumed, detectable
from sweeps.values import Limits, Question, SweepFile, SweepPlan, Trial
from tests.support.disk import finish

BASE = (
    *("sft.max_train_steps=10", "sft.save_freq=5", "grpo.num_training_steps=20"),
    *("grpo.save_freq=10", "grpo.resources.gpus=4", "publish.which=final"),
    "stages=[data,sft,grpo,evaluate]",
)
JUDGE = ("judge.kind=openai", "judge.model=big", "judge.base_url=http://127.0.0.1:9/v1")


def _plan(arms: dict[str, tuple[str, ...]], seeds: tuple[int, ...] = (1, 2)) -> SweepPlan:
    trials = [
        Trial(arm, seed, own, make_recipe_plan("tiny", (*BASE, *own, f"seed={seed}")))
        for seed in seeds
        for arm, own in arms.items()
    ]
    return SweepPlan(SweepFile("s", "tiny"), (), next(iter(arms)), tuple(trials))


@pytest.fixture(scope="module")
def plan() -> SweepPlan:
    return _plan({"a": (), "b": ("grpo.beta=0.01",)})


def _measured(stage: PlannedStage, plan: Plan, **known: Any) -> StageMeasure:
    """A finished stage, exactly like one that is planned."""
    prompts = 10 if stage.kind == "evaluate" else None
    model = stage.sources.get("model", "")
    return StageMeasure(
        shape=shape_of(stage.kind, stage.identity, model, stage.resources.gpus),
        work=work_of(stage.kind, stage.identity, prompts=prompts),
        identity=stage.identity,
        **known,
    )


def _of(forecast: SweepForecast, kind: str, trial: str) -> Any:
    return next(s for s in forecast.stages if s.kind == kind and s.trial == trial)


def test_a_stage_takes_as_long_as_a_measured_one(plan: SweepPlan) -> None:
    """20 steps of 3 s, and 40 s besides: 100 s on 4 GPUs."""
    one = plan.trials[0].plan
    history = History((_measured(one.by_name["grpo"], one, unit_s=3.0, start_s=40.0),))
    forecast = forecast_sweep(plan, history, set())
    found = _of(forecast, "grpo", "a/seed1")
    assert found.seconds == pytest.approx(100.0)
    assert found.gpu_hours == pytest.approx(4 * 100 / 3600)
    assert found.basis == "measured: 1 stage like it"
    # Another KL coefficient costs the same.
    assert _of(forecast, "grpo", "b/seed2").seconds == pytest.approx(100.0)


def test_old_measurements_count_at_the_legacy_value_of_a_field(plan: SweepPlan) -> None:
    """Steps that overlap sampling and training have another duration."""
    stage = plan.trials[0].plan.by_name["grpo"]
    new = dict(stage.identity)
    old = {k: v for k, v in new.items() if k not in ("grpo.async_steps", "grpo.active_sampling")}
    assert shape_of("grpo", old, "m", 4) == shape_of("grpo", new, "m", 4)
    assert shape_of("grpo", {**new, "grpo.async_steps": 1}, "m", 4) != shape_of("grpo", old, "m", 4)


def test_another_size_is_scaled_with_its_basis(plan: SweepPlan) -> None:
    one = plan.trials[0].plan
    history = History((_measured(one.by_name["grpo"], one, unit_s=3.0),))
    wider = _plan({"wide": ("grpo.num_samples_per_prompt_rollout=16",)}, (1,))
    found = _of(forecast_sweep(wider, history, set()), "grpo", "wide/seed1")
    assert found.seconds == pytest.approx(20 * 3.0 * 2)
    assert found.basis.startswith("by rule of thumb: 1 stage with another grpo.num_samples")


def test_unmeasured_stages_have_no_number(plan: SweepPlan) -> None:
    """No number is made up."""
    forecast = forecast_sweep(plan, History(), set())
    assert {s.seconds for s in forecast.stages} == {None}
    assert forecast.wall_seconds is None
    assert len(forecast.unknown()) == len(forecast.stages)
    text = "\n".join(forecast_lines(forecast))
    assert "unknown: no grpo stage of this model has been measured" in text
    one = plan.trials[0].plan
    # Other devices say nothing about these.
    elsewhere = _measured(one.by_name["grpo"], one, unit_s=3.0)
    elsewhere = replace(elsewhere, shape=elsewhere.shape._replace(devices=8))
    again = forecast_sweep(plan, History((elsewhere,)), set())
    assert _of(again, "grpo", "a/seed1").seconds is None


def test_a_shared_stage_counts_once_and_a_finished_one_not_at_all(plan: SweepPlan) -> None:
    forecast = forecast_sweep(plan, History(), set())
    assert sum(s.kind == "data" for s in forecast.stages) == 1
    assert sum(s.kind == "sft" for s in forecast.stages) == 2
    done = {s.stage for s in forecast.stages if s.kind in ("data", "sft")}
    left = forecast_sweep(plan, History(), done)
    assert not {s.kind for s in left.stages} & {"data", "sft"}
    assert forecast_lines(forecast_sweep(plan, History(), set(plan.stages()))) == [
        "Forecast: nothing is left to run."
    ]


def test_the_canary_corrects_every_stage_of_its_kind(plan: SweepPlan) -> None:
    one = plan.trials[0].plan
    grpo = one.by_name["grpo"]
    history = History((_measured(grpo, one, unit_s=3.0),))
    canary = CanaryMeasure(grpo.id, 2, 6.0, save_seconds=1.0, start_seconds=8.0)
    found = forecast_sweep(plan, history, set(), [canary])
    for trial in ("a/seed1", "b/seed2"):
        stage = _of(found, "grpo", trial)
        assert stage.seconds == pytest.approx(8 + 20 * 6 + 2 * 1)
        assert stage.basis == "by canary: 2 steps of grpo"
    assert forecast_json(found)["canary"][0]["seconds_per_step"] == 6.0


def test_judge_calls_follow_the_measured_calls_per_rollout() -> None:
    plan = _plan({"a": JUDGE, "other": (*JUDGE, "judge.model=small")}, (1,))
    one = plan.trials[0].plan
    asked = replace(_measured(one.by_name["grpo"], one, unit_s=1.0), judge_calls=20 * 64 * 3)
    forecast = forecast_sweep(plan, History((asked,)), set())
    assert _of(forecast, "grpo", "a/seed1").judge_calls == 20 * 64 * 3
    assert _of(forecast, "grpo", "other/seed1").judge_calls is None
    assert "no grpo stage has asked this judge" in _of(forecast, "grpo", "other/seed1").calls_basis
    lexical = _plan({"a": ()}, (1,))
    assert _of(forecast_sweep(lexical, History(), set()), "grpo", "a/seed1").judge_calls == 0


def _hours(plan: SweepPlan, each: float) -> SweepForecast:
    """A forecast in which every GRPO takes so many GPU-hours."""
    one = plan.trials[0].plan
    seconds = each * 3600 / 4 / 20
    return forecast_sweep(
        plan, History((_measured(one.by_name["grpo"], one, unit_s=seconds),)), set()
    )


def test_a_sweep_that_passes_its_limit_is_refused_with_what_fits(plan: SweepPlan) -> None:
    forecast = _hours(plan, 10.0)
    assert not list(passed_limits(forecast, Limits(gpu_hours=40)))
    (passed,) = passed_limits(forecast, Limits(gpu_hours=25))
    assert "limit 25; what fits: the first 2 of 4 trials" in passed.text
    with pytest.raises(ConfigurationError, match="needs 40 GPU-hours, limit 25"):
        refuse_what_cannot_fit((passed,))
    # What an earlier version has used counts.
    (more,) = passed_limits(forecast, Limits(gpu_hours=45), {"gpu_hours": 10})
    assert more.what_fits == "the first 3 of 4 trials"


def test_a_plans_assumptions_stand_in_for_measurements_but_refuse_nothing(plan: SweepPlan) -> None:
    assume = partial(assumed_cost, Workspace.read_only("nowhere"))
    forecast = forecast_sweep(plan, History(), set(), assume=assume)
    found = _of(forecast, "grpo", "a/seed1")
    assert found.seconds > 0
    assert found.basis.startswith("assumed: H100")
    assert _of(forecast, "sft", "a/seed1").seconds is None  # on a CPU
    assert not list(passed_limits(forecast, Limits(gpu_hours=1e-9)))
    measured = _measured(plan.trials[0].plan.by_name["grpo"], plan.trials[0].plan, unit_s=3.0)
    known = _of(forecast_sweep(plan, History((measured,)), set(), assume=assume), "grpo", "a/seed1")
    assert known.basis == "measured: 1 stage like it"


def test_the_wall_clock_knows_the_longest_chain_and_how_many_run_at_a_time(plan: SweepPlan) -> None:
    single = replace(plan, sweep=replace(plan.sweep, limits=Limits(1)))
    one = plan.trials[0].plan
    history = History((_measured(one.by_name["grpo"], one, unit_s=3.0),))
    done = {i for i in plan.stages() if not i.startswith("grpo")}
    at_once = plan.config.dispatch.max_parallel
    assert forecast_sweep(plan, history, done).wall_seconds == pytest.approx(4 * 60 / at_once)
    assert forecast_sweep(single, history, done).wall_seconds == pytest.approx(4 * 60)


# ---------------------------------------------------------------- the time of a plan


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


# ---------------------------------------------------------------- what a sweep can detect


KNOWN = SpreadEvidence(VarianceComponents(0.0001, 0.01, 0.05, 3, 100), "pairs", "measured", 0.5)


@functools.cache
def _seeded(
    seeds: tuple[int, ...] = (1, 2, 3), arms: int = 2, question: Question | None = None, *own: str
) -> SweepPlan:
    trials = [
        Trial(
            f"arm{arm}",
            seed,
            (),
            make_recipe_plan("tiny", (f"grpo.beta={0.001 * (arm + 1)}", f"seed={seed}", *own)),
        )
        for seed in seeds
        for arm in range(arms)
    ]
    return SweepPlan(
        SweepFile("s", "tiny", question=question or Question()), (), "arm0", tuple(trials)
    )


@pytest.fixture(scope="module")
def seeded() -> SweepPlan:
    return _seeded()


def _asks(plan: SweepPlan, **question: object) -> SweepPlan:
    return replace(plan, sweep=replace(plan.sweep, question=Question(**question)))


def test_more_prompts_show_smaller_effects_and_an_unknown_number_none(seeded: SweepPlan) -> None:
    few, many = (detectable(seeded, n, KNOWN).effect for n in (50, 400))
    assert 0 < many < few
    unknown = detectable(seeded, None, KNOWN)
    assert unknown.effect is None
    assert "unknown before the data are made" in detectable_lines(unknown)[0]


@pytest.mark.slow
def test_the_formulas_are_evaluated_at_the_planned_size() -> None:
    known = KNOWN.components
    found = detectable(_asks(_seeded(arms=4), smallest_effect=0.06), 100, KNOWN)
    strict = 0.05 / 3
    assert (found.seeds, found.prompts, found.arms) == (3, 100, 3)
    assert found.effect == detectable_effect(known, 3, 100, 0.8, strict)
    assert found.power_for_wanted == power_of(known, 3, 100, 0.06, strict)
    assert detectable(_seeded(arms=1), 100, KNOWN).arms == 0
    two = detectable(_seeded(arms=2), 2, KNOWN)
    assert two.effect == detectable_effect(known, 3, 2, 0.8, 0.05)
    assert detectable(_seeded(arms=2), 1, KNOWN).effect is None


@pytest.mark.slow
def test_the_suggested_size_is_the_least_sufficient_one(seeded: SweepPlan) -> None:
    known = KNOWN.components
    for wanted in (0.02, 0.03, 0.05, 0.06, 0.079):
        found = detectable(_asks(seeded, smallest_effect=wanted), 100, KNOWN)
        seeds, prompts = found.would_do["seeds"], found.would_do["prompts"]
        if seeds is not None:
            at, below = (power_of(known, s, 100, wanted) for s in (seeds, seeds - 1))
            assert at >= 0.8 > below
        if prompts is not None:
            at, below = (power_of(known, 3, p, wanted) for p in (prompts, prompts - 1))
            assert at >= 0.8 > below
        assert (seeds is None) == (power_of(known, 20, 100, wanted) < 0.8)
        assert (prompts is None) == (power_of(known, 3, 6400, wanted) < 0.8)
        ways = [f"{n} {of}" for n, of in ((seeds, "seeds"), (prompts, "prompts")) if n]
        told = f"{' or '.join(ways)} would do" if ways else "neither 20 seeds nor 64 times the"
        assert told in found.warnings[0]
    enough = detectable(_asks(seeded, smallest_effect=0.09), 100, KNOWN)
    assert (enough.would_do, enough.warnings) == (None, ())
    quiet = replace(KNOWN, components=VarianceComponents(0.0, 0.0, 0.05, 3, 100))
    one = detectable(_asks(_seeded((1,)), smallest_effect=0.06), 100, quiet)
    assert one.would_do["seeds"] == 4, "two differ by too much to show it"


def test_the_deciding_number_follows_from_what_is_measured() -> None:
    assert aim_of(_seeded((1,), 1)) == Question("", "oracle", "sampled", model="grpo")
    greedy = _seeded((1,), 1, None, "evaluate.decoding=[greedy]")
    assert aim_of(greedy).decoding == "greedy"
    asked = Question(metric="citation_f1", model="sft", decoding="sampled", protocol="p")
    assert aim_of(_seeded((1,), 1, asked)) == asked
    agents = (Trial("a", 1, (), make_recipe_plan("tiny-tools", ())),)
    assert aim_of(SweepPlan(SweepFile("s", "tiny-tools"), (), "a", agents)).metric == "pass@1"
    nothing = _seeded((1,), 1, None, "stages=[data,sft]")
    assert aim_of(nothing).model == ""


def test_shares_have_a_worst_case_and_other_numbers_none(seeded: SweepPlan) -> None:
    assert detectable(seeded, 1000, assumed("oracle")).effect is not None
    # Two independent coins, each with a variance of 1/4.
    assert assumed("oracle").components == (None, 0.0, 0.5, 0, 0)
    found = detectable(_asks(seeded, metric="length_tokens"), 100, assumed("length_tokens"))
    assert found.effect is None
    assert "no bounds" in found.evidence.text


def test_a_few_earlier_seeds_give_a_range_and_not_a_number(seeded: SweepPlan) -> None:
    """Three seeds say within a factor of three how far seeds differ; one number says otherwise."""
    found = detectable(seeded, 100, KNOWN)
    low, high = found.effect_range
    assert low < found.effect < 1.5 * found.effect < high
    told = detectable_lines(found)[1]
    assert told.startswith(f"  likely between {low:.3f} and {high:.3f}: 3 seeds say little")
    assert detectable_json(found)["effect_range"] == [low, high]
    more = SpreadEvidence(KNOWN.components._replace(seeds=30), "pairs", "measured", 0.5)
    narrow = detectable(seeded, 100, more).effect_range
    assert low <= narrow[0] <= found.effect < narrow[1] < high
    one_seed = SpreadEvidence(
        VarianceComponents(None, 0.06, 0.0, 1, 100), "one seed", "measured", 0.5
    )
    assert detectable(seeded, 100, one_seed).effect_range is None
    assert detectable_json(detectable(seeded, None, KNOWN))["effect_range"] is None


@pytest.mark.slow
@pytest.mark.parametrize("seed_sd", [0.0, 0.02, 0.06])
def test_the_range_holds_the_truth_about_as_often_as_it_says(seed_sd: float) -> None:
    """From one earlier pair of arms with three seeds."""
    rng = np.random.default_rng(5)
    truth = detectable_effect(VarianceComponents(seed_sd**2, 0.002, 0.05), 3, 100)
    held = 0
    for _ in range(80):
        values = rng.normal(0, seed_sd or 1e-12, (3, 1)) + rng.normal(0, 0.002**0.5, (1, 100))
        values = values + rng.normal(0, 0.05**0.5, (3, 100))
        limits = likely_components(variance_components(values))
        low, high = (detectable_effect(c, 3, 100) for c in limits)
        held += (
            low <= truth * 1.1 and truth <= high * 1.1
        )  # what prompts spread is an estimate, too
    assert held >= 0.72 * 80
