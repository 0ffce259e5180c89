"""Evaluated samples as frames: the evidence behind every number of an evaluation.

In: Parquet files, one per evaluation and decoding (:mod:`refiner_core.evaluation.samples`). Out: a
dataframe with a row per sample. Of each file only the columns that are wanted are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flows.frames.columns import TABLES, chosen, joined, plain, typed
from flows.frames.finding import evaluate_stages, gone, the_run
from flows.frames.of_runs import report_of
from flows.running.status import stage_names
from infra.store.sweep_records import read_sweep
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.evaluation.metrics import weighed

if TYPE_CHECKING:
    import pandas as pd

#: What says where a sample is from; these come first, always.
_PLACE = ("stage", "model", "protocol", "protocol_name", "decoding")
#: Long columns: only where they are asked for by name.
_LONG = ("judgements", "episode")


class _File(NamedTuple):
    """One samples file, and where it is from."""

    path: Path
    place: Mapping[str, Any]


def samples_frame(
    run: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    model: str | None = None,
    decoding: str | None = None,
    columns: Sequence[str] | None = None,
) -> pd.DataFrame:
    """The evaluated samples of a run, one row each.

    Parameters
    ----------
    run
        Which run (default: the newest).
    workspace
        The folder that it is recorded in.
    model
        Only answers of this model, such as ``grpo`` (default: all, and the random copier's).
    decoding
        Only ``greedy`` or ``sampled``.
    columns
        Only these, after those that say where a sample is from. By default all but long ones
        (``judgements``, JSON text; of agents ``episode``), which are read where they are named.

    Returns
    -------
    pandas.DataFrame
        ``describe_columns("samples")`` says what is in it; after these comes a column per metric,
        NaN where it was not measured. No rows where no evaluation is done.

    Raises
    ------
    ConfigurationError
        There is no such run or column, or it has not evaluated such a model or decoding.
    DataError
        A samples file was deleted or reclaimed, or is damaged.
    """
    room, record = the_run(run, workspace)
    stages = {n: record.stages[n] for n in stage_names(record)}
    files = list(_files(room, stages, record.run))
    return _frame(_only(files, model, decoding, f"Run {record.run}"), columns)


def sweep_samples_frame(
    sweep: str,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    arms: Sequence[str] | None = None,
    model: str | None = None,
    decoding: str | None = None,
    columns: Sequence[str] | None = None,
) -> pd.DataFrame:
    """The evaluated samples of a sweep's trials, with ``arm`` and ``seed`` in front.

    Parameters
    ----------
    sweep
        Its name.
    workspace
        The folder that it is recorded in.
    arms
        Only trials of these (default: all).
    model, decoding, columns
        As of :func:`samples_frame`.

    Returns
    -------
    pandas.DataFrame
        ``arm``, ``seed`` and the columns of :func:`samples_frame`. An evaluation that trials share
        is there with each of them; trials that have evaluated nothing yet have no rows.

    Raises
    ------
    ConfigurationError
        There is no such sweep, arm, model, decoding or column.
    DataError
        A samples file was deleted or reclaimed, or is damaged.
    """
    room = Workspace.read_only(workspace)
    record = read_sweep(room, sweep)
    names = chosen(arms, [a.name for a in record.arms], [a.name for a in record.arms], "The arms")
    files = [
        file._replace(place={"arm": trial.arm, "seed": trial.seed, **file.place})
        for trial in record.trials
        if trial.arm in names
        for file in _files(room, trial.stages, f"{sweep}:{trial.name}")
    ]
    return _frame(_only(files, model, decoding, f"Sweep {sweep}"), columns, ("arm", "seed"))


def _files(workspace: Workspace, stages: Mapping[str, str], run: str) -> Iterator[_File]:
    """The samples files of all evaluations that are done, each once."""
    for name, stage_id in evaluate_stages(stages).items():
        report, folder = report_of(workspace, stage_id), workspace.output_dir(stage_id)
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


def _only(
    files: Sequence[_File], model: str | None, decoding: str | None, of: str
) -> Sequence[_File]:
    """Files of a model and a decoding.

    Raises
    ------
    ConfigurationError
        There are files, and none of these.
    """
    kept = files
    for key, wanted in (("model", model), ("decoding", decoding)):
        there = sorted({str(f.place[key]) for f in files})
        if wanted is None or not files:
            continue
        if wanted not in there:
            raise ConfigurationError(
                f"{of} has evaluated no {key} {wanted!r}.",
                expected=f"one of: {', '.join(there)}",
                fix=f"name one of these in {key}=, or leave it out",
            )
        kept = [f for f in kept if str(f.place[key]) == wanted]
    return kept


def _frame(
    files: Sequence[_File], columns: Sequence[str] | None, before: Sequence[str] = ()
) -> pd.DataFrame:
    table = {**{n: TABLES["trials"][n] for n in before}, **TABLES["samples"]}
    parts: list[dict[str, Any]] = []
    for file in files:
        read = _read(file.path, columns)
        size = len(next(iter(read.values()), ()))
        parts.append({**{key: [value] * size for key, value in file.place.items()}, **read})
    if not parts:
        wanted = [n for n in table if n in (*before, *_PLACE) or columns is None or n in columns]
        return typed(table, {name: [] for name in wanted})
    names = list(dict.fromkeys(name for part in parts for name in part))
    return typed(table, {name: joined(parts, name) for name in names})


def _read(path: Path, columns: Sequence[str] | None) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            there = [n for n in file.schema_arrow.names if n not in _PLACE]
            short = [n for n in there if n not in _LONG]
            wanted = None if columns is None else [c for c in columns if c not in _PLACE]
            names = chosen(wanted, short, there, "The samples")
            # Something is to be read even where nothing is wanted: it says how many there are.
            table = file.read(columns=names or ["sample_id"])
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"{path} cannot be read ({error}).",
            expected="a samples file of an evaluation",
            fix="restore it, or delete its stage's folder and run the recipe again",
        ) from error
    return {name: plain(table.column(name)) for name in table.column_names}
