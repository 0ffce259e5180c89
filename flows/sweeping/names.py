"""What a word on a command line means: a sweep, a trial of one, or neither.

In: a workspace and a word. Out: a sweep's name, a trial's run. Reads folder names and small files.
"""

from __future__ import annotations

from infra.store.layout import is_sweep, sweep_call
from infra.store.sweep_records import read_sweep, sweep_names, sweep_versions
from infra.store.workspace import Workspace
from refiner_core.contract.records import RunRecord
from refiner_core.contract.sweep_records import trial_of


def sweep_named(workspace: Workspace, word: str) -> str | None:
    """The sweep of that name (``NAME``, or ``sweep:NAME`` where a run's name is as long)."""
    name = word.removeprefix(sweep_call("")) if is_sweep(word) else word
    if not name or "/" in name or name.startswith("."):
        return None
    return name if sweep_versions(workspace, name) else None


def newest_sweep(workspace: Workspace, newest: RunRecord | None) -> str | None:
    """The sweep that a workspace was last used for; None where that was a run of its own."""
    if newest is not None and (trial := trial_of(newest.provenance)) is not None:
        return trial[0] if sweep_versions(workspace, trial[0]) else None
    names = sweep_names(workspace)
    if not names:
        return None
    launched = {name: read_sweep(workspace, name).started_at for name in names}
    last = max(names, key=lambda name: launched[name])
    return last if newest is None or launched[last] > newest.started_at else None
