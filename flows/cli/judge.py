"""`refiner judge`: ask a judge, measure it, and look after the servers of judges."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flows.cli.options import (
    LazyGroup,
    json_option,
    output_folder,
    print_json,
    print_table,
    split_workspace,
    until_nobody_reads,
)

if TYPE_CHECKING:
    from flows.judges import Asked, Made, Stopped
    from infra.services.registry import ServiceStatus
    from refiner_core.judge_report.text import Section


#: Command -> (module below flows.cli, one line of help).
COMMANDS: dict[str, tuple[str, str]] = {
    "ask": ("judge", "Ask one question by hand: does the judge answer, and what?"),
    "report": ("judge", "Measure a judge: repeats, agreement, bias, hostile answers, cost."),
    "servers": ("judge", "List the servers of judges that refiner has started."),
    "stop": ("judge", "End a server of a judge."),
}


@click.group("judge", cls=LazyGroup, commands=COMMANDS)
def judge_command() -> None:
    """Ask a judge, measure it, see and end the servers of judges.

    A judge is named by fields of the recipe: judge.base_url=http://127.0.0.1:8000/v1
    judge.model=NAME. Without any, it is the lexical one, which needs no server.
    """


_KINDS = ("rubric", "citation_recall", "citation_precision", "citation_needed")


@click.command("report")
@click.argument("words", nargs=-1, metavar="[RUN] [workspace=DIR] [KEY=VALUE]...")
@click.option(
    "--against",
    multiple=True,
    metavar="KEY=VALUE",
    help="a second judge: fields that differ from the first; may be given several times",
)
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="at most N questions "
              "(default: 20 of a run, all of the shipped set)")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=3, metavar="K", show_default=True,
              help="how often everything is asked as it is")  # fmt: skip
@click.option("--out", metavar="DIR", help="where report.md and report.json go "
              "(default: WORKSPACE/judge-reports/ID where there is a workspace)")  # fmt: skip
@json_option
def report_command(
    words: tuple[str, ...],
    against: tuple[str, ...],
    sample: int | None,
    repeats: int,
    out: str | None,
    as_json: bool,
) -> None:
    """Measure a judge on answers of RUN, or on a small set with gold scores that refiner brings.

    Repeatability, agreement with gold scores and with a second judge, bias by order and by length,
    resistance to hostile answers, seconds and tokens a judgement: each number with its n and its
    interval. The judge is RUN's own (lexical without a run), changed by KEY=VALUE.
    """
    from flows.api import measure_judge
    from flows.judges import write_report

    where, run, overrides = _asked_for(words)
    given = output_folder(out) if out else None
    made = measure_judge(
        run, where, overrides=overrides, against=against, sample=sample, repeats=repeats,
        tell=_told,
    )  # fmt: skip
    folder = given or _default_folder(where, made)
    if folder is not None:
        write_report(made, folder)
    if as_json:
        kept = None if folder is None else str(folder)
        print_json({**made.report.to_json(), "id": made.name, "folder": kept})
        return
    with until_nobody_reads():
        _show_report(made)
    if folder is None:
        click.echo("\nNothing was written: there is no workspace; --out DIR keeps it.", err=True)
    else:
        click.echo(f"\nWritten: {folder}/report.md, report.json", err=True)
    if not against:
        words = (*words, "--against", "judge.model=OTHER")
        click.echo(f"Next:\n  {shlex.join(['refiner', 'judge', 'report', *words])}", err=True)


@click.command("ask")
@click.argument("words", nargs=-1, metavar="[workspace=DIR] [KEY=VALUE]...")
@click.option("--question", metavar="TEXT")
@click.option("--answer", metavar="TEXT", help="what is judged: an answer, a claim, a passage")
@click.option("--criterion", metavar="TEXT", help="what it is held against: a criterion, evidence, "
              "a source, the answer of a passage")  # fmt: skip
@click.option("--kind", type=click.Choice(_KINDS), help="what is asked  [default: rubric; of "
              "examples each in turn]")  # fmt: skip
@json_option
def ask_command(
    words: tuple[str, ...],
    question: str | None,
    answer: str | None,
    criterion: str | None,
    kind: Any,
    as_json: bool,
) -> int:
    """Ask a judge one question by hand, such as `refiner judge ask
    judge.base_url=http://127.0.0.1:8000/v1 judge.model=NAME`.

    Without --question, --answer and --criterion it is asked an example; without --kind, too, one of
    each kind that a run asks, since each allows scores of its own. Exit code: 0 when there is
    a score, 1 when the judge gave none.
    """
    from flows.api import ask_judge

    where, overrides = split_workspace(words)
    asked = ask_judge(
        overrides, where, kind=kind, question=question, answer=answer, criterion=criterion
    )
    if as_json:
        print_json(asked.to_json())
    else:
        _say_answer(asked)
    return 0 if asked.judgement.status == "scored" else 1


# ---------------------------------------------------------------- what was asked for


def _asked_for(words: Sequence[str]) -> tuple[str, str | None, list[str]]:
    """The workspace, the run if one is named, and the overrides."""
    from refiner_core.contract.errors import ConfigurationError

    where, rest = split_workspace(words)
    names = [word for word in rest if "=" not in word]
    if len(names) > 1:
        raise ConfigurationError(
            f"`refiner judge report` measures on one run, not on {len(names)}.",
            expected="the id of a run, or none for the set that comes with refiner",
            fix="name one of " + ", ".join(names),
        )
    return where, names[0] if names else None, [word for word in rest if "=" in word]


def _default_folder(where: str, made: Made) -> Path | None:
    from infra.store.workspace import Workspace

    layout = Workspace.read_only(where).layout
    return layout.judge_reports / made.name if layout.format_file.exists() else None


# ---------------------------------------------------------------- what is shown


def _told(what: str, count: int) -> None:
    click.echo(f"asking {count}: {what}", err=True)


def _show_report(made: Made) -> None:
    from refiner_core.judge_report.text import about, sections

    for line in about(made.report):
        click.echo(line)
    for section in sections(made.report):
        _show_section(section)


def _show_section(section: Section) -> None:
    click.echo(f"\n{section.title}")
    if section.rows:
        print_table(section.rows, section.header)
    for words in section.words:
        click.echo(words)


def _say_answer(asked: Asked) -> None:
    judgement = asked.judgement
    if judgement.score is None:
        click.echo(f"no score     {asked.request.kind}: {judgement.detail}")
    else:
        click.echo(f"score        {judgement.score:g} (0 is worst or untrue, 1 best or true)")
    click.echo(f"judge        {asked.judge}")
    click.echo(f"seconds      {asked.seconds:.3f}")
    if asked.usage is not None:
        used = asked.usage
        click.echo(f"tokens       {used.prompt_tokens} read, {used.completion_tokens} written")
        click.echo(f"schema       {asked.schema}")
        if used.retries:
            click.echo(f"tries        {used.calls}")


_HEADER = ("server", "state", "model", "where", "needed by", "idle", "last word")


@click.command("servers")
@click.argument("words", nargs=-1, metavar="[SERVICE] [workspace=DIR]")
@json_option
def servers_command(words: tuple[str, ...], as_json: bool) -> None:
    """List the judges' servers of a workspace: how they are, where they answer, who needs them.

    A server is started by a run that needs it, shared by all runs of the workspace that would start
    the same one, and ends by itself when nobody has needed it for `judge.serve.idle_timeout_s`.
    """
    from flows.api import list_judge_servers
    from refiner_core.contract.records import to_json

    where, rest = split_workspace(words)
    found = list_judge_servers(rest[0] if rest else None, where)
    if as_json:
        print_json({"version": 1, "servers": [to_json(service) for service in found]})
    elif not found:
        click.echo(f"No judge's server was ever started in {where}.")
    else:
        print_table([_row(service) for service in found], _HEADER)
        for service in found:
            if service.log:
                click.echo(f"log of {service.id}: {service.log}")


def _row(service: ServiceStatus) -> Sequence[str]:
    from flows.running.console import duration

    place = " on ".join(part for part in (service.url, service.node) if part)
    return (
        service.id,
        service.state,
        service.model,
        place,
        ", ".join(service.leases),
        "" if service.idle_s is None else duration(service.idle_s),
        service.reason.partition("\n")[0][:80],
    )


@click.command("stop")
@click.argument("words", nargs=-1, metavar="[SERVICE] [workspace=DIR]")
@json_option
def stop_command(words: tuple[str, ...], as_json: bool) -> int:
    """End a judge's server, or all that nobody needs just now.

    SERVICE is an id that `refiner judge servers` shows, or its beginning. A run that still needs a
    server starts another one. Exit code: 0 when they have ended, 1 when one has not.
    """
    from flows.api import stop_judge_servers

    where, rest = split_workspace(words)
    stopped = stop_judge_servers(
        rest[0] if rest else None, where, tell=lambda m: click.echo(m, err=True)
    )
    if as_json:
        print_json({"version": 1, "ended": stopped.ended, "left": stopped.left})
    else:
        _say_stopped(stopped)
    return 1 if stopped.left else 0


def _say_stopped(stopped: Stopped) -> None:
    for service_id in stopped.ended:
        click.echo(f"Ended: {service_id}.")
    for service_id in stopped.left:
        click.echo(f"Not ended yet: {service_id}.")
    if not stopped.ended and not stopped.left:
        text = "No server runs that nobody needs."
        busy = stopped.busy
        click.echo(f"{text} In use: {', '.join(busy)}." if busy else "No server runs.")
