"""The Prefect flow of a night: `refiner nightly run`, started by the server's clock.

In: the file, and the scheduled time of the run. Out: the night's records, written by the same
command as under cron, in a process of its own: if Prefect ends this process, the records stay
consistent, and the next run continues. Imports Prefect.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.schedules import CronSchedule
from prefect.events import emit_event
from prefect.flows import EntrypointType
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, State

from flows.nightly.night import load_nightly, shipped_nightlies
from infra.host.processes import own_python
from refiner_core.contract.errors import RefinerError
from refiner_core.nightly.definition import Nightly, Schedule

#: Name of the event of an alert.
ALERT = "refiner.nightly.alert"
#: Time to save after the flow run of a night is cancelled, seconds.
_GRACE_S = 120.0


@flow(  # type: ignore[untyped-decorator]  # mypy does not follow Prefect's imports
    name="nightly",
    flow_run_name="{name}",
    retries=0,
    persist_result=False,
    validate_parameters=False,
)
def nightly(name: str, file: str, folder: str, overrides: list[str], night: str = "") -> State[Any]:
    """Work on the scheduled night, or on ``night``."""
    log = get_run_logger()
    try:
        if not night:  # the scheduled one, however late the run starts
            loaded, due = load_nightly(file), flow_run.scheduled_start_time or datetime.now(UTC)
            night = Schedule(loaded.schedule, loaded.timezone).night_at(due)
    except RefinerError as error:
        return Failed(message=str(error))
    code, said = _run(["nightly", "run", file, *overrides, "--night", night, "--json"], folder)
    if not said or "night" not in said:
        return Failed(message=str(said.get("error") or f"it ended with code {code}"))
    for checkpoint in said["checkpoints"]:
        log.info("%s: %s %s", *(checkpoint[key] for key in ("checkpoint", "state", "why")))
    for alert in said["alerts"]:
        log.warning("%s", alert["title"])
        emit_alert(name, alert)
    words = f"{name}, night of {said['night']}: {said['state']}"
    log.info("%s", words)
    return Failed(message=words) if code else Completed(message=words)


def emit_alert(name: str, alert: dict[str, Any]) -> None:
    """Send the alert to the server, for automations, which may match all labels."""
    labels = {f"refiner.{k}": str(alert[k]) for k in ("kind", "cause", "checkpoint", "metric")}
    who = {"prefect.resource.id": f"refiner.nightly.{name}", "prefect.resource.name": name}
    emit_event(ALERT, {**who, **labels}, payload=alert)


def _run(arguments: list[str], folder: str) -> tuple[int, dict[str, Any]]:
    """Run the command to its end; returns exit code and output."""
    log = get_run_logger()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.cli.main", *arguments],
            cwd=folder,
            env=own_python(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            for line in process.stderr or ():
                log.info("%s", line.rstrip())
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait(_GRACE_S)
            raise
        output.seek(0)
        try:
            return code, dict(json.load(output))
        except ValueError:
            return code or 70, {}


# ---------------------------------------------------------------- deployments


def nightly_deployment(evaluation: Nightly) -> Any:
    """The deployment of a nightly evaluation, with its schedule."""
    shipped = {str(path): name for name, path in shipped_nightlies().items()}
    return nightly.to_deployment(
        name=evaluation.name,
        schedule=CronSchedule(cron=evaluation.schedule, timezone=evaluation.timezone),
        parameters={
            "name": evaluation.name,
            "file": shipped.get(evaluation.origin, evaluation.origin),
            "folder": evaluation.folder,
            "overrides": [o for o in evaluation.overrides if o.startswith("workspace=/")],
        },
        description=f"`refiner nightly run {evaluation.origin}` in each night",
        tags=["refiner", "nightly"],
        enforce_parameter_schema=False,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
