"""Stages, metrics, numbers and incidents of a run, and trials, comparisons and curves of a sweep,
as frames.

In: the name of a run or a sweep, and a workspace. Out: dataframes (see :mod:`flows.frames`). The
comparisons are those of ``refiner report``, number by number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.frames.columns import (
    TABLES,
    chosen,
    evaluate_stages,
    make_frame,
    the_run,
    trials_of,
    typed,
)
from flows.running.status import Watcher, stage_names
from flows.stored import attempts_of, results_of, the_stage
from infra.orchestrator.timeline import run_incidents
from infra.store.sweep_records import read_sweep
from infra.store.traces import read_metrics
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, no_such
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.records import RunRecord

if TYPE_CHECKING:
    import pandas as pd

_HERE = RecipeConfig.workspace


def stages_frame(run: str | None = None, workspace: str | Path = _HERE) -> pd.DataFrame:
    """The stages of a run, one row each, as they stand now.

    Parameters
    ----------
    run
        Which run (default: the newest).
    workspace
        The folder that it is recorded in.

    Returns
    -------
    pandas.DataFrame
        ``describe_columns("stages")`` says what is in it.

    Raises
    ------
    ConfigurationError
        There is no such run.
    WorkspaceError
        A record is damaged; says which, and what to do.
    """
    room, record = the_run(run, workspace)
    rows = []
    for stage in Watcher(room, record).look().stages:
        found = room.read_record(stage.id)
        attempts = found.attempts if found is not None else ()
        rows.append(
            {
                **{key: None if value == "" else value for key, value in asdict(stage).items()},
                "kind": stage.id.rpartition("-")[0],
                "attempt": stage.attempt or None,
                "started_at": attempts[0].started_at if attempts else None,
                "ended_at": attempts[-1].ended_at if attempts else None,
            }
        )
    return make_frame("stages", rows)


def metrics_frame(
    run: str | None = None,
    stage: str | None = None,
    workspace: str | Path = _HERE,
    *,
    columns: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Metrics that a training stage has logged, one row per step.

    Parameters
    ----------
    run
        Which run (default: the newest).
    stage
        Its name, such as ``sft`` or ``grpo`` (default: the last one that has logged something).
    workspace
        The folder that the run is recorded in.
    columns
        Only these metrics, after ``step`` (default: all, in the order in which they came).

    Returns
    -------
    pandas.DataFrame
        ``step`` and a column per metric; NaN where a step has none, or it was not finite. No rows
        where nothing was logged yet.

    Raises
    ------
    ConfigurationError
        There is no such run, stage or metric.
    WorkspaceError
        A line of the log is damaged.
    """
    room, record = the_run(run, workspace)
    if stage is None:
        stage = _last_logged(room, record)
    return metrics_of(room, the_stage(record, stage), columns)


def metrics_of(
    workspace: Workspace, stage_id: str, columns: Sequence[str] | None = None
) -> pd.DataFrame:
    """The same of a stage by its id."""
    steps: dict[int, dict[str, float | None]] = {}
    lines = (read_metrics(a.metrics) for a in attempts_of(workspace, stage_id).values())
    for line in next(filter(None, lines), ()):
        steps.setdefault(line.step, {}).update(line.metrics)
    names = list(dict.fromkeys(name for metrics in steps.values() for name in metrics))
    if steps:
        names = chosen(columns, names, names, f"The metrics of {stage_id}")
    elif columns is not None:
        names = list(columns)
    values = {n: [metrics.get(n) for metrics in steps.values()] for n in names if n != "step"}
    return typed(TABLES["metrics"], {"step": list(steps), **values})


def _last_logged(workspace: Workspace, run: RunRecord) -> str:
    """The last training stage that has logged something; where none has, the last.

    Raises
    ------
    ConfigurationError
        The run trains nothing.
    """
    trains = [n for n in stage_names(run) if run.stages[n].rpartition("-")[0] in TRAINED]
    for name in reversed(trains):
        if any(a.metrics.exists() for a in attempts_of(workspace, run.stages[name]).values()):
            return name
    if not trains:
        raise ConfigurationError(
            f"Run {run.run} trains nothing.",
            expected=f"a run with one of the stages {', '.join(TRAINED)}",
            fix="name another run",
        )
    return trains[-1]


def evaluations_frame(run: str | None = None, workspace: str | Path = _HERE) -> pd.DataFrame:
    """The numbers of a run's evaluations with their intervals, one row each.

    Parameters
    ----------
    run
        Which run (default: the newest).
    workspace
        The folder that it is recorded in.

    Returns
    -------
    pandas.DataFrame
        ``describe_columns("evaluations")`` says what is in it. Evaluations that are not done have
        no rows; the random copier, the floor of each protocol, comes last and once.

    Raises
    ------
    ConfigurationError
        There is no such run.
    WorkspaceError
        A record is damaged.
    """
    room, record = the_run(run, workspace)
    rows: list[dict[str, Any]] = []
    floor: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, stage_id in evaluate_stages(record.stages).items():
        report = results_of(room, stage_id) or {}
        rows += [_number(entry, name) for entry in report.get("evaluations", ())]
        for entry in report.get("reference", ()):
            key = (entry["protocol"], entry["metric"], entry["decoding"])
            floor.setdefault(key, _number(entry, name))
    return make_frame("evaluations", [*rows, *floor.values()])


