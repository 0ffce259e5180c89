"""Records as dataframes, for notebooks.

In: the name of a run or a sweep, and a workspace. Out: pandas dataframes, one row per run, stage,
step, rollout, evaluated sample, metric, trial, comparison or incident. Only records are read:
nothing is written, no scheduler is asked except by :func:`stages_frame`, and runs may be running.

>>> from flows.frames import metrics_frame
>>> metrics_frame(stage="grpo", workspace="runs").plot(x="step", y="scores")  # doctest: +SKIP

In all of them a run is named as in ``refiner status``: by its id, an unambiguous part of
it, or ``SWEEP:ARM/seed1``; None is the newest. Columns have fixed types, also without rows:

- text is ``string``, integers ``Int64``, flags ``boolean``, times ``datetime64[ns, UTC]``, with
  ``<NA>`` (``NaT``) for missing values;
- other numbers are ``float64``, with NaN for missing values, never 0.

:func:`describe_columns` has the meaning and unit of each column. Importing this package imports
neither pandas nor pyarrow; its functions do.

The comparisons have the same values as ``refiner report``. Files of answers are read one after the
other, and only the wanted columns are kept in memory: ``columns=["step", "reward"]`` of a run of
days fits into a laptop.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flows.frames.columns import (
    TABLES,
    chosen,
    evaluate_stages,
    gone,
    make_frame,
    the_run,
    trials_of,
    typed,
    typed_arrow,
)
from flows.frames.columns import describe_columns as describe_columns
from flows.running.status import RunWatcher, stage_names
from flows.runs.run_table import COLUMNS, list_rows
from flows.stored import newest_metrics, newest_rollouts, results_of, the_stage
from infra.orchestrator.timeline import run_incidents
from infra.store.sweep_records import read_sweep
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, no_such
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.records import RunRecord
from refiner_core.evaluation.metrics import weighed

if TYPE_CHECKING:
    import pandas as pd

_HERE = RecipeConfig.workspace


def runs_frame(
    workspace: str | Path = _HERE, *, every: bool = False, where: str = ""
) -> pd.DataFrame:
    """Runs of a workspace, newest first: one row each.

    Parameters
    ----------
    workspace
        The folder that has their records.
    every
        Also runs that did nothing of their own, repetitions and nights.
    where
        A filter such as ``grpo.beta < 0.01 and oracle > 0.8``.

    Returns
    -------
    pandas.DataFrame
        With the columns of ``describe_columns("runs")``; then a column per metric, with
        ``METRIC/low`` and ``METRIC/high``.

    Raises
    ------
    ConfigurationError
        The filter is not understood.
    WorkspaceError
        The folder is no workspace.
    """
    rows = list_rows(workspace, every=every, where=where)
    found = []
    for row in rows:
        value = {name: getattr(row, name) or None for name in COLUMNS}
        value |= {"tags": list(row.tags), "overrides": list(row.overrides)}
        for name, entry in row.metrics.items():
            value |= {name: entry.get("value")}
            value |= {f"{name}/{end}": entry.get(end) for end in ("low", "high")}
        found.append(value)
    return make_frame("runs", found, list(dict.fromkeys(n for row in found for n in row)))


def stages_frame(run: str | None = None, workspace: str | Path = _HERE) -> pd.DataFrame:
    """Current state of the stages of a run, one row each.

    Parameters
    ----------
    run
        Run id (default: the newest).
    workspace
        The folder that has its records.

    Returns
    -------
    pandas.DataFrame
        With the columns of ``describe_columns("stages")``.

    Raises
    ------
    ConfigurationError
        There is no such run.
    WorkspaceError
        A record is damaged; the message names it and the fix.
    """
    ws, record = the_run(run, workspace)
    rows = []
    for stage in RunWatcher(ws, record).observe().stages:
        found = ws.read_record(stage.id)
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
    """Logged metrics of a training stage, one row per step.

    Parameters
    ----------
    run
        Run id (default: the newest).
    stage
        Its name, such as ``sft`` or ``grpo`` (default: the last one that has logged metrics).
    workspace
        The folder that has the run's records.
    columns
        Only these metrics, after ``step`` (default: all, in the order of their logging).

    Returns
    -------
    pandas.DataFrame
        ``step`` and a column per metric; NaN if a step has none, or it was not finite. No rows
        before anything is logged.

    Raises
    ------
    ConfigurationError
        There is no such run, stage or metric.
    WorkspaceError
        A line of the log is damaged.
    """
    ws, record = the_run(run, workspace)
    if stage is None:
        stage = _last_logged(ws, record)
    return metrics_of(ws, the_stage(record, stage), columns)


def metrics_of(
    workspace: Workspace, stage_id: str, columns: Sequence[str] | None = None
) -> pd.DataFrame:
    """The same for a stage id."""
    steps: dict[int, dict[str, float | None]] = {}
    for line in newest_metrics(workspace, stage_id):
        steps.setdefault(line.step, {}).update(line.metrics)
    names = list(dict.fromkeys(name for metrics in steps.values() for name in metrics))
    if steps:
        names = chosen(columns, names, names, f"The metrics of {stage_id}")
    elif columns is not None:
        names = list(columns)
    values = {n: [metrics.get(n) for metrics in steps.values()] for n in names if n != "step"}
    return typed(TABLES["metrics"], {"step": list(steps), **values})


def _last_logged(workspace: Workspace, run: RunRecord) -> str:
    """The last training stage that has logged metrics; else the last one.

    Raises
    ------
    ConfigurationError
        The run trains nothing.
    """
    trains = [n for n in stage_names(run) if run.stages[n].rpartition("-")[0] in TRAINED]
    for name in reversed(trains):
        if newest_metrics(workspace, run.stages[name], ()):
            return name
    if not trains:
        raise ConfigurationError(
            f"Run {run.run} trains nothing.",
            expected=f"a run with one of the stages {', '.join(TRAINED)}",
            fix="name another run",
        )
    return trains[-1]


def evaluations_frame(run: str | None = None, workspace: str | Path = _HERE) -> pd.DataFrame:
    """Metrics of a run's evaluations with their intervals, one row each.

    Parameters
    ----------
    run
        Run id (default: the newest).
    workspace
        The folder that has its records.

    Returns
    -------
    pandas.DataFrame
        With the columns of ``describe_columns("evaluations")``. Unfinished evaluations have no
        rows; the random copier, the baseline of each protocol, comes last and once.

    Raises
    ------
    ConfigurationError
        There is no such run.
    WorkspaceError
        A record is damaged.
    """
    ws, record = the_run(run, workspace)
    rows: list[dict[str, Any]] = []
    baseline: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, stage_id in evaluate_stages(record.stages).items():
        report = results_of(ws, stage_id) or {}
        rows += [_number(entry, name) for entry in report.get("evaluations", ())]
        for entry in report.get("reference", ()):
            key = (entry["protocol"], entry["metric"], entry["decoding"])
            baseline.setdefault(key, _number(entry, name))
    return make_frame("evaluations", [*rows, *baseline.values()])


def _number(entry: Mapping[str, Any], stage: str) -> dict[str, Any]:
    return {**entry, "model": entry["stage"], "stage": stage, "under": entry.get("under", "")}


def incidents_frame(run: str | None = None, workspace: str | Path = _HERE) -> pd.DataFrame:
    """Incidents of a run with their times and costs, one row each, oldest first.

    Parameters
    ----------
    run
        Run id (default: the newest).
    workspace
        The folder that has its records.

    Returns
    -------
    pandas.DataFrame
        With the columns of ``describe_columns("incidents")``.

    Raises
    ------
    ConfigurationError
        There is no such run.
    WorkspaceError
        A record is damaged.
    """
    ws, record = the_run(run, workspace)
    return make_frame("incidents", [asdict(i) for i in run_incidents(ws, record)])


def trials_frame(sweep: str, workspace: str | Path = _HERE) -> pd.DataFrame:
    """Current state of the trials of a sweep, one row each.

    Parameters
    ----------
    sweep
        Its name.
    workspace
        The folder that has its records.

    Returns
    -------
    pandas.DataFrame
        With the columns of ``describe_columns("trials")``, then ``level/FACTOR`` for each factor:
        the label of the trial's arm.

    Raises
    ------
    ConfigurationError
        There is no such sweep; the message names the nearest.
    WorkspaceError
        A record is damaged.
    """
    from flows.sweeping.status import SweepWatcher

    ws = Workspace.read_only(workspace)
    record = read_sweep(ws, sweep)
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
        for standing in SweepWatcher(ws, record.name).standings(record)
    ]
    return make_frame("trials", rows, list(dict.fromkeys(n for of in levels.values() for n in of)))


def comparisons_frame(sweep: str, workspace: str | Path = _HERE) -> pd.DataFrame:
    """Metrics of a sweep's arms: one row per metric and arm, as in ``refiner report``.

    Parameters
    ----------
    sweep
        Its name.
    workspace
        The folder that has its records.

    Returns
    -------
    pandas.DataFrame
        With the columns of ``describe_columns("comparisons")``. The metric of the sweep's question
        comes first; a missing difference is NaN, and ``note`` has the reason.

    Raises
    ------
    ConfigurationError
        There is no such sweep; the message names the nearest.
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
    """Logged metrics of a training stage in every trial of a sweep.

    Parameters
    ----------
    sweep
        Its name.
    stage
        Name of the stage, such as ``grpo``.
    workspace
        The folder that has the sweep's records.
    arms
        Only trials of these arms (default: all).
    columns
        Only these metrics (default: all).

    Returns
    -------
    pandas.DataFrame
        ``arm``, ``seed``, and the columns of :func:`flows.frames.metrics_frame`: one row per trial
        and step. Trials without logged metrics have no rows.

    Raises
    ------
    ConfigurationError
        There is no such sweep, arm, stage or metric.
    WorkspaceError
        A line of a log is damaged.
    """
    import pandas as pd

    ws = Workspace.read_only(workspace)
    parts = []
    for trial in trials_of(read_sweep(ws, sweep), arms):
        if stage not in trial.stages:
            what = f"The trials of sweep {sweep} have no stage"
            raise no_such(what, stage, trial.stages, "name one of these in stage=")
        metrics = metrics_of(ws, trial.stages[stage], columns)
        place = {"arm": [trial.arm] * len(metrics), "seed": [trial.seed] * len(metrics)}
        parts.append(pd.concat([typed(TABLES["trials"], place), metrics], axis=1))
    return pd.concat(parts, ignore_index=True)


