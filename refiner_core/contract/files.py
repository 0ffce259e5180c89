"""Atomic file replacement, and YAML and Python files that people write.

In: a path. Out: an open file that replaces it, written beside it, synced, then renamed (for a
stage's own output folder; ``infra`` handles control files, which several processes may write). Or
the content of a YAML file, or the reason with the line why it cannot be read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

from refiner_core.contract.errors import ConfigurationError

if TYPE_CHECKING:
    from omegaconf import DictConfig


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


def imported_file(file: Path, fix: str) -> ModuleType:
    """The module of a Python file, cached per process and content.

    Raises
    ------
    ConfigurationError
        It cannot be imported.
    """
    content = hashlib.sha256(str(file).encode() + file.read_bytes()).hexdigest()
    name = f"refiner_own_{content[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigurationError(
            f"{file} cannot be imported: {type(error).__name__}: {error}",
            expected="a Python file that imports what is installed beside refiner",
            fix=fix,
        ) from error
    return module


def read_yaml(source: Path | str, what: str, fix: str = "") -> Any:
    """Content of a YAML file, or of the text of one.

    Parameters
    ----------
    what
        Its name in messages: ``Recipe mine.yaml``.
    fix
        How to fix an unreadable file, beyond its place.

    Raises
    ------
    ConfigurationError
        It cannot be read; names the line.
    """
    import yaml

    with readable(source, what, fix):
        return yaml.safe_load(_text(source))


def yaml_node(
    source: Path | str, what: str, example: str, *, may_be_empty: bool = False
) -> DictConfig:
    """The fields of a YAML file, or of the text of one, with interpolations. Duplicate keys are
    refused, ``1e-4`` is a number, and a date is text.

    Parameters
    ----------
    example
        A possible line of it.

    Raises
    ------
    ConfigurationError
        It cannot be read, is not a mapping, or is empty.
    """
    from omegaconf import DictConfig, OmegaConf

    try:
        with readable(source, what):
            node: Any = OmegaConf.create(_text(source))
    except AssertionError:  # OmegaConf's error for a lone number
        node = None
    if isinstance(node, DictConfig) and (node or may_be_empty):
        return node
    kind = "a value" if node is None else "a list"
    is_ = "is empty" if node == {} else f"holds {kind}, not a mapping of fields"
    raise ConfigurationError(
        f"{what} {is_}.",
        expected=f"`key: value` lines such as `{example}`",
        fix="see a shipped one for the form",
    )


def yaml_fields(
    source: Path | str, what: str, example: str, *, resolve: bool = True, may_be_empty: bool = False
) -> dict[str, Any]:
    """The same as plain values; errors as in :func:`yaml_node`."""
    from omegaconf import OmegaConf

    node = yaml_node(source, what, example, may_be_empty=may_be_empty)
    with readable(source, what):
        values: Any = OmegaConf.to_container(node, resolve=resolve)
    return {str(key): value for key, value in values.items()}


def keys_twice(root: Any) -> Iterator[tuple[int, str]]:
    """Line and name of duplicate keys below a composed node. With aliases a node has several
    places, possibly within itself; it is visited once."""
    waiting, looked_at = [root], set()
    while waiting:
        node = waiting.pop()
        if node is None or node.id == "scalar" or id(node) in looked_at:
            continue
        looked_at.add(id(node))
        if node.id == "sequence":
            waiting += node.value
            continue
        seen = set[str]()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                yield key.start_mark.line + 1, name
            seen.add(name)
            waiting.append(value)


@contextmanager
def readable(source: Path | str, what: str, fix: str = "") -> Iterator[None]:
    """Turn errors of the block into a refusal of an unreadable file or text."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:  # yaml and omegaconf raise their own families
        why, fix = _reason(error), "correct the place named above"
        if isinstance(error, RecursionError):
            why, fix = "it is nested too deeply", "correct the nesting"
        elif isinstance(error, OSError):
            why, fix = error.strerror or str(error), "correct the path, or its permissions"
        raise ConfigurationError(
            f"{what} cannot be read: {why}.", expected="a YAML file in UTF-8", fix=fix or fix
        ) from error


def _reason(error: BaseException) -> str:
    """``line 3, column 9: did not find expected ',' or ']'``; other errors as they are."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return " ".join(str(error).split())
    words = " ".join(str(problem).split())
    if "cannot start any token" in words:
        words += " (YAML indents by spaces, not tabs, and quotes what begins with @, ` or %)"
    return f"line {mark.line + 1}, column {mark.column + 1}: {words}"


def _text(source: Path | str) -> str:
    return source if isinstance(source, str) else source.read_text(encoding="utf-8-sig")
