"""`refiner diff`: in what two runs, trials or stages differ."""

from __future__ import annotations

import click

from flows.cli.options import json_option, print_json, split_workspace, until_nobody_reads


@click.command("diff")
@click.argument("words", nargs=-1, required=True, metavar="A B [workspace=DIR]")
@click.option(
    "--other", metavar="DIR", help="the workspace that B lies in, where it is another one"
)
@click.option("--exit-code", is_flag=True, help="exit with 1 where what came out is not the same")
@json_option
def diff_command(
    words: tuple[str, ...], other: str | None, exit_code: bool, as_json: bool
) -> int | None:
    """Compare two runs: configuration, rows, code, judge, environment, training, numbers.

    A and B are runs (ids, or parts of them that no other has), trials (SWEEP:ARM/seedN), or single
    stages (RUN:STAGE, a stage's id, with #N one of its attempts). With two executions of one recipe
    in two workspaces it finds the first step and sample in which they part.

    The exit code is 0 once both could be compared; with --exit-code it is 1 where what came out is
    not bitwise the same, or is not all there yet.
    """
    from flows.api import diff_runs
    from flows.diffing.document import as_json as document
    from flows.diffing.text import difference_lines, next_commands
    from refiner_core.contract.errors import ConfigurationError

    where, names = split_workspace(words)
    if len(names) != 2:
        raise ConfigurationError(
            f"`refiner diff` compares two, and was given {len(names)}.",
            expected="two runs, trials (SWEEP:ARM/seedN) or stages (RUN:STAGE)",
            fix="name two; `refiner status --all` lists runs",
        )
    found = diff_runs(names[0], names[1], where, other=other)
    code = 1 if exit_code and found.equal is not True else 0
    if as_json:
        print_json(document(found))
        return code
    with until_nobody_reads():
        for line in difference_lines(found):
            click.echo(line)
        if commands := next_commands(found):
            click.echo("\nNext:\n  " + "\n  ".join(commands), err=True)
    return code
