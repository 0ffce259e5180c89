"""`refiner cancel`: end a run or stages of it, from any shell, keeping what is saved."""

from __future__ import annotations

import click

from flows.cli.options import json_option, print_json, split_workspace


@click.command("cancel")
@click.argument("words", nargs=-1, metavar="[RUN|SWEEP] [STAGE]... [workspace=DIR]")
@click.option("--wait", "wait_s", type=float, help="seconds to wait for the end")
@click.option("--now", is_flag=True, help="do not leave it to the orchestrator; end jobs from here")
@json_option
def cancel_command(words: tuple[str, ...], wait_s: float | None, now: bool, as_json: bool) -> int:
    """End RUN (default: the newest), or only the STAGEs named; of a SWEEP all trials.

    Jobs are asked to save and end, and killed when they take longer than `dispatch.grace_s`.
    `refiner resume` goes on later. Jobs that another run waits for too are ended as well. Exit
    code: 0 when nothing of it runs any more, 1 when that takes longer than was waited for.
    """
    from flows.api import cancel_run, cancel_sweep
    from flows.running.cancelling import outcome_json, outcome_lines
    from flows.running.status import find_run
    from flows.sweeping.names import newest_sweep, sweep_named
    from infra.store.workspace import Workspace

    where, rest = split_workspace(words)
    workspace = Workspace.read_only(where)
    newest = find_run(workspace)
    sweep = sweep_named(workspace, rest[0]) if rest else newest_sweep(workspace, newest)

    def tell(message: str) -> None:
        click.echo(message, err=True)

    if sweep is not None and len(rest) <= 1:
        outcome = cancel_sweep(sweep, where, wait_s=wait_s, now=now, tell=tell)
    else:
        stages = set(newest.stages) if newest is not None else set()
        run = rest.pop(0) if rest and rest[0] not in stages else None
        outcome = cancel_run(run, rest, where, wait_s=wait_s, now=now, tell=tell)
    if as_json:
        print_json(outcome_json(outcome))
    else:
        for line in outcome_lines(outcome, workspace):
            click.echo(line)
    return 0 if outcome.ended else 1
