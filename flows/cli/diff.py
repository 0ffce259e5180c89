"""`refiner diff` and `refiner why`: in what two runs differ, and what a number was made of."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from flows.cli.options import json_option, print_json, split_workspace, until_nobody_reads

if TYPE_CHECKING:
    from flows.why import Figure


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
    from flows.diffing.document import difference_lines, next_commands
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


@click.command("why", context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, required=True, metavar="NUMBER|NAME... [RUN] [workspace=DIR]")
@click.option("--card", metavar="FILE|DIR", help="a card with the refiner.json beside it")
@click.option("--sample", metavar="ID", help="show this sample in full (default: a typical one)")
@json_option
def why_command(
    words: tuple[str, ...], card: str | None, sample: str | None, as_json: bool
) -> None:
    """Follow a number to its protocol, samples, answers and judgements.

    NUMBER is as it was printed, such as 0.512; or names say which it is: a metric, a model, a
    decoding (`citation_f1 grpo greedy`), or a training metric and a step (`scores step50`).
    Numbers of RUN are looked at (default: the newest run, then all), or of a card.
    """
    from flows.api import explain_number, find_numbers
    from flows.why.explanation import (
        OUTPUT_VERSION,
        candidate_lines,
        explanation_json,
        explanation_lines,
        figure_json,
    )

    where, rest = split_workspace(words)
    figures = find_numbers(rest, where, card=card)
    asked = " ".join(rest)
    if len(figures) > 1:
        if as_json:
            shown = [figure_json(f) for f in figures]
            print_json({"version": OUTPUT_VERSION, "query": asked, "figures": shown})
            return
        with until_nobody_reads():
            for line in candidate_lines(figures, asked):
                click.echo(line)
        _say_how_to_choose(figures, words, card)
        return
    found = explain_number(figures[0], where, sample=sample)
    if as_json:
        shown = [explanation_json(found)]
        print_json({"version": OUTPUT_VERSION, "query": asked, "figures": shown})
        return
    with until_nobody_reads():
        for line in explanation_lines(found):
            click.echo(line)
    if sample is None and len(found.counted) > 1:
        other = found.counted[0].name
        command = shlex.join(["refiner", "why", *words, *_card(card), "--sample", other])
        click.echo(f"\nNext:\n  {command}", err=True)


def _card(card: str | None) -> list[str]:
    return [] if card is None else ["--card", card]


def _say_how_to_choose(figures: Sequence[Figure], words: Sequence[str], card: str | None) -> None:
    """How to say which one is meant: the names of the first two."""
    from flows.why.figures import words_apart

    others = [w for w in words if w.startswith("workspace=")]
    commands = [
        shlex.join(["refiner", "why", *said, *others, *_card(card)])
        for figure, said in list(zip(figures, words_apart(figures), strict=True))[:2]
        if figure.kind != "fact"
    ]
    if commands:
        click.echo("\nNext:\n  " + "\n  ".join(commands), err=True)
