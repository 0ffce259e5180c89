"""Deployments on a Prefect server: served by one long process, or by the workers of a work pool.

In: recipes, sweep files and nightly files. Out: the deployments ``pipeline/refiner``,
``sweep/refiner`` and, for each nightly file, ``nightly/NAME``. A recipe or sweep file becomes the
default of the form. The server only starts flow runs; the workspace decides what is done. Prefect
is imported inside functions, after the environment names the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infra.prefect_server import ServerInfo, usable_server
from refiner_core.contract.errors import ConfigurationError, RefinerError, no_such
from refiner_core.contract.loading import load_recipe
from refiner_core.nightly.definition import Nightly

NAME = "refiner"
#: Concurrent flow runs; the machine's slots and the queue limit what really runs.
_LIMIT = 64
_MOST_POOLS = 100


def _by_kind(files: Sequence[str]) -> dict[str, list[str]]:
    """Files by kind: at most one recipe and one sweep, the defaults of the forms, and nightly
    files.

    Raises
    ------
    ConfigurationError
        A file is none of the three, or there are two recipes or two sweeps.
    """
    found: dict[str, list[str]] = {"recipe": [], "sweep": [], "nightly": []}
    for file in files:
        path = Path(file).expanduser()
        found[_kind_of(file)].append(str(path.absolute()) if path.is_file() else file)
    for kind in ("recipe", "sweep"):
        if len(found[kind]) > 1:
            raise ConfigurationError(
                f"{len(found[kind])} {kind} files were given: {', '.join(found[kind])}.",
                expected=f"at most one {kind}, as the default of the form",
                fix=f"name one of them; any other {kind} can be typed into the form",
            )
    return found


def _kind_of(file: str) -> str:
    from flows.nightly.night import load_nightly
    from flows.sweeping.planning import make_sweep_plan

    tries: dict[str, Callable[[str], object]] = {
        "recipe": load_recipe,
        "sweep": make_sweep_plan,
        "nightly": load_nightly,
    }
    said = []
    for kind, read in tries.items():
        try:
            read(file)
        except RefinerError as error:
            said.append(f"as a {kind}: {error.what}")
        else:
            return kind
    raise ConfigurationError(
        f"{file} is no recipe, no sweep and no nightly evaluation ({'; '.join(said)})",
        expected="a YAML file of one of the three, or a shipped name",
        fix="check `refiner plan`, `refiner sweep FILE --dry-run` or `refiner nightly check`",
    )


def serve(
    files: Sequence[str],
    *,
    workspace: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> int:
    """Carry out flow runs until Ctrl-C or SIGTERM.

    An unfinished night that has begun before starts at once. At the end schedules are paused, and
    flow runs in this process are cancelled: their stages save. A retry continues them.

    Parameters
    ----------
    files
        Recipe, sweep and nightly files, or shipped names.
    workspace
        Default workspace of the forms (default: runs); nights use it instead of their files' own.
    tell
        Receives warnings and the served deployments.

    Returns
    -------
    int
        An exit code.

    Raises
    ------
    RefinerError
        A file cannot be read or carried out, or no Prefect server can be used.
    """
    what = _by_kind(files)
    nightlies = _checked(what["nightly"], workspace, tell)
    tell("Looking for a Prefect server; starting one takes some ten seconds.")
    info = usable_server()
    from prefect.exceptions import PrefectException
    from prefect.runner import Runner

    runner = Runner(name=NAME, pause_on_shutdown=True, limit=_LIMIT)
    for deployment, nightly in _deployments(what, nightlies, workspace):
        made = runner.add_deployment(deployment)
        tell(f"{deployment.flow_name}/{deployment.name}: {_url(info, made)}")
        if nightly:
            _take_up(nightly, made, tell)
    try:
        asyncio.run(_carry_out(runner, tell))
    except (KeyboardInterrupt, PrefectException) as error:
        if not isinstance(error, KeyboardInterrupt) and type(error).__name__ != "TerminationSignal":
            raise
        tell("Stopped. A night that begins meanwhile runs at the next start.")
    return 0


async def _carry_out(runner: Any, tell: Callable[[str], None]) -> None:
    """Run until it is ended; once it listens, its end pauses schedules."""
    work = asyncio.create_task(runner.start())
    while not (runner.started or work.done()):
        await asyncio.sleep(0.05)
    tell("Ready. Ctrl-C ends it; running stages save, and a retry continues.")
    await work


def _take_up(nightly: Nightly, deployment: Any, tell: Callable[[str], None]) -> None:
    """Start an unfinished night that has begun before."""
    from prefect.client.orchestration import get_client

    from flows.nightly.night import due_night

    if night := due_night(nightly, datetime.now(UTC)):
        tell(f"{nightly.name}: the night of {night} is not done, and starts now")
        with get_client(sync_client=True) as client:
            client.create_flow_run_from_deployment(deployment, parameters={"night": night})


def deploy(
    files: Sequence[str],
    *,
    pool: str,
    workspace: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Create or update the deployments on the server, for workers of a work pool.

    Parameters
    ----------
    files, workspace, tell
        As of :func:`serve`.
    pool
        Its workers need refiner, and the files and the workspace at the same paths.

    Returns
    -------
    list of dict
        Name, id, pool and address of each.

    Raises
    ------
    RefinerError
        A file cannot be read or carried out, no Prefect server can be used, or the pool does not
        exist.
    """
    what = _by_kind(files)
    nightlies = _checked(what["nightly"], workspace, tell)
    info = usable_server()
    _check_pool(pool)
    made = []
    for deployment, _ in _deployments(what, nightlies, workspace):
        name = f"{deployment.flow_name}/{deployment.name}"
        found = deployment.apply(work_pool_name=pool)
        made.append({"name": name, "id": str(found), "pool": pool, "url": _url(info, found)})
    return made


