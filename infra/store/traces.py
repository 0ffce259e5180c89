"""Traces of a running stage: lines of metrics and files of rollouts.

In: rows of rollouts, or the path of a trace. Out: Parquet and back, and the lines of a
``metrics.jsonl``. The attempt decides when they are written (:mod:`infra.attempt.stage_io`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infra.host.files import again, names_in
from refiner_core.contract.errors import WorkspaceError
from refiner_core.contract.records import to_json

_JSON_COLUMNS = b"refiner.json_columns"


class MetricsLine(NamedTuple):
    """One line of ``metrics.jsonl``; NaN and infinity are None."""

    step: int
    metrics: dict[str, float | None]


def read_metrics(path: Path, only: Collection[str] | None = None) -> list[MetricsLine]:
    """The lines of a ``metrics.jsonl``, in order; a truncated last line is left out. ``only`` these
    metrics are kept: a long training logs more than a reader needs in memory.

    Raises
    ------
    WorkspaceError
        A line is not in the format of refiner; names it.
    """

    def read() -> list[MetricsLine]:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            lines = ((n, line) for n, line in enumerate(file, start=1) if line.endswith("\n"))
            return [_metrics_line(path, number, line, only) for number, line in lines]

    try:
        return again(read)
    except FileNotFoundError:
        return []


def last_metrics(path: Path, only: Collection[str], size: int = 1 << 18) -> list[MetricsLine]:
    """The complete lines in the last ``size`` bytes of a ``metrics.jsonl``, for a reader that looks
    often.

    Raises
    ------
    WorkspaceError
        A line is not in the format of refiner.
    """
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - size)
            file.seek(start)
            lines = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return []
    return [_metrics_line(path, n, line, only) for n, line in enumerate(lines[bool(start) : -1], 1)]


def _metrics_line(path: Path, number: int, line: str, only: Collection[str] | None) -> MetricsLine:
    try:
        value = json.loads(line)
        step, metrics = int(value["step"]), value["metrics"]
        if only is not None:
            metrics = {name: metrics[name] for name in only if name in metrics}
    except (ValueError, TypeError, KeyError) as error:
        raise WorkspaceError(
            f"Line {number} of {path} is not a line of metrics.",
            expected="JSON with `step` and `metrics`, as refiner writes it",
            fix="remove the line, or restore the file",
        ) from error
    return MetricsLine(step, metrics)


def list_rollouts(folder: Path) -> list[Path]:
    """The rollout files in a folder, by step."""
    names = (n for n in names_in(folder) if n.startswith("step-") and n.endswith(".parquet"))
    return sorted((folder / n for n in names), key=lambda p: int(p.stem.removeprefix("step-")))


def encode_rollouts(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows as Parquet. Columns of mappings, or of values of several types, are stored as JSON text
    and named in the file, so that :func:`read_rollouts` restores the rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    arrays, as_json = [], []
    for name in names:
        values = [to_json(row.get(name)) for row in rows]
        try:
            if any(_holds_mapping(v) for v in values):
                raise pa.ArrowInvalid("mapping")
            arrays.append(pa.array(values))
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            as_json.append(name)
            arrays.append(pa.array([None if v is None else json.dumps(v) for v in values]))
    table = pa.Table.from_arrays(arrays, names=names)
    table = table.replace_schema_metadata({_JSON_COLUMNS: json.dumps(as_json).encode()})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue().to_pybytes())


def read_rollouts(path: Path, leave_out: Collection[str] = ()) -> list[dict[str, Any]]:
    """The rows of one rollout file. ``leave_out``: columns that the reader does not need, such as
    the token ids and log-probabilities, which are most of the file."""
    return [row for rows in rollout_batches(path, 1 << 16, leave_out) for row in rows]


def rollout_batches(
    path: Path, size: int, leave_out: Collection[str] = (), lengths: Collection[str] = ()
) -> Iterator[list[dict[str, Any]]]:
    """The rows of one rollout file, ``size`` at a time. A list in one of the columns ``lengths`` is
    replaced by its length."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        names = [n for n in file.schema_arrow.names if n not in leave_out]
        as_json = json.loads((file.schema_arrow.metadata or {}).get(_JSON_COLUMNS, b"[]"))
        for batch in file.iter_batches(size, columns=names):
            for place, name in enumerate(names):
                if name in lengths:
                    batch = batch.set_column(place, name, pc.list_value_length(batch.column(name)))
            rows: list[dict[str, Any]] = batch.to_pylist()
            for row in rows:
                row.update({n: json.loads(row[n]) for n in as_json if row.get(n) is not None})
            yield rows


def _holds_mapping(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and any(_holds_mapping(v) for v in value)
    )
