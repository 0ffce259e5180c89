"""`refiner why`: follow a number to what it was made of."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from flows.cli.options import json_option, print_json, split_workspace, until_nobody_reads

if TYPE_CHECKING:
    from flows.why import Figure


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
    from flows.why.text import (
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
        _next(figures, words, card)
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


def _next(figures: Sequence[Figure], words: Sequence[str], card: str | None) -> None:
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
