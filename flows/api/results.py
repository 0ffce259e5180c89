"""How runs have ended, for scripts: stages and numbers as plain values.

In: a :class:`~flows.running.calls.RunOutcome`, or a plan and its workspace. Out: JSON-ready values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.api.plans import OUTPUT_VERSION
from flows.running.calls import RunOutcome
from infra.store.workspace import Workspace
from refiner_core.contract.plan import Plan
from refiner_core.contract.views import StageView


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


def evaluations_of(plan: Plan, workspace: Workspace) -> list[dict[str, Any]]:
    """Every number of the plan's finished evaluations, the random copier's floor last.

    Parameters
    ----------
    plan
        Whose evaluations.
    workspace
        Where their records are.

    Returns
    -------
    list of dict
        ``stage`` (the model), ``protocol``, ``protocol_name``, ``decoding``, ``metric``, ``value``,
        ``low``, ``high``, ``n`` and ``under``. As a dataframe: :func:`flows.api.evaluations_frame`.

    Raises
    ------
    WorkspaceError
        A record is damaged.
    """
    numbers: list[dict[str, Any]] = []
    floor: dict[tuple[str, ...], dict[str, Any]] = {}
    evaluations = [s for s in plan.stages if s.kind == "evaluate"]
    for stage in sorted(evaluations, key=lambda s: _place(s.model)):
        result = workspace.read_result(stage.id)
        if result is None:
            continue
        numbers += [_number(e) for e in result.report["evaluations"]]
        for entry in result.report["reference"]:
            floor[tuple(str(entry[k]) for k in ("protocol", "metric"))] = _number(entry)
    return [*numbers, *floor.values()]


def _place(model: str) -> tuple[int, int]:
    """Where a model stands among others: in the order of training, steps before the end."""
    family, _, step = model.partition("-step")
    order = ("base", "sft", "rft", "grpo", "command")
    return (order.index(family) if family in order else len(order), int(step) if step else 1 << 62)


def _number(entry: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("stage", "protocol", "protocol_name", "decoding", "metric", "value", "low", "high", "n")
    return {**{key: entry.get(key) for key in keys}, "under": entry.get("under", "")}
