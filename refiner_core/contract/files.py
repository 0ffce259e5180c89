"""Files that appear whole, and reasons why one is no YAML.

In: a path. Out: an open file that becomes it, written beside its place, synced, then renamed; for
what a stage leaves in its own output folder. Control files, which several processes may write, are
the business of ``infra``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


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