def _checked(
    files: Sequence[str], workspace: str | None, tell: Callable[[str], None]
) -> list[Nightly]:
    from flows.nightly.night import check_nightly

    checked = [check_nightly(f, [f"workspace={workspace}"] if workspace else []) for f in files]
    for one in checked:
        for warning in one.warnings:
            tell(f"{one.nightly.name}: {warning}")
    return [one.nightly for one in checked]


def _check_pool(pool: str) -> None:
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(pool)
        except ObjectNotFound as error:
            # Without a limit the client sends null, which the server refuses.
            known = [p.name for p in client.read_work_pools(limit=_MOST_POOLS)]
            fix = f"`prefect work-pool create {pool} --type process`, or name another --pool"
            raise no_such("The server has no work pool", pool, known, fix) from error


def _url(info: ServerInfo, deployment: Any) -> str:
    return f"{info.url}/deployments/deployment/{deployment}"


def _deployments(
    what: Mapping[str, list[str]], nightlies: Sequence[Nightly], workspace: str | None
) -> list[tuple[Any, Nightly | None]]:
    """All deployments in Prefect's form, and which of them are nightly evaluations."""
    from prefect.flows import EntrypointType

    from flows.nightly.flow import nightly_deployment
    from flows.pipeline import pipeline
    from flows.sweep import sweep

    root = Path(workspace or "runs").expanduser().absolute()
    where = {"workspace": str(root), "folder": str(Path.cwd())}
    common: dict[str, Any] = {"tags": [NAME], "entrypoint_type": EntrypointType.MODULE_PATH}
    named = dict(zip(["recipe"], what["recipe"], strict=False))
    of_sweep = dict(zip(["sweep"], what["sweep"], strict=False))
    return [
        (pipeline.to_deployment(name=NAME, parameters={**where, **named}, **common), None),
        (sweep.to_deployment(name=NAME, parameters={**where, **of_sweep}, **common), None),
        *((nightly_deployment(nightly), nightly) for nightly in nightlies),
    ]
