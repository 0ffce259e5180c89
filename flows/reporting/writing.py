"""Files of a report: ``report.html``, ``report.md``, ``report.csv``, ``trials.csv``,
``report.json``.

In: a workspace and the name of a sweep. Out: the report, and its files below
``WORKSPACE/reports/SWEEP`` or another folder, each there completely or not at all. Whoever watches
the page of a running sweep sees it load itself again; that of one that is over stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infra.store import atomic
from infra.store.room import no_space_guard
from infra.store.sweep_records import read_sweep
from infra.store.workspace import Workspace
from refiner_core.report.sweep.document import SweepReport
from refiner_core.report.sweep.files import NUMBERS, PAGE, TEXT, TRIALS, VALUES
from refiner_core.report.sweep.html import page
from refiner_core.report.sweep.markdown import markdown
from refiner_core.report.sweep.table import document, numbers_csv, trials_csv

#: Seconds after which the page of a running sweep loads itself again.
RELOAD_S = 15


@dataclass(frozen=True)
class Written:
    """A report, and where its files lie."""

    report: SweepReport
    folder: Path

    @property
    def page(self) -> Path:
        """What is opened in a browser."""
        return self.folder / PAGE


def make(workspace: Workspace, sweep: str) -> SweepReport:
    """The report of a sweep as it is now; changes nothing.

    Raises
    ------
    ConfigurationError
        There is no such sweep; names the nearest.
    """
    from flows.reporting.gather import gather
    from refiner_core.report.sweep.comparing import make_report

    read_sweep(workspace, sweep)
    return make_report(gather(workspace, sweep))


def report_folder(workspace: Workspace, sweep: str) -> Path:
    """Where a sweep's report lies where no other folder is named."""
    return workspace.layout.reports / sweep


def write_report(
    workspace: Workspace, sweep: str, folder: Path | None = None, *, reload_s: int = RELOAD_S
) -> Written:
    """Make the report and write all its files.

    Raises
    ------
    ConfigurationError
        There is no such sweep.
    NoSpaceError
        There is no room for the files; those that were there before still are.
    """
    written = Written(make(workspace, sweep), folder or report_folder(workspace, sweep))
    write_files(written, reload_s=reload_s)
    return written


def write_files(written: Written, *, reload_s: int = RELOAD_S) -> None:
    """Write a report's files; the page last, for it speaks of the others."""
    report, folder = written.report, written.folder
    with no_space_guard(folder, "writing the report"):
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_text(folder / VALUES, document(report))
        atomic.write_text(folder / NUMBERS, numbers_csv(report))
        atomic.write_text(folder / TRIALS, trials_csv(report))
        atomic.write_text(folder / TEXT, markdown(report))
        atomic.write_text(folder / PAGE, page(report, reload_s=reload_s))
