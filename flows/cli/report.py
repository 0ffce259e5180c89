"""`refiner report`: what a run has done and learned, or what the arms of a sweep have shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import click

from flows.cli.options import (
    at_most_one,
    json_option,
    output_folder,
    say,
    say_next,
    show,
    split_workspace,
)
from infra.store.sweep_records import sweep_names
from refiner_core.contract.errors import ConfigurationError
from refiner_core.report.printing import table_lines

if TYPE_CHECKING:
    from flows.reporting.writing import Written
    from infra.store.workspace import Workspace
    from refiner_core.report.run.document import RunReport
    from refiner_core.report.sweep.document import SweepReport

W = TypeVar("W", "Written[SweepReport]", "Written[RunReport]")
_MOST_INCIDENTS = 5
#: Tables of numbers that a terminal shows; the page has all.
_MOST_TABLES = 2


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
    from flows.reporting.run.report import report_run, values
    from flows.reporting.writing import log_report, report_sweep
    from infra.store.workspace import Workspace
    from refiner_core.report.sweep.rendering import values as sweep_values
    from refiner_core.report.sweep.wording import state_text

    where, rest = split_workspace(words)
    workspace = Workspace.read_only(where)
    sweep, name = _subject(workspace, rest)
    if to_wandb and not sweep:
        raise ConfigurationError(
            f"{name} is a run, and --wandb is for the tables of a sweep.",
            expected="the name of a sweep; a run logs its own numbers to W&B while it trains",
            fix="leave out --wandb; `refiner track sync` sends what was logged offline",
        )
    folder = output_folder(out or workspace.layout.reports / name)
    every = every_s if watch else 0

    if sweep:
        make = partial(report_sweep, name, workspace.root, folder=folder, reload_s=every_s)
        made = _written(make, lambda w: state_text(w.report), every, "sweep")
        logged = log_report(workspace, made) if to_wandb else ""
        document = {**sweep_values(made.report), "folder": str(folder), "wandb": logged}
        show(as_json, lambda: document, lambda: _sweep_lines(made.report))
        if not as_json:
            say(f"\nPage: {made.page}")
            say("Beside it: report.md, report.csv, trials.csv, report.json")
            if logged:
                say(f"W&B: {logged}")
            if made.report.state == "running":
                say_next(f"refiner report {name} --watch workspace={workspace.root}")
        return

    make_run = partial(report_run, name, where, folder=folder, reload_s=every_s)
    written = _written(make_run, lambda w: w.report.state_text, every, "run")
    report = written.report
    show(as_json, lambda: {**values(report), "folder": str(folder)}, lambda: _run_lines(report))
    if not as_json:
        say(f"\nPage: {written.page}\nBeside it: report.md, report.json")
        say_next(*report.next_commands)


def _subject(workspace: Workspace, words: Sequence[str]) -> tuple[bool, str]:
    """Subject of the report, by default what the workspace was last used for: True for a sweep, and
    its name or the id of a run."""
    from flows.running.status import find_run
    from flows.sweeping.status import newest_sweep, sweep_named

    word = at_most_one(
        words,
        "`refiner report` takes one run or sweep, not {count}.",
        expected="the id of a run or the name of a sweep, and perhaps workspace=DIR",
        fix=f"leave out {words[-1] if words else ''}",
    )
    if word is not None:
        sweep = sweep_named(workspace, word)
        return (True, sweep) if sweep is not None else (False, _run_named(workspace, word))
    run = find_run(workspace)
    if (sweep := newest_sweep(workspace, run)) is not None:
        return True, sweep
    if run is None:
        raise ConfigurationError(
            f"{workspace.root} has no runs and no sweeps.",
            expected="a workspace in which `refiner run RECIPE` or `refiner sweep FILE` was called",
            fix="name another one with workspace=DIR",
        )
    return False, run.run


def _run_named(workspace: Workspace, word: str) -> str:
    """The run of that id, or of enough of it.

    Raises
    ------
    ConfigurationError
        There is none; names what is near, sweeps among it.
    """
    from flows.running.status import find_run
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


def _written(make: Callable[[], W], state: Callable[[W], str], every_s: int, noun: str) -> W:
    """The report; with ``every_s`` the last of those that are made until nobody works on it any
    more. Ctrl-C ends the watching, not the work."""
    written = make()
    if not every_s:
        return written
    say(f"Page: {written.page}")
    told = ""
    try:
        while written.report.state == "running":
            if (said := state(written)) != told:
                told = said
                say(said)
            time.sleep(every_s)
            written = make()
    except KeyboardInterrupt:
        say(f"Watching has ended; the {noun} has not.")
    return written


def _run_lines(report: RunReport) -> Iterator[str]:
    from refiner_core.report.printing import moment, plain
    from refiner_core.report.run import rendering as words

    def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> Iterator[str]:
        return table_lines([[plain(cell) for cell in row] for row in rows], header)

    yield f"{report.run}  ({report.state}; as of {moment(report.made_at)})"
    yield plain(report.state_text)
    for text in report.warnings:
        yield f"warning: {plain(text)}"
    yield ""
    yield from table([words.stage_cells(row) for row in report.stages], words.STAGE_HEADER)
    for found in islice(words.number_tables(report, narrow=True), _MOST_TABLES):
        yield f"\n{found.title}"
        yield from table(found.rows, found.header)
    if report.incidents:
        yield f"\n{words.incidents_text(report).capitalize()}"
        for incident in report.incidents[-_MOST_INCIDENTS:]:
            over = "" if incident.resolved else " (open)"
            yield f"  {moment(incident.at)} {incident.stage}: {plain(incident.text)}{over}"
    yield f"\nCost: {words.cost_text(report)}"
    for one in report.published:
        yield f"Published: {plain(one.target)}"


def _sweep_lines(report: SweepReport) -> Iterator[str]:
    from refiner_core.report.printing import moment, plain
    from refiner_core.report.sweep import wording as words

    title = plain(report.title or report.sweep)
    yield f"{title}  ({report.state}; as of {moment(report.made_at)})"
    yield f"{words.state_text(report)} {words.cost_text(report)}."
    for text in report.warnings:
        yield f"warning: {plain(text)}"
    if report.question:
        yield f"\nQuestion  {plain(report.question)}"
    yield f"Answer    {words.answer(report)}\n"
    if (primary := report.primary) is None:
        return
    yield words.key_text(primary.key)
    column = words.Column.of(primary, report)
    shown = (words.arm_row(n, column, report) for n in primary.numbers)
    pairs = (("value", "bounds"), ("difference", "difference_bounds"), ("sign", "verdict"))
    rows = [
        (r["arm"], *texts[:2], r["p_adjusted"], texts[2], r["note"])
        for r in shown
        for texts in [[f"{r[one]} {r[other]}".strip() for one, other in pairs]]
    ]
    header = ("arm", primary.key.metric, "difference", "p (adjusted)", "says", "")
    yield from table_lines(rows, header)
