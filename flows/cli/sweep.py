"""`refiner sweep` and `refiner resume`: launch and amend an ablation; go on with a record."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from flows.cli.options import json_option, print_json, print_table, split_workspace
from flows.cli.run import detach_option, finish, leave_to, stop_on_signals
from infra.store.sweep_records import read_sweep, sweep_versions

if TYPE_CHECKING:
    from flows.sweeping.evidence import RescoreShare
    from flows.sweeping.launching import Launch, SweepOutcome
    from infra.store.workspace import Workspace
    from refiner_core.contract.records import RunRecord, SweepRecord
    from sweeps.values import SweepPlan


@click.command("sweep")
@click.argument("words", nargs=-1, metavar="[SWEEP] [KEY=VALUE]...")
@click.option("--dry-run", is_flag=True, help="show arms, forecast and warnings; change nothing")
@click.option("--yes", "-y", is_flag=True, help="launch without asking")
@click.option(
    "--rescore",
    metavar="RUN",
    help="also say, by the stored rollouts of RUN, which share of groups the arms' rewards and "
    "judges would change; asks no judge",
)
@click.option(
    "--past-canary", is_flag=True, help="go on whatever the first trial's first steps have shown"
)
@click.option("--take-over", is_flag=True, help="though another host says that it works on it")
@detach_option
@json_option
@click.option("--no-server", is_flag=True, help="no Prefect server, no flow run")
@click.option("--quiet", "-q", is_flag=True, help="no progress; warnings and failures only")
def sweep_command(
    words: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    rescore: str | None,
    past_canary: bool,
    take_over: bool,
    detach: str | None,
    as_json: bool,
    no_server: bool,
    quiet: bool,
) -> int:
    """Carry out SWEEP: a shipped name or a YAML file; without one, list sweeps.

    It is planned, forecast and shown; then it asks, or takes --yes. One trial goes ahead alone
    until it has trained two steps and saved once; the forecast is corrected by what these took, and
    the others follow. A failed trial stops no other. What is done is skipped: the same command goes
    on after any interruption, and when an arm, a seed or a limit in the file has changed, only what
    is new runs.

    Exit codes: 0 when every trial is done, 1 when one has failed, 6 when some were stopped or are
    held by a limit, 5 or 7 when a full disk or a judge stands in the way; the same command goes on.
    """
    from flows.api import make_sweep_plan
    from flows.sweeping.launching import Launch

    names = [word for word in words if not _is_override(word)]
    overrides = [word for word in words if _is_override(word)]
    if not names:
        where, rest = split_workspace(overrides)
        _refuse_without_one(rest, dry_run or yes or rescore is not None or detach is not None)
        _list(where, as_json)
        return 0
    _refuse_more_than_one(names)
    plan = make_sweep_plan(names[0], overrides)
    launch = Launch(
        use_server=not no_server, quiet=quiet, past_canary=past_canary, take_over=take_over
    )
    again = ["refiner", "sweep", names[0], *overrides, *(["--no-server"] if no_server else [])]
    again += [f"--detach={detach}"] if detach else []
    asked = _Asked(yes, detach, as_json, again, rescore)
    if dry_run:
        _show_only(plan, asked)
        return 0
    return _launch(plan, overrides, launch, asked)


def _show_only(plan: SweepPlan, asked: _Asked) -> None:
    """What it would do, and what it takes and can show; nothing is launched."""
    from flows.cli.options import until_nobody_reads
    from flows.sweeping.planning import show_sweep_plan, sweep_json

    share = asked.rescored(plan)
    if asked.as_json:
        print_json({**sweep_json(plan), **({} if share is None else {"rescore": share.json()})})
        return
    with until_nobody_reads():
        for line in [*show_sweep_plan(plan), *(() if share is None else share.lines())]:
            click.echo(line)


class _Asked:
    """How the command was typed."""

    def __init__(
        self,
        yes: bool,
        detach: str | None,
        as_json: bool,
        again: list[str],
        rescore: str | None = None,
    ) -> None:
        self.yes, self.detach, self.as_json, self.again = yes, detach, as_json, again
        self.rescore = rescore

    def rescored(self, plan: SweepPlan) -> RescoreShare | None:
        """What the arms would change about the run of ``--rescore``; None without it."""
        if self.rescore is None:
            return None
        from flows.api import rescore_share

        return rescore_share(plan, self.rescore)


def _launch(plan: SweepPlan, overrides: list[str], launch: Launch, asked: _Asked) -> int:
    from flows.api import begin_sweep, forecast_sweep
    from flows.sweeping.launching import check_launch, is_finished, work_on_sweep, workspace_of
    from flows.sweeping.planning import show_sweep_plan
    from sweeps.forecast import refuse_what_cannot_fit

    finished, look = is_finished(plan, workspace_of(plan)), None
    if not finished:
        check_launch(plan)
        look = forecast_sweep(plan)
        if not launch.quiet or not asked.yes:
            share = asked.rescored(plan)
            lines = [*show_sweep_plan(plan, look), *(() if share is None else share.lines())]
            for line in lines:
                click.echo(line, err=True)  # stdout is for the result
        refuse_what_cannot_fit(look.before.passed)  # before anybody is asked
        _ask(asked)
    record = begin_sweep(plan, overrides, look=look, take_over=launch.take_over)
    workspace = workspace_of(plan, to_write=True)
    if asked.detach is not None and not finished:
        return leave_sweep_to(asked.detach, workspace, record, launch, asked.as_json)
    stop_on_signals()
    return finish_sweep(work_on_sweep(plan, workspace, record, launch), asked.as_json)


def _ask(asked: _Asked) -> None:
    """Go on only if somebody has said so.

    Raises
    ------
    ConfigurationError
        There is nobody to ask.
    """
    from refiner_core.contract.errors import ConfigurationError

    if asked.yes:
        return
    if sys.stdin.isatty() and sys.stderr.isatty():
        if click.confirm("Launch it?", default=False, err=True):
            return
        raise click.Abort
    raise ConfigurationError(
        "Nothing was launched: this is no terminal, so nobody can be asked.",
        expected="--yes, or a terminal",
        fix=f"look at it with --dry-run, then: {shlex.join([*asked.again, '--yes'])}",
    )


def finish_sweep(outcome: SweepOutcome, as_json: bool) -> int:
    """Print how a call on a sweep ended; its exit code."""
    from flows.cli.options import until_nobody_reads
    from flows.sweeping.status import SweepWatcher, status_json, status_lines, table_of

    status = SweepWatcher(outcome.workspace, outcome.record.name).look()
    with until_nobody_reads():
        if as_json:
            print_json(
                {**status_json(status), "exit_code": outcome.exit_code, "held": outcome.held}
            )
        else:
            header, rows = table_of(status)
            print_table(rows, header)
            for line in status_lines(status, outcome.workspace):
                click.echo(line)
        sys.stdout.flush()
    return outcome.exit_code


def go_on_with_sweep(
    where: str, name: str, launch: Launch, detach: str | None, as_json: bool
) -> int:
    """`refiner resume SWEEP`: go on with the newest version, as it was recorded."""
    from flows.api import resume_sweep
    from infra.store.workspace import Workspace

    if detach is None:
        return finish_sweep(resume_sweep(name, where, launch=launch), as_json)
    workspace = Workspace.read_only(where)
    return leave_sweep_to(detach, workspace, read_sweep(workspace, name), launch, as_json)


def leave_sweep_to(
    where: Any, workspace: Workspace, record: SweepRecord, launch: Launch, as_json: bool
) -> int:
    """Leave a recorded sweep to the background, and say how to look at it and end it."""
    from flows.api import detach_sweep

    left = detach_sweep(record.name, workspace.root, where=where, launch=launch)
    place = f"workspace={workspace.root}"
    if as_json:
        value = {"version": 1, "sweep": record.name, "pid": left.pid, "job": left.job}
        print_json({**value, "log": str(left.log), "exit_code": left.exit_code})
    elif left.exit_code is not None:
        click.echo(f"{record.name}: ended at once with exit code {left.exit_code}; log: {left.log}")
    else:
        who = f"job {left.job}" if left.job else f"process {left.pid}"
        click.echo(f"{record.name}: in the background as {who}")
        click.echo(f"log: {left.log}")
        click.echo(
            f"Next:\n  refiner status {record.name} -w {place}\n"
            f"  refiner cancel {record.name} {place}",
            err=True,
        )
    if left.message:
        click.echo(left.message, err=True)
    return left.exit_code or 0


def _is_override(word: str) -> bool:
    """Whether it is ``key=value``, not the path of a file with such a sign in it."""
    key, equals, _ = word.partition("=")
    return bool(equals) and "/" not in key and not Path(word).is_file()


def _refuse_without_one(overrides: list[str], to_do: bool) -> None:
    """A list of sweeps is no answer to somebody who wants one to be carried out."""
    from refiner_core.contract.errors import ConfigurationError

    if overrides or to_do:
        given = f": {' '.join(overrides)} changes one" if overrides else ""
        raise ConfigurationError(
            f"No sweep is named{given}.",
            expected="a shipped sweep's name or the path of a YAML file",
            fix="name it: refiner sweep SWEEP (`refiner sweep` alone lists them)",
        )


def _refuse_more_than_one(names: list[str]) -> None:
    from refiner_core.contract.errors import ConfigurationError

    if len(names) > 1:
        raise ConfigurationError(
            f"sweep was given {len(names)} sweeps: {' '.join(names)}.",
            expected="one sweep, then key=value overrides",
            fix="launch them one by one, each with --detach",
        )


def _list(where: str, as_json: bool) -> None:
    """Shipped sweeps, and those of a workspace."""
    from flows.api import list_sweeps

    known = list_sweeps(where)
    shipped, found = known.shipped, known.recorded
    if as_json:
        recorded = [
            {"sweep": name, "counts": s.counts, "finished": s.finished, "number": s.record.number}
            for name, s in found.items()
        ]
        names = [one.name for one in shipped]
        print_json({"version": 1, "shipped": names, "recorded": recorded})
        return
    print_table(shipped, ("shipped sweep", "recipe", "question"))
    click.echo("")
    if found:
        rows = [
            (name, str(s.record.number), ", ".join(f"{n} {state}" for state, n in s.counts.items()))
            for name, s in found.items()
        ]
        print_table(rows, (f"sweeps of {where}", "version", "trials"))
    else:
        click.echo(f"No sweep is recorded in {where}.")
    click.echo("Next:\n  refiner sweep SWEEP --dry-run", err=True)


@click.command("resume")
@click.argument("words", nargs=-1, metavar="[RUN|SWEEP] [workspace=DIR]")
@detach_option
@click.option("--take-over", is_flag=True, help="though another host says that it works on it")
@click.option("--past-canary", is_flag=True, help="of a sweep: whatever its first trial has shown")
@click.option("--as-job", is_flag=True, hidden=True, help="this is a job that may come back")
@json_option
@click.option("--no-server", is_flag=True, help="no Prefect server, no flow run")
@click.option("--quiet", "-q", is_flag=True, help="no progress; warnings and failures only")
def resume_command(
    words: tuple[str, ...],
    detach: str | None,
    take_over: bool,
    past_canary: bool,
    as_job: bool,
    as_json: bool,
    no_server: bool,
    quiet: bool,
) -> int:
    """Go on with RUN or SWEEP (default: the newest run that is not finished, or its sweep), exactly
    as it was begun.

    It keeps its id, its configuration and its code, whatever has become of the recipe's file and
    the checkout since. What was cancelled goes on, too.
    """
    from flows.api import resume_run
    from flows.running.calls import run_to_resume
    from infra.store.workspace import Workspace
    from refiner_core.contract.errors import ConfigurationError

    where, rest = split_workspace(words)
    if len(rest) > 1:
        raise ConfigurationError(
            f"resume was given {len(rest)} runs: {' '.join(rest)}.",
            expected="one run, or none for the newest that is not finished",
            fix="resume them one by one, each with --detach",
        )
    sweep = _sweep_to_resume(Workspace.read_only(where), rest[0] if rest else None)
    if sweep is not None:
        from flows.sweeping.launching import Launch

        stop_on_signals()
        if as_job:
            signal.signal(signal.SIGTERM, _leave_the_node)
        launch = Launch(
            use_server=not no_server, quiet=quiet, past_canary=past_canary, take_over=take_over
        )
        return go_on_with_sweep(where, sweep, launch, detach, as_json)
    run = run_to_resume(Workspace.read_only(where), rest[0] if rest else None)
    for line in _what_differs(run):
        click.echo(f"note: {line}", err=True)
    if detach is not None:
        room = Workspace.read_only(where)
        how = {"use_server": not no_server, "take_over": take_over}
        return leave_to(detach, room, run, as_json, **how)
    stop_on_signals()
    if as_job:
        signal.signal(signal.SIGTERM, _leave_the_node)
    outcome = resume_run(run.run, where, take_over=take_over, use_server=not no_server, quiet=quiet)
    return finish(outcome, as_json)


def _sweep_to_resume(workspace: Workspace, word: str | None) -> str | None:
    """The sweep that is meant; None for a run."""
    from flows.running.calls import run_to_resume
    from flows.sweeping.status import sweep_named
    from refiner_core.contract.records import trial_of

    if word is not None:
        return sweep_named(workspace, word)
    trial = trial_of(run_to_resume(workspace).provenance)
    return trial[0] if trial is not None and sweep_versions(workspace, trial[0]) else None


#: What `refiner publish` sets itself, whatever the recipe says.
_BY_HAND = ("only", "publish.evaluate", "stages")


def _what_differs(run: RunRecord) -> list[str]:
    """What a new `refiner run` would do otherwise; the record is what counts here."""
    from flows.running.calls import in_folder_of
    from refiner_core.contract.errors import RefinerError
    from refiner_core.contract.loading import load_recipe
    from refiner_core.contract.records import to_json

    recipe = run.provenance.get("recipe")
    if not recipe:
        return []
    try:
        with in_folder_of(run):
            now = to_json(load_recipe(str(recipe), run.overrides))
    except RefinerError as error:
        return [f"the recipe cannot be read any more ({error.what}); the record is used"]
    by_hand = _BY_HAND if run.provenance.get("publishes") else ()
    fields = sorted(f for f in _differences("", run.config, now) if f not in by_hand)
    if not fields:
        return []
    shown = ", ".join(fields[:5]) + (f" and {len(fields) - 5} more" if len(fields) > 5 else "")
    return [f"the recipe {recipe} has changed since ({shown}); the run goes on as recorded"]


def _differences(prefix: str, old: object, new: object) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            name
            for key in {**old, **new}
            if key != "workspace" and key in old  # a field that is newer than the run says nothing
            for name in _differences(f"{prefix}.{key}".strip("."), old[key], new.get(key))
        ]
    return [] if old == new else [prefix]


def _leave_the_node(_number: int, _frame: FrameType | None) -> None:
    """This job's time is nearly up, or somebody else gets the node: the stages' jobs go on, and
    this one comes back, if it may."""
    from infra.slurm.submission import requeue_own_job

    requeue_own_job()
    os._exit(0)
