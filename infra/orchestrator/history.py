"""Reads what a timeline is made of: records, last heartbeats and the event log of a run.

In: a workspace and a run. Out: values for :mod:`infra.orchestrator.timeline`. Reads only; a line
that was cut off by a crash, and a stage that nobody has begun, are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.orchestrator.timeline import Incident, StageHistory, incidents_of
from infra.store.workspace import Workspace
from refiner_core.contract.kinds import section_name
from refiner_core.contract.records import RunRecord


def run_incidents(workspace: Workspace, run: RunRecord) -> list[Incident]:
    """What went wrong in the stages of a run, oldest first."""
    return incidents_of(run_histories(workspace, run), run_events(workspace, run.run))


def run_histories(workspace: Workspace, run: RunRecord) -> list[StageHistory]:
    """Every stage of the run that has been begun, in the run's order."""
    found = (stage_history(workspace, run, name) for name in run.stages)
    return [history for history in found if history is not None]


def stage_history(workspace: Workspace, run: RunRecord, name: str) -> StageHistory | None:
    """One stage of a run; None if nobody has begun it."""
    stage_id = run.stages[name]
    record = workspace.read_record(stage_id)
    if record is None:
        return None
    numbers = [attempt.number for attempt in record.attempts]
    beats = {n: workspace.read_heartbeat(stage_id, n) or {} for n in numbers}
    gpus = devices_of(run.config, record.spec.kind)
    return StageHistory(name, stage_id, record, beats, max(gpus, 1), "GPU" if gpus else "CPU")


def devices_of(config: Mapping[str, Any], kind: str) -> int:
    """GPUs of all nodes that a recipe gives to a kind of stage; 0 for one on CPUs."""
    section = config.get(section_name(kind))
    resources = (section or {}).get("resources") or {}
    return int(resources.get("gpus") or 0) * int(resources.get("nodes") or 1)


def run_events(workspace: Workspace, run_id: str) -> list[dict[str, Any]]:
    """The event log of a run, oldest first."""
    return read_events(workspace.layout.run(run_id).events)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a log, oldest first; none where there is no log."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except json.JSONDecodeError:  # its writer was killed in the middle of it
            continue
        if isinstance(event, dict):
            found.append(event)
    return found
