"""Flow runs of calls that a terminal has begun. Imports Prefect.

In: a recorded run or sweep that an orchestrator works on. Out: a flow run of the deployment
``pipeline/refiner`` or ``sweep/refiner``, made in a state that no runner picks up and carried out
by this process, so that Cancel, Suspend, Retry and Resume work on it as on any other. One that has
not ended, because whoever followed the call was killed, is gone on with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.flows import EntrypointType
from prefect.states import Pending

from flows.serving import NAME

_OPEN = [
    *(StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED),
    *(StateType.PAUSED, StateType.CANCELLING),
]


def flow_run_of(flow: Flow[Any, Any], parameters: Mapping[str, Any]) -> FlowRun:
    """A flow run for this process to carry out.

    Parameters
    ----------
    flow
        ``pipeline`` or ``sweep``.
    parameters
        Its parameters; ``run`` says which call it shows.
    """
    tag = f"{'run' if flow.name == 'pipeline' else 'sweep'}:{parameters['run']}"
    with get_client(sync_client=True) as client:
        states = filters.FlowRunFilterStateType(any_=_OPEN)
        mine = filters.FlowRunFilter(
            tags=filters.FlowRunFilterTags(all_=[tag]),
            state=filters.FlowRunFilterState(type=states),
        )
        for run in client.read_flow_runs(flow_run_filter=mine, limit=10):
            if run.parameters.get("workspace") == parameters["workspace"]:
                client.set_flow_run_state(run.id, Pending(), force=True)
                return client.read_flow_run(run.id)
        made: FlowRun = client.create_flow_run_from_deployment(
            _deployment(client, flow),
            parameters=dict(parameters),
            state=Pending(),
            tags=[NAME, tag],
        )
        return made


def _deployment(client: SyncPrefectClient, flow: Flow[Any, Any]) -> Any:
    """The id of the flow's deployment, which is made where nobody has served it yet."""
    try:
        return client.read_deployment_by_name(f"{flow.name}/{NAME}").id
    except ObjectNotFound:
        entrypoint = EntrypointType.MODULE_PATH
        return flow.to_deployment(name=NAME, tags=[NAME], entrypoint_type=entrypoint).apply()
