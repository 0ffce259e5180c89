"""Every error for a user names what was expected and the fix; named commands and fields exist.

The messages are read from the source: no test could raise them all.
"""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from flows.cli.main import cli
from refiner_core.contract import errors
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.marks import walk

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "infra", "refiner_core", "sweeps")
#: These refuse no value, so they need no ``expected``.
NOTHING_REFUSED = {"Interrupted", "AttemptClosed", "KilledError"}
#: (file, beginning of the message): errors that no user reads.
INCOMPLETE = [
    ("infra/ranks/bridge.py", "Rank 0 ended before"),
    ("refiner_core/rubrics/lint.py", ""),
]


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Path and syntax tree of each module."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return {f.relative_to(ROOT).as_posix(): ast.parse(f.read_text("utf-8")) for f in files}


def text_of(node: ast.AST) -> str | None:
    """The text of a string or f-string; each value in it becomes ``{…}``."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{…}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def texts_in(node: ast.AST) -> Iterator[str]:
    """All strings below a node; parts of an f-string only as the whole."""
    text = text_of(node)
    if text is not None:
        yield text
        return
    for child in ast.iter_child_nodes(node):
        yield from texts_in(child)


@functools.cache
def refusals() -> list[tuple[str, str, ast.Call]]:
    """Place, class and call of each error that is built for a user."""
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.RefinerError)
    }
    return [
        (f"{path}:{node.lineno}", node.func.id, node)
        for path, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds
    ]


@pytest.mark.slow
def test_every_error_names_what_was_expected_and_the_fix() -> None:
    """Without its fix, a message leaves a user to read the source."""
    lacking = []
    for where, kind, call in refusals():
        given = {keyword.arg for keyword in call.keywords}
        what = text_of(call.args[0]) or "" if call.args else ""
        excused = any(where.startswith(p) and what.startswith(w) for p, w in INCOMPLETE)
        wanted = {"fix"} if kind in NOTHING_REFUSED else {"expected", "fix"}
        if None not in given and not excused and wanted - given:
            lacking.append(f"{where} {kind} {what!r}: no {wanted - given}")
    assert len(refusals()) > 300
    assert not lacking, "\n".join(lacking)


def wrong_command(text: str) -> str | None:
    """The error in a command line, or None. Words in capitals and braces stand for any value."""
    try:
        words = shlex.split(text)[1:]
    except ValueError:
        return None  # cut from a longer text
    command: click.Command | None = cli
    context = click.Context(cli, info_name="refiner")
    while words and isinstance(command, click.Group):
        if not re.fullmatch(r"[a-z][a-z-]*", words[0]):
            return None if words[0].startswith("-") or not words[0][0].islower() else words[0]
        found = command.get_command(context, words[0])
        if found is None:
            return f"there is no `{words[0]}` below `{command.name}`"
        command, words = found, words[1:]
    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    choices = [p.type.choices for p in arguments if isinstance(p.type, click.Choice)]
    if choices and words and re.fullmatch(r"[a-z-]+", words[0]) and words[0] not in choices[0]:
        return f"`{command.name}` does not know {words[0]}"
    options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    for word in words:
        option = word.split("=")[0].rstrip(".,;…")
        if option.startswith("--") and option not in options | {"--help", "--debug"}:
            return f"`{command.name}` has no option {option}"
    return None


@functools.cache
def fields() -> tuple[set[str], set[str]]:
    """Dotted fields of the configuration, and their sections."""
    known = {path for path, _ in walk(RecipeConfig)}
    return known, {".".join(p.split(".")[:n]) for p in known for n in range(1, p.count(".") + 1)}


def wrong_fields(text: str) -> list[str]:
    """Words such as grpo.betta that begin with a section of the configuration and name no field."""
    known, sections = fields()
    files = {"json", "yaml", "py", "md", "jsonl", "parquet", "csv"}
    words = re.findall(r"(?<![\w./{}…-])([a-z_]+(?:\.[a-z_0-9]+)+)(?![\w(/{-])", text)
    return [
        word
        for word in words
        if word.split(".")[0] in sections and word.rsplit(".", 1)[1] not in files
        if word not in known | sections
    ]


def test_commands_and_fields_that_texts_name_exist() -> None:
    """Docstrings count: `--help` prints them."""
    wrong = [
        f"{path}: `{line}`: {why}"
        for path, tree in modules().items()
        for text in texts_in(tree)
        for line in re.findall(r"`(refiner [^`]*)`", text)
        if (why := wrong_command(line))
    ]
    wrong += [
        f"{where}: {word}: {text!r}"
        for where, _, call in refusals()
        for text in texts_in(call)
        for word in wrong_fields(text)
    ]
    assert not wrong, "\n".join(wrong)
