"""Records of sweeps: their versions, and the run of each trial.

In: :class:`SweepRecord` values and ids of runs. Out: the same, read from any shell.

    sweeps/<name>/versions/0001.json      one for each change of its definition; exclusive
                  pinned/                 code that runs were started with, and its origin
                  runs/<trial>.json       the run that works on a trial now, by the orchestrator
                  orchestrator.json       the process that works on the sweep, by itself
                  turns/ cancel/          as for a run
                  events.jsonl            events, one JSON line each
"""

from __future__ import annotations

from pathlib import Path

from infra.host.files import names_in
from infra.store import atomic
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError, WorkspaceError
from refiner_core.contract.fields import suggest
from refiner_core.contract.records import SweepRecord


def sweep_folder(workspace: Workspace, name: str) -> Path:
    """Folder of a sweep."""
    return workspace.layout.sweeps / name


def sweep_names(workspace: Workspace) -> list[str]:
    """All recorded sweeps, by the time of their first version."""
    begun = [(sweep_versions(workspace, name), name) for name in names_in(workspace.layout.sweeps)]
    first = {name: _version(workspace, name, v[0]).started_at for v, name in begun if v}
    return sorted(first, key=lambda name: (first[name], name))


def sweep_versions(workspace: Workspace, name: str) -> list[int]:
    """Numbers of a sweep's versions, ascending; none if it is not recorded."""
    found = atomic.json_files(sweep_folder(workspace, name) / "versions")
    return sorted(int(path.stem) for path in found)


def read_sweep(workspace: Workspace, name: str, number: int | None = None) -> SweepRecord:
    """A version of a sweep (default: the newest).

    Raises
    ------
    ConfigurationError
        There is none of that name or number; suggests the nearest.
    """
    versions = sweep_versions(workspace, name)
    if not versions:
        known = sweep_names(workspace)
        raise ConfigurationError(
            f"{workspace.root} has no sweep {name!r}.{suggest(name, known)}",
            expected=f"one of: {', '.join(known) or '(there are none)'}",
            fix="name one of these, or another `workspace=DIR`",
        )
    return _version(workspace, name, number or versions[-1])


def write_sweep(workspace: Workspace, record: SweepRecord) -> bool:
    """Record a version; False if another process was faster and it is taken."""
    path = sweep_folder(workspace, record.name) / "versions" / f"{record.number:04d}.json"
    return workspace.create(path, record, "recording the sweep")


def note_trial(workspace: Workspace, sweep: str, trial: str, run_id: str) -> None:
    """Record which run works on a trial (``ARM/seedN``). One writer: the sweep's orchestrator."""
    path = _trial_path(workspace, sweep, trial)
    workspace.replace(path, {"trial": trial, "run": run_id}, "recording a trial")


def trial_run(workspace: Workspace, sweep: str, trial: str) -> str | None:
    """The run that works, or has worked, on a trial; None if it has not started."""
    found = workspace.read_control(_trial_path(workspace, sweep, trial))
    return None if found is None else str(found["run"])


def _trial_path(workspace: Workspace, sweep: str, trial: str) -> Path:
    return sweep_folder(workspace, sweep) / "runs" / f"{trial.replace('/', '--')}.json"


def _version(workspace: Workspace, name: str, number: int) -> SweepRecord:
    path = sweep_folder(workspace, name) / "versions" / f"{number:04d}.json"
    record = workspace.load(SweepRecord, path)
    if record is None:
        raise WorkspaceError(
            f"There is no version {number} of sweep {name}: no {path}",
            expected="all versions that the sweep's folder names",
            fix="restore the file, or launch the sweep again: `refiner sweep SWEEP`",
        )
    return record
