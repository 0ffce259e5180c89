"""Files of a run's report: ``report.html``, ``report.md``, ``report.json``.

In: a workspace and the id of a run. Out: the report, and its files below ``WORKSPACE/reports/RUN``
or another folder, each there completely or not at all. The page of a running run loads itself
again; that of one that is over stays.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.reporting.run.gather import report_of_run
from infra.store import atomic
from infra.store.room import no_space_guard
from infra.store.workspace import Workspace
from refiner_core.contract.records import to_json
from refiner_core.report.printing import whole
from refiner_core.report.run.document import RunReport

PAGE, TEXT, VALUES = "report.html", "report.md", "report.json"
#: Seconds after which the page of a running run loads itself again.
RELOAD_S = 15


@dataclass(frozen=True)
class WrittenRun:
    """A report, and where its files lie."""

    report: RunReport
    folder: Path

    @property
    def page(self) -> Path:
        """What is opened in a browser."""
        return self.folder / PAGE


def values(report: RunReport) -> dict[str, Any]:
    """The whole report as plain JSON values."""
    found: dict[str, Any] = to_json(report)
    return found


def write_run_report(
    workspace: Workspace, run: str, folder: Path | None = None, *, reload_s: int = RELOAD_S
) -> WrittenRun:
    """Make the report of a run and write all its files.

    Raises
    ------
    ConfigurationError
        There is no such run.
    NoSpaceError
        There is no room for the files; those that were there before still are.
    """
    report = report_of_run(run, workspace)
    written = WrittenRun(report, folder or workspace.layout.reports / run)
    _write_files(written, reload_s)
    return written


def _write_files(written: WrittenRun, reload_s: int) -> None:
    """The page last, for it speaks of the others."""
    from refiner_core.report.run.html import page  # templates are of no use to who only gathers
    from refiner_core.report.run.markdown import markdown

    report, folder = written.report, written.folder
    with no_space_guard(folder, "writing the report"):
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(values(report), indent=1, ensure_ascii=False, allow_nan=False)
        atomic.write_text(folder / VALUES, whole(text) + "\n")
        atomic.write_text(folder / TEXT, whole(markdown(report)))
        atomic.write_text(folder / PAGE, page(report, reload_s=reload_s))
