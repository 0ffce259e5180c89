"""Both runs of a proof, read from their records and compared.

In: two finished stages of one fingerprint. Out: comparisons, in the order in which things come
about. Needs torch, which is imported when it is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.store.checkpoints import CheckpointStore
from infra.store.traces import list_rollouts, read_metrics, read_rollouts
from infra.store.workspace import Workspace
from refiner_core.contract.errors import WorkspaceError
from refiner_core.contract.proofs import Comparison


@dataclass(frozen=True)
class Trained:
    """A finished training, as far as it is compared."""

    workspace: Workspace
    stage_id: str

    @property
    def attempt(self) -> int:
        """The one that finished, whose files tell the whole story."""
        result = self.workspace.read_result(self.stage_id)
        if result is None:
            raise _gone(f"{self.stage_id} of {self.workspace.root} is not done", "a finished stage")
        return result.attempt

    def trace(self) -> list[tuple[int, dict[str, float | None]]]:
        """Step and numbers, line by line."""
        path = self.workspace.layout.attempt(self.stage_id, self.attempt).metrics
        return [(line.step, line.metrics) for line in read_metrics(path)]

    def rollouts(self) -> dict[int, list[dict[str, Any]]]:
        """Rows by step."""
        folder = self.workspace.layout.attempt(self.stage_id, self.attempt).rollouts
        files = list_rollouts(folder)
        return {int(p.stem.removeprefix("step-")): read_rollouts(p) for p in files}

    @property
    def model(self) -> Path:
        """The exported weights."""
        folder = self.workspace.output_dir(self.stage_id)
        if folder is None:
            raise _gone(f"{self.stage_id} of {self.workspace.root} has no output", "its weights")
        return folder / "model"

    @property
    def checkpoint(self) -> Path:
        """The last complete checkpoint: that of the last step."""
        folder = self.workspace.layout.stage(self.stage_id).checkpoints
        found = CheckpointStore(folder, 0).latest()
        if found is None:
            raise _gone(f"{folder} has no complete checkpoint", "that of the last step")
        return found.path


def _gone(what: str, expected: str) -> WorkspaceError:
    fix = "prove it again with `refiner prove-resume`; leave its workspace alone meanwhile"
    return WorkspaceError(what, expected=expected, fix=fix)


def compare(straight: Trained, interrupted: Trained, *, same_layout: bool) -> list[Comparison]:
    """All that can be compared of two trainings.

    Parameters
    ----------
    same_layout
        Both ended on as many processes.
    """
    from refiner_core.training.state.equality import (
        compare_checkpoints,
        compare_rollouts,
        compare_traces,
        compare_weights,
    )

    trace = straight.trace()
    moved = sum(numbers.get("learning_rate") or 0.0 for _, numbers in trace)
    found = [compare_traces(trace, interrupted.trace())]
    if rollouts := straight.rollouts():
        found.append(compare_rollouts(rollouts, interrupted.rollouts()))
    found.append(compare_weights(straight.model, interrupted.model, moved))
    found += compare_checkpoints(
        straight.checkpoint, interrupted.checkpoint, moved, same_layout=same_layout
    )
    return [c for c in found if c.compared]
