"""Export of a model folder from a checkpoint of a training that still runs.

In: a complete checkpoint (:mod:`refiner_core.training.engines.protocol`), and a folder or Hub id
with the model's architecture and tokenizer. Out: ``model/`` for ``from_pretrained``, the same bytes
as if the training stage had ended there, and its report. Reads only the checkpoint's weights, not
the optimiser's state; uses no GPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import WorkspaceError
from refiner_core.contract.types import Progress, StageIO
from refiner_core.generation.load import load_model, load_tokenizer, set_threads
from refiner_core.generation.saving import WEIGHTS, model_tensors, save_model
from refiner_core.training.engines.protocol import PROGRESS
from refiner_core.training.model.loading import check_shapes, saved_tensors
from refiner_core.training.steps.checkpoint_manager import curve

_COUNTED = ("tokens", "epoch", "counts", "judge")


def export_checkpoint(
    config: RecipeConfig, *, checkpoint: Path, model_ref: str, output_dir: Path, io: StageIO
) -> dict[str, Any]:
    """Export one checkpoint; returns the report of its training so far.

    Raises
    ------
    WorkspaceError
        The checkpoint is damaged, or belongs to another model.
    """
    io.progress(Progress(0, 2, "loading"))
    set_threads(config.model)
    try:
        progress = json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkspaceError(
            f"{checkpoint / PROGRESS} cannot be read ({error})",
            expected="a complete checkpoint of this version",
            fix="publish another step",
        ) from error
    # The model never runs, so its attention kernel, which may need a GPU, is not loaded.
    model = load_model(model_ref, replace(config.model, attn_implementation="eager"))
    saved = saved_tensors(checkpoint / WEIGHTS)
    check_shapes(model, saved, checkpoint)
    io.progress(Progress(1, 2, "exporting"))
    weights = ((name, saved[name]) for name in model_tensors(model))
    save_model(model, load_tokenizer(model_ref, config.model), output_dir / "model", weights)
    io.progress(Progress(2, 2, "exported"))
    return progress_report(progress)


def progress_report(progress: dict[str, Any]) -> dict[str, Any]:
    """Report of a training, from its checkpoint's progress."""
    curves = {n: points for n, v in progress.get("curves", {}).items() if (points := curve(v))}
    report = {"steps": progress["step"], "episodes": progress.get("episode"), "curves": curves}
    if losses := progress.get("losses"):
        report["train_loss"] = {"first": losses[0], "final": losses[-1], "curve": curve(losses)}
    return report | {key: progress[key] for key in _COUNTED if key in progress}
