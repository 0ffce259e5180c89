"""Files of a sweep's report (``report.html``, ``report.md``, ``report.csv``, ``trials.csv``,
``report.json``).

In: a workspace and the name of a sweep. Out: the report, and its files below
``WORKSPACE/reports/SWEEP`` or another folder, each complete or absent. The page of a running sweep
reloads itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from flows.sweeping.status import newest_sweep
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.report.pages import json_text
from refiner_core.report.printing import whole
from refiner_core.report.run.run_report import RunReport
from refiner_core.report.sweep.rendering import csv_of, markdown, number_rows, page, trial_rows
from refiner_core.report.sweep.sweep_report import (
    NUMBERS,
    PAGE,
    TEXT,
    TRIALS,
    VALUES,
    RunsReport,
    SweepReport,
)

#: Interval at which the page of a running sweep reloads itself, seconds.
RELOAD_S = 15


R = TypeVar("R", SweepReport, RunsReport, RunReport)


@dataclass(frozen=True)
class WrittenReport(Generic[R]):
    """A report of a sweep or a run, and the folder of its files."""

    report: R
    folder: Path

    @property
    def page(self) -> Path:
        """The page, for a browser."""
        return self.folder / PAGE


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write a report's files in this order, each completely or not at all.

    Raises
    ------
    NoSpaceError
        There is no space for the files; earlier files are kept.
    """
    with no_space_guard(folder, "writing the report"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            atomic.write_text(folder / name, whole(text))


def make_sweep_report(sweep: str, workspace: str | Path = RecipeConfig.workspace) -> SweepReport:
    """Current results of a sweep's arms. Writes nothing.

    Parameters
    ----------
    sweep
        Its name.
    workspace
        The folder that has its records.

    Returns
    -------
    SweepReport
        Comparisons, curves, costs. As a dataframe: :func:`flows.api.comparisons_frame`.

    Raises
    ------
    ConfigurationError
        There is no such sweep; the message names the nearest.
    """
    from flows.reporting.gather import gather
    from refiner_core.report.sweep.comparing import make_report

    return make_report(gather(Workspace.read_only(workspace), sweep))


def report_sweep(
    sweep: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    folder: str | Path | None = None,
    reload_s: int = RELOAD_S,
) -> WrittenReport[SweepReport]:
    """Write the report of a sweep as page, Markdown, CSV and JSON.

    Parameters
    ----------
    sweep
        Its name (default: the newest of the workspace).
    workspace
        The folder that has its records.
    folder
        Folder for the files (default: ``reports/SWEEP`` in the workspace).
    reload_s
        Interval at which the page of a running sweep reloads itself, seconds.

    Returns
    -------
    WrittenReport
        The report, and the path of its ``page``.

    Raises
    ------
    ConfigurationError
        There is no such sweep; the message names the nearest.
    NoSpaceError
        There is no space for the files; earlier files are kept.
    """
    ws = Workspace.read_only(workspace)
    name = newest_sweep(ws, None) if sweep is None else sweep
    if name is None:
        raise ConfigurationError(
            f"{ws.root} has no sweeps.",
            expected="a workspace in which `refiner sweep FILE` was run",
            fix="name another one with workspace=DIR",
        )
    place = ws.layout.reports / name if folder is None else Path(folder)
    written = WrittenReport(make_sweep_report(name, workspace), place)
    write_files(place, files_of(written.report, reload_s=reload_s))
    return written


def files_of(report: SweepReport, *, reload_s: int = RELOAD_S) -> dict[str, str]:
    """Texts of a sweep's report by name; the page last, as it refers to the others."""
    return {
        VALUES: json_text(report),
        NUMBERS: csv_of(number_rows(report)),
        TRIALS: csv_of(trial_rows(report)),
        TEXT: markdown(report),
        PAGE: page(report, reload_s=reload_s),
    }
