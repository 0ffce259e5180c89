"""The disk space of a run equals its forecast."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.running.calls import make_recipe_plan
from infra.disk.forecast import forecast_disk
from infra.disk.usage import take_inventory
from infra.store.workspace import Workspace
from refiner_core.models.random_model import save_random_model
from tests.support.command import SMALL, refiner


def test_the_disk_use_of_a_publishing_run_equals_its_forecast(tmp_path: Path) -> None:
    model = tmp_path / "model"  # large enough for its weights to be what counts
    save_random_model(model, hidden_size=256, num_hidden_layers=4, head_dim=64, seed=0)
    recipe = (
        *(f"workspace={tmp_path / 'runs'}", *(o for o in SMALL if "max_train" not in o)),
        *(f"model.name_or_path={model}", "stages=[data,sft,publish]", "sft.max_train_steps=3"),
        *("sft.keep=1", "publish.which=listed", "publish.steps=[2]"),
    )
    before = Workspace.read_only(tmp_path / "runs")
    forecast = forecast_disk([make_recipe_plan("tiny", recipe)], before)
    assert forecast.unknown == ()
    done = refiner("run", "tiny", *recipe, "--no-server")
    assert done.code == 0, done.stderr

    written: dict[str, int] = {}
    for item in take_inventory(Workspace.read_only(tmp_path / "runs").layout):
        kind = "publish" if item.kind == "published" else item.stage_id.partition("-")[0]
        written[kind] = written.get(kind, 0) + item.size.bytes
    expected = {need.stage.kind: need.final for need in forecast.stages}
    for kind in ("sft", "export", "publish"):
        assert expected[kind] == pytest.approx(written[kind], rel=0.15), kind
    written = {kind: size for kind, size in written.items() if kind in expected}
    assert forecast.final_bytes == pytest.approx(sum(written.values()), rel=0.15)
