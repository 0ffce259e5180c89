"""`refiner report`: what a run has done and learned, or what the arms of a sweep have shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from flows.cli.options import (
    json_option,
    output_folder,
    print_json,
    print_table,
    split_workspace,
    until_nobody_reads,
)
from infra.store.sweep_records import sweep_names

if TYPE_CHECKING:
    from flows.reporting.run.report import WrittenRun
    from flows.reporting.writing import Written
    from infra.store.workspace import Workspace
    from refiner_core.report.run.document import RunReport


class Asked(NamedTuple):
    """How a report is to be made."""

    folder: Path
    watch: bool
    every_s: int
    as_json: bool


_MOST_INCIDENTS = 5
#: Tables of numbers that a terminal shows; the page has all.
_MOST_TABLES = 2


def show_run_report(make: Callable[[], WrittenRun], asked: Asked) -> None:
    """Print what the report of a run says; ``make`` writes it as it is now."""
    from flows.reporting.run.report import values

    written = make()
    if asked.watch:
        written = _watched_run(make, written, asked.every_s)
    if asked.as_json:
        print_json({**values(written.report), "folder": str(written.folder)})
        return
    with until_nobody_reads():
        _show_run(written.report)
    click.echo(f"\nPage: {written.page}", err=True)
    click.echo("Beside it: report.md, report.json", err=True)
    click.echo("Next:", err=True)
    for command in written.report.next_commands:
        click.echo(f"  {command}", err=True)


def _watched_run(make: Callable[[], WrittenRun], written: WrittenRun, every_s: int) -> WrittenRun:
    """The last of the reports that are made until nobody works on the run. Ctrl-C ends the
    watching, not the run."""
    click.echo(f"Page: {written.page}", err=True)
    told = ""
    try:
        while written.report.state == "running":
            if written.report.state_text != told:
                told = written.report.state_text
                click.echo(told, err=True)
            time.sleep(every_s)
            written = make()
    except KeyboardInterrupt:
        click.echo("Watching has ended; the run has not.", err=True)
    return written


def _show_run(report: RunReport) -> None:
    from refiner_core.report.printing import moment, plain
    from refiner_core.report.run import tables as words

    click.echo(f"{report.run}  ({report.state}; as of {moment(report.made_at)})")
    click.echo(plain(report.state_text))
    for text in report.warnings:
        click.echo(f"warning: {plain(text)}")
    click.echo()
    _table([words.stage_cells(row) for row in report.stages], words.STAGE_HEADER)
    for table in words.change_tables(report)[:_MOST_TABLES]:
        click.echo(f"\n{table.title}")
        _table(table.rows, table.header)
    if report.incidents:
        click.echo(f"\n{words.incidents_text(report).capitalize()}")
        for incident in report.incidents[-_MOST_INCIDENTS:]:
            over = "" if incident.resolved else " (open)"
            click.echo(f"  {moment(incident.at)} {incident.stage}: {plain(incident.text)}{over}")
    click.echo(f"\nCost: {words.cost_text(report)}")
    for one in report.published:
        click.echo(f"Published: {plain(one.target)}")


def _table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> None:
    from refiner_core.report.printing import plain

    print_table([[plain(cell) for cell in row] for row in rows], header)


class _Subject(NamedTuple):
    """What a report is about: the name of a sweep, or the id of a run."""

    kind: str
    name: str


@click.command("report")
@click.argument("words", nargs=-1, metavar="[RUN|SWEEP] [workspace=DIR]")
@click.option("--out", metavar="DIR", help="where the files go (default: WORKSPACE/reports/NAME)")
@click.option("--watch", is_flag=True, help="make it again until nobody works on it")
@click.option("--every", "every_s", type=click.IntRange(min=1), default=15, show_default=True,
              metavar="SECONDS", help="how often, with --watch")  # fmt: skip
@click.option("--wandb", "to_wandb", is_flag=True, help="put a sweep's tables into a W&B run, too")
@json_option
def report_command(
    words: tuple[str, ...],
    out: str | None,
    watch: bool,
    every_s: int,
    to_wandb: bool,
    as_json: bool,
) -> None:
    """Say what RUN has done and learned, or what SWEEP has shown (default: the newest).

    RUN is an id, or enough of its beginning or end; a trial of a sweep is also SWEEP:ARM/seed1.
    Writes report.html, a page that needs nothing but a browser, with report.md and report.json
    beside it (of a sweep report.csv and trials.csv too). While a run or sweep is worked on, its
    page loads itself again; --watch keeps it fresh.
    """
    from infra.store.workspace import Workspace

    where, rest = split_workspace(words)
    workspace = Workspace.read_only(where)
    subject = _which(workspace, rest)
    if to_wandb and subject.kind == "run":
        raise _no_tables(subject.name)
    folder = output_folder(out or workspace.layout.reports / subject.name)
    asked = Asked(folder, watch, every_s, as_json)
    if subject.kind == "run":
        from flows.api import report_run

        make = partial(report_run, subject.name, where, folder=folder, reload_s=every_s)
        show_run_report(make, asked)
    else:
        _report_sweep(workspace, subject.name, asked, to_wandb)


def _report_sweep(workspace: Workspace, sweep: str, asked: Asked, to_wandb: bool) -> None:
    from flows.api import report_sweep

    root = workspace.root
    written = report_sweep(sweep, root, folder=asked.folder, reload_s=asked.every_s)
    if asked.watch:
        written = _watched_sweep(workspace, written, asked.every_s)
    logged = _to_wandb(workspace, written) if to_wandb else ""
    if asked.as_json:
        from refiner_core.report.sweep.exports import values

        print_json({**values(written.report), "folder": str(written.folder), "wandb": logged})
        return
    with until_nobody_reads():
        _show_sweep(written)
    click.echo(f"\nPage: {written.page}", err=True)
    click.echo("Beside it: report.md, report.csv, trials.csv, report.json", err=True)
    if logged:
        click.echo(f"W&B: {logged}", err=True)
    if written.report.state == "running":
        click.echo(f"Next:\n  refiner report {sweep} --watch workspace={root}", err=True)


def _which(workspace: Workspace, words: Sequence[str]) -> _Subject:
    """What is meant: by default what the workspace was last used for.

    Raises
    ------
    ConfigurationError
        None of that name, or there is nothing to report on.
    """
    from flows.running.status import find_run
    from flows.sweeping.status import newest_sweep, sweep_named
    from refiner_core.contract.errors import ConfigurationError

    if len(words) > 1:
        raise ConfigurationError(
            f"`refiner report` takes one run or sweep, not {len(words)}.",
            expected="the id of a run or the name of a sweep, and perhaps workspace=DIR",
            fix=f"leave out {words[1]}",
        )
    if words:
        if (sweep := sweep_named(workspace, words[0])) is not None:
            return _Subject("sweep", sweep)
        return _Subject("run", _run_named(workspace, words[0]))
    run = find_run(workspace)
    if (sweep := newest_sweep(workspace, run)) is not None:
        return _Subject("sweep", sweep)
    if run is None:
        raise ConfigurationError(
            f"{workspace.root} has no runs and no sweeps.",
            expected="a workspace in which `refiner run RECIPE` or `refiner sweep FILE` was called",
            fix="name another one with workspace=DIR",
        )
    return _Subject("run", run.run)


def _run_named(workspace: Workspace, word: str) -> str:
    """The run of that id, or of enough of it.

    Raises
    ------
    ConfigurationError
        There is none; names what is near, sweeps among it.
    """
    from flows.running.status import find_run
    from refiner_core.contract.errors import ConfigurationError
    from refiner_core.contract.fields import suggest

    sweeps = sweep_names(workspace)
    try:
        run = find_run(workspace, word)
    except ConfigurationError as error:
        hint = "" if ":" in word else suggest(word, sweeps)
        if not hint:
            raise
        raise ConfigurationError(
            f"{workspace.root} has no run and no sweep {word!r}.{hint}",
            expected=f"one of: {', '.join([*sweeps, *workspace.run_ids()][-5:])}",
            fix="name one of these, or another workspace=DIR",
        ) from error
    assert run is not None, "a name was given"
    return run.run


def _no_tables(run: str) -> Exception:
    from refiner_core.contract.errors import ConfigurationError

    return ConfigurationError(
        f"{run} is a run, and --wandb is for the tables of a sweep.",
        expected="the name of a sweep; a run logs its own numbers to W&B while it trains",
        fix="leave out --wandb; `refiner track sync` sends what was logged offline",
    )


def _watched_sweep(workspace: Workspace, written: Written, every_s: int) -> Written:
    """The last of the reports that are made until nobody works on the sweep."""
    from flows.reporting.writing import write_report
    from refiner_core.report.sweep.wording import state_text

    click.echo(f"Page: {written.page}", err=True)
    told = ""
    while written.report.state == "running":
        if (said := state_text(written.report)) != told:
            told = said
            click.echo(said, err=True)
        time.sleep(every_s)
        written = write_report(workspace, written.report.sweep, written.folder, reload_s=every_s)
    return written


def _to_wandb(workspace: Workspace, written: Written) -> str:
    from flows.reporting.writing import log_report

    return log_report(workspace, written)


def _show_sweep(written: Written) -> None:
    from refiner_core.report.printing import moment, plain
    from refiner_core.report.sweep import wording as words
    from refiner_core.report.sweep.wording import Column, arm_row

    report = written.report
    state = words.state_text(report)
    click.echo(
        f"{plain(report.title or report.sweep)}  ({report.state}; as of {moment(report.made_at)})"
    )
    click.echo(f"{state} {words.cost_text(report)}.")
    for text in report.warnings:
        click.echo(f"warning: {plain(text)}")
    if report.question:
        click.echo(f"\nQuestion  {plain(report.question)}")
    click.echo(f"Answer    {words.answer(report)}\n")
    if (primary := report.primary) is None:
        return
    click.echo(words.key_text(primary.key))
    column = Column.of(primary, report, drawn=False)
    rows = [arm_row(n, column, report) for n in primary.numbers]
    print_table(
        [
            [
                r.arm,
                f"{r.value} {r.bounds}".strip(),
                f"{r.difference} {r.difference_bounds}".strip(),
                r.p_adjusted,
                f"{r.sign} {r.verdict}".strip(),
                r.note,
            ]
            for r in rows
        ],
        ("arm", primary.key.metric, "difference", "p (adjusted)", "says", ""),
    )
