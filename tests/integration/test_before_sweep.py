"""The forecast of a sweep from the records of a workspace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.running.calls import make_recipe_plan
from flows.sweeping.forecasting import forecast_of
from flows.sweeping.planning import forecast_sweep
from infra.attempt.attempt import AttemptRun
from infra.store.workspace import Workspace
from refiner_core.contract.records import ArmRecord
from sweeps.values import Question, SweepFile, SweepPlan, Trial
from tests.support.recorded_run import PROMPTS, SMALL, RecordedRun


def _plan(root: Path, arms: dict[str, tuple[str, ...]], seeds: tuple[int, ...]) -> SweepPlan:
    def trial(name: str, seed: int) -> Trial:
        words = (*SMALL, f"workspace={root}", *arms[name], f"seed={seed}")
        return Trial(name, seed, arms[name], make_recipe_plan("tiny", words))

    trials = [trial(name, seed) for seed in seeds for name in arms]
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
            run.train("grpo")
            run.evaluate("evaluate-grpo", next(qualities))
    return root


def test_spreads_come_from_earlier_arms_with_seeds_in_common(compared: Path) -> None:
    plan = _plan(compared, {"a": (), "b": ("grpo.beta=0.1",)}, (1, 2, 3))
    found = forecast_sweep(plan).detectable
    assert found.evidence.basis == "pairs"
    known = found.evidence.components
    assert (known.seeds, known.prompts) == (2, PROMPTS)
    assert "2 seeds" in found.evidence.text
