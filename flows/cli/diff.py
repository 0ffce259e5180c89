"""`refiner diff` and `refiner why`: in what two runs differ, and what a number was made of."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from flows.cli.options import command_line, json_option, say_next, show, split_workspace
from refiner_core.contract.errors import ConfigurationError


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
    from flows.diffing.document import as_json as document
    from flows.diffing.document import diff_runs, difference_lines, next_commands

    where, names = split_workspace(words)
    if len(names) != 2:
        raise ConfigurationError(
            f"`refiner diff` compares two, and was given {len(names)}.",
            expected="two runs, trials (SWEEP:ARM/seedN) or stages (RUN:STAGE)",
            fix="name two; `refiner status --all` lists runs",
        )
    found = diff_runs(names[0], names[1], where, other=other)
    show(as_json, lambda: document(found), lambda: difference_lines(found))
    if not as_json and (commands := next_commands(found)):
        say_next(*commands, gap=True)
    return 1 if exit_code and found.equal is not True else 0


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
    from flows.why.explanation import (
        OUTPUT_VERSION,
        candidate_lines,
        explain_number,
        explanation_json,
        explanation_lines,
    )
    from flows.why.figures import find_numbers, words_apart

    where, rest = split_workspace(words)
    figures = find_numbers(rest, where, card=card)
    asked = " ".join(rest)
    of_card = [] if card is None else ["--card", card]

    def value(shown: list[dict[str, Any]]) -> dict[str, Any]:
        return {"version": OUTPUT_VERSION, "query": asked, "figures": shown}

    if len(figures) > 1:
        show(
            as_json,
            lambda: value([asdict(f) for f in figures]),
            lambda: candidate_lines(figures, asked),
        )
        # How to say which one is meant: the names of the first two.
        others = [w for w in words if w.startswith("workspace=")]
        commands = [
            command_line("why", *said, *others, *of_card)
            for figure, said in list(zip(figures, words_apart(figures), strict=True))[:2]
            if figure.kind != "fact"
        ]
    else:
        found = explain_number(figures[0], where, sample=sample)
        show(as_json, lambda: value([explanation_json(found)]), lambda: explanation_lines(found))
        commands = []
        if sample is None and len(found.counted) > 1:
            other = found.counted[0].name
            commands = [command_line("why", *words, *of_card, "--sample", other)]
    if commands and not as_json:
        say_next(*commands, gap=True)
