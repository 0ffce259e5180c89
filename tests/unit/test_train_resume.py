"""A run that was interrupted anywhere and resumed is bitwise the run that was not."""

from pathlib import Path
from typing import Any

import pytest

from refiner_core.training.steps.checkpoint_manager import curve
from tests.support.threaded_judge import ThreadedJudge
from tests.support.tiny_training import (
    AnsweringSampler,
    LiveSampler,
    TrainRun,
    save_answering_inputs,
    save_data,
    save_tiny_model,
)

pytestmark = pytest.mark.slow


def live(inputs: Path, root: Path, kind: str, **sections: Any) -> TrainRun:
    run = TrainRun(inputs, root, kind, **sections)
    run.sampler = LiveSampler()
    return run


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    save_data(root / "data")
    save_tiny_model(root / "model")
    return root


@pytest.fixture(scope="module")
def references(inputs, tmp_path_factory):
    """Report and outcome of an uninterrupted run, by kind."""
    runs = {kind: live(inputs, tmp_path_factory.mktemp(kind), kind) for kind in ("sft", "grpo")}
    return {kind: (run(), run.outcome()) for kind, run in runs.items()}


@pytest.fixture(params=["sft", "grpo"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def is_whole(references):
    """Check that a run ends as the uninterrupted one."""

    def check(run: TrainRun, report: dict[str, Any]) -> None:
        assert report == references[run.kind][0]
        assert run.outcome() == references[run.kind][1]

    return check


def test_stopping_after_every_step_resumes_bitwise(references, is_whole, inputs, tmp_path, kind):
    run = live(inputs, tmp_path, kind)
    is_whole(run, run.stopped_after(*range(1, references[kind][0]["steps"])))


@pytest.mark.parametrize(("fail_save_at", "saved"), [(2, []), (4, [2])])
def test_a_crash_while_saving_goes_back_to_the_checkpoint_before(
    is_whole, inputs, tmp_path, kind, fail_save_at, saved
):
    run = live(inputs, tmp_path, kind)
    run.io.fail_save_at = fail_save_at
    with pytest.raises(OSError, match="while saving"):
        run()
    assert run.io.checkpoint_steps() == saved
    run.io.fail_save_at = None
    is_whole(run, run())


def test_how_it_is_carried_out_changes_nothing(is_whole, inputs, tmp_path, kind):
    run = live(
        inputs, tmp_path, kind, model={"gradient_checkpointing": True}, **{kind: {"save_freq": 100}}
    )
    is_whole(run, run())


def test_a_crash_while_generating_repeats_the_same_rollouts(is_whole, inputs, tmp_path):
    run = live(inputs, tmp_path, "grpo")
    for further in (1, 2, 4):
        run.sampler.fail_at_call = run.sampler.calls + further
        with pytest.raises(RuntimeError, match="while generating"):
            run()
    is_whole(run, run())


@pytest.mark.parametrize("case", ["embedded sampler", "streaming judge", "several updates"])
def test_other_setups_resume_bitwise(inputs, tmp_path, case):
    """A judge that streams answers in any order, and its store knows more the second time."""
    grpo = {"num_mini_batches": 2, "num_epochs": 2, "clip_higher": 0.01, "adam_beta2": 0.98}
    answering = save_answering_inputs(tmp_path / "inputs")

    def make(name: str) -> TrainRun:
        if case == "embedded sampler":
            return TrainRun(inputs, tmp_path / name)
        if case == "several updates":
            return live(inputs, tmp_path / name, "grpo", grpo=grpo)
        run = TrainRun(answering, tmp_path / name)
        run.sampler, run.judge, run.rewards = AnsweringSampler(), ThreadedJudge(), None
        return run

    whole, cut = make("whole"), make("cut")
    report = whole()
    if case == "several updates":
        assert any((share or 0) > 0 for share in whole.column("policy/clipfrac_avg"))
    assert cut.stopped_after(1, 3) == report
    assert cut.outcome() == whole.outcome()


def test_a_point_of_a_curve_stands_at_its_step_also_after_steps_without_that_number() -> None:
    assert curve([0.5, None, 0.7]) == [[1, 0.5], [3, 0.7]]
    assert curve([None, None]) == []
    long = curve([float(i) for i in range(1000)])
    assert len(long) <= 101
    assert long[0] == [1, 0.0]
    assert long[-1] == [1000, 999.0]
