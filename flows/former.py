"""Former names that still work, with a warning, for one release: commands and names of `flows.api`.

Former options are declared beside their commands, by :func:`flows.cli.aliases.former_option`; the
former field and JSON key ``mend`` (now ``fix``) of a finding is kept by
:class:`infra.doctor.check.CheckResult` and :func:`flows.doctor.findings_json`, the method ``look``
(now ``observe``) by the watchers of runs and sweeps.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

from refiner_core.contract.config import RecipeConfig

#: Former command of `refiner` -> command.
COMMANDS = {"recipes": "list recipes", "profiles": "list profiles"}
#: Former name in `flows.api` -> name.
API_NAMES = {
    **{"deploy_nightly": "deploy", "rescore_share": "rescore", "serve_nightly": "serve"},
    **{"Begun": "InitFolder", "Explained": "StageExplanation", "Launch": "LaunchOptions"},
    **{"Pinned": "PinnedStage", "Played": "PlayedTask", "Rescored": "RescoreResult"},
    **{"Stopped": "StoppedServers", "Synced": "SyncResult"},
}


class KnownRun(NamedTuple):
    """One recorded run, as :func:`list_runs` gives it."""

    run: str
    recipe: str
    standing: str
    finished: bool
    done: int
    stages: int

    @property
    def state(self) -> str:
        """State in two words."""
        words = {"running": "running", "elsewhere": "running elsewhere"}
        return words.get(self.standing, "finished" if self.finished else "not finished")


def list_runs(workspace: str | Path = RecipeConfig.workspace) -> list[KnownRun]:
    """All runs of a workspace, oldest first; :func:`flows.api.list_rows` says more of each.

    Raises
    ------
    WorkspaceError
        The folder is no workspace.
    """
    from flows.runs.run_table import list_rows
    from infra.store.orchestrators import orchestrator_of
    from infra.store.workspace import Workspace

    warnings.warn("list_runs is list_rows now", DeprecationWarning, stacklevel=2)
    ws = Workspace.read_only(workspace)
    return [
        KnownRun(
            *(row.run, row.recipe, orchestrator_of(ws, row.run).standing),
            *(row.stages_done == row.stages, row.stages_done, row.stages),
        )
        for row in reversed(list_rows(ws.root, every=True))
    ]
