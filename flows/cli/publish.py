"""`refiner publish`, `card` and `adopt`: publish by hand, check cards, import checkpoints."""

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
    ignore_closed_pipe,
    json_option,
    misuse,
    overrides_argument,
    print_json,
    print_line,
    show,
    split_overrides,
    split_workspace,
    working_options,
    wrong_text,
)
from flows.cli.run import finish, leave_to, stop_on_signals
from refiner_core.contract.records import picked, to_json
from refiner_core.report.printing import size, table_lines

if TYPE_CHECKING:
    from flows.adopting import How
    from flows.cards.inspection import CardCheck
    from flows.running.foreground import LaunchOptions


@click.command("publish")
@argument("words", nargs=-1, metavar="[RUN] [workspace=DIR] [KEY=VALUE]...")
@click.option("--step", "steps", type=int, multiple=True, help="a saved step; repeatable")
@click.option("--no-evaluate", is_flag=True, help="neither wait for evaluations nor start any")
@click.option("--dry-run", is_flag=True, help="print the plan and change nothing")
@working_options
def publish_command(
    words: tuple[str, ...],
    steps: tuple[int, ...],
    no_evaluate: bool,
    dry_run: bool,
    detach: str | None,
    as_json: bool,
    launch: LaunchOptions,
) -> int:
    """Publish the last checkpoint of RUN (default: the newest run that trains), or those of --step.

    The run may be training, have ended, or have died. No training is started: the checkpoint is
    exported, published with its card, and evaluated. The target is the run's own, or set by
    overrides, e.g. publish.target=hub publish.repo_id=me/my-model. Files that are already published
    are not sent again.
    """
    from flows.cli.plan import show_plan_of
    from flows.publishing.by_hand import begin_publication, plan_publication
    from flows.running.calls import publish_run

    where, rest = split_workspace(words)
    runs, overrides = split_overrides(rest)
    run = at_most_one(runs, "run", " for the newest run that trains")
    asked: dict[str, Any] = {"steps": steps, "overrides": overrides, "evaluate": not no_evaluate}
    if dry_run:
        show_plan_of(plan_publication(run, where, **asked), as_json)
        return 0
    plan, workspace, record = begin_publication(run, where, **asked)
    if detach is not None:
        return leave_to(detach, workspace, record, as_json, launch)
    stop_on_signals()
    how = picked(launch, "use_server", "quiet")
    return finish(publish_run(plan, workspace, record, **how), as_json)


#: Exit code for a card with errors: bad data.
_WRONG = 3


@click.group("card", epilog="`refiner publish` checks its cards by the same rules.")
def card_command() -> None:
    """Check or print model cards."""


@card_command.command("check")
@argument("target", metavar="PATH")
@click.option(
    "--evidence",
    type=click.Path(dir_okay=False, path_type=Path),
    help="the refiner.json of the card (default: the one beside it)",
)
@click.option(
    "--template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="your own template of the card; no other one is run",
)
@json_option
def check_command(target: str, evidence: Path | None, template: Path | None, as_json: bool) -> int:
    """Check the card at PATH: one of refiner, or any README.

    PATH is a README.md, the folder of a publication, OWNER/NAME[@revision] on the Hub, or - for
    stdin. Numbers are recomputed from their own tables; licence, base model and leaks are checked.
    With refiner.json beside it, the card is rendered again, and every difference is reported with
    the fact and the record behind it. In a folder, the hashes of the files are checked as well.
    Nothing is changed; the exit code is 3 if there is an error.
    """
    from flows.cards.inspection import check_card

    checked = check_card(target, evidence, template=template)
    value = {
        **{"version": 1, "card": checked.name, "evidence": checked.has_evidence},
        **picked(checked, "errors", "warnings"),
        "findings": to_json(checked.findings),
    }
    option = ["--evidence", str(evidence)] if evidence else []
    again = [command_line("card", "check", target, *option)] * bool(checked.errors)
    show(as_json, lambda: value, lambda: _checked_lines(checked), again)
    return _WRONG if checked.errors else 0


