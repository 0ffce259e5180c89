"""The Prefect flow ``sweep``: an ablation, carried out. Imports Prefect.

In: the parameters of a flow run. Out: a recorded sweep that an orchestrator works on, and a flow
run with a task run for each trial; see :mod:`flows.flow_runs` for who does what.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from prefect.states import State
from pydantic import Field

from flows.flow_runs import Call, carry_out, shown_flow
from infra.store.workspace import Workspace

#: Names a sweep or a folder.
_Path = Annotated[str, Field(min_length=1)]


@shown_flow("sweep")
def sweep(
    sweep: _Path = "citation-weight-tiny",
    overrides: list[str] = [],  # noqa: B006
    workspace: _Path = "runs",
    folder: _Path = ".",
    run: str = "",
) -> State[Any]:
    """Carry out a sweep: its arms with each seed; a task run shows a trial.

    Parameters
    ----------
    sweep
        A shipped name, or the path of a YAML file.
    overrides
        `key=value`, for all arms.
    workspace
        Folder that holds records, outputs and checkpoints.
    folder
        Where relative paths begin.
    run
        A recorded sweep to go on with; a new version where none is given.
    """

    def begin() -> Call:
        from flows.sweeping.launching import begin_sweep, workspace_of
        from flows.sweeping.planning import make_sweep_plan

        if run:
            return Call.of_sweep(Workspace.read_only(Path(workspace).absolute()), run)
        plan = make_sweep_plan(sweep, [f"workspace={workspace}", *overrides])
        record = begin_sweep(plan, [f"workspace={workspace}", *overrides])
        return Call.of_sweep(workspace_of(plan, to_write=True), record.name)

    return carry_out(sweep, folder, begin)
