"""A run's rollouts as a frame: every sampled answer with its reward parts.

In: Parquet files, one per step (:mod:`infra.attempt.stage_io`). Out: a dataframe. Files are read
one after the other, and of each only the columns that are wanted, so that what is held is what is
asked for: ``columns=["step", "reward"]`` of a run of days fits into a laptop.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.frames.columns import TABLES, chosen, joined, plain, typed
from flows.frames.finding import attempts_of, gone, is_over, the_run, the_stage
from infra.store.traces import list_rollouts
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    import pandas as pd

#: Long columns: only where they are asked for by name.
_LONG = ("response_ids", "logprobs", "judgements")
#: Columns that are made here -> what of the file they are made of.
_MADE = {
    "response_tokens": "response_ids",
    "judgements_scored": "judgements",
    "judgements_failed": "judgements",
    "judgements_mean": "judgements",
}


def rollouts_frame(
    run: str | None = None,
    steps: int | Iterable[int] | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    stage: str = "grpo",
    columns: Sequence[str] | None = None,
) -> pd.DataFrame:
    """The rollouts of a run, one row each.

    Parameters
    ----------
    run
        Which run (default: the newest).
    steps
        One step or several, such as ``range(1, 11)`` (default: all that are kept).
    workspace
        The folder that the run is recorded in.
    stage
        The stage that sampled them.
    columns
        Only these, in this order. By default all but long ones: ``judgements`` (JSON text, each
        with its criterion and score), ``response_ids`` and ``logprobs`` (lists) are read where they
        are named.

    Returns
    -------
    pandas.DataFrame
        ``describe_columns("rollouts")`` says what is in it; after these come the parts of the
        reward (``reward/…``) as the reward names them. No rows where no step is finished yet.

    Raises
    ------
    ConfigurationError
        There is no such run, stage, step or column.
    DataError
        The rollouts were deleted or reclaimed, or a file is damaged.
    """
    room, record = the_run(run, workspace)
    stage_id = the_stage(record, stage)
    files = _files(room, stage_id)
    if not files and is_over(room, stage_id):
        if not stage_id.startswith("grpo-"):
            raise ConfigurationError(
                f"The stage {stage} of run {record.run} samples no rollouts.",
                expected="a stage that trains on rewards, such as grpo",
                fix="leave stage= out, or see samples_frame for what evaluations have sampled",
            )
        raise gone(room, stage_id, "rollouts", record.run)
    wanted = _steps(steps, files, record.run)
    parts = [_read(files[step], columns) for step in wanted]
    if not parts:
        names = [n for n in TABLES["rollouts"] if columns is None or n in columns]
        return typed(TABLES["rollouts"], {name: [] for name in names})
    names = list(dict.fromkeys(name for part in parts for name in part))
    return typed(TABLES["rollouts"], {name: joined(parts, name) for name in names})


def _files(workspace: Workspace, stage_id: str) -> dict[int, Path]:
    """Step -> file, of the newest attempt that has some."""
    for attempt in attempts_of(workspace, stage_id):
        if found := list_rollouts(attempt.rollouts):
            return {int(p.stem.removeprefix("step-")): p for p in found}
    return {}


def _steps(wanted: int | Iterable[int] | None, files: Mapping[int, Path], run: str) -> list[int]:
    if wanted is None or not files:
        return list(files)
    # A step that comes out of a frame is NumPy's.
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


def _read(path: Path, columns: Sequence[str] | None) -> dict[str, Any]:
    """Columns of one file: name -> list or array."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            there = file.schema_arrow.names
            names = _names(there, columns)
            stored = list(dict.fromkeys(_MADE.get(n, n) for n in names if n not in there))
            table = file.read(columns=[*(n for n in names if n in there), *stored])
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"{path} cannot be read ({error}).",
            expected="the rollouts of one step, as refiner has written them",
            fix="leave this step out with steps=, or restore the file",
        ) from error
    return {n: _column(table, n) for n in names}


def _names(there: Sequence[str], columns: Sequence[str] | None) -> list[str]:
    made = [name for name, source in _MADE.items() if source in there]
    known = [*(n for n in TABLES["rollouts"] if n in there or n in made)]
    known += [n for n in there if n not in known and n not in _LONG]
    return chosen(columns, known, [*known, *(n for n in _LONG if n in there)], "The rollouts")


def _column(table: Any, name: str) -> Any:
    import pyarrow.compute as pc

    if name == "response_tokens" and name not in table.column_names:
        return pc.list_value_length(table.column("response_ids")).to_pylist()
    if name in _MADE and name not in table.column_names:
        counted = [_judged(text) for text in table.column("judgements").to_pylist()]
        return [one[name] for one in counted]
    return plain(table.column(name))


def _judged(text: str | None) -> dict[str, float | None]:
    """What the judgements of a rollout come to; everything is missing where none were kept."""
    if text is None:
        return dict.fromkeys(("judgements_scored", "judgements_failed", "judgements_mean"))
    found = json.loads(text)
    scored = [j for j in found if j.get("score") is not None]
    credit = [
        1.0 - j["score"] if j.get("polarity") == "negative" else float(j["score"])
        for j in scored
        if j.get("kind") == "rubric"
    ]
    return {
        "judgements_scored": len(scored),
        "judgements_failed": len(found) - len(scored),
        "judgements_mean": sum(credit) / len(credit) if credit else None,
    }
