"""How runs have ended, for scripts: stages and numbers as plain values.

In: a :class:`~flows.running.calls.RunOutcome`, or a plan and its workspace. Out: JSON-ready values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.api.plans import OUTPUT_VERSION
from flows.evaluations import evaluations_of as evaluations_of
from flows.running.calls import RunOutcome
from infra.store.workspace import Workspace
from refiner_core.contract.types import StageView


def run_json(outcome: RunOutcome, workspace: Workspace | None = None) -> dict[str, Any]:
    """A finished run for scripts: stages, and every evaluated number with its interval.

    Parameters
    ----------
    outcome
        What :func:`flows.api.run_recipe` has returned.
    workspace
        Where its records are (default: the plan's own).

    Returns
    -------
    dict
        What ``refiner run --json`` prints.

    Raises
    ------
    WorkspaceError
        A record is damaged.
    """
    workspace = workspace or Workspace.read_only(outcome.plan.config.workspace)
    return {
        "version": OUTPUT_VERSION,
        "run": outcome.run,
        "recipe": outcome.plan.recipe,
        "workspace": str(Path(outcome.plan.config.workspace)),
        "exit_code": outcome.exit_code,
        "stages": [
            {
                "stage": view.kind,
                "name": view.name,
                "id": outcome.plan.by_name[view.name].id,
                "fingerprint": view.fingerprint,
                "state": view.state,
                "seconds": round(view.seconds, 3),
                "attempt": view.attempt,
                "message": view.message,
                "log": view.log,
                **_target(view),
                "output": str(workspace.output_dir(outcome.plan.by_name[view.name].id) or ""),
            }
            for view in outcome.views.values()
        ],
        "evaluations": evaluations_of(outcome.plan, workspace),
    }


def _target(view: StageView) -> dict[str, str]:
    """Where a publish or card stage has put what it published."""
    return {"target": str(view.report["target"])} if "target" in view.report else {}
