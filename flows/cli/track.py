"""`refiner track`: what experiment tracking has kept offline, and where it goes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from flows.cli.options import json_option, print_json, split_workspace, until_nobody_reads

if TYPE_CHECKING:
    from infra.tracking.sync import OfflineRun


@click.group("track")
def track_command() -> None:
    """Send what W&B has logged offline, from a node with network."""


@track_command.command("sync")
@click.argument("words", nargs=-1, metavar="[RUN|SWEEP]... [workspace=DIR]")
@click.option("--dry-run", is_flag=True, help="say what would be sent; send nothing")
@json_option
def sync_command(words: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Send the offline W&B runs of RUNs or SWEEPs (default: the newest run) to the W&B server.

    Compute nodes without internet log offline; run this where the network is, with WANDB_API_KEY
    set or after `wandb login`. It may be run again at any time, also while training goes on: only
    what is new is sent. All attempts at a stage are one W&B run, under the stage's id.
    """
    from flows.api import sync_tracking

    where, names = split_workspace(words)
    done = sync_tracking(names, where, dry_run=dry_run, tell=_tell)
    _show(done.runs, done.new, as_json, sent=done.sent)


def _tell(done: int, total: int) -> None:
    if sys.stderr.isatty() or done == total:
        click.echo(f"{done} of {total} sent", err=True)


def _show(
    runs: Sequence[OfflineRun], new: Sequence[OfflineRun], as_json: bool, *, sent: int
) -> None:
    if as_json:
        print_json(
            {
                "version": 1,
                "offline": len(runs),
                "new": len(new),
                "sent": sent,
                "runs": [_run_json(run) for run in runs],
            }
        )
        return
    with until_nobody_reads():
        if not runs:
            click.echo("Nothing was logged offline: tracking was online or disabled.")
        elif not new:
            click.echo(f"All of {len(runs)} offline runs are sent.")
        elif sent:
            click.echo(f"Sent {sent} of {len(runs)} offline runs.")
        else:
            click.echo(f"{len(new)} of {len(runs)} offline runs have something new:")
            for run in new:
                click.echo(f"  {run.stage_id} #{run.attempt}  {run.folder}")


def _run_json(run: OfflineRun) -> dict[str, Any]:
    return {
        "stage_id": run.stage_id,
        "attempt": run.attempt,
        "folder": str(run.folder),
        "bytes": run.bytes,
        "new": run.is_new,
    }
