"""Weights that a Hub has can be reclaimed; whatever a stage still waits for cannot."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from flows.cli.machine import disk_command
from infra.disk.garbage_collection import ReclaimOrder
from infra.disk.inventory import read_holds
from infra.disk.manager import DiskManager
from infra.store.checkpoints import CheckpointStore, RetainedCheckpoints, pin, read_reclaimed
from infra.store.workspace import Workspace
from refiner_core.contract.config import DiskConfig, PublishConfig
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.records import to_json
from tests.support.disk import finish, save, weights_go
from tests.support.git_hub import LoopbackHub
from tests.support.git_store import pointer_text
from tests.support.plans import SOURCES, claim, run_record, small_config

MIB = 1 << 20
REPO = "me/model"
#: What the client asks of its own accord once a day.
REGISTRY = {"/api/agent-harnesses"}


def stepwise_plan(*steps: int) -> Plan:
    """GRPO of four steps, of which ``steps`` are published before it ends."""
    config = small_config("data", "grpo", "publish", "evaluate")
    publish = PublishConfig(which="listed", steps=steps)
    grpo = replace(config.grpo, num_training_steps=4, save_freq=1, keep=2)
    return make_plan(replace(config, publish=publish, grpo=grpo), SOURCES)


class Exported(NamedTuple):
    """An exported step that was published on a Hub."""

    plan: Plan
    export: str
    publish: str
    weights: Path
    data: bytes
    commit: str


def publish_on(hub: LoopbackHub, data: bytes) -> tuple[str, dict[str, object]]:
    """Weights in a commit of a private repository, and what a publish stage reports of it."""
    git = hub.create(REPO)
    digest = hashlib.sha256(data).hexdigest()
    git.put_large(digest, data)
    head = git.refs("heads")["main"]
    blob = git.blob(pointer_text(digest, len(data)))
    commit = git.commit({**git.files(head), "model.safetensors": blob}, head, "step 2")
    git.set_ref("heads/main", commit)
    git.set_ref("tags/step-2", commit)
    report = {
        "repo_id": REPO,
        "where": "hub",
        "target": f"{hub.url}/{REPO}/tree/step-2",
        "revision": "step-2",
        "commit": commit,
        "verified": True,
        "files": [{"path": "model.safetensors", "bytes": len(data), "sha256": digest}],
    }
    return commit, report


@pytest.fixture
def exported(workspace: Workspace, hub: LoopbackHub) -> Exported:
    plan = stepwise_plan(2)
    for name in ("export-step2", "publish-step2", "evaluate-grpo-step2"):
        claim(workspace, plan, name)
    data = os.urandom(MIB)
    commit, report = publish_on(hub, data)
    by_name = {name: stage.id for name, stage in plan.by_name.items()}
    finish(workspace, by_name["evaluate-grpo-step2"])
    finish(workspace, by_name["export-step2"], model_safetensors=data, config_json=b"{}")
    finish(workspace, by_name["publish-step2"], report=report)
    weights = workspace.layout.attempt(by_name["export-step2"], 1).output / "model"
    publish = by_name["publish-step2"]
    return Exported(
        plan, by_name["export-step2"], publish, weights / "model.safetensors", data, commit
    )


def finish_again(workspace: Workspace, exported: Exported, **report: object) -> None:
    """Change the report of the publish stage."""
    path = workspace.layout.stage(exported.publish).result
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "report": {**result["report"], **report}}))


def reclaim(workspace: Workspace) -> tuple[str, ...]:
    disk_manager = DiskManager(workspace, DiskConfig())
    return disk_manager.carry_out(disk_manager.candidates()).items


# ---------------------------------------------------------------- published on a Hub


def test_weights_on_a_hub_go(workspace: Workspace, hub: LoopbackHub, exported: Exported) -> None:
    before, where = len(hub.log), f"workspace={workspace.root}"
    (row,) = json.loads(CliRunner().invoke(disk_command, [where, "--json"]).stdout)["published"]
    assert (row["where"], row["revision"], row["commit"]) == ("hub", "step-2", exported.commit)
    assert row["here_bytes"] >= MIB
    assert str(exported.weights.parent.parent) in reclaim(workspace)
    assert not exported.weights.exists()
    assert (exported.weights.parent / "config.json").exists(), "only weights are large"
    asked = {r.path for r in hub.log[before:]} - REGISTRY
    assert asked == {f"/api/models/{REPO}/tree/{exported.commit}"}
    note = read_reclaimed(workspace.layout.stage(exported.export))
    damage = workspace.output_damage(exported.export) or ""
    assert f"{hub.url}/{REPO}/tree/step-2 (commit {exported.commit[:12]})" in damage
    (row,) = json.loads(CliRunner().invoke(disk_command, [where, "--json"]).stdout)["published"]
    assert row["here_bytes"] == 0
    assert "hf download" in row["reclaimed"]
    command = note["way_back"]
    assert command in damage
    # What the message says works as it stands, in a shell with the user's token.
    environment = {**os.environ, "HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1"}
    hf = Path(sys.executable).with_name("hf")
    done = subprocess.run(
        ["bash", "-c", command.replace(" hf ", f" {hf} ", 1)],
        env={**environment, "HF_HUB_OFFLINE": "0", "HF_HOME": str(workspace.root / "hf")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert exported.weights.read_bytes() == exported.data
    assert workspace.output_damage(exported.export) is None


def test_one_verified_copy_is_enough(workspace: Workspace, exported: Exported) -> None:
    for change in ({"verified": False}, {"verified": True, "commit": None}):
        finish_again(workspace, exported, **change)
        assert not weights_go(workspace), change
    finish_again(workspace, exported, commit=exported.commit)
    config = exported.plan.config
    plan = make_plan(replace(config, publish=replace(config.publish, files=("*.json",))), SOURCES)
    other = claim(workspace, plan, "publish-step2")
    assert other.id != exported.publish
    report = json.loads(workspace.layout.stage(exported.publish).result.read_text())["report"]
    finish(workspace, other.id, report={**report, "files": []})
    reclaim(workspace)
    assert not exported.weights.exists()


@pytest.mark.parametrize(
    "trouble", ["commit gone", "other bytes", "repository gone", "no network", "offline", "token"]
)
def test_weights_stay_while_the_hub_does_not_vouch_for_them(
    workspace: Workspace,
    hub: LoopbackHub,
    exported: Exported,
    trouble: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    git = hub.git(REPO)
    if trouble == "commit gone":
        (git.folder / "objects" / exported.commit[:2] / exported.commit[2:]).unlink()
    elif trouble == "other bytes":
        commit = hub.add(REPO, {"model.safetensors": b"other"})
        finish_again(workspace, exported, commit=commit)
    elif trouble == "repository gone":
        del hub.repos[REPO]
    elif trouble == "no network":
        hub._server.shutdown()
        hub._server.server_close()
    elif trouble == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    assert weights_go(workspace), "by the records alone they might"
    reclaim(workspace)
    assert exported.weights.read_bytes() == exported.data
    assert read_reclaimed(workspace.layout.stage(exported.export)) is None
    assert "was not reclaimed" in caplog.text, "the log says why"
    assert REPO in caplog.text


def test_our_token_goes_to_no_hub_but_the_one_that_is_configured(
    workspace: Workspace, hub: LoopbackHub, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    reclaim(workspace)
    assert hub.log == []
    assert exported.weights.exists()


# ---------------------------------------------------------------- who still needs what


@pytest.mark.parametrize("unfinished", ["publish-step2", "evaluate-grpo-step2"])
def test_exports_wait_for_reads(workspace: Workspace, exported: Exported, unfinished: str) -> None:
    run = run_record(workspace, exported.plan)
    workspace.write_run(replace(run, config=to_json(exported.plan.config)))
    assert weights_go(workspace), "GRPO and its publication read nothing of it"
    stage = workspace.layout.stage(exported.plan.by_name[unfinished].id)
    stage.result.unlink()
    assert not weights_go(workspace)


@pytest.mark.parametrize("known", [True, False])
def test_publications_protect_input(workspace: Workspace, exported: Exported, known: bool) -> None:
    config = exported.plan.config
    config = replace(config, only=("evaluate-grpo-step2",))
    config = replace(config, evaluate=replace(config.evaluate, num_samples=9))
    run = run_record(workspace, make_plan(config, SOURCES))
    assert weights_go(workspace)
    provenance = {"sources": SOURCES} if known else {}
    workspace.write_run(replace(run, config=to_json(config), provenance=provenance))
    assert not weights_go(workspace), "the export is no stage of that call, but its input"


@pytest.mark.parametrize("who", ["pin", "run", "attempt", "unreadable run"])
def test_late_readers_are_respected(workspace: Workspace, exported: Exported, who: str) -> None:
    disk_manager = DiskManager(workspace, DiskConfig())
    candidates = [c for c in disk_manager.candidates() if c.rank is ReclaimOrder.WEIGHTS]
    assert candidates
    plan = exported.plan
    again = replace(plan.config, evaluate=replace(plan.config.evaluate, num_samples=9))
    other = make_plan(again, SOURCES)
    if who == "pin":
        pin(workspace.layout, exported.export)
    elif who == "run":
        workspace.write_run(replace(run_record(workspace, other), config=to_json(other.config)))
    elif who == "attempt":
        claim(workspace, other, "evaluate-grpo-step2")
    else:
        paths = workspace.layout.run(workspace.new_run_id("broken"))
        paths.record.write_text("{")
    assert disk_manager.carry_out(candidates).items == ()
    assert exported.weights.exists()


# ---------------------------------------------------------------- held checkpoints


def holding(workspace: Workspace, *steps: int) -> tuple[Plan, str]:
    """A plan whose holds are noted, and the id of its training stage, which has saved 1 to 4."""
    plan = stepwise_plan(*steps)
    grpo = claim(workspace, plan, "grpo").id
    save(workspace, grpo, 1, 2, 3, 4)
    return plan, grpo


def steps_of(workspace: Workspace, stage_id: str) -> list[int]:
    store = CheckpointStore(workspace.layout.stage(stage_id).checkpoints, 0)
    return [c.step for c in store.complete()]


@pytest.mark.parametrize("trained", [False, True])
def test_a_held_checkpoint_stays(workspace: Workspace, trained: bool) -> None:
    plan, grpo = holding(workspace, 2)
    RetainedCheckpoints(plan, workspace.layout).keep(())
    if trained:
        finish(workspace, grpo)
    reclaim(workspace)
    assert steps_of(workspace, grpo) == ([2] if trained else [2, 4])
    assert [bool(h.idle) for h in read_holds(workspace)] == [True], "no run needs it"
    workspace.layout.run(workspace.new_run_id("broken")).record.write_text("{")
    assert [h.idle for h in read_holds(workspace)] == [""], "a run that cannot be read may"


def test_a_late_hold_is_respected(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, grpo = holding(workspace, 2)
    disk_manager = DiskManager(workspace, DiskConfig())
    candidates = disk_manager.candidates()
    assert [c.step for c in candidates] == [1, 2, 3]
    holds, rename = RetainedCheckpoints(plan, workspace.layout), Path.rename

    def late(path: Path, target: Path) -> Path:
        """Right after the last look and before the checkpoint is out of sight."""
        if path.name == "step-00000002":
            holds.keep(())
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    disk_manager.carry_out(candidates)
    assert steps_of(workspace, grpo) == [2, 4]
    assert holds.there(()) == {(grpo, 2)}


def test_a_reclaim_drops_the_holds_of_a_cancelled_run(workspace: Workspace) -> None:
    plan, grpo = holding(workspace, 1, 2)
    RetainedCheckpoints(plan, workspace.layout).keep(())
    run = replace(run_record(workspace, plan), config=to_json(plan.config))
    workspace.write_run(run)
    where = f"workspace={workspace.root}"
    runner = CliRunner()
    assert "still to come" in runner.invoke(disk_command, [where]).output
    runner.invoke(disk_command, [where, "--reclaim"], catch_exceptions=False)
    assert steps_of(workspace, grpo) == [1, 2, 4]

    workspace.request_cancel(run.run, "somebody", stages=["export-step1"])
    assert "idle, cancelled" in runner.invoke(disk_command, [where]).output
    dry = runner.invoke(disk_command, [where, "--reclaim", "--dry-run", "--json"])
    value = json.loads(dry.stdout)
    assert [h["step"] for h in value["holds"]] == [1]
    assert [c["kind"] for c in value["candidates"]] == ["older"]
    assert len(read_holds(workspace)) == 2, "a dry run lets nothing go"
    said = runner.invoke(disk_command, [where, "--reclaim"], catch_exceptions=False).output
    assert f"The hold on step 1 of {grpo} was released" in said
    assert steps_of(workspace, grpo) == [2, 4]
    assert [h.step for h in read_holds(workspace)] == [2]
