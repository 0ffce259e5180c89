"""Rows of users' files: JSON Lines and Parquet.

In: a path. Out: rows in order, and errors of unreadable ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from refiner_core.contract.errors import DataError


def json_lines(path: Path) -> Iterator[tuple[int, Any, str]]:
    """Number, value and error of each non-blank line, such as ``is not JSON: …``."""
    with path.open("rb") as lines:
        for line, data in enumerate(lines, start=1):
            try:
                text = data.decode("utf-8-sig" if line == 1 else "utf-8").strip()
                value = json.loads(text, parse_constant=_refuse_constant) if text else None
                if "\\ud" in text.lower():  # an escaped half of a character cannot be encoded
                    json.dumps(value, ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
                cut = "" if data.endswith(b"\n") else " (the last line; is the file cut off?)"
                yield line, None, f"is not JSON{cut}: {error}"
                continue
            if text:
                yield line, value, ""


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parquet_rows(
    path: Path, columns: Sequence[str] | None = None, *, fix: str
) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file, with the existing ones of the columns.

    Raises
    ------
    DataError
        The file is not complete; ``fix`` tells how to fix it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            known = file.schema_arrow.names
            wanted = [c for c in known if columns is None or c in columns]
            for batch in file.iter_batches(batch_size=256, columns=wanted):
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{path} is not a complete Parquet file: {error}",
            expected="all of the file, its footer included",
            fix=fix,
        ) from error
