"""Deployments on a Prefect server: served by one long process, or left to a work pool.

In: recipes, sweep files and nightly files. Out: the deployments ``pipeline/refiner``,
``sweep/refiner`` and one for each nightly file. A recipe or sweep file becomes what the form
proposes. The server only says what to start and when; what is done is read from the workspace.
Prefect is imported inside functions, after the environment says which server it is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infra.prefect_server.server import ServerInfo, ensure_server
from refiner_core.contract.errors import ConfigurationError, RefinerError
from refiner_core.contract.loading import load_recipe

NAME = "refiner"
_SERVER_WAIT_S = 120.0
#: Flow runs at a time; the machine's slots and the queue bound what really runs.
_LIMIT = 64


class Proposed(NamedTuple):
    """What is served: the recipe and the sweep that the forms propose, and nightly files."""

    recipe: str | None = None
    sweep: str | None = None
    nightlies: tuple[str, ...] = ()


def proposed(files: Sequence[str]) -> Proposed:
    """Which of the files is what.

    Raises
    ------
    ConfigurationError
        One is none of the three, or there are two recipes or two sweeps.
    """
    found: dict[str, list[str]] = {"recipe": [], "sweep": [], "nightly": []}
    for file in files:
        found[_kind_of(file)].append(_absolute(file))
    for kind in ("recipe", "sweep"):
        if len(found[kind]) > 1:
            raise ConfigurationError(
                f"{len(found[kind])} {kind} files were given: {', '.join(found[kind])}.",
                expected=f"one {kind} at most: it is what the form proposes",
                fix=f"name one of them; any other {kind} can be typed into the form",
            )
    recipe, sweep = (next(iter(found[kind]), None) for kind in ("recipe", "sweep"))
    return Proposed(recipe, sweep, tuple(found["nightly"]))


def _kind_of(file: str) -> str:
    from flows.api import make_sweep_plan
    from flows.nightly.files import load_nightly

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
        fix="look with `refiner plan`, `refiner sweep FILE --dry-run` or `refiner nightly check`",
    )


def _absolute(file: str) -> str:
    path = Path(file).expanduser()
    return str(path.absolute()) if path.is_file() else file


def serve(
    files: Sequence[str], workspace: str, *, tell: Callable[[str], None] = lambda text: None
) -> int:
    """Carry out flow runs as they come, until Ctrl-C or SIGTERM.

    On the way out schedules are paused, and flow runs that are carried out here are cancelled:
    their stages save. A retry goes on with them.

    Parameters
    ----------
    files
        Recipe, sweep and nightly files, or shipped names.
    workspace
        The folder that the forms propose.
    tell
        Hears what is served.

    Returns
    -------
    int
        An exit code.

    Raises
    ------
    RefinerError
        A file cannot be read, or there is no Prefect server.
    """
    what = proposed(files)
    tell("Looking for a Prefect server; starting one takes some ten seconds.")
    info = _server()
    from prefect.exceptions import PrefectException
    from prefect.runner import Runner

    runner = Runner(name=NAME, pause_on_shutdown=True, limit=_LIMIT)
    for deployment in _deployments(what, workspace):
        made = runner.add_deployment(deployment)
        tell(f"{deployment.flow_name}/{deployment.name}: {info.url}/deployments/deployment/{made}")
    tell("Ready. Ctrl-C ends it; what runs then saves, and a retry goes on.")
    try:
        asyncio.run(runner.start())
    except (KeyboardInterrupt, PrefectException) as error:
        if not isinstance(error, KeyboardInterrupt) and type(error).__name__ != "TerminationSignal":
            raise
        tell("Stopped.")
    return 0


def deploy(files: Sequence[str], workspace: str, pool: str) -> list[dict[str, Any]]:
    """Put the deployments on the server, for workers of a work pool; again, and they are what the
    files say now.

    Parameters
    ----------
    files, workspace
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
        A file cannot be read, there is no Prefect server, or it has no such pool.
    """
    what = proposed(files)
    info = _server()
    return asyncio.run(_deploy(_deployments(what, workspace), info, pool))


async def _deploy(wanted: Sequence[Any], info: ServerInfo, pool: str) -> list[dict[str, Any]]:
    from flows.nightly.serving import check_pool

    await check_pool(pool)
    made = []
    for deployment in wanted:
        found = await deployment.aapply(work_pool_name=pool)
        made.append(
            {
                "name": f"{deployment.flow_name}/{deployment.name}",
                "id": str(found),
                "pool": pool,
                "url": f"{info.url}/deployments/deployment/{found}",
            }
        )
    return made


def _server() -> ServerInfo:
    info = ensure_server(_SERVER_WAIT_S)
    os.environ.update(info.client_env())
    return info


def _deployments(what: Proposed, workspace: str) -> list[Any]:
    """All of them, as Prefect wants them."""
    from prefect.flows import EntrypointType

    from flows.api import check_nightly
    from flows.nightly.serving import nightly_deployment
    from flows.pipeline import pipeline
    from flows.sweep import sweep

    where = {"workspace": str(Path(workspace).expanduser().absolute()), "folder": str(Path.cwd())}
    common: dict[str, Any] = {"tags": [NAME], "entrypoint_type": EntrypointType.MODULE_PATH}
    named = {"recipe": what.recipe} if what.recipe else {}
    of_sweep = {"sweep": what.sweep} if what.sweep else {}
    made = [
        pipeline.to_deployment(name=NAME, parameters={**where, **named}, **common),
        sweep.to_deployment(name=NAME, parameters={**where, **of_sweep}, **common),
    ]
    return [*made, *(nightly_deployment(check_nightly(f).nightly) for f in what.nightlies)]
