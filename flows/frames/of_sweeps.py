"""A sweep's trials, comparisons and curves as frames.

In: the name of a sweep and a workspace. Out: dataframes (see :mod:`flows.frames`). The comparisons
are those of ``refiner report``, number by number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.frames.columns import TABLES, chosen, make_frame, typed
from flows.frames.of_runs import metrics_of
from infra.store.sweep_records import read_sweep
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest

if TYPE_CHECKING:
    import pandas as pd

    from refiner_core.contract.sweep_records import TrialRecord
    from refiner_core.report.sweep.document import Comparison

_HERE = RecipeConfig.workspace


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
    from flows.sweeping.reading import SweepReader

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
        for standing in SweepReader(room, record.name).standings(record)
    ]
    return make_frame("trials", rows, list(dict.fromkeys(n for of in levels.values() for n in of)))


def comparisons_frame(sweep: str, workspace: str | Path = _HERE) -> pd.DataFrame:
    """What the arms of a sweep have shown: one row per number and arm, as in ``refiner report``.

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
    from flows.reporting.writing import make

    report = make(Workspace.read_only(workspace), sweep)
    rows = [row for one in report.comparisons for row in _rows(one, report.baseline)]
    return make_frame("comparisons", rows)


def _rows(comparison: Comparison, baseline: str) -> Iterator[Mapping[str, Any]]:
    beside = {
        "primary": comparison.primary,
        "higher_is_better": comparison.higher_is_better,
        **asdict(comparison.key),
    }
    for number in comparison.numbers:
        yield {**beside, **asdict(number), "baseline": number.arm == baseline}


def sweep_metrics_frame(
    sweep: str,
    stage: str,
    workspace: str | Path = _HERE,
    *,
    arms: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> pd.DataFrame:
    """What a training stage has logged in every trial of a sweep.

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
    record = read_sweep(room, sweep)
    known = [arm.name for arm in record.arms]
    wanted = chosen(arms, known, known, "The arms")
    parts = [
        _with_place(metrics_of(room, _stage(trial.stages, stage, sweep), columns), trial)
        for trial in record.trials
        if trial.arm in wanted
    ]
    return pd.concat(parts, ignore_index=True)


def _stage(stages: Mapping[str, str], name: str, sweep: str) -> str:
    if name not in stages:
        raise ConfigurationError(
            f"The trials of sweep {sweep} have no stage {name!r}.{suggest(name, stages)}",
            expected=f"one of: {', '.join(stages)}",
            fix="name one of these in stage=",
        )
    return stages[name]


def _with_place(metrics: pd.DataFrame, trial: TrialRecord) -> pd.DataFrame:
    import pandas as pd

    place = {"arm": [trial.arm] * len(metrics), "seed": [trial.seed] * len(metrics)}
    return pd.concat([typed(TABLES["trials"], place), metrics], axis=1)
