"""Uploads offline logs of W&B, from a node with network.

In: names of runs and sweeps. Out: :class:`SyncResult`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from flows.running.status import required_run
from infra.store.sweep_records import read_sweep, sweep_versions
from infra.store.workspace import Workspace
from infra.tracking import OfflineRun, offline_runs, offline_runs_in, send
from refiner_core.contract.config import RecipeConfig


class SyncResult(NamedTuple):
    """Offline runs, those with new data before the upload, and the number sent."""

    runs: list[OfflineRun]
    new: list[OfflineRun]
    sent: int


def sync_tracking(
    names: Sequence[str] = (),
    workspace: str | Path = RecipeConfig.workspace,
    *,
    dry_run: bool = False,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> SyncResult:
    """Upload W&B's offline logs from a node with network. Sends only new data.

    Parameters
    ----------
    names
        Runs or sweeps (default: the newest run).
    workspace
        The folder that has their records.
    dry_run
        Only list the new data.
    tell
        Receives the numbers of sent and of all runs.

    Returns
    -------
    SyncResult
        All runs, those with new data, and the number sent.

    Raises
    ------
    ConfigurationError
        There is no such run or sweep.
    SystemOutage
        The server cannot be reached, or refuses; sent data are recorded.
    WorkspaceError
        The logs may have been written by another user.
    """
    ws = Workspace.read_only(workspace)
    if not dry_run:
        ws.require_trust()
    runs = _offline_runs(ws, names)
    new = [run for run in runs if run.is_new]
    return SyncResult(runs, new, 0 if dry_run else send(runs, tell))


def _offline_runs(workspace: Workspace, names: Sequence[str]) -> list[OfflineRun]:
    """Offline runs of all named runs and sweeps, each once."""
    stages: list[str] = []
    reports: list[OfflineRun] = []
    for name in names or (None,):
        if name is not None and (versions := sweep_versions(workspace, name)):
            for number in versions:  # including the runs of earlier versions
                for trial in read_sweep(workspace, name, number).trials:
                    stages += trial.stages.values()
            reports += offline_runs_in(workspace.layout.reports / name / "tracking", name)
            continue
        run = required_run(workspace, name, "a workspace in which something was trained")
        stages += run.stages.values()
    return [*offline_runs(workspace, stages), *reports]
