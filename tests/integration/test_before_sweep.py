"""What a workspace knows is what a sweep's forecast rests on: records as runs leave them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.running.calls import make_recipe_plan
from flows.sweeping.evidence import rescore_share
from flows.sweeping.forecasting import forecast_of
from flows.sweeping.planning import forecast_sweep, sweep_json
from infra.attempt.attempt import AttemptRun
from infra.store.workspace import Workspace
from refiner_core.contract.records import ArmRecord, Outcome
from refiner_core.data.copier import random_copier
from refiner_core.evaluation.metrics import sample_row
from refiner_core.judges import build_judge
from refiner_core.rewards import RewardInput, compute_rewards
from sweeps.values import Limits, Question, SweepFile, SweepPlan, Trial
from tests.support.recorded_run import (
    PROMPTS,
    SMALL,
    RecordedRun,
    prompt_rows,
    training_report,
    write_model,
)

JUDGED = ("judge.kind=openai", "judge.model=big", "judge.base_url=http://127.0.0.1:9/v1")


def _plan(root: Path, arms: dict[str, tuple[str, ...]], seeds: tuple[int, ...]) -> SweepPlan:
    trials = [
        Trial(
            name,
            seed,
            own,
            make_recipe_plan("tiny", (*SMALL, f"workspace={root}", *own, f"seed={seed}")),
        )
        for seed in seeds
        for name, own in arms.items()
    ]
    settings = tuple(
        ArmRecord(name, {}, {o.partition("=")[0]: o.partition("=")[2] for o in own})
        for name, own in arms.items()
    )
    sweep = SweepFile("s", "tiny", question=Question(metric="rubric_score"))
    return SweepPlan(sweep, settings, next(iter(arms)), tuple(trials))


def _train(run: RecordedRun, name: str, metrics: Callable[[int], dict[str, float]]) -> None:
    """A training stage that has logged its steps."""

    def work(attempt: AttemptRun) -> dict[str, Any]:
        for step in range(1, 7):
            attempt.io.log_metrics(step, metrics(step))
        return {"steps": 6, "tokens": 6000, "counts": {}}

    run.do(name, work)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished run, whose steps took two seconds each by its own log."""
    root = tmp_path_factory.mktemp("before") / "runs"
    run = RecordedRun(root, "sft.max_train_steps=6")
    run.data()
    _train(run, "sft", lambda _: {"time/step_s": 2.0})
    _train(run, "grpo", lambda step: {"time/step_s": 9.0 if step == 1 else 2.0})
    run.evaluate("evaluate-grpo")
    return root


def test_one_finished_run_predicts_the_steps_of_every_trial(root: Path) -> None:
    arms = {
        "a": ("sft.max_train_steps=6",),
        "long": ("sft.max_train_steps=6", "grpo.num_training_steps=60"),
    }
    forecast = forecast_of(_plan(root, arms, (1, 2)), Workspace.read_only(root))
    seconds = {(s.kind, s.trial): s.seconds for s in forecast.stages}
    assert seconds["grpo", "a/seed2"] == pytest.approx(6 * 2.0, abs=0.5)
    assert seconds["grpo", "long/seed2"] == pytest.approx(60 * 2.0, abs=0.5)
    assert seconds["sft", "a/seed2"] == pytest.approx(6 * 2.0, abs=0.5)
    # What is done is not done again.
    assert ("grpo", "a/seed1") not in seconds
    assert forecast.disk_bytes


def test_an_empty_workspace_is_no_error_and_no_number(tmp_path: Path) -> None:
    plan = _plan(tmp_path / "none", {"a": (), "b": ("grpo.beta=0.1",)}, (1,))
    before = forecast_sweep(plan)
    assert before.forecast.wall_seconds is None
    assert sweep_json(plan, before)["forecast"]["kinds"][0]["seconds"] is None
    assert not (tmp_path / "none").exists(), "looking writes nothing"


def test_a_record_that_cannot_be_read_is_passed_over(root: Path, tmp_path: Path) -> None:
    """One damaged stage among thousands must not keep a sweep from being planned."""
    run = RecordedRun(root, "seed=7")
    run.fail("sft", Outcome("bug", "stop", "no"))
    (root / "runs" / run.run.run / "run.json").write_text("{")
    assert forecast_of(_plan(root, {"a": ()}, (1,)), Workspace.read_only(root)).stages


