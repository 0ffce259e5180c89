"""`refiner publish`, `card` and `adopt`: by hand, checked, and of dead runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flows.cli.options import (
    argument,
    at_most_one,
    command_line,
    json_option,
    misuse,
    overrides_argument,
    print_json,
    say,
    show,
    split_overrides,
    split_workspace,
    until_nobody_reads,
    working_options,
    wrong_text,
)
from flows.cli.run import finish, leave_to, stop_on_signals
from infra.disk.keeper import gib
from refiner_core.contract.records import picked
from refiner_core.report.printing import table_lines

if TYPE_CHECKING:
    from flows.adopting import How
    from flows.cards.inspection import Checked
    from flows.running.showing import Launch


@click.command("publish")
@argument("words", nargs=-1, metavar="[RUN] [workspace=DIR] [KEY=VALUE]...")
@click.option("--step", "steps", type=int, multiple=True, help="a saved step; may be repeated")
@click.option("--no-evaluate", is_flag=True, help="do not wait for evaluations, nor begin any")
@click.option("--dry-run", is_flag=True, help="print the plan and change nothing")
@working_options
def publish_command(
    words: tuple[str, ...],
    steps: tuple[int, ...],
    no_evaluate: bool,
    dry_run: bool,
    detach: str | None,
    as_json: bool,
    launch: Launch,
) -> int:
    """Publish the last checkpoint of RUN (default: the newest that trains), or those of --step.

    The run may still train, have ended, or have died. No training is started: the checkpoint is
    exported, published with its card, and evaluated. The target is the run's own, or set by
    overrides, e.g. publish.target=hub publish.repo_id=me/my-model. Files that are published already
    are not sent again.
    """
    from flows.cli.plan import show_made_plan
    from flows.publishing.by_hand import begin_publication, plan_publication
    from flows.running.calls import publish_run

    where, rest = split_workspace(words)
    runs, overrides = split_overrides(rest)
    run = at_most_one(runs, "run", " for the newest that trains")
    asked: dict[str, Any] = {"steps": steps, "overrides": overrides, "evaluate": not no_evaluate}
    if dry_run:
        show_made_plan(plan_publication(run, where, **asked), as_json)
        return 0
    plan, workspace, record = begin_publication(run, where, **asked)
    if detach is not None:
        return leave_to(detach, workspace, record, as_json, launch)
    stop_on_signals()
    how = picked(launch, "use_server", "quiet")
    return finish(publish_run(plan, workspace, record, **how), as_json)


#: Exit code of a card that is wrong: bad data.
_WRONG = 3


@click.group(
    "card",
    epilog="A card that `refiner publish` makes is checked before it leaves, by the same rules.",
)
def card_command() -> None:
    """Check or print model cards."""


@card_command.command("check")
@argument("target", metavar="PATH")
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
    stdin. Numbers are recomputed from their own tables; licence, base model and leaks are looked
    at; and where refiner.json lies beside the card, the card is made from it again and every
    difference is told with the fact and the record behind it. Of a folder, the files are checked by
    their hashes, too. Nothing is changed; the exit code is 3 where something is wrong.
    """
    from flows.cards.inspection import check_card

    checked = check_card(target, evidence, template=template)
    value = {
        **{"version": 1, "card": checked.name, "evidence": checked.has_evidence},
        **picked(checked, "errors", "warnings"),
        "findings": [f.to_json() for f in checked.findings],
    }
    option = ["--evidence", str(evidence)] if evidence else []
    again = [command_line("card", "check", target, *option)] * bool(checked.errors)
    show(as_json, lambda: value, lambda: _checked_lines(checked), again)
    return _WRONG if checked.errors else 0


def _checked_lines(checked: Checked) -> Iterator[str]:
    """Each finding, and one line that sums up."""
    for f in checked.findings:
        kind = "" if f.is_error else " (warning)"
        fix = f" To fix it: {f.fix}." if f.fix else ""
        message = f.message if f.message.endswith((".", "…")) else f"{f.message}."
        yield f"{checked.name}:{f.line}: {f.rule}{kind}: {message}{fix}"
    found = wrong_text(checked.errors, checked.warnings)
    compared = checked.has_evidence and all(f.rule != "evidence" for f in checked.findings)
    if not checked.errors and compared:
        good = "the card is what its evidence gives, number by number"
        yield f"{checked.name}: {good}{f'; {found}' if found else ''}"
    else:
        yield f"{checked.name}: {found or 'nothing wrong was found'}"


