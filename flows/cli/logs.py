"""`refiner logs`: what a stage's worker printed, from attempt to attempt."""

from __future__ import annotations

import sys

import click

from flows.cli.options import split_workspace, until_nobody_reads


@click.command("logs")
@click.argument("words", nargs=-1, required=True, metavar="STAGE [RUN] [workspace=DIR]")
@click.option("-f", "--follow", is_flag=True, help="go on printing until the stage ends")
@click.option("--attempt", type=int, help="an attempt's number (default: the newest)")
def logs_command(words: tuple[str, ...], follow: bool, attempt: int | None) -> None:
    """Print the log of STAGE's newest attempt in RUN (default: the newest run).

    With -f it goes over to the next attempt when there is one, and ends when the stage does. On a
    terminal control sequences are left out; a pipe has the log as it is.
    """
    from flows.api import find_log, follow_log
    from flows.running.logs import log_pieces
    from refiner_core.contract.errors import ConfigurationError

    where, rest = split_workspace(words)
    if not rest:
        raise ConfigurationError(
            "`refiner logs` was given no stage.",
            expected="STAGE, such as grpo, and perhaps RUN and workspace=DIR",
            fix="name one; `refiner status` shows the stages of the newest run",
        )
    stage, *runs = rest
    run = runs[0] if runs else None
    if follow:
        lines = follow_log(stage, run, where, attempt=attempt, tell=_say)
    else:
        log = find_log(stage, run, where, attempt=attempt)
        if log is None:
            _say(f"{stage} has not been started yet.")
            return
        if log.why:
            _say(f"Attempt {log.attempt} of {stage} has printed nothing: {log.why}.")
            return
        _say(f"{log.path} (attempt {log.attempt})")
        lines = log_pieces(log.path)
    with until_nobody_reads():
        for text in lines:
            sys.stdout.write(text)
            sys.stdout.flush()


def _say(text: str) -> None:
    click.echo(text, err=True)
