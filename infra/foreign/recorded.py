"""Another trainer's checkpoints by what is recorded of its stage: for who keeps room.

In: a workspace and a stage id. Out: the checkpoints that lie in the trainer's folder, and how many
of them the newest call wants to keep.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from infra.foreign.checkpoints import CheckpointRule, ForeignCheckpoint, find_checkpoints
from infra.foreign.layout import work_folder
from infra.store.workspace import Workspace
from refiner_core.contract.config import CommandConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.records import from_json

log = logging.getLogger(__name__)


class Recorded(NamedTuple):
    """Checkpoints, oldest step first, and ``command.keep``."""

    found: list[ForeignCheckpoint]
    keep: int


def recorded_checkpoints(workspace: Workspace, stage_id: str) -> Recorded:
    """What lies there; nothing of a stage of another kind, or whose records cannot be read."""
    stage = workspace.layout.stage(stage_id)
    numbers = stage.attempt_numbers() if stage_id.startswith("command-") else []
    if not numbers:
        return Recorded([], 1)
    try:
        recorded = workspace.part(stage.attempt(numbers[-1]), "config")
        command = from_json(CommandConfig, recorded["command"])
        return Recorded(
            find_checkpoints(work_folder(stage), CheckpointRule.of(command)), command.keep
        )
    except (RefinerError, OSError, KeyError, TypeError, ValueError) as error:
        log.warning("the checkpoints of %s cannot be told: %s", stage_id, error)
        return Recorded([], 1)
