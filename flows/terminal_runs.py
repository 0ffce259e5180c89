"""Flow runs of calls from a terminal. Imports Prefect.

In: a recorded run or sweep with an orchestrator. Out: a flow run of the deployment
``pipeline/refiner`` or ``sweep/refiner``, created in a state that no runner picks up, and carried
out by this process, so that Cancel, Suspend, Retry and Resume work as usual. An unfinished flow run
is continued; one whose follower was killed is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort, TaskRunSort
from prefect.exceptions import ObjectNotFound
from prefect.flows import EntrypointType
from prefect.states import Crashed, Pending, State

from flows.flow_runs import FOLLOWER
from flows.serving import NAME
from infra.host.processes import ProcessId
from infra.store.layout import sweep_call
from infra.store.orchestrators import orchestrator_of
from infra.store.workspace import Workspace
from refiner_core.contract.errors import RefinerError

log = logging.getLogger(__name__)
_OPEN = [
    *(StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED),
    *(StateType.PAUSED, StateType.CANCELLING),
]
_LIMIT = 200


def flow_run_of(flow: Flow[Any, Any], parameters: Mapping[str, Any]) -> tuple[FlowRun, bool]:
    """Find or create a flow run for this process to carry out.

    Parameters
    ----------
    flow
        ``pipeline`` or ``sweep``.
    parameters
        Its parameters; ``run`` and ``workspace`` identify the call.

    Returns
    -------
    FlowRun, bool
        The flow run; True if a living process already follows the call with it.
    """
    with get_client(sync_client=True) as client:
        deployment = _deployment(client, flow)
        found = None
        for run in _open_runs(client):
            ours = all(run.parameters.get(k) == parameters[k] for k in ("run", "workspace"))
            if ours and run.deployment_id == deployment:
                found = found or run
            elif why := _why_left(run):
                _crash_tasks(client, run, why)
                client.set_flow_run_state(run.id, Crashed(message=why), force=True)
        if found is not None and _followed(found):
            return found, True
        if found is None:
            tags = [NAME, f"{'run' if flow.name == 'pipeline' else 'sweep'}:{parameters['run']}"]
            made = client.create_flow_run_from_deployment(
                deployment, parameters=dict(parameters), state=Pending(), tags=tags
            )
            return made, False
        _crash_tasks(client, found, "Another process now follows the run.")
        client.set_flow_run_state(found.id, Pending(), force=True)
        return client.read_flow_run(found.id), False


def _deployment(client: SyncPrefectClient, flow: Flow[Any, Any]) -> Any:
    """The id of the flow's deployment, created if it was never served."""
    try:
        return client.read_deployment_by_name(f"{flow.name}/{NAME}").id
    except ObjectNotFound:
        entrypoint = EntrypointType.MODULE_PATH
        return flow.to_deployment(name=NAME, tags=[NAME], entrypoint_type=entrypoint).apply()


def _open_runs(client: SyncPrefectClient) -> list[FlowRun]:
    of_ours = filters.DeploymentFilter(name=filters.DeploymentFilterName(any_=[NAME]))
    states = filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=_OPEN))
    runs: list[FlowRun] = client.read_flow_runs(
        deployment_filter=of_ours,
        flow_run_filter=filters.FlowRunFilter(state=states),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=_LIMIT,
    )
    return runs


def _follower(run: FlowRun) -> ProcessId | None:
    try:
        return ProcessId.parse(str(run.labels.get(FOLLOWER, "")))
    except ValueError:  # no follower yet
        return None


def _followed(run: FlowRun) -> bool:
    process = _follower(run)
    if process is None or run.state_type != StateType.RUNNING:
        return False
    return process.here and process.alive and process != ProcessId.of()


def _why_left(run: FlowRun) -> str:
    """Reason why a flow run has no follower any more; empty if it may have one."""
    process, state = _follower(run), run.state_type
    if process is None or state not in (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING):
        return ""
    if process.here and process.alive:
        return ""
    if process.here:
        how = f"`refiner status {run.parameters.get('run', '')}` shows its state."
        return f"The process {process.pid} that followed it is gone, killed perhaps; {how}"
    return _by_its_records(run)


def _by_its_records(run: FlowRun) -> str:
    """As :func:`_why_left` for a follower on another host, by the records of the orchestrator."""
    name, root = str(run.parameters.get("run", "")), str(run.parameters.get("workspace", ""))
    call = name if f"run:{name}" in run.tags else sweep_call(name)
    try:
        who = orchestrator_of(Workspace.read_only(root), call)
    except (RefinerError, OSError) as error:  # a workspace that this host cannot read
        log.info("%s is left as it is: %s", run.name, error)
        return ""
    return f"The orchestrator ({who.where}) has ended." if who.standing == "ended" else ""


def _crash_tasks(client: SyncPrefectClient, run: FlowRun, why: str) -> None:
    """Close the task runs that an earlier follower has left open."""
    state: State[Any] = Crashed(message=why)
    for task_run in client.read_task_runs(
        flow_run_filter=filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=[run.id])),
        task_run_filter=filters.TaskRunFilter(
            state=filters.TaskRunFilterState(type=filters.TaskRunFilterStateType(any_=_OPEN))
        ),
        sort=TaskRunSort.END_TIME_DESC,
        limit=_LIMIT,
    ):
        client.set_task_run_state(task_run.id, state, force=True)
