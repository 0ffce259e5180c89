"""What is wrong with a text that is no YAML, in words for whoever wrote it: line and column first.

In: an exception of reading a file as YAML, and the file. Out: one line.
"""

from __future__ import annotations

from pathlib import Path


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
