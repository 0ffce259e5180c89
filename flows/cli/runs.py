"""`refiner runs`, `tag`, `rm`, `prune`, `bundle`, `unbundle` and `ui`: find runs, mark them, remove
them, take them along, see them all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from flows.cli.options import (
    argument,
    ask_leave,
    at_most_one,
    command_line,
    json_option,
    misuse,
    output_folder,
    print_line,
    progress,
    show,
    show_listing,
    split_workspace,
)

if TYPE_CHECKING:
    from flows.runs.removing import Removal
    from flows.runs.run_table import RunRow


@click.command("runs")
@argument("words", nargs=-1, metavar="[workspace=DIR]")
@click.option("--where", metavar="FILTER", default="",
              help="only runs that match, e.g. 'grpo.beta < 0.01 and oracle > 0.8'")  # fmt: skip
@click.option("--metric", metavar="NAME", help="the metric to show (default: the reward)")
@click.option("--sort", metavar="NAME", help="order by a metric, column or field, largest first")
@click.option("--reverse", is_flag=True, help="turn the order round")
@click.option("--limit", "-n", type=click.IntRange(min=1), default=30, show_default=True,
              help="maximum number of rows")  # fmt: skip
@click.option("--all", "every", is_flag=True, help="also repetitions, and evaluations of nights")
@json_option
def runs_command(
    words: tuple[str, ...],
    where: str,
    metric: str | None,
    sort: str | None,
    reverse: bool,
    limit: int,
    every: bool,
    as_json: bool,
) -> None:
    """List runs: changes, state, a metric, cost and note, one row per configuration.

    FILTER compares columns (state, recipe, note, tags, gpu_hours, started …), metrics and
    configuration fields with numbers or quoted texts, joined by and, or, not.
    """
    from flows.runs.run_table import check_names, list_rows, main_metric, sorted_rows

    folder, rest = split_workspace(words)
    if rest:
        raise misuse(f"It was given {' '.join(rest)}. It takes workspace=DIR; see --where.")
    every_row = list_rows(folder, every=every, where=where, progress=progress("runs"))
    if metric is not None:
        check_names(every_row, [metric])
    rows = sorted_rows(every_row, sort, reverse=reverse) if sort else every_row
    rows = rows[::-1] if reverse and not sort else rows
    _show_rows(rows, metric or main_metric(rows), limit, folder, as_json)


def _show_rows(rows: Sequence[RunRow], metric: str, limit: int, folder: str, as_json: bool) -> None:
    from flows.runs.run_table import changes_of
    from refiner_core.report.printing import label, measured, moment

    changes, where = changes_of(rows), f"workspace={folder}"
    names = _short_names([row.run for row in rows])
    table = []
    for row in rows[:limit]:
        said = [row.sweep, *changes[row.run], label(row.note and f'"{row.note}"', row.tags)]
        table.append(
            (
                *(names[row.run], moment(row.started), row.recipe, row.state),
                measured(row.metrics.get(metric) or {}, ""),
                _cost(row),
                " ".join(filter(None, said)),
            )
        )
    header = ("run", "started", "recipe", "state", metric or "metric", "cost", "changes and note")
    if not rows:
        nothing = [f"No run matches in {folder}."]
        show(as_json, lambda: {"version": 1, "runs": []}, lambda: nothing, ["refiner run tiny"])
        return
    following = [command_line("report", *(row.run for row in rows[:n]), where) for n in (1, 2)]
    show_listing(as_json, lambda: rows_json(rows), table, header, following[: len(rows)])
    if len(rows) > limit and not as_json:
        print_line(f"{limit} of {len(rows)} runs; --limit {len(rows)} shows all")


def rows_json(rows: Sequence[RunRow]) -> dict[str, Any]:
    """Rows as JSON."""
    from refiner_core.contract.records import to_json

    hidden = ("key", "began", "night", "fields")
    found = [{k: v for k, v in to_json(row).items() if k not in hidden} for row in rows]
    return {"version": 1, "runs": found}


def _short_names(runs: Sequence[str]) -> dict[str, str]:
    """The ends of ids, as long as they differ."""
    length = 4
    while length < 40 and len({run[-length:] for run in runs}) < len(runs):
        length += 5
    return {run: run[-length:] for run in runs}


def _cost(row: RunRow) -> str:
    from refiner_core.report.printing import hours

    if row.gpu_hours:
        return f"{hours(row.gpu_hours)} GPU-h"
    return f"{hours(row.cpu_hours)} CPU-h" if row.cpu_hours else ""


@click.command("tag")
@argument("run", metavar="RUN")
@argument("words", nargs=-1, metavar="[TAG]... [workspace=DIR]")
@click.option("--note", help="replace the note of the run")
@click.option("--remove", is_flag=True, help="remove the tags instead")
@json_option
def tag_command(
    run: str, words: tuple[str, ...], note: str | None, remove: bool, as_json: bool
) -> None:
    """Give RUN tags and a note, shown by `refiner runs` and `status`.

    W&B and Prefect show those that a run begins with: `run --note`, tracking.tags.
    """
    from flows.runs.run_table import label_run
    from refiner_core.report.printing import label

    folder, tags = split_workspace(words)
    made = label_run(run, folder, tags=tags, note=note, remove=remove)
    lines = [f"{made['run']}: {label(made['note'], made['tags'])}".rstrip(": ")]
    show(as_json, lambda: {"version": 1, **made}, lambda: lines)


_removing = (
    click.option("--dry-run", is_flag=True, help="show what would go, and change nothing"),
    click.option("--yes", "-y", is_flag=True, help="do not ask"),
)


@click.command("rm")
@argument("words", nargs=-1, required=True, metavar="RUN|SWEEP... [workspace=DIR]")
@click.option("--unverified", is_flag=True, help="also runs whose publication is not verified")
@_removing[0]
@_removing[1]
@json_option
def rm_command(
    words: tuple[str, ...], unverified: bool, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Remove RUNs and SWEEPs, with the stages that nothing else needs.

    Stages that another run or sweep has stay. A run that is running, pinned, or published without
    verification stays as a whole.
    """
    from flows.runs.removing import remove_runs

    folder, names = split_workspace(words)
    if not names:
        raise misuse("It was given no run.")
    _remove(
        lambda dry: remove_runs(names, folder, unverified=unverified, dry_run=dry),
        *(dry_run, yes, as_json),
    )


