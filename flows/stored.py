"""Finds stored outputs of stages: attempts, rollouts, results, prompts. Reads only.

In: a workspace and a stage's id. Out: paths and plain values. An attempt takes over the files of
the one before up to the checkpoint that it resumes from, so the newest attempt with a file has the
complete history; one that has not begun has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flows.running.status import the_stage as the_stage
from infra.store.layout import AttemptPaths
from infra.store.traces import MetricsLine, list_rollouts, read_metrics
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.marks import ABSENT, FieldInfo, walk

#: Prepared prompts of evaluations, and of training.
HELD_OUT, TRAINED_ON = "rl_test.parquet", "rl_train.parquet"
#: Page of all samples, beside the report of a run.
SAMPLES_PAGE = "samples.html"
#: The function of that page that its scripts call, and the script of a part.
SCRIPT_CALL = "refinerSamples("
_PART = re.compile(rb'refinerSamples\("[0-9a-f]+-\d+","[A-Za-z0-9+/=]*"\)')


def attempts_of(workspace: Workspace, stage_id: str) -> dict[int, AttemptPaths]:
    """All attempts at a stage by number, the newest first."""
    stage = workspace.layout.stage(stage_id)
    return {number: stage.attempt(number) for number in reversed(stage.attempt_numbers())}


def newest_metrics(
    workspace: Workspace, stage_id: str, only: Collection[str] | None = None
) -> list[MetricsLine]:
    """Lines of the newest attempt that has logged anything, of ``only`` these metrics."""
    attempts = attempts_of(workspace, stage_id).values()
    return next(filter(None, (read_metrics(paths.metrics, only) for paths in attempts)), [])


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


def field_values(
    configs: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, FieldInfo, list[Any]]]:
    """Each field of a recipe by its dotted name, with its value in recorded configurations."""
    for path, info in walk(RecipeConfig):
        default = info.default if info.legacy_value is ABSENT else info.legacy_value
        yield path, info, [recorded_field(config, path, default) for config in configs]


def sample_name(stage: str, part: str | int, row: Mapping[str, Any]) -> str:
    """Name of a sample on the page of all samples; ``part`` is a step or a decoding."""
    return f"{stage}/{part}/{row['sample_id']}/{row['sample_index']}"


def part_of_file(file: str) -> str:
    """The decoding that a samples file of an evaluation is named after."""
    return Path(file).stem.removeprefix("samples-")


def is_samples_script(path: Path) -> bool:
    """True for a script that only gives values to a page of samples: not one of somebody else."""
    text = path.read_bytes()
    if _PART.fullmatch(text):
        return True
    try:
        json.loads(text.removeprefix(SCRIPT_CALL.encode()).removesuffix(b")\n"))
    except ValueError:
        return False
    return True


def sample_address(
    workspace: Workspace, stage_id: str, part: str | int, sample: Mapping[str, Any]
) -> str:
    """Address of a sample on the newest page of samples that has its stage; empty without one."""
    for run_id in reversed(workspace.run_ids()):
        page = workspace.layout.reports / run_id / SAMPLES_PAGE
        if page.exists():
            stages = workspace.read_run(run_id).stages
            name = next((name for name, i in stages.items() if i == stage_id), None)
            if name is not None:
                return f"{page.as_uri()}#s={quote(sample_name(name, part, sample), safe='/')}"
    return ""


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
