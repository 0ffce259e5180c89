"""The gold monitor of GRPO: training is the same with it, and it ends or pauses where it should."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.durations import monitor_cost
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.errors import ConfigurationError, Interrupted, JudgeOutage, MonitorPause
from refiner_core.contract.loading import load_recipe
from refiner_core.training import monitor
from refiner_core.training.monitor import Gold, choose_rows
from tests.support.tiny_training import (
    LiveSampler,
    NoJudge,
    TrainRun,
    low_or_high,
    prompts,
    save_data,
    save_tiny_model,
    watched,
)

ROWS, STEPS = 48, 12


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    save_data(root / "data")
    save_tiny_model(root / "model")
    return root


@pytest.fixture
def new(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs whose proxy is the share of low words, and whose gold is that of high ones."""

    monkeypatch.setattr(monitor, "_shares", low_or_high)

    def made(name: str, **section: Any) -> TrainRun:
        run = TrainRun(inputs, tmp_path / name)
        grpo = replace(
            run.config.grpo, num_training_steps=STEPS, save_freq=100, lr_scheduler_type="constant"
        )
        run.config = replace(run.config, stages=("data", "grpo"), grpo=grpo)
        if section:
            run.config = watched(run.config, **section)
            run.golds = [Gold("gold", run.config, NoJudge())]
        return run

    return made


def weights(run: TrainRun) -> Any:
    return run.outcome()["weights"]


def steps(run: TrainRun) -> list[dict[str, Any]]:
    """Metrics and rollouts, without what the monitor adds."""
    rows = run.io.comparable_metrics()
    return [{k: v for k, v in row.items() if not k.startswith("monitor/")} for row in rows]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_training_is_bitwise_the_same_with_it(new: Any, late: int) -> None:
    plain, watched = new("plain"), new("watched", every=2)
    settings = {"async_steps": late, "num_training_steps": 5, "active_sampling": late == 1}
    plain(**settings)
    report = watched(**settings)
    assert weights(watched) == weights(plain)
    assert steps(watched) == steps(plain)
    assert watched.io.rollouts() == plain.io.rollouts()
    assert [step for step, _ in report["monitor"]["gold"]] == [0, 2, 4, 5]
    assert watched.column("monitor/gold")[0] is None
    assert 0 <= watched.column("monitor/gold")[1] <= 1


def test_a_falling_gold_stops_the_run_with_the_best_weights(new: Any) -> None:
    run = new("stop", every=1, action="stop", keep=1.0)
    report = run()
    told = report["monitor"]
    assert 2 < told["stopped"] < STEPS
    assert len(run.io.metrics()) == told["stopped"], "no step after the stop"
    best = max(told["gold"][1:], key=lambda look: look[1])[0]
    assert (report["steps"], told["best"]) == (best, best)
    assert f"at step {told['stopped']}" in report["remark"]
    short = new("short")
    short(num_training_steps=best)
    assert weights(run) == weights(short)


@pytest.mark.slow
def test_an_interrupted_look_gives_the_same_series(new: Any) -> None:
    whole, cut = new("whole", every=2, rows=6), new("cut", every=2, rows=6)
    whole.sampler, cut.sampler = LiveSampler(), LiveSampler()
    expected = whole(num_training_steps=6)
    for call in (1, 4, 7):  # the looks at steps 0, 2 and 4, each at its first try
        cut.sampler.fail_at_call = cut.sampler.calls + call
        with pytest.raises(RuntimeError, match="while generating"):
            cut(num_training_steps=6, save_freq=1)
    cut.io.stop_at = 5
    with pytest.raises(Interrupted):
        cut(num_training_steps=6, save_freq=1)
    cut.io.stop_at = None
    assert cut(num_training_steps=6, save_freq=1) == expected
    assert cut.outcome() == whole.outcome()


def test_a_gold_judge_that_is_gone_costs_looks_and_no_training(
    new: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, run, gone, stops = new("plain"), new("some"), new("none"), new("stops")
    for one, action in ((run, "warn"), (gone, "warn"), (stops, "stop")):
        one.config = watched(one.config, every=2, action=action)
        one.golds = [Gold("gold", one.config, NoJudge())]
    plain(num_training_steps=4)
    answers = iter([False, True, True])  # at step 0, 2 and 4

    def shares(one: Gold, samples: Any) -> Any:
        if one.name == "gold" and not next(answers, False):
            raise JudgeOutage("Gold is gone", expected="an answer", fix="start it")
        return low_or_high(one, samples)

    monkeypatch.setattr(monitor, "_shares", shares)
    report = run(num_training_steps=4)
    assert [step for step, _ in report["monitor"]["gold"]] == [2, 4]
    assert weights(run) == weights(plain)
    assert "not looked once" in gone(num_training_steps=4)["remark"]
    with pytest.raises(JudgeOutage):
        stops(num_training_steps=4)


@pytest.mark.slow
def test_a_pause_happens_once_and_the_same_command_continues(new: Any) -> None:
    plain, run = new("plain"), new("pause", every=1, action="pause", keep=1.0)
    plain()
    with pytest.raises(MonitorPause, match="same command again to continue"):
        run()
    report = run()
    assert report["monitor"]["alarm"] < STEPS
    assert report["monitor"]["stopped"] is None
    assert weights(run) == weights(plain)


def test_the_best_checkpoint_by_gold_is_kept(new: Any) -> None:
    run = new("kept", every=1, keep=1.0)
    report = run()
    assert report["monitor"]["best"] in run.io.kept
    assert report["monitor"]["best"] in run.io.checkpoint_steps()


def test_monitored_prompts_are_held_out_and_not_evaluated(new: Any) -> None:
    run = new("rows", every=1)
    held_out = prompts(ROWS + 4, seed=3)
    evaluated = replace(run.config.evaluate, max_prompts=4)
    config = replace(run.config, stages=("data", "grpo", "evaluate"), evaluate=evaluated)
    rows = choose_rows(config, held_out)
    assert {row.sample_id for row in rows} == {row.sample_id for row in held_out[4:]}
    assert rows == choose_rows(replace(config, seed=99), held_out), "the same in all arms"
    with pytest.raises(ConfigurationError, match=r"evaluate.max_prompts=4"):
        choose_rows(replace(config, evaluate=replace(evaluated, max_prompts=5)), held_out)


ON = ("monitor.every=5", "evaluate.max_prompts=20")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (ON, r"monitor.gold. is \[\].*held-out-judge-v1"),
        ((*ON, "monitor.gold=[held-out-greedy-v1]"), "unlike the recipe's own"),
        ((*ON, "monitor.gold=[labels.jsonl]"), "Labels belong to the answers"),
        (("monitor.every=5", "monitor.gold=[gold-rubrics-v1]"), "evaluate.max_prompts=N"),
        (
            (*ON, "monitor.gold=[gold-rubrics-v1]", "monitor.action=stop", "publish.which=best"),
            "publish.which=final",
        ),
    ],
)
def test_a_monitor_that_says_nothing_is_refused(words: tuple[str, ...], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        check_config(load_recipe("tiny", words))


def test_by_default_it_adds_less_than_a_twentieth_to_the_judge_calls() -> None:
    for gold in ("gold-overall-v1", "held-out-judge-v1"):
        for every in (5, 10, 50):
            words = (f"monitor.every={every}", f"monitor.gold=[{gold}]", "evaluate.protocols=[]")
            config = load_recipe("refiner-gpt54", words)
            cost = monitor_cost(config)
            assert cost is not None
            assert cost.share is not None
            assert 0 < cost.share <= 0.05
