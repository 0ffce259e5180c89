"""Prepared rows on disk: written by the data stage, read by every later stage.

In: :class:`PromptRow` and :class:`DemonstrationRow` values. Out: Parquet files, and back.

A file names its kind and format version in the Parquet schema, so that a stage given
the wrong file refuses it instead of training on it. ``truth`` and ``rubrics`` are stored as JSON
text. The same rows give the same bytes (with one version of pyarrow): no time or place is stored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from refiner_core.contract.errors import DataError
from refiner_core.contract.files import replacing
from refiner_core.contract.types import DemonstrationRow, PromptRow

FORMAT_VERSION = 1
_KIND_KEY = b"refiner.kind"
_VERSION_KEY = b"refiner.format"

_IDS = pa.list_(pa.field("element", pa.int32(), nullable=False))
_MASK = pa.list_(pa.field("element", pa.bool_(), nullable=False))


def _schema(kind: str, columns: dict[str, Any], nullable: frozenset[str] = frozenset()) -> Any:
    fields = [pa.field(name, type_, nullable=name in nullable) for name, type_ in columns.items()]
    return pa.schema(
        fields, metadata={_KIND_KEY: kind.encode(), _VERSION_KEY: str(FORMAT_VERSION).encode()}
    )


PROMPT_SCHEMA = _schema(
    "prompts",
    {
        "sample_id": pa.string(),
        "question": pa.string(),
        "prompt_text": pa.string(),
        "prompt_ids": _IDS,
        "rubrics": pa.string(),
        "refiner_mode": pa.string(),
        "truth": pa.string(),
    },
    nullable=frozenset({"truth"}),
)
DEMONSTRATION_SCHEMA = _schema(
    "demonstrations", {"sample_id": pa.string(), "input_ids": _IDS, "loss_mask": _MASK}
)


def write_prompts(path: Path, rows: Sequence[PromptRow]) -> None:
    """Write prompts (atomically; an existing file is replaced)."""
    values = [{**vars(row), "truth": _json(row.truth)} for row in rows]
    _write(path, values, PROMPT_SCHEMA)


def load_prompts(path: Path) -> list[PromptRow]:
    """Read prompts back, in the order of writing.

    Raises
    ------
    DataError
        The file is missing, not Parquet, or contains something other than prompts.
    """
    rows = _read(path, PROMPT_SCHEMA)
    for row in rows:
        row["prompt_ids"] = tuple(row["prompt_ids"])
        row["truth"] = None if row["truth"] is None else json.loads(row["truth"])
    return [PromptRow(**row) for row in rows]


def write_demonstrations(path: Path, rows: Sequence[DemonstrationRow]) -> None:
    """Write demonstrations (atomically; an existing file is replaced)."""
    for row in rows:
        assert len(row.input_ids) == len(row.loss_mask), f"{row.sample_id}: one value per token"
    _write(path, [vars(row) for row in rows], DEMONSTRATION_SCHEMA)


def load_demonstrations(path: Path) -> list[DemonstrationRow]:
    """Read demonstrations back, in the order of writing.

    Raises
    ------
    DataError
        The file is missing, not Parquet, or contains something other than demonstrations.
    """
    return [
        DemonstrationRow(row["sample_id"], tuple(row["input_ids"]), tuple(row["loss_mask"]))
        for row in _read(path, DEMONSTRATION_SCHEMA)
    ]


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _write(path: Path, rows: list[dict[str, Any]], schema: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), file, compression="zstd")


def _read(path: Path, schema: Any) -> list[dict[str, Any]]:
    kind = schema.metadata[_KIND_KEY].decode()
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"{path} does not exist, or is not a complete Parquet file ({error})",
            expected=f"prepared {kind}, as the data stage has written them",
            fix="delete the data stage's folder and run the recipe again, which prepares it again",
        ) from error
    metadata = table.schema.metadata or {}
    found = metadata.get(_KIND_KEY, b"rows of an unknown kind").decode()
    version = metadata.get(_VERSION_KEY, b"?").decode()
    if found != kind or version != str(FORMAT_VERSION):
        raise DataError(
            f"{path} holds {found} (format {version})",
            expected=f"prepared {kind} (format {FORMAT_VERSION})",
            fix="run the data stage again; prepared files are not raw rows",
        )
    rows: list[dict[str, Any]] = table.select(schema.names).to_pylist()
    return rows
