"""Nightly files on the disk: shipped ones by name, others by path.

In: a name or path, and overrides of this call. Out: a :class:`Nightly` whose relative paths mean
what they say where work is done: below the file's own folder, wherever a clock has started us (for
a shipped one, below the current folder).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from infra.store.nightly_records import NightlyRecords
from infra.store.workspace import Workspace
from refiner_core.contract.files import readable
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.shipped import find_file, shipped_files
from refiner_core.nightly.definition import Nightly, Schedule, parse_nightly


def shipped_nightlies() -> dict[str, Path]:
    """Names and files of the nightly evaluations that come with refiner."""
    return shipped_files("flows.nightly")


def load_nightly(file: str, overrides: Sequence[str] = ()) -> Nightly:
    """The nightly evaluation of a shipped name or a YAML file.

    Parameters
    ----------
    overrides
        Of the recipe, for this call: they come after those of the file. ``workspace=DIR`` is taken
        from the current folder.

    Raises
    ------
    ConfigurationError
        There is no such file, or what it says cannot be meant.
    """
    shipped = shipped_nightlies()
    path = find_file(file, "nightly evaluation", shipped).absolute()
    folder = Path.cwd() if file in shipped else path.parent
    with readable(path, f"The nightly file {path}"):
        text = path.read_text(encoding="utf-8")
    nightly = parse_nightly(text, stem=path.stem, origin=str(path), folder=str(folder))
    return replace(nightly, overrides=(*nightly.overrides, *map(_whole, overrides)))


def _whole(override: str) -> str:
    """The same from any folder."""
    key, sep, value = override.partition("=")
    if sep and key.strip() == "workspace":
        return f"workspace={Path(value).expanduser().absolute()}"
    return override


def workspace_of(nightly: Nightly) -> Path:
    """The folder of the workspace that its recipe and overrides name."""
    with contextlib.chdir(nightly.folder):
        config = load_recipe(nightly.recipe, nightly.overrides)
        return Path(config.workspace).expanduser().absolute()


def due_night(nightly: Nightly, now: datetime) -> str:
    """The newest night, where something was done before and it is not; else empty."""
    workspace = Workspace.read_only(workspace_of(nightly))
    records = NightlyRecords(workspace, nightly.name)
    night = Schedule(nightly.schedule, nightly.timezone).night_at(now)
    return night if records.nights() and records.ended(night) is None else ""
