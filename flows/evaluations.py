"""Metrics of finished evaluations, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.store.workspace import Workspace
from refiner_core.contract.kinds import model_order
from refiner_core.contract.plan import Plan


def evaluations_of(plan: Plan, workspace: Workspace) -> list[dict[str, Any]]:
    """Every metric of the plan's finished evaluations, the random copier's baseline last.

    Parameters
    ----------
    plan
        The plan with the evaluations.
    workspace
        The workspace with their records.

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
    baseline: dict[tuple[str, ...], dict[str, Any]] = {}
    evaluations = [s for s in plan.stages if s.kind == "evaluate"]
    for stage in sorted(evaluations, key=lambda s: model_order(s.model)):
        result = workspace.read_result(stage.id)
        if result is None:
            continue
        numbers += [_number(e) for e in result.report["evaluations"]]
        for entry in result.report["reference"]:
            baseline[tuple(str(entry[k]) for k in ("protocol", "metric"))] = _number(entry)
    return [*numbers, *baseline.values()]


def _number(entry: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("stage", "protocol", "protocol_name", "decoding", "metric", "value", "low", "high", "n")
    return {**{key: entry.get(key) for key in keys}, "under": entry.get("under", "")}
