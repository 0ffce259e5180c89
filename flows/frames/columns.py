"""Columns of frames (names, types, units and meanings), and the run, stage and attempt of a frame.

In: rows, or columns, of plain values; names from the caller. Out: dataframes with the types of the
table; records and paths. A column that is not in the table (a metric, a reward part, the level of a
factor) is a number if all its values are, else text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from flows.running.status import required_run
from infra.store.checkpoints import reclaimed_text
from infra.store.workspace import Workspace
from refiner_core.contract.errors import DataError, no_such
from refiner_core.contract.records import RunRecord, SweepRecord, TrialRecord

if TYPE_CHECKING:
    import pandas as pd


Kind = Literal["text", "whole", "number", "yes_no", "time", "list"]
_DTYPES: Mapping[Kind, str] = {
    "text": "string",
    "whole": "Int64",
    "number": "float64",
    "yes_no": "boolean",
    "time": "datetime64[ns, UTC]",
    "list": "object",
}


class _Column(NamedTuple):
    """One column: its type, its meaning, and its unit (empty for names and counts)."""

    kind: Kind
    meaning: str
    unit: str = ""


#: Columns of several frames.
_PROTOCOL = {
    "protocol": _Column("text", "fingerprint: only values under the same protocol are comparable"),
    "protocol_name": _Column("text", "name of the protocol"),
    "decoding": _Column("text", "greedy or sampled"),
}
_ANSWER = {
    "sample_index": _Column("whole", "place among the samples of its prompt, from 0"),
    "response_text": _Column("text", "the answer"),
    "finish_reason": _Column("text", "stop, or length if it was cut"),
    "status": _Column("text", "scored, malformed (0 by rule) or unscored (the judge failed)"),
}
_ENDS = {
    "low": _Column("number", "lower end of its 95 % interval"),
    "high": _Column("number", "upper end of its 95 % interval"),
}
#: The columns of each frame that are always there, in order.
TABLES: Mapping[str, Mapping[str, _Column]] = {
    "runs": {
        "run": _Column("text", "id of the run"),
        "recipe": _Column("text", "name of the recipe"),
        "started": _Column("time", "time of the call", "UTC"),
        "state": _Column(
            "text", "running, waiting, done, failed, blocked, cancelled, interrupted, not begun"
        ),
        "stages_done": _Column("whole", "finished stages"),
        "stages": _Column("whole", "all stages"),
        "overrides": _Column("list", "overrides of the recipe"),
        "model": _Column("text", "the last evaluated model; metrics are its"),
        "seconds": _Column("number", "running time of all attempts at its stages", "seconds"),
        "gpu_hours": _Column("number", "GPUs of all nodes times time", "GPU hours"),
        "cpu_hours": _Column("number", "cores of all nodes times time", "core hours"),
        "judge_calls": _Column("whole", "judge calls; missing if not counted"),
        "sweep": _Column("text", "SWEEP:ARM/seedN of a trial"),
        "note": _Column("text", "note of the run"),
        "tags": _Column("list", "tags of the run"),
    },
    "stages": {
        "name": _Column("text", "name in the run, such as evaluate-sft"),
        "kind": _Column("text", "kind of stage, such as evaluate"),
        "id": _Column("text", "id in the workspace; runs that share a stage share it"),
        "state": _Column("text", "as in refiner status: done, running, waiting, failed, …"),
        "reason": _Column("text", "why it waits, or how its last attempt ended"),
        "attempt": _Column("whole", "number of the newest attempt; missing if there is none"),
        "attempts": _Column("whole", "number of attempts"),
        "phase": _Column("text", "last phase of the newest attempt"),
        "step": _Column("whole", "finished steps of that phase"),
        "total": _Column("whole", "all steps of that phase"),
        "eta_s": _Column("number", "time to the end of the phase, at the rate so far", "seconds"),
        "seconds": _Column("number", "duration of the newest attempt", "seconds"),
        "gpus": _Column("whole", "GPUs of all its nodes"),
        "job_id": _Column("text", "the scheduler's job, or the process"),
        "node": _Column("text", "node of the newest attempt"),
        "started_at": _Column("time", "start of the first attempt", "UTC"),
        "ended_at": _Column(
            "time", "end of the newest attempt; missing while it is running", "UTC"
        ),
        "last_failure": _Column("text", "failure of the newest failed attempt"),
    },
    "metrics": {"step": _Column("whole", "training step, from 1")},
    "rollouts": {
        "step": _Column("whole", "training step that it was sampled for"),
        "sample_id": _Column("text", "the prompt's id in the data stage's rl_train.parquet"),
        "prompt_index": _Column("whole", "the prompt's row there"),
        **_ANSWER,
        "response_tokens": _Column("whole", "length of the answer", "tokens"),
        "reward": _Column("number", "total reward; missing if it is unscored"),
        "advantage": _Column("number", "within its group; missing if it was not trained on"),
        "judgements_scored": _Column("whole", "judgements that gave a score"),
        "judgements_failed": _Column("whole", "judgements without a score"),
        "judgements_mean": _Column(
            "number", "mean credit of rubric judgements: score, for faults 1 - score", "0 to 1"
        ),
    },
    "samples": {
        "stage": _Column("text", "name of the evaluate stage"),
        "model": _Column("text", "the model that answered: base, sft, rft, grpo, …, random_copier"),
        **_PROTOCOL,
        "sample_id": _Column("text", "the prompt's id in the data stage's rl_test.parquet"),
        **_ANSWER,
    },
    "evaluations": {
        "stage": _Column("text", "name of the evaluate stage"),
        "model": _Column("text", "the model that was measured; random_copier is the baseline"),
        **_PROTOCOL,
        "metric": _Column("text", "name of the metric"),
        "value": _Column("number", "the mean over prompts"),
        **_ENDS,
        "n": _Column("whole", "number of prompts"),
        "interval": _Column("text", "method of the interval"),
        "under": _Column("text", "the protocol file, empty for the recipe's own"),
    },
    "incidents": {
        "at": _Column("time", "time, by the writer's clock", "UTC"),
        "stage": _Column("text", "name in the run"),
        "attempt": _Column("whole", "its number; 0 if none was running"),
        "failure": _Column("text", "failure class, such as preempted or disk_full"),
        "text": _Column("text", "one line for people"),
        "lost_steps": _Column("whole", "repeated steps; missing if unknown"),
        "lost_seconds": _Column("number", "repeated device time", "device seconds"),
        "resolved": _Column("yes_no", "another attempt has continued, or the stage is done"),
    },
    "trials": {
        "arm": _Column("text", "name of the arm"),
        "seed": _Column("whole", "seed of the trial"),
        "baseline": _Column("yes_no", "the other arms are compared with this one"),
        "run": _Column("text", "its run; missing before it has begun"),
        "state": _Column("text", "waiting, running, done, failed, interrupted or held"),
        "reason": _Column("text", "reason of the state, if there is one"),
        "stage": _Column("text", "the running stage"),
        "step": _Column("whole", "finished steps of that stage"),
        "total": _Column("whole", "all steps of that stage"),
        "eta_s": _Column("number", "time to its end, at the rate so far", "seconds"),
        "stages_done": _Column("whole", "finished stages"),
        "stages": _Column("whole", "all stages"),
        "seconds": _Column(
            "number", "duration of its own stages (shared ones: first trial)", "seconds"
        ),
        "gpu_hours": _Column("number", "GPUs of all nodes times time", "GPU hours"),
        "cpu_hours": _Column("number", "cores of all nodes times time", "core hours"),
        "queue_seconds": _Column("number", "time in the scheduler's queue", "seconds"),
        "lost_seconds": _Column("number", "repeated work", "seconds"),
        "lost_steps": _Column("whole", "repeated steps"),
        "attempts": _Column("whole", "attempts at its own stages"),
        "incidents": _Column("whole", "attempts that ended before their work was done"),
        "judge_calls": _Column("whole", "judge calls; missing if not counted"),
    },
    "comparisons": {
        "model": _Column("text", "the model that was measured"),
        **_PROTOCOL,
        "metric": _Column("text", "name of the metric"),
        "primary": _Column("yes_no", "the metric of the sweep's question"),
        "higher_is_better": _Column("yes_no", "missing if neither is, as for a length"),
        "arm": _Column("text", "name of the arm"),
        "baseline": _Column("yes_no", "the other arms are compared with this one"),
        "value": _Column("number", "mean over seeds and prompts"),
        **_ENDS,
        "difference": _Column("number", "arm minus baseline, paired over seeds and prompts"),
        **{f"difference_{end}": column for end, column in _ENDS.items()},
        "p": _Column("number", "two-sided p-value of the difference"),
        "p_adjusted": _Column("number", "adjusted over all arms of this metric (Holm)"),
        "n": _Column("whole", "prompts used"),
        "excluded": _Column("whole", "prompts not used"),
        "seeds": _Column("whole", "seeds used"),
        "verdict": _Column(
            "text", "better, worse, not clear, judge moved, not comparable, missing"
        ),
        "interval": _Column("text", "method of the interval"),
        "note": _Column("text", "reason why a value is missing or unreliable"),
    },
}


def describe_columns(frame: str) -> pd.DataFrame:
    """Describe the columns of a frame.

    Parameters
    ----------
    frame
        Its name, such as ``"rollouts"`` for :func:`flows.frames.rollouts_frame`.

    Returns
    -------
    pandas.DataFrame
        ``column``, ``dtype``, ``unit`` and ``meaning``, one row per column. Columns that depend on
        the run (metrics, ``reward/…``, ``level/…``) are not listed.

    Raises
    ------
    ConfigurationError
        There is no such frame; the message lists them.
    """
    import pandas as pd

    if frame not in TABLES:
        raise no_such("There is no frame", frame, TABLES)
    rows = [(n, _DTYPES[c.kind], c.unit, c.meaning) for n, c in TABLES[frame].items()]
    return pd.DataFrame(rows, columns=["column", "dtype", "unit", "meaning"], dtype="string")


def make_frame(
    name: str, rows: Iterable[Mapping[str, Any]], more: Sequence[str] = ()
) -> pd.DataFrame:
    """A frame of rows, with the types of its table.

    Parameters
    ----------
    name
        Name of the table in :data:`TABLES`; its columns come first.
    rows
        Absent values are missing; keys in neither the table nor ``more`` are dropped.
    more
        Columns after those of the table.
    """
    table = TABLES[name]
    found = list(rows)
    return typed(table, {c: [row.get(c) for row in found] for c in (*table, *more)})


def typed(table: Mapping[str, _Column], columns: Mapping[str, Any]) -> pd.DataFrame:
    """A frame of whole columns (lists or arrays), with the types of the table."""
    import pandas as pd

    made = {
        name: _series(values, table[name].kind if name in table else _kind_of(values))
        for name, values in columns.items()
    }
    return pd.DataFrame(made)


def typed_arrow(table: Mapping[str, _Column], parts: Sequence[Any], empty: Iterable[str]) -> Any:
    """A frame of concatenated Arrow tables; without any, with the columns ``empty``."""
    import pyarrow as pa

    if not parts:
        return typed(table, {name: [] for name in empty})
    whole = pa.concat_tables(parts, promote_options="permissive")
    columns = dict(zip(whole.column_names, whole.columns, strict=True))
    return typed(
        table,
        {
            name: column.to_numpy() if pa.types.is_floating(column.type) else column.to_pylist()
            for name, column in columns.items()
        },
    )


def chosen(
    wanted: Sequence[str] | None, default: Sequence[str], there: Sequence[str], of: str
) -> list[str]:
    """The requested columns, in that order; ``default`` if none are requested.

    Raises
    ------
    ConfigurationError
        A column does not exist; the message names the nearest.
    """
    if wanted is None:
        return list(default)
    if isinstance(wanted, str):
        wanted = [wanted]
    for name in wanted:
        if name not in there:
            fix = "name some of these in columns=[…], or leave it out"
            raise no_such(f"{of} have no column", name, there, fix)
    return list(dict.fromkeys(wanted))


def _kind_of(values: Any) -> Kind:
    """Type of a column that is not in the table: a number if all its values are."""
    dtype = getattr(values, "dtype", None)
    if dtype is not None and dtype.kind in "fiub":
        return "number"
    known = [v for v in values if v is not None]
    if any(isinstance(v, list) for v in known):
        return "list"
    return "number" if all(isinstance(v, int | float) for v in known) else "text"


def _series(values: Any, kind: Kind) -> pd.Series:
    import pandas as pd

    if kind == "time":
        times = pd.to_datetime(pd.Series(values, dtype="object"), utc=True, format="ISO8601")
        return times.astype(_DTYPES[kind])
    if kind == "number":
        return pd.Series(values, dtype="float64")
    if kind == "text":
        values = [None if value is None else str(value) for value in values]
    return pd.Series(values, dtype=_DTYPES[kind])


def the_run(run: str | None, workspace: str | Path) -> tuple[Workspace, RunRecord]:
    """The workspace, for reading, and the run.

    Raises
    ------
    ConfigurationError
        There is none, or several; the message names the nearest.
    """
    ws = Workspace.read_only(workspace)
    return ws, required_run(ws, run, "a workspace with a run")


def gone(workspace: Workspace, stage_id: str, what: str, run: str) -> DataError:
    """Error for a finished stage whose files were deleted."""
    why = reclaimed_text(workspace.layout.stage(stage_id))
    return DataError(
        f"Run {run} has no {what} any more: {why or f'they were deleted from {stage_id}'}.",
        expected=f"{what} in {workspace.layout.stage(stage_id).data}",
        fix="the other frames of the run still work; `refiner disk pin STAGE` keeps all of a stage",
    )


def evaluate_stages(stages: Mapping[str, str]) -> dict[str, str]:
    """Name -> id of the evaluations among stages."""
    return {n: i for n, i in stages.items() if i.rpartition("-")[0] == "evaluate"}


def trials_of(sweep: SweepRecord, arms: Sequence[str] | None) -> list[TrialRecord]:
    """Trials of some arms of a sweep, by default of all."""
    known = [arm.name for arm in sweep.arms]
    names = chosen(arms, known, known, "The arms")
    return [trial for trial in sweep.trials if trial.arm in names]
