"""Nights by a Prefect server's clock: served by one long process, or deployed to a work pool.

In: nightly evaluations. Out: deployments ``refiner-nightly/NAME`` with their schedules. The server
only says when; which nights are done, and what was missed while nobody was there, is read from the
workspace. Prefect is imported inside functions, after the environment says which server it is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from flows.nightly.channels import ALERT
from flows.nightly.files import shipped_nightlies, workspace_of
from infra.prefect_server.server import ServerInfo, ensure_server
from infra.store.nightly_records import NightlyRecords
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError
from refiner_core.nightly.schedule import Schedule
from refiner_core.nightly.values import Nightly

#: Where a worker finds the flow.
_SERVER_WAIT_S = 120.0
_MOST_POOLS = 100


def serve(nightlies: Sequence[Nightly], *, tell: Callable[[str], None]) -> int:
    """Carry out nights as they come, until Ctrl-C or SIGTERM; exit code.

    A night that has begun before, and is not done, is begun at once. On the way out schedules are
    paused, so that the server does not pile up runs that nobody carries out.
    """
    info = _server()
    from prefect.exceptions import PrefectException
    from prefect.runner import Runner

    runner = Runner(name="refiner-nightly", pause_on_shutdown=True, limit=max(2, len(nightlies)))
    due = {n.name: night for n in nightlies if (night := due_night(n, datetime.now(UTC)))}
    for nightly in nightlies:
        deployment = runner.add_deployment(nightly_deployment(nightly))
        tell(f"{nightly.name}: {nightly.schedule} ({nightly.timezone}), {_url(info, deployment)}")
        if nightly.name in due:
            tell(f"{nightly.name}: the night of {due[nightly.name]} is not done, and begins now")
            asyncio.run(_begin(deployment, due[nightly.name]))
    try:
        asyncio.run(runner.start())
    except (KeyboardInterrupt, PrefectException) as error:
        if not isinstance(error, KeyboardInterrupt) and type(error).__name__ != "TerminationSignal":
            raise
        tell("Stopped. Nights that come meanwhile are looked after at the next start.")
    return 0


def due_night(nightly: Nightly, now: datetime) -> str:
    """The newest night, where something was done before and it is not; else empty."""
    workspace = Workspace.read_only(workspace_of(nightly))
    records = NightlyRecords(workspace, nightly.name)
    night = Schedule(nightly.schedule, nightly.timezone).night_at(now)
    return night if records.nights() and records.ended(night) is None else ""


def deploy(
    nightlies: Sequence[Nightly], *, pool: str | None = None, automation: str | None = None
) -> list[dict[str, Any]]:
    """Put deployments on the server; again, and they are what the files say now.

    Parameters
    ----------
    pool
        The work pool whose workers carry them out. They need refiner, and the files at the same
        paths.
    automation
        ``FLOW/DEPLOYMENT`` that the server runs for each alert of these nightly evaluations.

    Raises
    ------
    ConfigurationError
        There is no such pool or deployment.
    """
    info = _server()
    wanted = [(nightly, nightly_deployment(nightly)) for nightly in nightlies]
    return asyncio.run(_deploy(wanted, info, pool, automation))


async def _deploy(
    wanted: Sequence[tuple[Nightly, Any]],
    info: ServerInfo,
    pool: str | None,
    automation: str | None,
) -> list[dict[str, Any]]:
    if pool is not None:
        await check_pool(pool)
    target = await _target(automation) if automation is not None else None
    made = []
    for nightly, prepared in wanted:
        deployment = await prepared.aapply(work_pool_name=pool)
        one = {
            "name": f"refiner-nightly/{nightly.name}",
            "id": str(deployment),
            "schedule": nightly.schedule,
            "timezone": nightly.timezone,
            "pool": pool,
            "url": _url(info, deployment),
        }
        if target is not None:
            one["automation"] = await _automate(nightly, target)
        made.append(one)
    return made


def _server() -> ServerInfo:
    info = ensure_server(_SERVER_WAIT_S)
    os.environ.update(info.client_env())
    return info


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


async def _begin(deployment: Any, night: str) -> None:
    from prefect.client.orchestration import get_client

    async with get_client() as client:
        await client.create_flow_run_from_deployment(deployment, parameters={"night": night})


async def check_pool(pool: str) -> None:
    """Refuse a work pool that the server does not have.

    Raises
    ------
    ConfigurationError
        Names those that it has.
    """
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    async with get_client() as client:
        try:
            await client.read_work_pool(pool)
        except ObjectNotFound as error:
            # Without a limit the client sends null for it, which the server refuses.
            known = [p.name for p in await client.read_work_pools(limit=_MOST_POOLS)]
            raise ConfigurationError(
                f"The server has no work pool {pool!r}.",
                expected=f"one of: {', '.join(known) or '(there are none)'}",
                fix=f"`prefect work-pool create {pool} --type process`, or name another --pool",
            ) from error


async def _target(name: str) -> Any:
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    async with get_client() as client:
        try:
            return (await client.read_deployment_by_name(name)).id
        except (ObjectNotFound, ValueError) as error:
            raise ConfigurationError(
                f"The server has no deployment {name!r}.",
                expected="FLOW/DEPLOYMENT, as `prefect deployment ls` shows it",
                fix="correct --automation",
            ) from error


async def _automate(nightly: Nightly, deployment: Any) -> str:
    """The automation that runs a deployment for each alert; one for each nightly evaluation."""
    from prefect.client.orchestration import get_client
    from prefect.events.actions import RunDeployment
    from prefect.events.schemas.automations import AutomationCore, EventTrigger

    name = f"refiner-nightly-{nightly.name}"
    wanted = AutomationCore(
        name=name,
        description=f"for each alert of the nightly evaluation {nightly.name}",
        trigger=EventTrigger(
            expect={ALERT}, match={"prefect.resource.id": f"refiner.nightly.{nightly.name}"}
        ),
        actions=[RunDeployment(source="selected", deployment_id=deployment)],
    )
    async with get_client() as client:
        for old in await client.read_automations_by_name(name):
            await client.delete_automation(old.id)
        await client.create_automation(wanted)
    return name


def _url(info: ServerInfo, deployment: Any) -> str:
    return f"{info.url}/deployments/deployment/{deployment}"
