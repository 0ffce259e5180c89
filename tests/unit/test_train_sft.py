"""What SFT learns from, what it refuses, and what it reports."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from refiner_core.contract.errors import (
    ConfigurationError,
    DataError,
    StageFailed,
)
from refiner_core.contract.types import DemonstrationRow
from refiner_core.data.prepared import write_demonstrations
from refiner_core.training.batches import sft_steps
from refiner_core.training.sft import train_sft
from tests.support.stage_io import FolderStageIO
from tests.support.tiny_training import (
    demonstrations,
    recipe,
    save_data,
    save_tiny_model,
)


@pytest.fixture
def run(tmp_path):
    """Train; keyword arguments change the ``sft`` section."""
    save_data(tmp_path / "data")
    save_tiny_model(tmp_path / "model")

    def train(name: str = "io", **sft):
        io = FolderStageIO(tmp_path / name)
        report = train_sft(
            recipe(sft=sft),
            data_dir=tmp_path / "data",
            model_ref=str(tmp_path / "model"),
            output_dir=tmp_path / name / "out",
            io=io,
        )
        return report, io

    train.root = tmp_path
    return train


def test_it_learns_what_can_be_learnt(run):
    report, _ = run(num_train_epochs=12.0, lr_scheduler_type="constant")
    curve = report["validation_loss"]["curve"]
    assert report["validation_loss"]["best"] < 0.8 * curve[0][1]


def test_every_loss_token_of_an_epoch_is_trained_on_once(run):
    report, _ = run(num_train_epochs=1.0)
    rows = demonstrations(30)
    assert report["tokens"] == sum(len(row.input_ids) for row in rows)
    assert report["loss_tokens"] == sum(sum(row.loss_mask) for row in rows)


def test_prompt_tokens_are_context_and_never_targets(run):
    """The first loss is the plain mean over assistant tokens under the starting model."""
    path = run.root / "data/sft_train.parquet"
    rows = demonstrations(3)
    write_demonstrations(path, rows)
    report, _ = run(num_train_epochs=1.0)
    model = AutoModelForCausalLM.from_pretrained(run.root / "model")
    total = count = 0.0
    for row in rows:
        ids = torch.tensor([row.input_ids])
        labels = torch.where(torch.tensor([row.loss_mask]), ids, -100)
        tokens = sum(row.loss_mask)
        total += float(model(ids, labels=labels, use_cache=False).loss.detach()) * tokens
        count += tokens
    assert report["train_loss"]["first"] == pytest.approx(total / count, rel=1e-5)


def test_accumulating_is_the_same_as_a_larger_batch(run):
    """Packs of unlike sizes weigh by their tokens, not by pack."""
    large, _ = run("large", per_device_train_batch_size=4, gradient_accumulation_steps=1)
    small, _ = run("small", per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert small["steps"] == large["steps"]
    curves = [[loss for _, loss in report["train_loss"]["curve"]] for report in (small, large)]
    assert curves[0][:3] == pytest.approx(curves[1][:3], rel=1e-4)


def test_how_often_it_validates_changes_no_weight(run):
    (_, often), (_, never) = run("often", eval_freq=1), run("never", eval_freq=1000)
    pick = [[row["loss/train_avg"] for row in io.metrics()] for io in (often, never)]
    assert pick[0] == pick[1]


def test_a_demonstration_longer_than_a_pack_is_refused(run):
    row = DemonstrationRow("giant", (5,) * 60, (False,) + (True,) * 59)
    write_demonstrations(run.root / "data/sft_train.parquet", [*demonstrations(3), row])
    with pytest.raises(ConfigurationError, match="does not fit in a pack"):
        run()


def test_no_demonstrations_is_an_error_of_the_data(run):
    write_demonstrations(run.root / "data/sft_train.parquet", [])
    with pytest.raises(DataError, match="nothing to train on"):
        run()


def test_a_loss_that_is_not_finite_stops_the_stage_before_it_saves(run):
    with pytest.raises(StageFailed, match=r"step \d+"):
        run(learning_rate=math.inf, muon_learning_rate=math.inf, save_freq=100)
    assert FolderStageIO(run.root / "io").checkpoint_steps() == []


def test_weights_come_out_in_the_type_they_are_trained_in(run):
    config = recipe(sft={"max_train_steps": 2}, model={"dtype": "bfloat16"})
    io = FolderStageIO(run.root / "bf16")
    train_sft(
        config,
        data_dir=run.root / "data",
        model_ref=str(run.root / "model"),
        output_dir=run.root / "bf16",
        io=io,
    )
    again = AutoModelForCausalLM.from_pretrained(run.root / "bf16/model", dtype="auto")
    assert again.dtype == torch.bfloat16


LENGTHS = st.lists(st.integers(1, 10), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 4), st.sampled_from([1.0, 2.0, 3.0]))
def test_an_epoch_shows_every_row_once(lengths, packs_per_step, epochs):
    steps = sft_steps(1, lengths, pack_length=10, packs_per_step=packs_per_step, epochs=epochs)
    for epoch in range(int(epochs)):
        seen = [i for at, packs in steps if at == epoch for pack in packs for i in pack]
        assert sorted(seen) == list(range(len(lengths)))
