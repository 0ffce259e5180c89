"""Closes flow runs that an orchestrator left behind when it was killed. Imports Prefect.

In: the Prefect server's runs of our flow that have not ended, the processes of this node, and what
the workspace says of the orchestrators of other nodes. Out: those whose owner is dead, has ended or
was followed by another are set to Crashed, with their task runs. Without it they would show as
running for ever.
"""

from __future__ import annotations

import logging

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort, TaskRunSort
from prefect.states import Crashed

from flows.picture.feed import Drawing
from infra.host.processes import ProcessId
from infra.store.workspace import Workspace

log = logging.getLogger(__name__)

FLOW_NAME = "refiner"
_OPEN = [StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED, StateType.CANCELLING]
_LIMIT = 200


def close_leftovers(drawing: Drawing) -> int:
    """Set to Crashed what nobody draws any more; returns how many flow runs that were.

    An earlier picture of ``drawing`` itself counts: whoever calls this is about to draw it anew.
    """
    closed = 0
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[FLOW_NAME])),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_OPEN))
            ),
            sort=FlowRunSort.START_TIME_DESC,
            limit=_LIMIT,
        ):
            if why := _why_left(run, drawing):
                _crash(client, run, why)
                closed += 1
    return closed


def _why_left(run: FlowRun, drawing: Drawing) -> str:
    owner = str(run.parameters.get("owner", ""))
    if owner == drawing.owner and run.parameters.get("run") == drawing.run:
        return "The picture was lost, and is drawn again in another flow run."
    try:
        process = ProcessId.parse(owner)
    except ValueError:  # not one of ours, or from a version that wrote it differently
        return ""
    if process.here and not process.alive:
        return f"The orchestrator (process {process.pid}) was killed or its node restarted."
    return _by_its_record(str(run.parameters.get("run", "")), owner, drawing)


def _by_its_record(run_id: str, owner: str, drawing: Drawing) -> str:
    """Why nobody draws a run of another host any more, by what the workspace says of it."""
    if drawing.story is None or not run_id:
        return ""
    workspace = Workspace.read_only(drawing.story.workspace)
    said, (_, turn) = workspace.read_orchestrator(run_id) or {}, workspace.newest_turn(run_id)
    newest = str(turn.get("process") or said.get("process") or "")
    if newest and newest != owner:
        return f"The run was taken up by another process ({newest})."
    if said.get("state") == "ended" and said.get("process") == owner:
        return "The orchestrator has ended, and its picture was lost."
    return ""


def _crash(client: SyncPrefectClient, run: FlowRun, why: str) -> None:
    for task_run in client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])),
        task_run_filter=TaskRunFilter(
            state=TaskRunFilterState(type=TaskRunFilterStateType(any_=_OPEN))
        ),
        sort=TaskRunSort.END_TIME_DESC,
        limit=_LIMIT,
    ):
        client.set_task_run_state(task_run.id, Crashed(message=why), force=True)
    client.set_flow_run_state(run.id, Crashed(message=why), force=True)
    log.info("closed flow run %s: %s", run.name, why)
