"""Files that appear whole, rows of files, and reasons why one is no YAML.

In: a path. Out: an open file that becomes it, written beside its place, synced, then renamed; for
what a stage leaves in its own output folder. Control files, which several processes may write, are
the business of ``infra``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from refiner_core.contract.errors import DataError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file that replaces ``path`` once the block ends without error.

    After an error the old file, if there was one, is still there.
    """
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def json_lines(path: Path) -> Iterator[tuple[int, Any, str]]:
    """Number and value of each line that is not blank, and why it is none: ``is not JSON: …``."""
    with path.open("rb") as lines:
        for line, data in enumerate(lines, start=1):
            try:
                text = data.decode("utf-8-sig" if line == 1 else "utf-8").strip()
                value = json.loads(text, parse_constant=_refuse_constant) if text else None
                if "\\ud" in text.lower():  # an escaped half of a character cannot be written out
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
    """The rows of a Parquet file, with those of the columns that it has.

    Raises
    ------
    DataError
        The file is not complete; ``fix`` is what mends it.
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


def yaml_reason(error: BaseException, path: Path | None = None) -> str:
    """``line 3, column 9: did not find expected ',' or ']'``; other errors as they are."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return " ".join(str(error).split())
    where = f"line {mark.line + 1}, column {mark.column + 1}"
    if _character(path, mark.line, mark.column) == "\t":
        return f"{where}: a tab stands there, and YAML indents by spaces alone"
    words = " ".join(str(problem).split())
    context, begin = getattr(error, "context", None), getattr(error, "context_mark", None)
    if context and words.startswith("but "):
        words = f"{context}, {words}"
    elif context and begin is not None and begin.line != mark.line:
        words += f" ({context}, which begins in line {begin.line + 1})"
    return f"{where}: {words}"


def _character(path: Path | None, line: int, column: int) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()[line][column]
    except (OSError, UnicodeDecodeError, IndexError):
        return ""
