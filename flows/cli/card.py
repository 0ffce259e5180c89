"""`refiner card`: check a model card, show it again from records, print the template."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flows.cli.options import json_option, print_json, split_workspace, until_nobody_reads

if TYPE_CHECKING:
    from flows.cards.calls import Checked

#: Exit code of a card that is wrong: bad data.
_WRONG = 3


@click.group(
    "card",
    epilog="A card that `refiner publish` makes is checked before it leaves, by the same rules.",
)
def card_command() -> None:
    """Check a model card, show one again from records, or print the template."""


@card_command.command("check")
@click.argument("target", metavar="PATH")
@click.option(
    "--evidence",
    type=click.Path(dir_okay=False, path_type=Path),
    help="the refiner.json that belongs to the card (default: the one beside it)",
)
@click.option(
    "--template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="your own template that the card was made with; no other one is run",
)
@json_option
def check_command(target: str, evidence: Path | None, template: Path | None, as_json: bool) -> int:
    """Check the card at PATH: ours, or any README.

    PATH is a README.md, the folder of a publication, OWNER/NAME[@revision] on the Hub, or - for
    stdin. Numbers are recomputed from their own tables; links, licence, base model, commands and
    leaks are looked at; and where refiner.json lies beside the card, the card is made from it again
    and every difference is told with the fact and the record behind it. Of a folder, the files are
    checked by their hashes, too. Nothing is changed; the exit code is 3 where something is wrong.
    """
    from flows.api import check_card

    checked = check_card(target, evidence, template=template)
    with until_nobody_reads():
        if as_json:
            print_json(_json(checked))
        else:
            _show(checked, target, evidence)
    return _WRONG if checked.errors else 0


def _json(checked: Checked) -> dict[str, object]:
    return {
        "version": 1,
        "card": checked.name,
        "evidence": checked.has_evidence,
        "errors": checked.errors,
        "warnings": checked.warnings,
        "findings": [f.to_json() for f in checked.findings],
    }


def _show(checked: Checked, target: str, evidence: Path | None) -> None:
    for f in checked.findings:
        kind = "" if f.is_error else " (warning)"
        fix = f" To mend it: {f.fix}." if f.fix else ""
        message = f.message if f.message.endswith((".", "…")) else f"{f.message}."
        click.echo(f"{checked.name}:{f.line}: {f.rule}{kind}: {message}{fix}")
    click.echo(_summary(checked))
    if checked.errors:
        option = ["--evidence", str(evidence)] if evidence else []
        again = shlex.join(["refiner", "card", "check", target, *option])
        click.echo(f"Next: mend what is named above, then\n  {again}", err=True)


def _summary(checked: Checked) -> str:
    counts = [(checked.errors, "error"), (checked.warnings, "warning")]
    found = " and ".join(f"{n} {word}{'s' * (n != 1)}" for n, word in counts if n)
    compared = checked.has_evidence and all(f.rule != "evidence" for f in checked.findings)
    if not checked.errors and compared:
        good = "the card is what its evidence gives, number by number"
        return f"{checked.name}: {good}{f'; {found}' if found else ''}"
    return f"{checked.name}: {found or 'nothing wrong was found'}"


@card_command.command(
    "show", short_help="Print the card of a publication, made again from records."
)
@click.argument("words", nargs=-1, metavar="[RUN] [STAGE] [workspace=DIR]")
@json_option
def show_command(words: tuple[str, ...], as_json: bool) -> None:
    """Print the card of a finished publication, made from its records now.

    RUN is an id, or enough of its beginning or end (default: the newest run); STAGE is one of its
    `publish` or `card` stages, such as card-step50 (default: the last one). The same records give
    the same bytes: where it is not what was published, stderr says what has changed.
    """
    from flows.api import show_card

    where, rest = split_workspace(words)
    shown = show_card(rest, where)
    with until_nobody_reads():
        if as_json:
            value = {"run": shown.run, "stage": shown.stage, "card": shown.card}
            print_json({"version": 1, **value, "as_published": not shown.differs})
        else:
            click.echo(shown.card, nl=False)
    if shown.differs:
        click.echo(f"{shown.stage} of {shown.run} is not what was published:", err=True)
        for line in shown.difference():
            click.echo(f"  {line}", err=True)
        # A stage that is done is not done again while its record is there.
        again = (["rm", "-r", str(shown.folder)], ["refiner", *shown.again, f"workspace={where}"])
        lines = "\n".join(f"  {shlex.join(commands)}" for commands in again)
        click.echo(f"Next, to publish it as it is now:\n{lines}", err=True)


@card_command.command("template")
def template_command() -> None:
    """Print the template that cards are made with, to copy and change.

    A recipe takes another one by `publish.card_template=FILE`.
    """
    from flows.api import card_template

    with until_nobody_reads():
        click.echo(card_template(), nl=False)