def _number(entry: Mapping[str, Any], stage: str) -> dict[str, Any]:
    return {**entry, "model": entry["stage"], "stage": stage, "under": entry.get("under", "")}


def incidents_frame(run: str | None = None, workspace: str | Path = _HERE) -> pd.DataFrame:
    """Incidents of a run, when they were and what they cost; one row each, oldest first.

    Parameters
    ----------
    run
        Which run (default: the newest).
    workspace
        The folder that it is recorded in.

    Returns
    -------
    pandas.DataFrame
        ``describe_columns("incidents")`` says what is in it.

    Raises
    ------
    ConfigurationError
        There is no such run.
    WorkspaceError
        A record is damaged.
    """
    room, record = the_run(run, workspace)
    return make_frame("incidents", [asdict(i) for i in run_incidents(room, record)])


def trials_frame(sweep: str, workspace: str | Path = _HERE) -> pd.DataFrame:
    """The trials of a sweep, one row each, as they stand now.

    Parameters
    ----------
    sweep
        Its name.
    workspace
        The folder that it is recorded in.

    Returns
    -------
    pandas.DataFrame
        ``describe_columns("trials")`` says what is in it; after these comes ``level/FACTOR`` for
        each factor: the label that the trial's arm has of it.

    Raises
    ------
    ConfigurationError
        There is no such sweep; names the nearest.
    WorkspaceError
        A record is damaged.
    """
    from flows.sweeping.status import SweepWatcher

    room = Workspace.read_only(workspace)
    record = read_sweep(room, sweep)
    levels = {arm.name: {f"level/{f}": v for f, v in arm.levels.items()} for arm in record.arms}
    rows = [
        {
            **asdict(standing.use),
            **asdict(standing),
            **levels[standing.arm],
            "run": standing.run or None,
            "stage": standing.stage or None,
            "baseline": standing.arm == record.baseline,
        }
        for standing in SweepWatcher(room, record.name).standings(record)
    ]
    return make_frame("trials", rows, list(dict.fromkeys(n for of in levels.values() for n in of)))


def comparisons_frame(sweep: str, workspace: str | Path = _HERE) -> pd.DataFrame:
    """Numbers of a sweep's arms: one row per number and arm, as in ``refiner report``.

    Parameters
    ----------
    sweep
        Its name.
    workspace
        The folder that it is recorded in.

    Returns
    -------
    pandas.DataFrame
        ``describe_columns("comparisons")`` says what is in it. The number that answers the sweep's
        question comes first; a difference that cannot be given is NaN, and ``note`` says why.

    Raises
    ------
    ConfigurationError
        There is no such sweep; names the nearest.
    WorkspaceError
        A record is damaged.
    """
    from flows.reporting.writing import make_sweep_report
    from refiner_core.report.sweep.rendering import number_rows

    return make_frame("comparisons", number_rows(make_sweep_report(sweep, workspace)))


def sweep_metrics_frame(
    sweep: str,
    stage: str,
    workspace: str | Path = _HERE,
    *,
    arms: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Metrics that a training stage has logged in every trial of a sweep.

    Parameters
    ----------
    sweep
        Its name.
    stage
        Name of the stage, such as ``grpo``.
    workspace
        The folder that the sweep is recorded in.
    arms
        Only trials of these (default: all).
    columns
        Only these metrics (default: all).

    Returns
    -------
    pandas.DataFrame
        ``arm``, ``seed``, and the columns of :func:`flows.frames.metrics_frame`: one row per trial
        and step. Trials that have logged nothing yet have no rows.

    Raises
    ------
    ConfigurationError
        There is no such sweep, arm, stage or metric.
    WorkspaceError
        A line of a log is damaged.
    """
    import pandas as pd

    room = Workspace.read_only(workspace)
    parts = []
    for trial in trials_of(read_sweep(room, sweep), arms):
        if stage not in trial.stages:
            what = f"The trials of sweep {sweep} have no stage"
            raise no_such(what, stage, trial.stages, "name one of these in stage=")
        metrics = metrics_of(room, trial.stages[stage], columns)
        place = {"arm": [trial.arm] * len(metrics), "seed": [trial.seed] * len(metrics)}
        parts.append(pd.concat([typed(TABLES["trials"], place), metrics], axis=1))
    return pd.concat(parts, ignore_index=True)
