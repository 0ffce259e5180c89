"""``export``: a checkpoint of a training that may still go on to weights in the Hub's layout."""

from __future__ import annotations

from typing import Any

from flows.stages.work import StageWork
from infra.store import atomic
from infra.store.checkpoints import MARKER
from refiner_core.contract.errors import WorkspaceError


def run_export(work: StageWork) -> dict[str, Any]:
    """A checkpoint of a training that may still go on to weights in the layout of the Hub."""
    from refiner_core.training.export import export_checkpoint

    trained = work.input_stages["policy"]
    report = export_checkpoint(
        work.config,
        checkpoint=work.inputs["policy"],
        model_ref=_trained_from(work, trained),
        output_dir=work.output_dir,
        io=work.io,
    )
    # The attempt that made the checkpoint, and for how long it had run by then.
    marker = atomic.read_json(work.inputs["policy"] / MARKER) or {}
    made_by = {"attempt": marker.get("attempt"), "elapsed_s": marker.get("elapsed_s")}
    return {**report, "stage": trained, **made_by}


def _trained_from(work: StageWork, stage_id: str) -> str:
    """The model that a training stage started from: a folder, or the recipe's base."""
    layout = work.workspace.layout
    newest = layout.stage(stage_id).attempt_numbers()[-1]
    inputs = work.workspace.part(layout.attempt(stage_id, newest), "inputs")
    if "policy" not in inputs:
        return work.config.model.name_or_path
    folder = work.workspace.output_dir(inputs["policy"])
    if folder is None:
        raise WorkspaceError(
            f"{inputs['policy']}, which {stage_id} has started from, is not recorded any more",
            expected="the stages that a model was made from",
            fix="put its folder back, or train again",
        )
    return str(folder / "model")
