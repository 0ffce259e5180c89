"""`refiner why`: follow a number to what it was made of."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flows.cli.options import json_option, print_json, split_workspace, until_nobody_reads

if TYPE_CHECKING:
    from flows.why import Figure
    from infra.store.workspace import Workspace
    from refiner_core.cards import Evidence
    from refiner_core.contract.records import RunRecord


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
    from flows.why import explain
    from flows.why.text import (
        OUTPUT_VERSION,
        candidate_lines,
        explanation_json,
        explanation_lines,
        figure_json,
    )
    from infra.store.workspace import Workspace

    where, rest = split_workspace(words)
    workspace = Workspace.read_only(where)
    figures = _find(workspace, rest, card)
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
    there = workspace if workspace.stage_ids() else None
    found = explain(figures[0], there, sample)
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


def _find(workspace: Workspace, words: Sequence[str], card: str | None) -> list[Figure]:
    """The numbers that are meant.

    Raises
    ------
    ConfigurationError
        There are none.
    """
    from flows.why import Query, figures_of_card, figures_of_stages, parse_query
    from flows.why.figures import nothing_found

    if card is not None:
        evidence = _evidence(Path(card))
        query = parse_query(words)
        if found := figures_of_card(query, evidence):
            return found
        others = figures_of_card(Query(names=query.names), evidence)
        others = others or figures_of_card(Query(), evidence)
        raise nothing_found(query, others, f"the evidence of {card}")
    run, names = _run_of(workspace, words)
    query = parse_query(names)
    everything = workspace.stage_ids()
    newest = list(run.stages.values()) if run is not None else everything
    if found := figures_of_stages(query, workspace, newest):
        return found
    named = len(names) < len(words)
    if not named and (found := figures_of_stages(query, workspace, everything)):
        return found
    where = f"run {run.run}" if named and run is not None else str(workspace.root)
    ids = newest if named else everything
    others = figures_of_stages(Query(names=query.names), workspace, ids)
    raise nothing_found(query, others or figures_of_stages(Query(), workspace, ids), where)


def _run_of(workspace: Workspace, words: Sequence[str]) -> tuple[RunRecord | None, list[str]]:
    """The run that a word names, else the newest; and the other words."""
    from flows.running.status import find_run

    known = workspace.run_ids()
    for word in words:
        if any(word == run or (len(word) >= 4 and run.endswith(f"-{word}")) for run in known):
            return find_run(workspace, word), [w for w in words if w != word]
    return find_run(workspace), list(words)


def _evidence(path: Path) -> Evidence:
    """What a card was made from.

    Raises
    ------
    ConfigurationError
        There is no evidence beside it.
    """
    from infra.store.published import EVIDENCE
    from refiner_core.cards import load_evidence
    from refiner_core.contract.errors import ConfigurationError

    file = (path if path.is_dir() else path.parent) / EVIDENCE
    if not path.exists():
        raise ConfigurationError(
            f"There is no {path}.",
            expected=f"a card that refiner has published, with its {EVIDENCE} beside it",
            fix="check the path; or leave --card out and name the run's workspace=DIR",
        )
    try:
        return load_evidence(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"{file} cannot be read ({error.strerror}).",
            expected=f"a card that refiner has published, with its {EVIDENCE} beside it",
            fix="name its folder, or README.md in it, with --card; or leave --card out and name "
            "the run's workspace=DIR",
        ) from error


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
