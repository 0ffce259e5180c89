"""Deployments of nightly evaluations: ``nightly/NAME``, with the schedule of its file.

In: nightly evaluations. Out: what :mod:`flows.serving` puts on a Prefect server. The server only
says when; which nights are done, and what was missed while nobody was there, is read from the
workspace. Prefect is imported inside functions, after the environment says which server it is.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from flows.nightly.files import shipped_nightlies, workspace_of
from infra.store.nightly_records import NightlyRecords
from infra.store.workspace import Workspace
from refiner_core.nightly.definition import Nightly, Schedule

#: The flow's former name, under which deployments of earlier versions stand.
_FORMER = "refiner-nightly"


def due_night(nightly: Nightly, now: datetime) -> str:
    """The newest night, where something was done before and it is not; else empty."""
    workspace = Workspace.read_only(workspace_of(nightly))
    records = NightlyRecords(workspace, nightly.name)
    night = Schedule(nightly.schedule, nightly.timezone).night_at(now)
    return night if records.nights() and records.ended(night) is None else ""


def nightly_deployment(nightly: Nightly) -> Any:
    """The deployment of a nightly evaluation, with its schedule."""
    from prefect.client.schemas.schedules import CronSchedule
    from prefect.flows import EntrypointType

    from flows.nightly.flow import nightly as nightly_flow

    shipped = {str(path): name for name, path in shipped_nightlies().items()}
    return nightly_flow.to_deployment(
        name=nightly.name,
        schedule=CronSchedule(cron=nightly.schedule, timezone=nightly.timezone),
        parameters={
            "name": nightly.name,
            "file": shipped.get(nightly.origin, nightly.origin),
            "folder": nightly.folder,
            "overrides": [o for o in nightly.overrides if o.startswith("workspace=/")],
        },
        description=f"`refiner nightly run {nightly.origin}` in each night",
        tags=["refiner", "nightly"],
        enforce_parameter_schema=False,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


def remove_former(name: str, tell: Callable[[str], None]) -> None:
    """Take the deployment of an earlier version off the server: each night would begin twice."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            former = client.read_deployment_by_name(f"{_FORMER}/{name}")
            client.delete_deployment(former.id)
        except ObjectNotFound:
            return
    tell(f"{_FORMER}/{name} is gone from the server: nightly/{name} has taken its place.")
