"""SFT: what it trains on, what it refuses, what it reports."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from refiner_core.contract.errors import ConfigurationError, DataError, StageFailed
from refiner_core.contract.types import DemonstrationRow
from refiner_core.data.prepared import write_demonstrations
from refiner_core.training.sft import train_sft
from tests.support.stage_io import FolderStageIO
from tests.support.tiny_training import demonstrations, recipe, save_data, save_tiny_model


@pytest.fixture
def run(tmp_path):
    """Train; keyword arguments change the ``sft`` section."""
    save_data(tmp_path / "data")
    save_tiny_model(tmp_path / "model")

    def train(name: str = "io", config=None, stage="sft", **sft):
        io = FolderStageIO(tmp_path / name)
        report = train_sft(
            config or recipe(sft=sft),
            data_dir=tmp_path / "data",
            model_ref=str(tmp_path / "model"),
            output_dir=tmp_path / name / "out",
            io=io,
            stage=stage,
        )
        return report, io

    train.root = tmp_path  # type: ignore[attr-defined]
    return train


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


def test_weights_are_exported_in_the_type_they_are_trained_in(run):
    run("bf16", recipe(sft={"max_train_steps": 2}, model={"dtype": "bfloat16"}))
    again = AutoModelForCausalLM.from_pretrained(run.root / "bf16/out/model", dtype="auto")
    assert again.dtype == torch.bfloat16


def test_rft_is_sft_with_a_section_of_its_own(run):
    config = recipe()
    other = replace(config.sft, learning_rate=0.5, pack_length=8)
    one, _ = run("sft", config)
    two, io = run("rft", replace(config, sft=other, rft=config.sft), "rft")
    assert one == two
    weights = [run.root / name / "out/model/model.safetensors" for name in ("sft", "rft")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    progress = next((io.root / "checkpoints").rglob("progress.json"))
    assert json.loads(progress.read_text())["stage"] == "rft"