@click.command("prune")
@argument("words", nargs=-1, metavar="[workspace=DIR]")
@click.option("--older-than", required=True, metavar="AGE", help="an age such as 30d, 12h or 4w")
@click.option("--keep-best", type=click.IntRange(min=1), default=None, metavar="N",
              help="keep the N runs with the largest --metric")  # fmt: skip
@click.option("--metric", default="", metavar="NAME", help="the metric of --keep-best")
@click.option("--where", default="", metavar="FILTER", help="only runs that match, as in `runs`")
@_removing[0]
@_removing[1]
@json_option
def prune_command(
    words: tuple[str, ...],
    older_than: str,
    keep_best: int | None,
    metric: str,
    where: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove old runs, but the best ones, those tagged `keep`, and trials of sweeps."""
    from flows.runs.removing import prune_runs

    folder, rest = split_workspace(words)
    if rest:
        raise misuse(f"It was given {' '.join(rest)}. It takes workspace=DIR; see `refiner rm`.")
    _remove(
        lambda dry: prune_runs(
            folder,
            older_than=older_than,
            keep_best=keep_best or 0,
            metric=metric,
            where=where,
            dry_run=dry,
        ),
        *(dry_run, yes, as_json),
    )


def _remove(make: Callable[[bool], Removal], dry_run: bool, yes: bool, as_json: bool) -> None:
    """Show a removal, ask, and carry it out."""
    planned = make(True)
    nothing = not planned.plan.runs and not planned.plan.sweeps
    if dry_run or nothing:
        show(as_json, lambda: _removal_json(planned), lambda: _removal_lines(planned))
        return
    if not as_json:
        print_line("\n".join(_removal_lines(planned)))
    if not yes:
        ask_leave("Remove this?", "Nothing was removed.", "add --yes, or see it with --dry-run")
    done = make(False)
    line = f"Removed {len(done.plan.runs)} runs and {len(done.plan.stages)} stages."
    show(as_json, lambda: _removal_json(done), lambda: [line])


def _removal_json(removal: Removal) -> dict[str, Any]:
    from refiner_core.contract.records import to_json

    value = to_json(removal.plan)
    return {"version": 1, **value, "kept": removal.kept, "cost": to_json(removal.cost),
            "removed": removal.done}  # fmt: skip


def _removal_lines(removal: Removal) -> Iterator[str]:
    from refiner_core.report.printing import counted, hours, size

    plan, cost = removal.plan, removal.cost
    what = [counted(len(plan.runs), "run"), counted(len(plan.stages), "stage")]
    if plan.sweeps:
        what.insert(0, counted(len(plan.sweeps), "sweep"))
    again = f"{hours(cost.gpu_hours)} GPU-hours" if cost.gpu_hours else ""
    again = again or f"{hours(cost.cpu_hours)} CPU-hours"
    if not (plan.runs or plan.sweeps):
        yield "Nothing goes."
    else:
        yield f"{', '.join(what)} go, {size(plan.bytes)}; making them took {again}"
    yield from (f"  goes: {name}" for name in (*plan.sweeps, *plan.runs))
    yield from (f"  stays: stage {i}, which {run} has too" for i, run in plan.shared.items())
    yield from (f"  stays: {name}, {reason}" for name, reason in plan.refused.items())
    yield from (f"  stays: {name}, {reason}" for name, reason in removal.kept.items())


@click.command("bundle")
@argument("words", nargs=-1, metavar="[RUN] [workspace=DIR]")
@click.option("--out", metavar="FILE", help="the new file (default: RUN.tar.gz here)")
@click.option("--weights", is_flag=True, help="include exported weights")
@click.option("--rollouts", is_flag=True, help="include the rollouts of training")
@json_option
def bundle_command(
    words: tuple[str, ...], out: str | None, weights: bool, rollouts: bool, as_json: bool
) -> None:
    """Write RUN (default: the newest) to one file, for a colleague.

    It has records, metrics, logs, prepared rows, evaluated samples, reports and cards; no code, no
    checkpoints.
    """
    from flows.runs.bundling import bundle_run
    from refiner_core.contract.records import picked
    from refiner_core.report.printing import size

    folder, names = split_workspace(words)
    run = at_most_one(names, "run", " for the newest")
    made = bundle_run(run, folder, out=out, weights=weights, rollouts=rollouts)
    value = {"version": 1, "file": str(made.file)}
    value |= picked(made, "run", "files", "bytes", "weights")
    line = f"{made.file}: {made.run}, {made.files} files, {size(made.bytes)} unpacked"
    following = [command_line("unbundle", str(made.file), "workspace=DIR")]
    show(as_json, lambda: value, lambda: [line], following)


@click.command("unbundle")
@argument("words", nargs=-1, required=True, metavar="FILE [workspace=DIR]")
@json_option
def unbundle_command(words: tuple[str, ...], as_json: bool) -> None:
    """Put the run of a bundle into a workspace; every file is checked by its hash."""
    from flows.runs.bundling import unbundle
    from refiner_core.contract.records import picked

    folder, names = split_workspace(words)
    file = at_most_one(names, "file")
    if file is None:
        raise misuse("It was given no file.")
    found = unbundle(file, folder)
    value = {"version": 1, **picked(found, "run", "stages", "kept")}
    line = f"{found.run}: {len(found.stages)} stages, {len(found.kept)} were here already"
    following = [command_line("report", found.run, f"workspace={folder}")]
    show(as_json, lambda: value, lambda: [line], following)


@click.command("ui")
@argument("words", nargs=-1, metavar="[workspace=DIR]")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="port (default: a free one)")
@click.option("--out", metavar="DIR", help="write the page to DIR/index.html instead")
def ui_command(words: tuple[str, ...], port: int, out: str | None) -> None:
    """Show all runs of a workspace in a browser: filters, order, curves, reports.

    The page only reads; Prefect launches and cancels. It is served on loopback until Ctrl-C, and
    its address has a key.
    """
    import secrets

    from flows.runs.ui import app, write_page

    folder, rest = split_workspace(words)
    if rest:
        raise misuse(f"It was given {' '.join(rest)}. It takes workspace=DIR.")
    if out is not None:
        click.echo(write_page(folder, output_folder(out)))
        return
    import uvicorn

    key = secrets.token_urlsafe(24)
    socket = _listening(port)
    print_line("Ctrl-C ends it.")
    click.echo(f"http://127.0.0.1:{socket.getsockname()[1]}/?key={key}")
    served = uvicorn.Config(app(folder, key), log_level="warning", access_log=False)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(served).run([socket])


def _listening(port: int) -> Any:
    """A socket of loopback.

    Raises
    ------
    ConfigurationError
        The port is taken.
    """
    import socket

    from refiner_core.contract.errors import ConfigurationError

    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise ConfigurationError(
            f"Port {port} cannot be used: {error.strerror}.",
            expected="a free port of this machine",
            fix="leave --port out, or name another one",
        ) from error