def _checked_lines(checked: CardCheck) -> Iterator[str]:
    """Each finding, and a summary line."""
    for f in checked.findings:
        kind = "" if f.is_error else " (warning)"
        fix = f" To fix it: {f.fix}." if f.fix else ""
        message = f.message if f.message.endswith((".", "…")) else f"{f.message}."
        yield f"{checked.name}:{f.line}: {f.rule}{kind}: {message}{fix}"
    found = wrong_text(checked.errors, checked.warnings)
    compared = checked.has_evidence and all(f.rule != "evidence" for f in checked.findings)
    if not checked.errors and compared:
        good = "the card matches its evidence, number by number"
        yield f"{checked.name}: {good}{f'; {found}' if found else ''}"
    else:
        yield f"{checked.name}: {found or 'no errors were found'}"


@card_command.command("show", short_help="Print the card of a publication, rendered from records.")
@argument("words", nargs=-1, metavar="[RUN] [STAGE] [workspace=DIR]")
@json_option
def show_command(words: tuple[str, ...], as_json: bool) -> None:
    """Print the card of a finished publication, rendered from its records now.

    RUN is an id, or enough of its beginning or end (default: the newest run); STAGE is one of its
    `publish` or `card` stages, such as card-step50 (default: the last one). The same records give
    the same bytes; if the published card differs, stderr shows the differences.
    """
    from flows.cards.inspection import show_card

    where, rest = split_workspace(words)
    shown = show_card(rest, where)
    with ignore_closed_pipe():
        if as_json:
            value = picked(shown, "run", "stage", "card")
            print_json({"version": 1, **value, "as_published": not shown.differs})
        else:
            click.echo(shown.card, nl=False)
    if shown.differs:
        said = "\n".join(f"  {line}" for line in shown.difference())
        print_line(f"{shown.stage} of {shown.run} is not what was published:\n{said}")
        # A finished stage does not run again while its record exists.
        again = (["rm", "-r", str(shown.folder)], ["refiner", *shown.again, f"workspace={where}"])
        lines = "\n".join(f"  {shlex.join(commands)}" for commands in again)
        print_line(f"Next, to publish the new card:\n{lines}")


@card_command.command("template")
def template_command() -> None:
    """Print the template of cards, to copy and change.

    A recipe sets its own with `publish.card_template=FILE`.
    """
    from refiner_core.cards.build import shipped_template

    with ignore_closed_pipe():
        click.echo(shipped_template(), nl=False)


@click.command("adopt")
@argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@overrides_argument
@click.option("--step", type=int, help="step of the checkpoint; the newest complete one otherwise")
@click.option("--recipe", help="recipe with data, judge and evaluation")
@click.option(
    "--companions",
    type=click.Path(path_type=Path),
    help="folder with config and tokenizer, if the checkpoint has none",
)
@click.option("--name", help="name of the model; the folder's otherwise")
@click.option("--copy", is_flag=True, help="copy the files instead of linking them")
@click.option("--in-place", is_flag=True, help="link by name; DIR must stay where it is")
@click.option("--dry-run", is_flag=True, help="print the plan and change nothing")
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

    Every checkpoint is checked for truncated or missing shards and empty folders. The newest
    complete one becomes a finished stage in the workspace, ready to be published and evaluated.
    Files are linked, unless --copy is given.
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
        [str(c["step"]), c["path"], c["layout"], size(c["bytes"]), c["note"]]
        for c in report["checkpoints"]
    ]
    yield from table_lines(rows, ["STEP", "CHECKPOINT", "LAYOUT", "SIZE", "STATE"])
    if report["adopted"]:
        new = "" if report["adopted"]["new"] else " (it was adopted before)"
        yield f"Adopted step {report['step']} as {report['adopted']['id']}{new}."
        yield f"Files: {report['how']}; recipe: {report['recipe']}"
    yield from (f"note: {note}" for note in report["notes"])
    dry = "Nothing was changed. After a run without --dry-run, continue with"
    yield f"{dry if report['dry_run'] else 'Next'}: {shlex.join(report['next'])}"
