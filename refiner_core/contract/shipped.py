"""Shipped files by name, and users' own files by path.

In: a name or path as typed. Out: the file, or an error with the nearest name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from importlib import resources
from pathlib import Path

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest


def shipped_files(package: str) -> dict[str, Path]:
    """Names and files of a package's shipped YAML; files with a leading ``_`` are parts."""
    folder = Path(str(resources.files(package)))
    return {p.stem: p for p in sorted(folder.glob("*.yaml")) if not p.stem.startswith("_")}


def is_file_name(text: str) -> bool:
    """True if the text looks like the path of a YAML file."""
    return "/" in text or text.endswith((".yaml", ".yml"))


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
    if is_file_name(named):
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
