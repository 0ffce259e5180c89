"""Shipped files by name, and users' own files by path.

In: a name or path as it was typed. Out: the file, or an error that names the nearest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from importlib import resources
from pathlib import Path

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest


def shipped_files(package: str) -> dict[str, Path]:
    """Names and files of what a package ships in YAML; those with ``_`` in front are parts."""
    folder = Path(str(resources.files(package)))
    return {p.stem: p for p in sorted(folder.glob("*.yaml")) if not p.stem.startswith("_")}


def is_file_name(text: str) -> bool:
    """True if this is meant as the path of a YAML file."""
    return "/" in text or text.endswith((".yaml", ".yml"))


def find_file(
    named: str, kind: str, shipped: Mapping[str, Path], folder: Path | None = None, hint: str = ""
) -> Path:
    """The file of what is shipped under a name, or that lies at a path.

    Parameters
    ----------
    kind
        What messages call it: ``recipe``.
    folder
        Where it is looked for before the current folder.
    hint
        What is said of a name that is none, instead of the nearest one.

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
            fix="check the path (it is taken from the current folder)",
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
    """Refuse keys of a file that it has no field for.

    Parameters
    ----------
    where, at
        The file, or the part of it, for messages; what stands before the key there.
    hint
        What is said of a key instead of the nearest one.

    Raises
    ------
    ConfigurationError
        Names the first, and the nearest that there is.
    """
    for key in keys:
        if key not in known:
            raise ConfigurationError(
                f"There is no field `{at}{key}` in {where}.{hint or suggest(str(key), known)}",
                expected=f"some of: {', '.join(known)}",
                fix=fix,
            )
