"""The Prefect flow ``pipeline``: carries out a recipe. Imports Prefect.

In: the parameters of a flow run, from the form of its deployment, a schedule, or a script. Out: a
recorded run with an orchestrator, and a flow run that shows it; see :mod:`flows.flow_runs`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from prefect.states import State
from pydantic import Field

from flows.flow_runs import RecordedCall, carry_out, observing_flow
from infra.store.workspace import Workspace

#: Name of a recipe or a folder.
_Path = Annotated[str, Field(min_length=1)]


@observing_flow("pipeline")
def pipeline(
    recipe: _Path = "tiny",
    overrides: list[str] = [],  # noqa: B006  # Prefect shows defaults in its form
    workspace: _Path = "runs",
    seed: int | None = None,
    notes: str = "",
    folder: _Path = ".",
    run: str = "",
) -> State[Any]:
    """Carry out a recipe: data, SFT, RFT, GRPO, publication and evaluations.

    Parameters
    ----------
    recipe
        A shipped name, or the path of a YAML file.
    overrides
        `key=value`, such as `grpo.beta=0.01`.
    workspace
        Folder for records, outputs and checkpoints.
    seed
        Seed of training; the recipe's by default.
    notes
        Notes on the run.
    folder
        Base folder of relative paths.
    run
        A recorded run to continue; by default a new one.
    """

    def begin() -> RecordedCall:
        from flows.running.calls import begin_run

        if run:
            return RecordedCall.of_run(Workspace.read_only(Path(workspace).absolute()), run)
        fields = [f"workspace={workspace}"]
        fields += [] if seed is None else [f"seed={seed}"]
        fields += [f"tracking.notes={json.dumps(notes)}"] if notes else []
        _, ws, record = begin_run(recipe, [*fields, *overrides])
        return RecordedCall.of_run(ws, record.run)

    return carry_out(recipe, folder, begin)
