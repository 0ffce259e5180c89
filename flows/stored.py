"""Finds stored outputs of stages: attempts, rollouts, results, prompts. Reads only.

In: a workspace and a stage's id. Out: paths and plain values. An attempt takes over the files of
the one before up to the checkpoint that it resumes from, so the newest attempt with a file has the
complete history; one that has not begun has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.running.status import the_stage as the_stage
from infra.store.layout import AttemptPaths
from infra.store.traces import list_rollouts
from infra.store.workspace import Workspace

#: Prepared prompts of evaluations, and of training.
HELD_OUT, TRAINED_ON = "rl_test.parquet", "rl_train.parquet"


def attempts_of(workspace: Workspace, stage_id: str) -> dict[int, AttemptPaths]:
    """All attempts at a stage by number, the newest first."""
    stage = workspace.layout.stage(stage_id)
    return {number: stage.attempt(number) for number in reversed(stage.attempt_numbers())}


def rollouts_by_step(folder: Path) -> dict[int, Path]:
    """Step -> rollout file, in order."""
    return {int(p.stem.removeprefix("step-")): p for p in list_rollouts(folder)}


def newest_rollouts(workspace: Workspace, stage_id: str) -> tuple[int, dict[int, Path]]:
    """Number of the newest attempt with rollouts, and its files by step; else 0 and none."""
    for number, paths in attempts_of(workspace, stage_id).items():
        if found := rollouts_by_step(paths.rollouts):
            return number, found
    return 0, {}


def monitor_of(workspace: Workspace, stages: Mapping[str, str]) -> Mapping[str, Any]:
    """Report of a run's monitor, by its stages; empty without one, or before the end of GRPO."""
    stage_id = stages.get("grpo")
    result = None if stage_id is None else workspace.read_result(stage_id)
    found: Mapping[str, Any] = {} if result is None else result.report.get("monitor") or {}
    return found


def results_of(workspace: Workspace, stage_id: str) -> Mapping[str, Any] | None:
    """Results of an evaluation; None if it is not done."""
    result = workspace.read_result(stage_id)
    if result is None or "evaluations" in result.report:
        return None if result is None else result.report
    from refiner_core.evaluation.results import load_results

    return load_results(workspace.layout.stage(stage_id).data / result.output_dir)


def prompts_of(workspace: Workspace, attempt: AttemptPaths, name: str) -> tuple[str, Path | None]:
    """The data stage that an attempt has read, and its file of prompts, if it exists."""
    data = str(workspace.part(attempt, "inputs").get("data") or "")
    folder = workspace.output_dir(data) if data else None
    path = None if folder is None else folder / name
    return data, path if path is not None and path.is_file() else None


def recorded_field(config: Mapping[str, Any], path: str, default: Any) -> Any:
    """A field of a recorded configuration by its dotted name, as JSON."""
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _listed(default)
        value = value[part]
    return _listed(value)


def _listed(value: Any) -> Any:
    return [_listed(v) for v in value] if isinstance(value, list | tuple) else value
