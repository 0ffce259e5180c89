"""The forecast of disk space before a run: from measurements, else from the model's size."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flows.cli.machine import disk_command
from flows.cli.main import main
from flows.cli.plan import plan_command
from infra.disk.forecast import (
    STATE_BYTES,
    Forecast,
    ModelSize,
    StageNeed,
    forecast_disk,
    model_size,
)
from infra.store.workspace import Workspace
from refiner_core.contract.config import (
    CommandConfig,
    DiskConfig,
    GrpoConfig,
    ModelConfig,
    PublishConfig,
)
from refiner_core.contract.plan import Plan, make_plan
from tests.support.disk import finish, foreign_checkpoint, save
from tests.support.plans import SOURCES, claim, small_config, small_plan

MIB, GIB = 1 << 20, 1 << 30
FOUR_B = ModelSize(4 * 10**9, "from the name")


def plan_of(**grpo: Any) -> Plan:
    settings = GrpoConfig(num_training_steps=200, save_freq=50, **grpo)
    config = replace(small_config("data", "grpo"), grpo=settings)
    return make_plan(replace(config, model=replace(config.model, dtype="bfloat16")), SOURCES)


def need(plan: Plan, workspace: Workspace, kind: str = "grpo") -> StageNeed:
    found = forecast_disk([plan], workspace, lambda _: FOUR_B)
    return next(s for s in found.stages if s.stage.kind == kind)


# ---------------------------------------------------------------- sizes


def test_a_checkpoint_is_as_large_as_forecast(tmp_path: Path) -> None:
    import torch

    from refiner_core.training.engines.plain import PlainEngine
    from refiner_core.training.model.loading import LoadedModel
    from tests.support.tiny_training import tiny_tokenizer

    class Layer(torch.nn.Linear):
        """What an engine asks of a model; of transformers it needs nothing."""

        device = torch.device("cpu")

        def get_input_embeddings(self) -> None: ...

        def get_output_embeddings(self) -> None: ...

    for dtype in ("float32", "bfloat16"):
        model = Layer(400, 300, dtype=getattr(torch, dtype))
        loaded = LoadedModel(model, tiny_tokenizer(), share_prompts=False, balance=None)
        engine = PlainEngine(loaded, ModelConfig(), learning_rate=1e-3, max_grad_norm=1.0)
        model(torch.ones(400, dtype=getattr(torch, dtype))).sum().backward()
        engine.step(1.0)
        folder = tmp_path / dtype
        folder.mkdir()
        engine.snapshot({}).write(folder)
        written = sum(p.stat().st_size for p in folder.iterdir())
        parameters = sum(p.numel() for p in model.parameters())
        assert written == pytest.approx(parameters * STATE_BYTES[dtype], rel=0.1)


def test_a_4b_model_in_bfloat16_takes_56_gb_a_checkpoint(workspace: Workspace) -> None:
    one = 4 * 10**9 * 14
    kept_two, kept_one = need(plan_of(keep=2), workspace), need(plan_of(keep=1), workspace)
    assert kept_two.peak - kept_two.kept == 2 * one
    assert kept_one.peak == kept_two.peak, "while it saves, the old one is still there"
    assert kept_one.final == kept_two.final - one
    assert need(plan_of(keep=5), workspace).peak - kept_two.kept == 4 * one, "it saves four times"


def test_an_own_trainer_takes_what_it_keeps_and_one_more(workspace: Workspace) -> None:
    """What its checkpoints take is learned from those that are there: nothing else tells."""
    command = CommandConfig(run="train", keep=3)
    plan = make_plan(replace(small_config("command"), command=command), SOURCES)
    assert forecast_disk([plan], workspace, lambda _: FOUR_B).unknown == ("command",)
    stage = claim(workspace, plan, "command")
    for step in (10, 20):
        foreign_checkpoint(workspace.layout.stage(stage.id).data / "work", step)
    found = need(plan, workspace, "command")
    assert 4 * 9 * MIB < found.peak < 4 * 10 * MIB
    assert found.basis == "measured"
    assert found.known
    other = replace(plan.config, command=CommandConfig(run="another one"))
    plans = [make_plan(other, SOURCES)]
    assert forecast_disk(plans, workspace, lambda _: FOUR_B).unknown == ("command",)


def test_what_was_measured_counts_more_than_what_is_computed(workspace: Workspace) -> None:
    plan = plan_of(keep=2)
    claim(workspace, plan, "data")
    stage = claim(workspace, plan, "grpo")
    save(workspace, stage.id, 50, size=3 * MIB)
    found = need(plan, workspace)
    assert found.basis == "measured"
    assert 2 * 3 * MIB <= found.peak - found.kept < 2 * 4 * MIB


def test_shared_stages_count_once_and_finished_ones_not_at_all(workspace: Workspace) -> None:
    known = (workspace, lambda _: FOUR_B)
    one, two = plan_of(beta=0.0), plan_of(beta=0.1)
    both = forecast_disk([one, two], *known)
    assert sorted(s.stage.kind for s in both.stages) == ["data", "grpo", "grpo"]
    assert both.final_bytes > 1.9 * forecast_disk([one], *known).final_bytes
    claim(workspace, one, "data")
    finish(workspace, one.by_name["data"].id)
    left = forecast_disk([one], workspace, lambda _: ModelSize(None, "?"))
    assert [s.stage.kind for s in left.stages] == ["grpo"]
    assert left.unknown == ("grpo",)


def test_a_reclaim_makes_space_for_the_next_trial(workspace: Workspace) -> None:
    plans = [plan_of(beta=b) for b in (0.0, 0.1, 0.2)]
    found = forecast_disk(plans, workspace, lambda _: FOUR_B)
    one = replace(found, parallel=1)
    assert isinstance(one, Forecast)
    assert one.least_bytes < one.peak_bytes
    assert one.needed_bytes == one.least_bytes
    assert replace(one, reclaim=False).needed_bytes == one.peak_bytes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen3-4B", 4 * 10**9),
        ("Qwen/Qwen3.5-0.6b-base", 6 * 10**8),
        ("me/refiner-135m", 135 * 10**6),
        ("me/v3b", 3 * 10**9),
        ("Qwen/Qwen3-30B-A3B", 30 * 10**9),
        ("me/model-8bit", None),
        ("me/refiner", None),
    ],
)
def test_names_tell_sizes(name: str, parameters: int | None) -> None:
    assert model_size(None, name).parameters == parameters


def test_local_models_are_counted_without_loading_them(tmp_path: Path) -> None:
    from refiner_core.models import tiny_model_dir

    counted = model_size(tiny_model_dir(), "builtin:tiny").parameters
    assert counted is not None
    assert counted == pytest.approx(
        (tiny_model_dir() / "model.safetensors").stat().st_size / 4, rel=0.01
    )
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    assert model_size(tmp_path, "x").parameters is None


# ---------------------------------------------------------------- the command


def run(command: Any, *words: str) -> Any:
    done = CliRunner().invoke(command, list(words))
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def test_plan_says_so_where_it_does_not_fit_and_what_takes_less(tmp_path: Path) -> None:
    where = f"workspace={tmp_path / 'none'}"
    assert "disk:" not in run(plan_command, "tiny", where).output
    assert "fits" in run(plan_command, "tiny", where, "--disk").output
    tight = (where, "disk.limit_gb=0.125")
    said = run(plan_command, "tiny", *tight).output
    assert "does not fit" in said
    assert "dispatch.max_parallel=1" in said
    value = json.loads(run(plan_command, "tiny", *tight, "--json").stdout)["disk"]
    assert not value["fits"]
    assert value["needed_bytes"] > value["free_bytes"]
    done = run(plan_command, "tiny", *tight, "dispatch.max_parallel=1", "--fit")
    assert "does not fit" not in done.stdout, "as the first call has said"
    assert "nothing any more" in done.stderr
    assert not (tmp_path / "none").exists()


def test_disk_shows_pins_and_reclaims(workspace: Workspace) -> None:
    plan = small_plan("data")
    stage = claim(workspace, plan, "data")
    save(workspace, stage.id, 1, 2, size=2 * MIB)
    where = f"workspace={workspace.root}"
    shown = run(disk_command, where).output
    assert "checkpoints  4.0 MiB" in shown
    assert "A reclaim would free 2.0 MiB (1 items)" in shown
    value = json.loads(run(disk_command, where, "--json").stdout)
    assert value["reclaimable"][0]["kind"] == "older"
    assert {u["kind"] for u in value["use"]} >= {"checkpoints", "records"}
    assert "is pinned" in run(disk_command, "pin", stage.id, where).output
    assert "nothing that may be deleted" in run(disk_command, where, "--reclaim").output
    assert stage.id in run(disk_command, where).output
    run(disk_command, "unpin", stage.id, where)
    assert "2.0 MiB would be free" in run(disk_command, where, "--reclaim", "--dry-run").output
    assert "2.0 MiB reclaimed" in run(disk_command, where, "--reclaim").output
    steps = workspace.layout.stage(stage.id).checkpoints
    assert [p.name for p in steps.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(
    "words", [["keep", "x"], ["pin"], ["pin", "no-such-stage"], ["--dry-run"], ["disk.nothing=1"]]
)
def test_disk_refuses_what_it_does_not_know(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["disk", f"workspace={tmp_path / 'none'}", *words]) == 2
    assert capsys.readouterr().err


def test_the_recorded_disk_section_counts_and_overrides_change_it(workspace: Workspace) -> None:
    from flows.disk import disk_config
    from refiner_core.contract.records import to_json
    from tests.support.plans import run_record

    assert disk_config(workspace) == DiskConfig()
    plan = small_plan("data", disk=DiskConfig(limit_gb=3.0, margin_gb=1.0))
    workspace.write_run(replace(run_record(workspace, plan), config=to_json(plan.config)))
    assert disk_config(workspace).limit_gb == 3.0
    changed = disk_config(workspace, ["disk.margin_gb=2"])
    assert (changed.limit_gb, changed.margin_gb) == (3.0, 2.0)


# ---------------------------------------------------------------- publications


def publishing_plan(which: str = "every-save", target: str = "folder", **grpo: Any) -> Plan:
    config = small_config("data", "grpo", "publish")
    settings = GrpoConfig(num_training_steps=200, save_freq=50, **grpo)
    publish = PublishConfig(which=which, target=target)
    model = replace(config.model, dtype="bfloat16")
    return make_plan(replace(config, grpo=settings, publish=publish, model=model), SOURCES)


def test_each_published_step_takes_space(workspace: Workspace) -> None:
    known, weights = (workspace, lambda _: FOUR_B), 4 * 10**9 * 2
    final = forecast_disk([publishing_plan("final")], *known).final_bytes
    every = forecast_disk([publishing_plan()], *known).final_bytes
    one_held = 4 * 10**9 * 14
    assert every - final == pytest.approx(3 * 2 * weights + one_held, rel=1e-3), "steps 50 to 150"
    hub = forecast_disk([publishing_plan(target="hub")], *known).final_bytes
    assert every - hub == pytest.approx(4 * weights, rel=1e-3), "nothing of it lies here"
