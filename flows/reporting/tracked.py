"""A report's tables in W&B: one run per report, in the sweep's group, with job type ``report``.

In: a written report. Out: W&B's address of it, or the folder of an offline run. Where and how comes
from ``tracking`` of the recipe as the sweep's newest trial has recorded it.
"""

from __future__ import annotations

import secrets

from flows.reporting.writing import Written
from infra.store.workspace import Workspace
from infra.tracking.tables import Table, log_tables
from infra.tracking.tracker import TrackedRun
from refiner_core.contract.config import TrackingConfig
from refiner_core.contract.records import from_json
from refiner_core.report.sweep.document import SweepReport
from refiner_core.report.sweep.table import TRIAL_HEADER, number_header, number_rows, trial_rows

FOLDER = "tracking"


def log_report(workspace: Workspace, written: Written) -> str:
    """Log two tables, ``arms`` and ``trials``; says where they are.

    Raises
    ------
    UnsupportedError
        W&B does not take them.
    NoSpaceError
        There is no room for its files.
    """
    report = written.report
    tables = {
        "arms": Table(number_header(report), list(number_rows(report))),
        "trials": Table(TRIAL_HEADER, list(trial_rows(report))),
    }
    folder = written.folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return log_tables(tracking_of(workspace, report), _run(written), tables)


def _run(written: Written) -> TrackedRun:
    report = written.report
    return TrackedRun(
        run_id=f"report-{secrets.token_hex(6)}",
        name=f"report of {report.sweep}",
        group=report.sweep,
        job_type="report",
        folder=written.folder / FOLDER,
        config={
            "sweep": report.sweep,
            "recipe": report.recipe,
            "baseline": report.baseline,
            "state": report.state,
            "made_at": report.made_at,
        },
    )


def tracking_of(workspace: Workspace, report: SweepReport) -> TrackingConfig:
    """``tracking`` of the newest trial that has begun; the default where none has."""
    runs = sorted(filter(None, (trial.run for trial in report.trials)))
    for run in reversed(runs):
        found = workspace.read_run(run).config.get("tracking")
        if isinstance(found, dict):
            return from_json(TrackingConfig, found)
    return TrackingConfig()
