"""`refiner status` and `report`: state and results of a run or a sweep."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from flows.cli.aliases import former_list_of_runs, former_option
from flows.cli.options import (
    argument,
    at_most_one,
    command_line,
    json_option,
    output_folder,
    print_json,
    print_line,
    print_next,
    progress,
    show,
    split_workspace,
)
from infra.host.terminal import raw
from refiner_core.report.printing import counted, label, size, table_lines

if TYPE_CHECKING:
    from flows.reporting.writing import WrittenReport
    from flows.running.status import RunStatus, StageStatus
    from flows.sweeping.status import SweepStatus
    from infra.store.workspace import Workspace
    from refiner_core.contract.records import RunRecord


_REFRESH_S = 2.0
#: A watcher waits longer for the scheduler: nothing waits for the watcher.
_WATCH_WAIT_S = 5.0
#: Maximum number of rows in a redrawn page.
_ROWS = 40
#: Metrics drawn of a running stage, by their names in several trainers; number of their values.
_DRAWN = (("scores", "rewards/mean", "reward"), ("loss/train_avg", "loss/total_avg", "loss"))
_LAST = 30
_HEADER = ("stage", "state", "job", "attempt", "progress", "left", "message")


@click.command("status")
@argument("words", nargs=-1, metavar="[RUN|SWEEP] [workspace=DIR]")
@click.option("--workspace", "folder", help="the same as workspace=DIR")
@click.option("--watch", "-w", is_flag=True, help="redraw until the run has ended")
@click.option("--incidents", is_flag=True, help="errors with their times and costs")
@click.option("--all", "every", is_flag=True, hidden=True)
@json_option
def status_command(
    words: tuple[str, ...],
    folder: str | None,
    watch: bool,
    incidents: bool,
    every: bool,
    as_json: bool,
) -> None:
    """Show the state of RUN or SWEEP (default: the newest): stages, jobs, progress, disk, failures.

    RUN is an id, or an unambiguous part of one; a trial of a sweep is also
    SWEEP:ARM/seed1. A sweep is shown with all trials and totals. Nothing is written. A scheduler
    that does not answer at once is left out; the last line reports that.
    """
    from flows.running.status import SCHEDULER_WAIT_S, watch_run
    from flows.sweeping.status import status_json as of_sweep
    from flows.sweeping.status import watch_sweep
    from infra.store.workspace import Workspace

    where, rest = split_workspace(words)
    word = at_most_one(rest, "run", " for the newest; `refiner runs` lists them")
    workspace = Workspace.read_only(folder or where)
    if every:
        former_list_of_runs(str(workspace.root), as_json)
        return
    sweep, run = subject(workspace, word)
    watching = watch and not as_json
    look: Callable[[], Any]
    page: Callable[..., _Page]
    if sweep is not None:
        look, page = watch_sweep(sweep, workspace.root).observe, _sweep_page
    elif run is not None:
        wait_s = _WATCH_WAIT_S if watching else SCHEDULER_WAIT_S
        look, page = watch_run(run.run, workspace.root, wait_s=wait_s).observe, _run_page
    else:
        said = f"No run is recorded in {workspace.root}."
        nothing: dict[str, object] = {"version": 1, "run": None, "stages": []}
        show(as_json, lambda: nothing, lambda: [said], ["refiner run tiny"])
        return
    made = partial(page, workspace=workspace)
    status: Any
    status = _watched(look, made, "run" if sweep is None else "sweep") if watching else look()
    if status is None:
        return
    if as_json:
        print_json(of_sweep(status) if sweep is not None else status_json(status, workspace))
    elif incidents and sweep is None and not watching:
        _show_incidents(status)
    else:
        shown = made(status)
        show(as_json, dict, shown.lines, shown.following)


def subject(workspace: Workspace, word: str | None) -> tuple[str | None, RunRecord | None]:
    """The sweep or run of that name, by default the last one used in the workspace.

    Raises
    ------
    ConfigurationError
        There is no such run or sweep; the message names the nearest.
    """
    from flows.running.status import find_run
    from flows.sweeping.status import newest_sweep, sweep_named

    sweep = sweep_named(workspace, word) if word is not None else None
    run = find_run(workspace, word) if sweep is None else None
    return newest_sweep(workspace, run) if word is None else sweep, run


def status_json(status: RunStatus, workspace: Workspace) -> dict[str, object]:
    """The complete status as JSON; ``resolved`` incidents are over; ``unsent`` are messages that
    a channel did not accept."""
    from flows.notifying.sender import unsent
    from refiner_core.contract.records import to_json

    value: dict[str, object] = {"version": 1, **to_json(status)}
    value["incidents"] = [{**to_json(i), "line": i.line} for i in status.incidents]
    value["not_told"] = unsent(workspace, status.run)
    return value


# ---------------------------------------------------------------- once


def _show_incidents(status: RunStatus) -> None:
    for incident in status.incidents:
        click.echo(incident.line + ("" if incident.resolved else " (open)"))
    click.echo(_count(status) or f"Nothing went wrong in {status.run} so far.")


def cells(stage: StageStatus) -> tuple[str, ...]:
    """One row of the table."""
    from refiner_core.report.printing import clock

    job = " on ".join(filter(None, [stage.job_id or "", stage.node]))
    attempt = f"{stage.attempt} of {stage.attempts}" if stage.attempts > stage.attempt else ""
    word = stage.reason or (stage.last_failure if stage.state != "done" else "")
    return (
        stage.name,
        stage.state,
        job,
        attempt or str(stage.attempt or ""),
        _progress(stage),
        "" if stage.eta_s is None or stage.state != "running" else clock(stage.eta_s),
        word,
    )


def _progress(stage: StageStatus) -> str:
    from flows.running.status import progress_text

    if stage.state in ("done", "waiting", "blocked", "idle") or stage.step is None:
        return ""
    return progress_text(stage.phase, stage.step, stage.total, stage.metric)


def closing_lines(status: RunStatus, workspace: Workspace) -> Iterator[str]:
    """Lines below the table: orchestrator, free space, errors, next commands."""
    from flows.notifying.sender import unsent_lines
    from flows.runs.run_table import label_of

    tracking = workspace.read_run(status.run).config.get("tracking") or {}
    if said := label(*label_of(workspace, status.run, tracking)):
        yield f"notes: {said}"
    yield from _curve_lines(status, workspace)
    yield from _orchestrator_lines(status, workspace)
    if (disk := status.disk) is not None:
        yield (
            f"disk: {size(disk.free_bytes)} of {size(disk.total_bytes)} are free in {disk.folder}, "
            f"by {disk.source} (details: refiner disk)"
        )
    if status.incidents:
        newest = status.incidents[-1]
        yield f"{_count(status)} The last one: {newest.line}"
    yield from unsent_lines(workspace, status.run)
    if status.scheduler:
        yield f"scheduler: {status.scheduler}; the states of its jobs are the last known ones"


def _curve_lines(status: RunStatus, workspace: Workspace) -> Iterator[str]:
    """The last values of reward and loss of running stages, as blocks."""
    from infra.store.traces import last_metrics
    from refiner_core.contract.errors import WorkspaceError
    from refiner_core.report.printing import short, spark

    for stage in status.stages:
        if stage.state != "running":
            continue
        path, lines = workspace.layout.attempt(stage.id, stage.attempt).metrics, []
        with contextlib.suppress(WorkspaceError):
            lines = last_metrics(path, [name for names in _DRAWN for name in names])
        for names in _DRAWN:
            name = next((n for n in names if any(n in metrics for _, metrics in lines)), "")
            values = [metrics[name] for _, metrics in lines if name in metrics][-_LAST:]
            known = [value for value in values if value is not None]
            if len(known) > 1:
                low, high = min(known), max(known)
                ends = f"{short(known[-1])} (from {short(low)} to {short(high)})"
                yield f"{stage.name}: {name} {spark(values, low, high)} {ends}"


def _orchestrator_lines(status: RunStatus, workspace: Workspace) -> Iterator[str]:
    from flows.running.status import cancel_lines, orchestrator_text

    who, where = status.orchestrator, f"workspace={workspace.root}"
    yield from cancel_lines(status.cancel_asked)
    said = orchestrator_text(who, status.finished)
    if who.standing not in ("running", "elsewhere") and not status.finished:
        said += f". Next: {command_line('resume', status.run, where)}"
    yield said
    if status.outage:
        yield f"it waits, and continues by itself: {status.outage}"


def _count(status: RunStatus) -> str:
    count = len(status.incidents)
    if not count:
        return ""
    still = sum(not i.resolved for i in status.incidents)
    return f"{counted(count, 'incident')}, {f'{still} open' if still else 'all resolved'}."


# ---------------------------------------------------------------- watching


class _Page(NamedTuple):
    """View of a status; ``following`` are suggested commands for a single look."""

    heading: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    below: Sequence[str]
    following: Sequence[str] = ()

    def lines(self, most: int | None = None) -> list[str]:
        """All lines; at most ``most`` rows."""
        table = table_lines(self.rows[:most], self.header)
        more = 0 if most is None else len(self.rows) - most
        cut = [f"and {more} more {self.header[0]}s"] if more > 0 else []
        return [self.heading, *table, "", *cut, *self.below]


def _watched(look: Callable[[], Any], page: Callable[[Any], _Page], what: str) -> Any:
    """Redraw on a terminal until the orchestrator has ended; returns the last status. Ctrl-C ends
    the watching, not the work."""
    from rich.console import Console
    from rich.live import Live

    from flows.running.console import drawn

    screen = Live(console=Console(file=raw(sys.stdout)), auto_refresh=False, transient=True)
    try:
        with screen if sys.stdout.isatty() else contextlib.nullcontext() as live:
            while (status := look()).orchestrator.works:
                if live is not None:
                    live.update(drawn(page(status).lines(_ROWS)), refresh=True)
                time.sleep(_REFRESH_S)
            return status
    except KeyboardInterrupt:
        print_line(f"Watching has ended; the {what} has not.")
        return None


def _run_page(status: RunStatus, workspace: Workspace) -> _Page:
    rows, where = [cells(stage) for stage in status.stages], f"workspace={workspace.root}"
    following = []
    if status.finished:
        following = [command_line("report", status.run, where)]
    elif status.orchestrator.works:
        following = [command_line("status", status.run, "--watch", where)]
    heading = f"{status.run}: {command_line(*status.command[1:])}"
    return _Page(heading, _HEADER, rows, [*closing_lines(status, workspace)], following)


def _sweep_page(status: SweepStatus, workspace: Workspace) -> _Page:
    from flows.sweeping.status import status_lines, table_of

    (header, rows), record = table_of(status), status.record
    version = f", version {record.number}" if record.number > 1 else ""
    heading = f"sweep {record.name} of {record.recipe}{version}; baseline {record.baseline}"
    return _Page(heading, header, rows, [*status_lines(status, workspace)])


# ---------------------------------------------------------------- reports


@click.command("report")
@argument("words", nargs=-1, metavar="[RUN|SWEEP] [RUN]... [workspace=DIR]")
@click.option("--out", metavar="DIR", help="folder for the files (default: WORKSPACE/reports/NAME)")
@click.option("--watch", is_flag=True, help="update the report until the orchestrator has ended")
@click.option("--every", "every_s", type=click.IntRange(min=1), default=15, show_default=True,
              metavar="SECONDS", help="interval of --watch")  # fmt: skip
@former_option("--wandb", "Log a sweep's numbers yourself: wandb.Table(dataframe=flows.api."
             "comparisons_frame(SWEEP)), or report.csv.", flag=True)  # fmt: skip
@json_option
def report_command(
    words: tuple[str, ...], out: str | None, watch: bool, every_s: int, as_json: bool
) -> None:
    """Write the report of RUN or SWEEP (default: the newest), or of several RUNs on one page.

    Several runs are compared with the first: settings that differ, paired differences, curves over
    each other, answers side by side.

    RUN is an id, or an unambiguous part of one; a trial of a sweep is also
    SWEEP:ARM/seed1. Prints report.md and writes report.html, a page that works offline, with
    report.json beside it (for a sweep also report.csv and trials.csv). The page of a running run or
    sweep reloads itself; --watch keeps it up to date.
    """
    from flows.reporting.run.report import report_run
    from flows.reporting.several import compared_name, report_runs
    from flows.reporting.writing import report_sweep
    from flows.running.status import required_run
    from infra.store.workspace import Workspace
    from refiner_core.report.pages import values
    from refiner_core.report.sweep.rendering import runs_lines
    from refiner_core.report.sweep.sweep_report import TEXT

    where, rest = split_workspace(words)
    workspace = Workspace.read_only(where)
    several, sweep = len(rest) > 1, None
    make: Callable[..., WrittenReport[Any]]
    if several:
        runs = [required_run(workspace, word, "a run to compare").run for word in rest]
        name, make = compared_name(runs), partial(report_runs, runs)
    else:
        sweep, run = subject(workspace, next(iter(rest), None))
        what = "a workspace in which `refiner run RECIPE` or `refiner sweep FILE` was called"
        name = sweep or (run or required_run(workspace, None, what)).run
        make = partial(report_sweep if sweep else report_run, name)
    folder = output_folder(out or workspace.layout.reports / name)
    options: dict[str, Any] = {}
    if not (several or sweep):
        options = {"progress": progress("files of samples")}
    make = partial(make, where, folder=folder, reload_s=every_s, **options)
    made = _written(make, every_s if watch else 0)
    report = made.report
    document = {**values(report), "folder": str(folder)}
    if sweep:
        document["wandb"] = ""
    lines = (folder / TEXT).read_text(encoding="utf-8").splitlines
    show(as_json, lambda: document, partial(runs_lines, report) if several else lines)
    if as_json:
        return
    files = ("report.md", "report.csv", "trials.csv", "report.json", "samples.html")
    beside = ", ".join(name for name in files if (folder / name).exists())
    print_line(f"\nPage: {made.page}\nBeside it: {beside}")
    if several:
        print_next(command_line("diff", *runs[:2], f"workspace={workspace.root}"))
    elif sweep and report.state == "running":
        print_next(command_line("report", name, "--watch", f"workspace={workspace.root}"))
    elif not sweep:
        print_next(*report.next_commands)


def _written(make: Callable[[], WrittenReport[Any]], every_s: int) -> WrittenReport[Any]:
    """The report; with ``every_s`` the last of those that are made until the orchestrator has
    ended. Ctrl-C ends the watching, not the work."""
    written = make()
    try:
        if every_s:
            print_line(f"Page: {written.page}")
        while every_s and written.report.state == "running":
            time.sleep(every_s)
            written = make()
    except KeyboardInterrupt:
        print_line("Watching has ended; the work has not.")
    return written
