"""The forecast of a sweep: time, GPU-hours and judge calls from measurements alone."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from flows.running.calls import make_recipe_plan
from flows.sweeping.forecasting import assumed_cost, forecast_json, forecast_lines
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
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
from sweeps.values import Limits, SweepFile, SweepPlan, Trial

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
