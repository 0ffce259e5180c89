"""Workspaces with something in them: saved checkpoints, finished stages, published weights."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save as safetensors

from infra.disk.garbage_collection import ReclaimOrder
from infra.disk.manager import DiskManager
from infra.publishing import FolderTarget, report_of
from infra.store.checkpoints import CheckpointStore
from infra.store.workspace import Workspace
from refiner_core.contract.config import DiskConfig, PublishConfig
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import OutputFile, StageResult
from tests.support.plans import claim
from tests.support.publications import card, publication

MIB = 1 << 20
CONFIG = b'{"model_type": "qwen3"}'


def save(workspace: Workspace, stage_id: str, *steps: int, size: int = MIB) -> None:
    """Complete checkpoints of these steps, ``size`` bytes each."""
    store = CheckpointStore(workspace.layout.stage(stage_id).checkpoints, 1, keep=99)
    for step in steps:
        with store.new(step) as folder:
            (folder / "state.bin").write_bytes(os.urandom(size))


def steps_of(workspace: Workspace, stage_id: str) -> list[int]:
    """Steps of the complete checkpoints."""
    store = CheckpointStore(workspace.layout.stage(stage_id).checkpoints, 0)
    return [c.step for c in store.complete()]


def finish(
    workspace: Workspace,
    stage_id: str,
    number: int = 1,
    report: dict[str, object] | None = None,
    **files: bytes,
) -> StageResult:
    """The stage is done; its output holds ``files`` (``_`` in a name stands for a dot)."""
    output = workspace.layout.attempt(stage_id, number).output
    found = []
    for key, data in files.items():
        path = output / "model" / key.replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        found.append(OutputFile(f"model/{path.name}", len(data), digest))
    output.mkdir(parents=True, exist_ok=True)
    name = output.relative_to(workspace.layout.stage(stage_id).data).as_posix()
    result = StageResult(1, number, name, tuple(found), report or {}, {}, 1.0, "now")
    assert workspace.publish_result(stage_id, result)
    return result


def published(workspace: Workspace, tmp_path: Path, plan: Plan, **more: bytes) -> tuple[str, Path]:
    """A finished training stage whose weights lie in a folder, too."""
    for name in ("data", "sft", "publish"):
        claim(workspace, plan, name)
    sft, target = plan.by_name["sft"].id, tmp_path / "archive" / "model"
    files = {"model_safetensors": os.urandom(MIB), "config_json": CONFIG, **more}
    finish(workspace, sft, **files, tokenizer_config_json=b"{}")
    weights = workspace.layout.attempt(sft, 1).output / "model"
    (weights / "tokenizer.config.json").rename(weights / "tokenizer_config.json")
    sent = publication(
        tmp_path / "sent",
        1,
        files={p.name: p.read_bytes() for p in weights.iterdir()},
        final=True,
        repo_id=target.name,
    )
    done = FolderTarget(target.parent, PublishConfig()).publish(sent)
    report = {**report_of(done, sent), "card": card()}
    finish(workspace, plan.by_name["publish"].id, report=report)
    return sft, target


def weights_go(workspace: Workspace) -> bool:
    """Whether a reclaim would delete weights now."""
    return any(
        c.rank is ReclaimOrder.WEIGHTS for c in DiskManager(workspace, DiskConfig()).candidates()
    )


def foreign_checkpoint(work: Path, step: int, mib: int = 3, *, saved: bool = True) -> Path:
    """As Hugging Face's Trainer leaves one; not ``saved``: it has died after the weights."""
    path, size = work / f"checkpoint-{step}", mib * MIB
    path.mkdir(parents=True)
    weights = {"w": np.frombuffer(os.urandom(size), np.uint8)}
    (path / "model.safetensors").write_bytes(safetensors(weights))
    if saved:
        (path / "optimizer.pt").write_bytes(b"\x80\x02" + os.urandom(2 * size))
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path
