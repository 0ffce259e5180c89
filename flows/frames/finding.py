"""Which run, stage and attempt is meant, and what to say where it is not there.

In: names as people type them. Out: records and paths. Attempts take over what the one before had
logged, so the newest one that has a file tells the whole story.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flows.running.status import find_run, stage_names
from infra.store.layout import AttemptPaths
from infra.store.marks import reclaimed_text
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.fields import suggest
from refiner_core.contract.records import RunRecord


def the_run(run: str | None, workspace: str | Path) -> tuple[Workspace, RunRecord]:
    """The workspace, for reading, and the run that is meant.

    Raises
    ------
    ConfigurationError
        There is none, or several; names the nearest.
    """
    room = Workspace.read_only(workspace)
    found = find_run(room, run)
    if found is None:
        raise ConfigurationError(
            f"No run is recorded in {room.root}.",
            expected="a workspace in which something was run",
            fix="name another one with workspace=, or begin with `refiner run tiny`",
        )
    return room, found


def the_stage(run: RunRecord, name: str) -> str:
    """A stage's id.

    Raises
    ------
    ConfigurationError
        The run has none of that name; lists them.
    """
    if name not in run.stages:
        raise ConfigurationError(
            f"Run {run.run} has no stage {name!r}.{suggest(name, run.stages)}",
            expected=f"one of: {', '.join(stage_names(run))}",
            fix="name one of these",
        )
    return run.stages[name]


def attempts_of(workspace: Workspace, stage_id: str) -> list[AttemptPaths]:
    """All attempts at a stage, the newest first."""
    stage = workspace.layout.stage(stage_id)
    return [stage.attempt(number) for number in reversed(stage.attempt_numbers())]


def is_over(workspace: Workspace, stage_id: str) -> bool:
    """Whether the stage is done, so that nothing will come any more."""
    return workspace.layout.stage(stage_id).result.exists()


def gone(workspace: Workspace, stage_id: str, what: str, run: str) -> DataError:
    """What to say where a stage that is done has lost something that it had."""
    why = reclaimed_text(workspace.layout.stage(stage_id))
    return DataError(
        f"Run {run} has no {what} any more: {why or f'they were deleted from {stage_id}'}.",
        expected=f"{what} in {workspace.layout.stage(stage_id).data}",
        fix="the other frames of the run still work; `refiner disk pin STAGE` keeps all of a stage",
    )


def evaluate_stages(stages: Mapping[str, str]) -> dict[str, str]:
    """Name -> id of the evaluations among stages."""
    return {n: i for n, i in stages.items() if i.rpartition("-")[0] == "evaluate"}
