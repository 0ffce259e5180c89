"""Evaluations of every night: checked, worked on, looked at.

In: the file of a nightly evaluation, or its name. Out: outcomes, standings, tables, pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from flows.nightly.history import Reading
    from flows.nightly.night import NightOutcome
    from infra.store.nightly_records import NightlyRecords
    from refiner_core.nightly.definition import Nightly


class CheckedNightly(NamedTuple):
    """A nightly evaluation that can be carried out: when it is next, and what is worth knowing."""

    nightly: Nightly
    following: datetime
    warnings: list[str]


class NightlyHistory(NamedTuple):
    """All nights of a nightly evaluation, read; and its records."""

    reading: Reading
    records: NightlyRecords


def check_nightly(file: str, overrides: Sequence[str] = ()) -> CheckedNightly:
    """Whether a nightly evaluation can be carried out. Changes nothing.

    Parameters
    ----------
    file
        A YAML file or a shipped name.
    overrides
        ``key=value``.

    Returns
    -------
    CheckedNightly
        What the file says, its next night, warnings.

    Raises
    ------
    RefinerError
        It cannot: the file, the recipe, the canary, or a checkpoint that can never be there.
    """
    from flows.nightly import night
    from flows.nightly.files import load_nightly
    from refiner_core.nightly.definition import Schedule

    nightly = load_nightly(file, overrides)
    warnings = night.check_nightly(nightly)
    following = Schedule(nightly.schedule, nightly.timezone).next_after(datetime.now(UTC))
    return CheckedNightly(nightly, following, warnings)


def run_nightly(
    file: str,
    overrides: Sequence[str] = (),
    *,
    night: str | None = None,
    take_over: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> NightOutcome:
    """Work on a night once: what is done is kept, what was left is gone on with.

    Parameters
    ----------
    file, overrides
        As of :func:`flows.api.check_nightly`.
    night
        A date of the schedule (default: the newest night that has begun).
    take_over
        Also where a process on another host says that it works on the night.
    tell
        Hears what is done.

    Returns
    -------
    NightOutcome
        What was evaluated, missed and told.

    Raises
    ------
    ConfigurationError
        The canary is not what was pinned, there is no such night, or the recipe cannot be meant.
    """
    from flows.nightly.files import load_nightly
    from flows.nightly.night import run_night

    return run_night(load_nightly(file, overrides), night, take_over=take_over, tell=tell)


def nightly_history(file: str, overrides: Sequence[str] = ()) -> NightlyHistory:
    """All nights so far.

    Parameters
    ----------
    file
        A YAML file, a shipped name, or the name that records have.
    overrides
        ``key=value``, such as ``workspace=DIR``.

    Returns
    -------
    NightlyHistory
        Numbers of all nights, and what was seen in them.

    Raises
    ------
    ConfigurationError
        There is none; says where it was looked for.
    """
    from flows.nightly.files import find_nightly, workspace_of
    from flows.nightly.history import read_history
    from infra.store.nightly_records import NightlyRecords
    from infra.store.workspace import Workspace

    nightly = find_nightly(file, overrides)
    workspace = Workspace.read_only(workspace_of(nightly))
    return NightlyHistory(read_history(nightly, workspace), NightlyRecords(workspace, nightly.name))


def nightly_status(file: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """How a nightly evaluation stands: tonight, last numbers, alerts that have not recovered.

    Parameters
    ----------
    file, overrides
        As of :func:`flows.api.nightly_history`.

    Returns
    -------
    dict
        What ``refiner nightly status --json`` prints.

    Raises
    ------
    ConfigurationError
        There is none; says where it was looked for.
    """
    from flows.nightly.night import status_json

    reading, records = nightly_history(file, overrides)
    return status_json(reading, records, datetime.now(UTC))


def nightly_page(
    file: str, overrides: Sequence[str] = (), *, out: str | Path | None = None
) -> Path:
    """Write the trend page: one HTML file that needs nothing but a browser.

    Parameters
    ----------
    file, overrides
        As of :func:`flows.api.nightly_history`.
    out
        Where to (default: into the workspace).

    Returns
    -------
    Path
        The page.

    Raises
    ------
    ConfigurationError
        There is no such nightly evaluation.
    OSError
        The page cannot be written there.
    """
    from flows.nightly.night import page_text
    from infra.store import atomic

    reading, records = nightly_history(file, overrides)
    if out is None:
        return records.write_page(page_text(reading))
    path = Path(out).expanduser().absolute()
    atomic.write_text(path, page_text(reading))
    return path
