"""`refiner judge`: ask a judge, measure it, and look after the servers of judges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from flows.cli.options import (
    LazyGroup,
    at_most_one,
    command_line,
    json_option,
    output_folder,
    say,
    say_next,
    show,
    split_overrides,
    split_workspace,
)
from refiner_core.report.printing import table_lines

if TYPE_CHECKING:
    from flows.judges import Asked, Made, Stopped
    from infra.services.registry import ServiceStatus

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
    words: tuple[str, ...], against: tuple[str, ...], out: str | None, as_json: bool, **options: Any
) -> None:
    """Measure a judge on answers of RUN, or on a small set with gold scores that refiner brings.

    Repeatability, agreement with gold scores and with a second judge, bias by order and by length,
    resistance to hostile answers, seconds and tokens a judgement: each number with its n and its
    interval. The judge is RUN's own (lexical without a run), changed by KEY=VALUE.
    """
    from flows.judges import measure_judge, write_report
    from infra.store.workspace import Workspace

    where, rest = split_workspace(words)
    names, overrides = split_overrides(rest)
    run = at_most_one(
        names,
        "`refiner judge report` measures on one run, not on {count}.",
        expected="the id of a run, or none for the set that comes with refiner",
        fix="name one of " + ", ".join(names),
    )
    folder = output_folder(out) if out else None
    made = measure_judge(
        run,
        where,
        overrides=overrides,
        against=against,
        tell=lambda what, count: say(f"asking {count}: {what}"),
        **options,
    )
    layout = Workspace.read_only(where).layout
    if folder is None and layout.format_file.exists():
        folder = layout.judge_reports / made.name
    if folder is not None:
        write_report(made, folder)
    kept = None if folder is None else str(folder)
    value = {**made.report.to_json(), "id": made.name, "folder": kept}
    show(as_json, lambda: value, lambda: _report_lines(made))
    if as_json:
        return
    if folder is None:
        say("\nNothing was written: there is no workspace; --out DIR keeps it.")
    else:
        say(f"\nWritten: {folder}/report.md, report.json")
    if not against:
        words = (*words, "--against", "judge.model=OTHER")
        say_next(command_line("judge", "report", *words))


def _report_lines(made: Made) -> Iterator[str]:
    from refiner_core.judge_report.build import about, sections

    yield from about(made.report)
    for section in sections(made.report):
        yield f"\n{section.title}"
        if section.rows:
            yield from table_lines(section.rows, section.header)
        yield from section.words


@click.command("ask")
@click.argument("words", nargs=-1, metavar="[workspace=DIR] [KEY=VALUE]...")
@click.option("--question", metavar="TEXT")
@click.option("--answer", metavar="TEXT", help="what is judged: an answer, a claim, a passage")
@click.option("--criterion", metavar="TEXT", help="what it is held against: a criterion, evidence, "
              "a source, the answer of a passage")  # fmt: skip
@click.option("--kind", type=click.Choice(_KINDS), help="what is asked  [default: rubric; of "
              "examples each in turn]")  # fmt: skip
@json_option
def ask_command(words: tuple[str, ...], as_json: bool, **question: Any) -> int:
    """Ask a judge one question by hand, such as `refiner judge ask
    judge.base_url=http://127.0.0.1:8000/v1 judge.model=NAME`.

    Without --question, --answer and --criterion it is asked an example; without --kind, too, one of
    each kind that a run asks, since each allows scores of its own. Exit code: 0 when there is
    a score, 1 when the judge gave none.
    """
    from flows.judges import ask_judge

    where, overrides = split_workspace(words)
    asked = ask_judge(overrides, where, **question)
    show(as_json, asked.to_json, lambda: _answer_lines(asked))
    return 0 if asked.judgement.status == "scored" else 1


def _answer_lines(asked: Asked) -> Iterator[str]:
    judgement = asked.judgement
    if judgement.score is None:
        yield f"no score     {asked.request.kind}: {judgement.detail}"
    else:
        yield f"score        {judgement.score:g} (0 is worst or untrue, 1 best or true)"
    yield f"judge        {asked.judge}"
    yield f"seconds      {asked.seconds:.3f}"
    if asked.usage is not None:
        used = asked.usage
        yield f"tokens       {used.prompt_tokens} read, {used.completion_tokens} written"
        yield f"schema       {asked.schema}"
        if used.retries:
            yield f"tries        {used.calls}"


_HEADER = ("server", "state", "model", "where", "needed by", "idle", "last word")


@click.command("servers")
@click.argument("words", nargs=-1, metavar="[SERVICE] [workspace=DIR]")
@json_option
def servers_command(words: tuple[str, ...], as_json: bool) -> None:
    """List the judges' servers of a workspace: how they are, where they answer, who needs them.

    A server is started by a run that needs it, shared by all runs of the workspace that would start
    the same one, and ends by itself when nobody has needed it for `judge.serve.idle_timeout_s`.
    """
    from flows.judges import list_judge_servers
    from refiner_core.contract.records import to_json

    where, rest = split_workspace(words)
    found = list_judge_servers(rest[0] if rest else None, where)

    def lines() -> Iterator[str]:
        if not found:
            yield f"No judge's server was ever started in {where}."
            return
        yield from table_lines([_row(service) for service in found], _HEADER)
        for service in found:
            if service.log:
                yield f"log of {service.id}: {service.log}"

    show(as_json, lambda: {"version": 1, "servers": [to_json(one) for one in found]}, lines)


def _row(service: ServiceStatus) -> Sequence[str]:
    from refiner_core.report.printing import clock

    place = " on ".join(part for part in (service.url, service.node) if part)
    return (
        service.id,
        service.state,
        service.model,
        place,
        ", ".join(service.leases),
        "" if service.idle_s is None else clock(service.idle_s),
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
    from flows.judges import stop_judge_servers

    where, rest = split_workspace(words)
    stopped = stop_judge_servers(rest[0] if rest else None, where, tell=say)
    value = {"version": 1, "ended": stopped.ended, "left": stopped.left}
    show(as_json, lambda: value, lambda: _stopped_lines(stopped))
    return 1 if stopped.left else 0


def _stopped_lines(stopped: Stopped) -> Iterator[str]:
    yield from (f"Ended: {service_id}." for service_id in stopped.ended)
    yield from (f"Not ended yet: {service_id}." for service_id in stopped.left)
    if not stopped.ended and not stopped.left:
        if stopped.busy:
            yield f"No server runs that nobody needs. In use: {', '.join(stopped.busy)}."
        else:
            yield "No server runs."