#: Long columns: included only by name.
_LONG_ROLLOUTS = ("response_ids", "logprobs", "judgements")
#: Computed columns -> their columns in the file.
_MADE = {
    "response_tokens": "response_ids",
    "judgements_scored": "judgements",
    "judgements_failed": "judgements",
    "judgements_mean": "judgements",
}


def rollouts_frame(
    run: str | None = None,
    steps: int | Iterable[int] | None = None,
    workspace: str | Path = _HERE,
    *,
    stage: str = "grpo",
    columns: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Rollouts of a run, one row each.

    Parameters
    ----------
    run
        Run id (default: the newest).
    steps
        One step or several, such as ``range(1, 11)`` (default: all stored ones).
    workspace
        The folder that has the run's records.
    stage
        The stage that sampled them.
    columns
        Only these, in this order. By default all but long ones: ``judgements`` (JSON text, each
        with its criterion and score), ``response_ids`` and ``logprobs`` (lists) are included only
        by
        name.

    Returns
    -------
    pandas.DataFrame
        With the columns of ``describe_columns("rollouts")``, then the parts of the reward
        (``reward/…``). No rows before a step is finished.

    Raises
    ------
    ConfigurationError
        There is no such run, stage, step or column.
    DataError
        The rollouts were deleted or reclaimed, or a file is damaged.
    """
    ws, record = the_run(run, workspace)
    stage_id = the_stage(record, stage)
    _, files = newest_rollouts(ws, stage_id)
    if not files and ws.layout.stage(stage_id).result.exists():
        if not stage_id.startswith("grpo-"):
            raise ConfigurationError(
                f"The stage {stage} of run {record.run} samples no rollouts.",
                expected="a stage that trains on rewards, such as grpo",
                fix="leave stage= out, or see samples_frame for what evaluations have sampled",
            )
        raise gone(ws, stage_id, "rollouts", record.run)
    table = TABLES["rollouts"]
    parts = [_read_rollouts(files[step], columns) for step in _steps(steps, files, record.run)]
    return typed_arrow(table, parts, (n for n in table if columns is None or n in columns))


def _steps(wanted: int | Iterable[int] | None, files: Mapping[int, Path], run: str) -> list[int]:
    if wanted is None or not files:
        return list(files)
    # A step from a frame is NumPy's.
    steps = [int(step) for step in (wanted if isinstance(wanted, Iterable) else [wanted])]
    if absent := [step for step in steps if step not in files]:
        known = list(files)
        raise ConfigurationError(
            f"Run {run} has no rollouts of step {absent[0]}"
            + (f" and {len(absent) - 1} more" if len(absent) > 1 else "")
            + ".",
            expected=f"steps from {known[0]} to {known[-1]}, of which {len(known)} are kept",
            fix="name some of these in steps=, or leave it out",
        )
    return steps


def _read_rollouts(path: Path, columns: Sequence[str] | None) -> Any:
    """An Arrow table of one file."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from refiner_core.evaluation.metrics import opened

    expected = "the rollouts of one step, as refiner has written them"
    with opened(path, None, expected, "leave this step out with steps=, or restore it") as file:
        there = file.schema_arrow.names
        made = [name for name, source in _MADE.items() if source in there and name not in there]
        known = [n for n in TABLES["rollouts"] if n in there or n in made]
        known += [n for n in there if n not in known and n not in _LONG_ROLLOUTS]
        long = [n for n in _LONG_ROLLOUTS if n in there]
        names = chosen(columns, known, known + long, "The rollouts")
        table = file.read(columns=list(dict.fromkeys(_MADE[n] if n in made else n for n in names)))
    if "response_tokens" in set(made) & set(names):
        lengths = pc.list_value_length(table.column("response_ids"))
        table = table.append_column("response_tokens", lengths)
    if judged := [n for n in names if n in made and _MADE[n] == "judgements"]:
        counted = [_judged(text) for text in table.column("judgements").to_pylist()]
        for name in judged:
            table = table.append_column(name, pa.array([one[name] for one in counted]))
    return table.select(names)


def _judged(text: str | None) -> dict[str, float | None]:
    """Counts and mean of a rollout's judgements; all missing if none are stored."""
    if text is None:
        return dict.fromkeys(("judgements_scored", "judgements_failed", "judgements_mean"))
    from flows.reporting.samples import credit_of

    found = json.loads(text)
    scored = [j for j in found if j.get("score") is not None]
    credit = [credit_of(j) for j in scored if j.get("kind") == "rubric"]
    return {
        "judgements_scored": len(scored),
        "judgements_failed": len(found) - len(scored),
        "judgements_mean": sum(credit) / len(credit) if credit else None,
    }


#: Columns on the origin of a sample; these always come first.
_PLACE = ("stage", "model", "protocol", "protocol_name", "decoding")
#: Long columns: included only by name.
_LONG_SAMPLES = ("judgements", "episode")


class _File(NamedTuple):
    """One samples file, and its origin."""

    path: Path
    place: Mapping[str, Any]


def samples_frame(
    run: str | None = None,
    workspace: str | Path = _HERE,
    *,
    model: str | None = None,
    decoding: str | None = None,
    columns: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Evaluated samples of a run, one row each.

    Parameters
    ----------
    run
        Run id (default: the newest).
    workspace
        The folder that has its records.
    model
        Only answers of this model, such as ``grpo`` (default: all, with the random copier's).
    decoding
        Only ``greedy`` or ``sampled``.
    columns
        Only these, after those on the origin of a sample. By default all but long ones
        (``judgements``, JSON text; for agents ``episode``), which are included only by name.

    Returns
    -------
    pandas.DataFrame
        With the columns of ``describe_columns("samples")``, then a column per metric, NaN if it was
        not measured. No rows before an evaluation is done.

    Raises
    ------
    ConfigurationError
        There is no such run or column, or the run has not evaluated such a model or decoding.
    DataError
        A samples file was deleted or reclaimed, or is damaged.
    """
    ws, record = the_run(run, workspace)
    stages = {n: record.stages[n] for n in stage_names(record)}
    files = list(_sample_files(ws, stages, record.run))
    return _frame(_only_of(files, model, decoding, f"Run {record.run}"), columns)


def sweep_samples_frame(
    sweep: str,
    workspace: str | Path = _HERE,
    *,
    arms: Sequence[str] | None = None,
    model: str | None = None,
    decoding: str | None = None,
    columns: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Evaluated samples of a sweep's trials, after ``arm`` and ``seed``.

    Parameters
    ----------
    sweep
        Its name.
    workspace
        The folder that has its records.
    arms
        Only trials of these arms (default: all).
    model, decoding, columns
        As of :func:`samples_frame`.

    Returns
    -------
    pandas.DataFrame
        ``arm``, ``seed`` and the columns of :func:`samples_frame`. A shared evaluation appears with
        each of its trials; trials without finished evaluations have no rows.

    Raises
    ------
    ConfigurationError
        There is no such sweep, arm, model, decoding or column.
    DataError
        A samples file was deleted or reclaimed, or is damaged.
    """
    ws = Workspace.read_only(workspace)
    record = read_sweep(ws, sweep)
    files = [
        file._replace(place={"arm": trial.arm, "seed": trial.seed, **file.place})
        for trial in trials_of(record, arms)
        for file in _sample_files(ws, trial.stages, f"{sweep}:{trial.name}")
    ]
    return _frame(_only_of(files, model, decoding, f"Sweep {sweep}"), columns, ("arm", "seed"))


def _sample_files(workspace: Workspace, stages: Mapping[str, str], run: str) -> Iterator[_File]:
    """Samples files of all finished evaluations, each once."""
    for name, stage_id in evaluate_stages(stages).items():
        report, folder = results_of(workspace, stage_id), workspace.output_dir(stage_id)
        if report is None or folder is None:
            continue
        seen = set()
        for entry in (*report["evaluations"], *report.get("reference", ())):
            key = (entry["samples_file"], entry["decoding"])
            if key in seen or weighed(str(entry["metric"])):
                continue
            seen.add(key)
            path = folder / str(entry["samples_file"])
            if not path.exists():
                raise gone(workspace, stage_id, f"samples of {name}", run)
            yield _File(path, {**{k: entry.get(k) for k in _PLACE}, "model": entry["stage"],
                               "stage": name})  # fmt: skip


def _only_of(
    files: Sequence[_File], model: str | None, decoding: str | None, of: str
) -> Sequence[_File]:
    """Files of a model and a decoding.

    Raises
    ------
    ConfigurationError
        There are files, but none of these.
    """
    kept = files
    for key, wanted in (("model", model), ("decoding", decoding)):
        there = sorted({str(f.place[key]) for f in files})
        if wanted is None or not files:
            continue
        if wanted not in there:
            fix = f"name one of these in {key}=, or leave it out"
            raise no_such(f"{of} has evaluated no {key}", wanted, there, fix)
        kept = [f for f in kept if str(f.place[key]) == wanted]
    return kept


def _frame(
    files: Sequence[_File], columns: Sequence[str] | None, before: Sequence[str] = ()
) -> pd.DataFrame:
    table = {**{n: TABLES["trials"][n] for n in before}, **TABLES["samples"]}
    parts = [_read_samples(file, columns) for file in files]
    wanted = (n for n in table if n in (*before, *_PLACE) or columns is None or n in columns)
    return typed_arrow(table, parts, wanted)


def _read_samples(found: _File, columns: Sequence[str] | None) -> Any:
    """An Arrow table of one file, with the columns on its origin in front."""
    import pyarrow as pa

    from refiner_core.evaluation.metrics import opened

    with opened(found.path) as file:
        there = [n for n in file.schema_arrow.names if n not in _PLACE]
        short = [n for n in there if n not in _LONG_SAMPLES]
        wanted = None if columns is None else [c for c in columns if c not in _PLACE]
        names = chosen(wanted, short, there, "The samples")
        # At least one column is read, for the number of rows.
        table = file.read(columns=names or ["sample_id"])
    place = {key: pa.repeat(value, len(table)) for key, value in found.place.items()}
    columns_of = dict(zip(table.column_names, table.columns, strict=True))
    return pa.table({**place, **columns_of})
