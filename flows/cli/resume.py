"""`refiner resume`: go on with a recorded run, from any shell."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import TYPE_CHECKING

import click

from flows.cli.options import json_option, split_workspace
from flows.cli.run import detach_option, finish, leave_to, stop_on_signals
from infra.store.sweep_records import sweep_versions

if TYPE_CHECKING:
    from infra.store.workspace import Workspace
    from refiner_core.contract.records import RunRecord


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
        from flows.cli.sweep import go_on_with_sweep
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
    from flows.sweeping.names import sweep_named
    from refiner_core.contract.sweep_records import trial_of

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
    from infra.slurm.orchestrator import requeue_own_job

    requeue_own_job()
    os._exit(0)
