"""The Prefect flow ``sweep``: carries out an ablation. Imports Prefect.

In: the parameters of a flow run. Out: a recorded sweep with an orchestrator, and a flow run with a
task run per trial; see :mod:`flows.flow_runs`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from prefect.states import State
from pydantic import Field

from flows.flow_runs import RecordedCall, carry_out, observing_flow
from infra.store.workspace import Workspace

#: Name of a sweep or a folder.
_Path = Annotated[str, Field(min_length=1)]


@observing_flow("sweep")
def sweep(
    sweep: _Path = "citation-weight-tiny",
    overrides: list[str] = [],  # noqa: B006
    workspace: _Path = "runs",
    folder: _Path = ".",
    run: str = "",
) -> State[Any]:
    """Carry out a sweep: its arms with each seed, one task run per trial.

    Parameters
    ----------
    sweep
        A shipped name, or the path of a YAML file.
    overrides
        `key=value`, for all arms.
    workspace
        Folder for records, outputs and checkpoints.
    folder
        Base folder of relative paths.
    run
        A recorded sweep to continue; by default a new version.
    """

    def begin() -> RecordedCall:
        from flows.sweeping.launching import begin_sweep, workspace_of
        from flows.sweeping.planning import make_sweep_plan

        if run:
            return RecordedCall.of_sweep(Workspace.read_only(Path(workspace).absolute()), run)
        plan = make_sweep_plan(sweep, [f"workspace={workspace}", *overrides])
        record = begin_sweep(plan, [f"workspace={workspace}", *overrides])
        return RecordedCall.of_sweep(workspace_of(plan, to_write=True), record.name)

    return carry_out(sweep, folder, begin)