def test_limits_are_held_against_what_is_left(root: Path) -> None:
    arms = {"a": ("grpo.resources.gpus=2",)}
    plan = _plan(root, arms, (1, 2))
    plan = replace(plan, sweep=replace(plan.sweep, limits=Limits(disk_gb=0.001)))
    before = forecast_sweep(plan)
    assert [p.field for p in before.passed] == ["disk_gb"]
    assert any(line.startswith("Limit: needs") for line in before.lines())


def _train_on_groups(run: RecordedRun) -> None:
    """A step of GRPO with groups of four answers, rewarded by the real thing."""
    prompts = prompt_rows(2 * PROMPTS)[PROMPTS : PROMPTS + 3]
    items = [
        RewardInput(prompt, random_copier(prompt.prompt_text, random.Random(number)), stopped=True)
        for prompt in prompts
        for number in range(4)
    ]
    results = compute_rewards(items, run.config.reward, build_judge(run.config.judge))

    def work(attempt: AttemptRun) -> dict[str, Any]:
        rows = []
        for place, (item, result) in enumerate(zip(items, results, strict=True)):
            row = sample_row(item.prompt, place % 4, item.text, length_tokens=9, stopped=True,
                             result=result)  # fmt: skip
            kept = ("sample_id", "sample_index", "response_text", "finish_reason", "status",
                    "judgements", "reward")  # fmt: skip
            rows.append({"step": 1, **{k: row[k] for k in kept}, "advantage": 0.5,
                         "reward/rubric": row["rubric_score"]})  # fmt: skip
        attempt.io.save_rollouts(1, rows)
        write_model(attempt.output_dir / "model", f"grpo {run.config.seed}")
        return training_report("grpo", 1)

    run.do("grpo", work)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms with two seeds each, evaluated."""
    root = tmp_path_factory.mktemp("compared") / "runs"
    qualities = iter((1.0, 0.5, 0.67, 0.34))
    for beta in (0.001, 0.01):
        for seed in (1, 2):
            run = RecordedRun(root, f"grpo.beta={beta}", f"seed={seed}")
            for name, make in (("data", run.data), ("sft", lambda r=run: r.train("sft"))):
                if run.workspace.read_result(run.stage(name).id) is None:
                    make()
            _train_on_groups(run)
            run.evaluate("evaluate-grpo", next(qualities))
    return root


def test_spreads_come_from_earlier_arms_with_seeds_in_common(compared: Path) -> None:
    plan = _plan(compared, {"a": (), "b": ("grpo.beta=0.1",)}, (1, 2, 3))
    found = forecast_sweep(plan).detectable
    assert found.evidence.basis == "pairs"
    assert found.prompts is not None
    known = found.evidence.components
    assert known is not None
    assert (known.seeds, known.prompts) == (2, PROMPTS)
    assert found.effect is not None
    assert "2 seeds" in found.evidence.text


def test_without_earlier_evaluations_the_worst_case_is_said_to_be_assumed(root: Path) -> None:
    plan = _plan(root, {"a": (), "b": ("grpo.beta=0.1",)}, (1, 2, 3))
    found = forecast_sweep(plan).detectable
    assert found.evidence.basis == "assumed"
    assert found.evidence.mean is not None, "where the metric stands is known all the same"


def test_rescoring_says_which_groups_other_rewards_would_change(compared: Path) -> None:
    """Before a GPU is asked for: an ablation that changes no group's winner cannot train another
    model."""
    workspace = Workspace.read_only(compared)
    run = workspace.read_run(workspace.run_ids()[-1])
    arms = {
        "own": (),
        "additive": ("reward.combination=additive",),
        "beta": ("grpo.beta=0.2",),
        "served": JUDGED,
    }
    found = {a["arm"]: a for a in rescore_share(_plan(compared, arms, (1,)), run.run)["arms"]}
    assert found["own"]["note"] == "rewards and judges as the run did"
    assert found["additive"]["sign_changed"] is not None
    assert found["additive"]["calls"] == 0
    assert "grpo.beta" in found["beta"]["note"]
    # A server is never asked: the command that would is named.
    assert found["served"]["calls"] > 0
    assert found["served"]["best_changed"] is None
    assert found["served"]["command"].startswith(f"refiner rescore {run.run} workspace=")
    assert "judge.model=big" in found["served"]["command"]
