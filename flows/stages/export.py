"""``export``: a checkpoint, possibly of a running training, to weights in the Hub's layout."""

from __future__ import annotations

from typing import Any

from flows.stages.work import StageWork
from infra.store import atomic
from infra.store.checkpoints import MARKER
from refiner_core.contract.errors import WorkspaceError


def run_export(work: StageWork) -> dict[str, Any]:
    """A checkpoint, possibly of a running training, to weights in the layout of the Hub."""
    from refiner_core.training.export import export_checkpoint

    trained = work.input_stages["policy"]
    report = export_checkpoint(
        work.config,
        checkpoint=work.inputs["policy"],
        model_ref=_trained_from(work, trained),
        output_dir=work.output_dir,
        io=work.io,
    )
    # The attempt that made the checkpoint, and its running time until then.
    marker = atomic.read_json(work.inputs["policy"] / MARKER) or {}
    made_by = {"attempt": marker.get("attempt"), "elapsed_s": marker.get("elapsed_s")}
    return {**report, "stage": trained, **made_by}


def _trained_from(work: StageWork, stage_id: str) -> str:
    """The base of a training stage: a folder, or the recipe's base model."""
    layout = work.workspace.layout
    newest = layout.stage(stage_id).attempt_numbers()[-1]
    inputs = work.workspace.part(layout.attempt(stage_id, newest), "inputs")
    if "policy" not in inputs:
        return work.config.model.name_or_path
    folder = work.workspace.output_dir(inputs["policy"])
    if folder is None:
        raise WorkspaceError(
            f"{inputs['policy']}, the base of {stage_id}, is not recorded any more",
            expected="the records of all stages behind a model",
            fix="restore its folder, or train again",
        )
    return str(folder / "model")
