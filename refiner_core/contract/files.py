"""Atomic file replacement, and files that people write: YAML, Python, rows; shipped ones by name.

In: a path. Out: an open file that replaces it, written beside it, synced, then renamed (for a
stage's own output folder; ``infra`` handles control files, which several processes may write). Or
the content of a YAML file, or the reason with the line why it cannot be read; rows in order, and
errors of unreadable ones. In: a name or path as typed. Out: the file, or an error with the nearest
name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.fields import suggest

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


def read_yaml(source: Path | str, what: str) -> Any:
    """Content of a YAML file, or of the text of one.

    Parameters
    ----------
    what
        Its name in messages: ``Recipe mine.yaml``.

    Raises
    ------
    ConfigurationError
        It cannot be read; names the line.
    """
    import yaml

    with readable(what):
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
        with readable(what):
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
    with readable(what):
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
def readable(what: str, expected: str = "a YAML file in UTF-8") -> Iterator[None]:
    """Turn errors of the block into a refusal of an unreadable file or text."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:  # yaml and omegaconf raise their own families
        why, fix = _reason(error), "correct the place named above"
        if isinstance(error, RecursionError):
            why, fix = "it is nested too deeply", "correct the nesting"
        elif isinstance(error, UnicodeDecodeError):
            why, fix = "it is not text in UTF-8", "save it as UTF-8"
        elif isinstance(error, OSError):
            why, fix = error.strerror or str(error), "correct the path, or its permissions"
        raise ConfigurationError(
            f"{what} cannot be read: {why}.", expected=expected, fix=fix
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


# ---------------------------------------------------------------- rows of users' files


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


# ---------------------------------------------------------------- shipped and own files


def shipped_files(package: str) -> dict[str, Path]:
    """Names and files of a package's shipped YAML; files with a leading ``_`` are parts."""
    files = Path(str(resources.files(package))).glob("*.yaml")
    return {p.stem: p for p in sorted(files, key=lambda p: p.stem) if not p.stem.startswith("_")}


def find_file(
    named: str, kind: str, shipped: Mapping[str, Path], folder: Path | None = None, hint: str = ""
) -> Path:
    """The shipped file of a name, or the file at a path.

    Parameters
    ----------
    kind
        Its name in messages: ``recipe``.
    folder
        Searched before the current folder.
    hint
        Hint for an unknown name, instead of the nearest one.

    Raises
    ------
    ConfigurationError
        There is none.
    """
    if named in shipped:
        return shipped[named]
    given = Path(named).expanduser()
    for path in ((folder or Path()) / given, given):
        if path.is_file():
            return path
    expected = f"a shipped name ({', '.join(shipped)}) or the path of a YAML file"
    if "/" in named or named.endswith((".yaml", ".yml")):
        raise ConfigurationError(
            f"There is no {kind} file {named}.",
            expected=expected,
            fix="check the path (it is relative to the current folder)",
        )
    raise ConfigurationError(
        f"There is no {kind} {named!r}.{hint or suggest(named, shipped)}",
        expected=expected,
        fix="name one of these",
    )


def refuse_unknown(
    keys: Iterable[object],
    known: Collection[str],
    where: str,
    at: str = "",
    *,
    hint: str = "",
    fix: str = "correct the key",
) -> None:
    """Refuse unknown keys of a file.

    Parameters
    ----------
    where, at
        The file, or the part of it, for messages; the prefix of its keys.
    hint
        Hint for a key, instead of the nearest one.

    Raises
    ------
    ConfigurationError
        Names the first one, and the nearest known key.
    """
    for key in keys:
        if key not in known:
            raise ConfigurationError(
                f"There is no field `{at}{key}` in {where}.{hint or suggest(str(key), known)}",
                expected=f"some of: {', '.join(known)}",
                fix=fix,
            )