@card_command.command(
    "show", short_help="Print the card of a publication, made again from records."
)
@argument("words", nargs=-1, metavar="[RUN] [STAGE] [workspace=DIR]")
@json_option
def show_command(words: tuple[str, ...], as_json: bool) -> None:
    """Print the card of a finished publication, made from its records now.

    RUN is an id, or enough of its beginning or end (default: the newest run); STAGE is one of its
    `publish` or `card` stages, such as card-step50 (default: the last one). The same records give
    the same bytes: where it is not what was published, stderr says what has changed.
    """
    from flows.cards.inspection import show_card

    where, rest = split_workspace(words)
    shown = show_card(rest, where)
    with until_nobody_reads():
        if as_json:
            value = picked(shown, "run", "stage", "card")
            print_json({"version": 1, **value, "as_published": not shown.differs})
        else:
            click.echo(shown.card, nl=False)
    if shown.differs:
        said = "\n".join(f"  {line}" for line in shown.difference())
        say(f"{shown.stage} of {shown.run} is not what was published:\n{said}")
        # A stage that is done is not done again while its record is there.
        again = (["rm", "-r", str(shown.folder)], ["refiner", *shown.again, f"workspace={where}"])
        lines = "\n".join(f"  {shlex.join(commands)}" for commands in again)
        say(f"Next, to publish it as it is now:\n{lines}")


@card_command.command("template")
def template_command() -> None:
    """Print the template that cards are made with, to copy and change.

    A recipe takes another one by `publish.card_template=FILE`.
    """
    from refiner_core.cards.build import shipped_template

    with until_nobody_reads():
        click.echo(shipped_template(), nl=False)


@click.command("adopt")
@argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@overrides_argument
@click.option("--step", type=int, help="which checkpoint; the newest complete one otherwise")
@click.option("--recipe", help="recipe whose data, judge and evaluation are used")
@click.option(
    "--companions",
    type=click.Path(path_type=Path),
    help="folder with config and tokenizer, where the checkpoint has none",
)
@click.option("--name", help="name of the model; the folder's otherwise")
@click.option("--copy", is_flag=True, help="copy the files instead of linking them")
@click.option("--in-place", is_flag=True, help="links by name; DIR must stay where it is")
@click.option("--dry-run", is_flag=True, help="look, say what would be done, change nothing")
@json_option
def adopt_command(
    folder: Path,
    overrides: tuple[str, ...],
    copy: bool,
    in_place: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Import a checkpoint of another trainer from DIR.

    Every checkpoint is examined for truncated or missing shards and empty folders. The newest
    complete one becomes a finished stage in the workspace, ready to be published and evaluated.
    Files are linked, not copied, unless --copy is given.
    """
    from flows.adopting import adopt_run

    if copy and in_place:
        raise misuse("--copy and --in-place exclude each other; leave one out, or both.")
    how: How = "copy" if copy else "in-place" if in_place else "link"
    report = adopt_run(folder, overrides, how=how, **options)
    show(as_json, lambda: report, lambda: _adopted_lines(report))
    return 0


def _adopted_lines(report: dict[str, Any]) -> Iterator[str]:
    rows = [
        [str(c["step"]), c["path"], c["layout"], gib(c["bytes"]), c["note"]]
        for c in report["checkpoints"]
    ]
    yield from table_lines(rows, ["STEP", "CHECKPOINT", "LAYOUT", "SIZE", "STATE"])
    if report["adopted"]:
        new = "" if report["adopted"]["new"] else " (it was adopted before)"
        yield f"Adopted step {report['step']} as {report['adopted']['id']}{new}."
        yield f"Files: {report['how']}; recipe: {report['recipe']}"
    yield from (f"note: {note}" for note in report["notes"])
    dry = "Nothing was changed. Without --dry-run, the next command will be"
    yield f"{dry if report['dry_run'] else 'Next'}: {shlex.join(report['next'])}"
