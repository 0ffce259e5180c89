"""A run that was interrupted anywhere and resumed is bitwise the run that was not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from refiner_core.contract.errors import Interrupted
from refiner_core.training.model import loading
from refiner_core.training.sft import train_sft
from tests.support.stage_io import FolderStageIO
from tests.support.threaded_judge import ThreadedJudge
from tests.support.tiny_training import (
    AnsweringSampler,
    LiveSampler,
    NoJudge,
    count_low_words,
    recipe,
    save_answering_inputs,
    save_data,
    save_tiny_model,
    train_rewarded,
)

pytestmark = pytest.mark.slow


class Stage:
    """One training stage over a folder, run with planned faults."""

    def __init__(self, kind: str, inputs: Path, root: Path, monkeypatch: Any, **sections: Any):
        self.kind, self.root, self.inputs = kind, root, inputs
        self.config = recipe(**sections)
        self.io = FolderStageIO(root / "io")
        self.sampler: LiveSampler | None = LiveSampler()
        self.judge, self.rewards = NoJudge(), count_low_words
        load = loading.load_for_training

        def load_and_tell(*args: Any) -> Any:
            loaded = load(*args)
            if self.sampler is not None:
                self.sampler.model = loaded.model
            return loaded

        monkeypatch.setattr(loading, "load_for_training", load_and_tell)

    def run(self) -> dict[str, Any]:
        torch.rand(3)  # a process that comes back has another random state
        common = {
            "data_dir": self.inputs / "data",
            "model_ref": str(self.inputs / "model"),
            "output_dir": self.root / "out",
            "io": self.io,
        }
        if self.kind == "sft":
            return train_sft(self.config, **common)
        return train_rewarded(
            self.rewards,
            self.config,
            **common,
            judge=self.judge,
            generator=self.sampler,
        )

    def outcome(self) -> dict[str, Any]:
        """All that must not depend on interruptions."""
        return {
            "metrics": self.io.comparable_metrics(),
            "rollouts": self.io.rollouts(),
            "weights": {
                name: value.tolist()
                for name, value in load_file(self.root / "out/model/model.safetensors").items()
            },
        }


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    save_data(root / "data")
    save_tiny_model(root / "model")
    return root


@pytest.fixture(scope="module")
def references(inputs, tmp_path_factory):
    """(kind, report, outcome) of an uninterrupted run of either kind."""
    done = {}
    for kind in ("sft", "grpo"):
        with pytest.MonkeyPatch.context() as patch:
            stage = Stage(kind, inputs, tmp_path_factory.mktemp(kind), patch)
            done[kind] = (kind, stage.run(), stage.outcome())
    return done


@pytest.fixture(params=["sft", "grpo"])
def reference(request, references):
    return references[request.param]


@pytest.fixture
def stage(reference, inputs, tmp_path, monkeypatch):
    return partial(Stage, reference[0], inputs, tmp_path, monkeypatch)


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4])
def test_a_stop_saves_the_step_and_resumes_bitwise(reference, stage, stop_at):
    stage = stage()
    stage.io.stop_at = stop_at
    with pytest.raises(Interrupted):
        stage.run()
    assert stage.io.checkpoint_steps()[-1] == stop_at
    stage.io.stop_at = None
    assert stage.run() == reference[1]
    assert stage.outcome() == reference[2]


def test_stopping_after_every_step_resumes_bitwise(reference, stage):
    stage = stage()
    steps = reference[1]["steps"]
    for stop_at in range(1, steps):
        stage.io.stop_at = stop_at
        with pytest.raises(Interrupted):
            stage.run()
    stage.io.stop_at = None
    assert stage.run() == reference[1]
    assert stage.outcome() == reference[2]


def test_a_crash_while_saving_goes_back_to_the_checkpoint_before(reference, stage):
    stage = stage()
    stage.io.fail_save_at = 4
    with pytest.raises(OSError, match="while saving"):
        stage.run()
    assert stage.io.checkpoint_steps() == [2]
    stage.io.fail_save_at = None
    assert stage.run() == reference[1]
    assert stage.outcome() == reference[2]


def test_a_crash_before_the_first_checkpoint_starts_over(reference, stage):
    stage = stage()
    stage.io.fail_save_at = 2
    with pytest.raises(OSError, match="while saving"):
        stage.run()
    stage.io.fail_save_at = None
    assert stage.run() == reference[1]
    assert stage.outcome() == reference[2]


def test_how_often_it_saves_changes_nothing(reference, stage):
    kind, report, outcome = reference
    stage = stage(**{kind: {"save_freq": 100}})
    assert stage.run() == report
    assert stage.outcome() == outcome


def test_recomputing_activations_changes_nothing(reference, stage):
    stage = stage(model={"gradient_checkpointing": True})
    assert stage.run() == reference[1]
    assert stage.outcome() == reference[2]


@pytest.mark.parametrize("fail_at_call", [1, 2, 4])
def test_a_crash_while_generating_repeats_the_same_rollouts(
    references, inputs, tmp_path, monkeypatch, fail_at_call
):
    stage = Stage("grpo", inputs, tmp_path, monkeypatch)
    stage.sampler.fail_at_call = fail_at_call
    with pytest.raises(RuntimeError, match="while generating"):
        stage.run()
    assert stage.run() == references["grpo"][1]
    assert stage.outcome() == references["grpo"][2]


def test_a_stop_while_generating_gives_the_step_up_and_keeps_those_before(
    references, inputs, tmp_path, monkeypatch
):
    stage = Stage("grpo", inputs, tmp_path, monkeypatch, grpo={"save_freq": 100})
    monkeypatch.setattr(stage.io, "should_stop", lambda: stage.sampler.calls == 4)
    with pytest.raises(Interrupted, match="after step 3"):
        stage.run()
    assert stage.io.checkpoint_steps() == [3]
    stage.sampler.calls = 100
    assert stage.run() == references["grpo"][1]
    assert stage.outcome() == references["grpo"][2]


def test_with_the_embedded_sampler_it_resumes_bitwise_too(
    inputs, tmp_path, tmp_path_factory, monkeypatch
):
    with pytest.MonkeyPatch.context() as patch:
        whole = Stage("grpo", inputs, tmp_path_factory.mktemp("whole"), patch)
        whole.sampler = None
        report = whole.run()
    stage = Stage("grpo", inputs, tmp_path, monkeypatch)
    stage.sampler = None
    for stop_at in (1, 3):
        stage.io.stop_at = stop_at
        with pytest.raises(Interrupted):
            stage.run()
    stage.io.stop_at = None
    assert stage.run() == report
    assert stage.outcome() == whole.outcome()


def test_a_judge_that_streams_leaves_resume_bitwise(tmp_path_factory, tmp_path, monkeypatch):
    """Its answers come in any order and its store knows more the second time: neither is seen."""
    inputs = save_answering_inputs(tmp_path / "inputs")

    def stage(root: Path, patch: Any) -> Stage:
        made = Stage("grpo", inputs, root, patch)
        made.sampler, made.judge, made.rewards = AnsweringSampler(), ThreadedJudge(), None
        return made

    with pytest.MonkeyPatch.context() as patch:
        whole = stage(tmp_path_factory.mktemp("whole"), patch)
        report = whole.run()
    cut = stage(tmp_path, monkeypatch)
    for stop_at in (1, 3):
        cut.io.stop_at = stop_at
        with pytest.raises(Interrupted):
            cut.run()
    cut.io.stop_at = None
    assert cut.run() == report
    assert cut.outcome() == whole.outcome()


def test_several_optimiser_steps_per_rollout_resume_bitwise_too(
    inputs, tmp_path, tmp_path_factory, monkeypatch
):
    sections = {"grpo": {"num_mini_batches": 2, "num_epochs": 2, "clip_higher": 0.01}}
    with pytest.MonkeyPatch.context() as patch:
        whole = Stage("grpo", inputs, tmp_path_factory.mktemp("whole"), patch, **sections)
        report = whole.run()
    assert any(row.get("policy/clipfrac_avg", 0) > 0 for row in whole.io.metrics())
    stage = Stage("grpo", inputs, tmp_path, monkeypatch, **sections)
    stage.io.stop_at = 3
    with pytest.raises(Interrupted):
        stage.run()
    stage.io.stop_at = None
    assert stage.run() == report
    assert stage.outcome() == whole.outcome()


def test_a_point_of_a_curve_stands_at_its_step_also_after_steps_without_that_number() -> None:
    from refiner_core.training.steps.boundary import curve

    assert curve([0.5, None, 0.7]) == [[1, 0.5], [3, 0.7]]
    assert curve([None, None]) == []
    long = curve([float(i) for i in range(1000)])
    assert len(long) <= 101
    assert long[0] == [1, 0.0]
    assert long[-1] == [1000, 999.0]
