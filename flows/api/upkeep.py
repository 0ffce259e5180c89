"""Upkeep: the disk, the local Prefect server, what tracking has kept offline.

In: workspaces. Out: reports, and what was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from infra.store.sweep_records import read_sweep, sweep_versions
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError

if TYPE_CHECKING:
    from flows.disk import Reclaimed, Report
    from infra.prefect_server import ServerStatus
    from infra.tracking import OfflineRun

_HERE = RecipeConfig.workspace


class Pinned(NamedTuple):
    """A stage that is (or is no longer) kept whole; ``changed`` is False if it was so before."""

    stage_id: str
    changed: bool


class Synced(NamedTuple):
    """Offline runs, those with something new before anything was sent, and how many were sent."""

    runs: list[OfflineRun]
    new: list[OfflineRun]
    sent: int


def disk_report(workspace: str | Path = _HERE, overrides: Sequence[str] = ()) -> Report:
    """What a workspace uses by run and kind, the room that is left, and what may go.

    Parameters
    ----------
    workspace
        The folder.
    overrides
        Of ``disk``, as ``key=value`` (default: as the newest run has it).

    Returns
    -------
    Report
        ``rows``, and ``json``: what ``refiner disk --json`` prints.

    Raises
    ------
    ConfigurationError
        An override cannot be meant.
    WorkspaceError
        It is no workspace, or a record is damaged.
    """
    from flows import disk
    from infra.disk.keeper import DiskKeeper

    room = Workspace.read_only(workspace)
    return disk.disk_report(room, DiskKeeper(room, disk.disk_config(room, overrides)))


def pin_stage(stage: str, workspace: str | Path = _HERE) -> Pinned:
    """Keep everything of a stage, whatever is reclaimed.

    Parameters
    ----------
    stage
        Its id, or its name in the newest run.
    workspace
        The folder.

    Returns
    -------
    Pinned
        Which stage.

    Raises
    ------
    ConfigurationError
        There is no such stage; names the nearest.
    """
    from flows.disk import stage_to_pin
    from infra.store.checkpoints import pin

    room = Workspace.read_only(workspace)
    stage_id = stage_to_pin(room, stage)
    return Pinned(stage_id, pin(room.layout, stage_id))


def unpin_stage(stage: str, workspace: str | Path = _HERE) -> Pinned:
    """Take back :func:`flows.api.pin_stage`.

    Parameters
    ----------
    stage, workspace
        As of :func:`flows.api.pin_stage`.

    Returns
    -------
    Pinned
        Which stage.

    Raises
    ------
    ConfigurationError
        There is no such stage; names the nearest.
    """
    from flows.disk import stage_to_pin
    from infra.store.checkpoints import unpin

    room = Workspace.read_only(workspace)
    stage_id = stage_to_pin(room, stage)
    return Pinned(stage_id, unpin(room.layout, stage_id))


def reclaim_disk(
    workspace: str | Path = _HERE,
    overrides: Sequence[str] = (),
    *,
    caches: bool = False,
    judgements: bool = False,
    dry_run: bool = True,
) -> Reclaimed:
    """Delete all that the policy allows.

    Parameters
    ----------
    workspace, overrides
        As of :func:`flows.api.disk_report`.
    caches
        The caches of ``disk.watch_caches``, too.
    judgements
        What judges have said, too.
    dry_run
        Only say what would go. To delete, say False.

    Returns
    -------
    Reclaimed
        Candidates, and what is gone.

    Raises
    ------
    ConfigurationError
        An override cannot be meant.
    WorkspaceError
        It is no workspace, a record is damaged, or somebody else may have written there.
    """
    from flows import disk
    from infra.disk.keeper import DiskKeeper

    room = Workspace.read_only(workspace)
    keeper = DiskKeeper(room, disk.disk_config(room, overrides))
    return disk.reclaim(keeper, caches=caches, judgements=judgements, dry_run=dry_run)


def prefect_server_status() -> ServerStatus:
    """How the local Prefect server is. Starts nothing.

    Returns
    -------
    ServerStatus
        Its state and address, and where its key and its log lie.

    Raises
    ------
    OSError
        Its folder cannot be read.
    """
    from infra.prefect_server import server_status

    return server_status()


def stop_prefect_server() -> bool:
    """Stop the local Prefect server that refiner has started.

    Returns
    -------
    bool
        False where there is none of ours.

    Raises
    ------
    OSError
        Its folder cannot be read.
    """
    from infra.prefect_server import stop_server

    return stop_server()


def sync_tracking(
    names: Sequence[str] = (),
    workspace: str | Path = _HERE,
    *,
    dry_run: bool = False,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Synced:
    """Send what W&B has logged offline, from a node with network. Only what is new is sent.

    Parameters
    ----------
    names
        Runs or sweeps (default: the newest run).
    workspace
        The folder that they are recorded in.
    dry_run
        Only say what would be sent.
    tell
        Hears how many of how many are sent.

    Returns
    -------
    Synced
        What there is, what is new, and how many were sent.

    Raises
    ------
    ConfigurationError
        There is no such run or sweep.
    TrackerOutage
        The server cannot be reached, or refuses; what was sent is noted.
    WorkspaceError
        Somebody else may have written what would be sent.
    """
    from infra.tracking import send

    room = Workspace.read_only(workspace)
    if not dry_run:
        room.require_trust()
    runs = _offline_runs(room, names)
    new = [run for run in runs if run.is_new]
    return Synced(runs, new, 0 if dry_run else send(runs, tell))


def _offline_runs(workspace: Workspace, names: Sequence[str]) -> list[OfflineRun]:
    """Offline runs of everything that is named, each once."""
    from flows.running.status import find_run
    from infra.tracking import offline_runs, offline_runs_in

    stages: list[str] = []
    reports: list[OfflineRun] = []
    wanted: Sequence[str | None] = names or (None,)
    for name in wanted:
        if name is not None and sweep_versions(workspace, name):
            stages += _stages_of_sweep(workspace, name)
            reports += offline_runs_in(workspace.layout.reports / name / "tracking", name)
            continue
        run = find_run(workspace, name)
        if run is None:
            raise ConfigurationError(
                f"{workspace.root} has no runs.",
                expected="a workspace in which something was trained",
                fix="name another one with workspace=DIR",
            )
        stages += run.stages.values()
    return [*offline_runs(workspace, stages), *reports]


def _stages_of_sweep(workspace: Workspace, name: str) -> Iterator[str]:
    """Of all versions: what an earlier one has trained belongs to it, too."""
    for number in sweep_versions(workspace, name):
        for trial in read_sweep(workspace, name, number).trials:
            yield from trial.stages.values()
