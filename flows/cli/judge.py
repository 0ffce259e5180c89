"""`refiner judge`, `reward` and `rescore`: ask and measure a judge, manage judge servers; attack a
reward, and score stored rollouts under other settings, before GPU time is spent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from flows.cli.aliases import former_option
from flows.cli.options import (
    argument,
    ask_leave,
    at_most_one,
    command_line,
    json_option,
    misuse,
    output_folder,
    overrides_argument,
    print_line,
    print_next,
    progress,
    recipe_argument,
    show,
    split_overrides,
    split_workspace,
)
from refiner_core.contract.records import picked
from refiner_core.report.printing import table_lines

if TYPE_CHECKING:
    from flows.judges import StoppedServers
    from flows.rescoring.rescore_plan import RescorePlan
    from infra.services.judges import ServiceStatus


@click.group("judge")
def judge_command() -> None:
    """Ask and measure judges; list and stop their servers.

    A judge is named by fields of the recipe: judge.base_url=http://127.0.0.1:8000/v1
    judge.model=NAME. The default is the lexical judge, which needs no server.
    """


_KINDS = ("rubric", "citation_recall", "citation_precision", "citation_needed")


@judge_command.command(
    "report", short_help="Measure a judge: repeats, agreement, bias, hostile answers, cost."
)
@argument("words", nargs=-1, metavar="[RUN] [workspace=DIR] [KEY=VALUE]...")
@click.option(
    "--against",
    multiple=True,
    metavar="KEY=VALUE",
    help="second judge: fields that differ from the first; repeatable",
)
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="at most N questions "
              "(default: 20 of a run, all of the shipped set)")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=3, metavar="K", show_default=True,
              help="repetitions of each unchanged question")  # fmt: skip
@click.option("--out", metavar="DIR", help="folder for report.md and report.json "
              "(default: WORKSPACE/judge-reports/ID)")  # fmt: skip
@json_option
def report_command(
    words: tuple[str, ...], against: tuple[str, ...], out: str | None, as_json: bool, **options: Any
) -> None:
    """Measure a judge on answers of RUN, or on a small shipped set with gold scores.

    Repeatability, agreement with gold scores and with a second judge, bias by order and by length,
    resistance to hostile answers, seconds and tokens per judgement, each with n and interval. The
    judge is RUN's own (lexical without a run), changed by KEY=VALUE.
    """
    from flows.judges import measure_judge, write_report
    from infra.store.workspace import Workspace
    from refiner_core.judge_report.build import markdown, report_json

    where, rest = split_workspace(words)
    names, overrides = split_overrides(rest)
    run = at_most_one(names, "run", " for the shipped set")
    folder = output_folder(out) if out else None
    made = measure_judge(
        run,
        where,
        overrides=overrides,
        against=against,
        tell=lambda what, count: print_line(f"asking {count}: {what}"),
        **options,
    )
    layout = Workspace.read_only(where).layout
    if folder is None and layout.format_file.exists():
        folder = layout.judge_reports / made.name
    if folder is not None:
        write_report(made.report, folder)
    kept = None if folder is None else str(folder)
    value = {**report_json(made.report), "id": made.name, "folder": kept}
    show(as_json, lambda: value, markdown(made.report).splitlines)
    if as_json:
        return
    if folder is None:
        print_line("\nNothing was written: there is no workspace; --out DIR keeps it.")
    else:
        print_line(f"\nWritten: {folder}/report.md, report.json")
    if not against:
        words = (*words, "--against", "judge.model=OTHER")
        print_next(command_line("judge", "report", *words))


@judge_command.command("ask", short_help="Ask a judge one question.")
@argument("words", nargs=-1, metavar="[workspace=DIR] [KEY=VALUE]...")
@click.option("--question", metavar="TEXT")
@click.option("--answer", metavar="TEXT", help="text to judge: an answer, a claim, a passage")
@click.option("--criterion", metavar="TEXT", help="text to judge it by: a criterion, evidence, "
              "a source, the answer of a passage")  # fmt: skip
@click.option("--kind", type=click.Choice(_KINDS), help="kind of question  [default: rubric; "
              "one of each as examples]")  # fmt: skip
@json_option
def ask_command(words: tuple[str, ...], as_json: bool, **question: Any) -> int:
    """Ask a judge one question, such as `refiner judge ask
    judge.base_url=http://127.0.0.1:8000/v1 judge.model=NAME`.

    Without --question, --answer and --criterion the question is an example; without --kind, too,
    one of each kind, since each allows scores of its own. Exit code: 0 if there is a score, 1 if
    the judge gave none.
    """
    from flows.judges import ask_judge

    where, overrides = split_workspace(words)
    asked = ask_judge(overrides, where, **question)
    show(as_json, asked.to_json, lambda: _answer_lines(asked))
    return 0 if asked.judgement.status == "scored" else 1


def _answer_lines(asked: Any) -> Iterator[str]:
    from refiner_core.contract.types import WITHOUT_REASONING

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
        if asked.reasoning:
            yield f"reasoning    {asked.reasoning}"
            yield f"To fix it: {WITHOUT_REASONING}"


_HEADER = ("server", "state", "model", "where", "needed by", "idle", "message")


@judge_command.command("servers")
@argument("words", nargs=-1, metavar="[SERVICE] [workspace=DIR]")
@json_option
def servers_command(words: tuple[str, ...], as_json: bool) -> None:
    """List the judge servers of a workspace: state, address, users.

    The first run that needs a server starts it, and all runs of the workspace share it. It ends
    when it has been idle for `judge.serve.idle_timeout_s`.
    """
    from flows.judges import list_judge_servers
    from refiner_core.contract.records import to_json

    where, rest = split_workspace(words)
    found = list_judge_servers(rest[0] if rest else None, where)

    def lines() -> Iterator[str]:
        if not found:
            yield f"No judge server was ever started in {where}."
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


@judge_command.command("stop")
@argument("words", nargs=-1, metavar="[SERVICE] [workspace=DIR]")
@json_option
def stop_command(words: tuple[str, ...], as_json: bool) -> int:
    """Stop a judge's server, or all idle ones.

    SERVICE is an id from `refiner judge servers`, or its beginning. A run that still needs a server
    starts another one. Exit code: 0 if they have ended, 1 if one has not.
    """
    from flows.judges import stop_judge_servers

    where, rest = split_workspace(words)
    stopped = stop_judge_servers(rest[0] if rest else None, where, tell=print_line)
    value = {"version": 1, "ended": stopped.ended, "left": stopped.left}
    show(as_json, lambda: value, lambda: _stopped_lines(stopped))
    return 1 if stopped.left else 0


def _stopped_lines(stopped: StoppedServers) -> Iterator[str]:
    yield from (f"Ended: {service_id}." for service_id in stopped.ended)
    yield from (f"Not ended yet: {service_id}." for service_id in stopped.left)
    if not stopped.ended and not stopped.left:
        if stopped.busy:
            yield f"No idle server is running. In use: {', '.join(stopped.busy)}."
        else:
            yield "No server is running."


# ---------------------------------------------------------------- attacks


@click.group("reward")
def reward_command() -> None:
    """Attack a reward before training; compare its judge with people's labels."""


@reward_command.command("attack")
@recipe_argument
@overrides_argument
@click.option("--rows", metavar="FILE", help="rows of your own (default: the held-out questions)")
@click.option("-n", "count", type=click.IntRange(min=2), default=32, show_default=True,
              help="at most this many rows")  # fmt: skip
@click.option("--attack", "own", multiple=True, metavar="FILE.py:function",
              help="an attack of your own; repeatable")  # fmt: skip
@click.option("--strict", is_flag=True, help="exit code 1 if an attack pays")
@click.option("--yes", is_flag=True, help="do not confirm calls to a judge's server")
@json_option
def attack_command(
    recipe: str,
    overrides: tuple[str, ...],
    own: tuple[str, ...],
    strict: bool,
    yes: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Compare rewards of dishonest answers with those of honest ones.

    Rows are answered honestly, at random and by each attack, and scored by RECIPE's own judge and
    reward. An attack pays if it earns more than the honest answer, beyond the 95 % interval of the
    paired difference. For an agent, held-out tasks are tried instead.
    """
    from flows.attacking import attack_lines, attack_reward

    def tell(text: str, calls: int) -> None:
        print_line(text)
        if calls and not yes:
            why = f"This takes {calls} new judge calls, which need a confirmation."
            ask_leave(f"Make {calls} calls?", why, "add --yes; or use fewer rows with -n 8")

    asked = {**options, "own": own, "tell": tell, "progress": progress("answers judged")}
    found = attack_reward(recipe, overrides, **asked)
    show(as_json, lambda: found, lambda: ["", *attack_lines(found)])
    return int(strict and any(attack["pays"] for attack in found["attacks"]))


@reward_command.command("label", short_help="Write a blind form for people's labels, or read it.")
@argument("words", nargs=-1, metavar="[RUN|SWEEP]... [workspace=DIR]")
@click.option("--samples", type=click.IntRange(min=2), default=50, show_default=True,
              help="answers of each run, one per prompt")  # fmt: skip
@click.option("--model", help="whose answers (default: the last trained model)")
@click.option("--decoding", type=click.Choice(["greedy", "sampled"]),
              help="of the answers (default: sampled, if there is it)")  # fmt: skip
@click.option("--citations", is_flag=True, help="also ask about citations, to correct the reward")
@click.option("--seed", type=int, default=0, show_default=True, help="of the draw and the order")
@click.option("--read", "reads", is_flag=True, help="read filled forms: words are FILE...")
@json_option
def label_command(words: tuple[str, ...], reads: bool, as_json: bool, **options: Any) -> None:
    """Compare the judge of evaluated answers with people.

    Writes a form without model, step or score, one question per line, answers shuffled. Give each
    person a copy (ann.jsonl, bob.jsonl) in which to set every label: 1 for yes, 0 for no, or a
    number between. `refiner reward label --read ann.jsonl bob.jsonl` then prints how far people
    agree, the judge's sensitivity and specificity, and corrected means, and records them for
    report, sweep and card. Read all copies of a form together.
    """
    from flows.rescoring.labelling import read_label_forms, write_label_form
    from refiner_core.report.printing import document
    from refiner_core.rescoring.labels import sections

    where, names = split_workspace(words)
    if reads:
        if not names:
            raise misuse("--read needs the filled forms.")
        found = read_label_forms(names, where)
        people = ", ".join(f"{person} ({n})" for person, n in found["people"].items())
        lead = f"Labels of {people}; {found['unlabelled']} questions have none."
        show(as_json, lambda: found, document("People's labels", lead, sections(found)).splitlines)
        return
    made = write_label_form(names, where, **options)
    lines = [
        f"{made['questions']} questions on {made['answers']} answers: {made['file']}",
        f"Which row is what (not for the people who label): {made['key']}",
    ]
    filled = ("ann.jsonl", "bob.jsonl", f"workspace={where}")
    following = [command_line("reward", "label", "--read", *filled)]
    show(as_json, lambda: made, lambda: lines, following)


# ---------------------------------------------------------------- rescoring


#: More new calls than this need a confirmation.
ASK_ABOVE = 5000


@click.command("rescore", context_settings={"ignore_unknown_options": False})
@argument("words", nargs=-1, metavar="[RUN]... [workspace=DIR] [KEY=VALUE]...")
@click.option(
    "--judge",
    "judges",
    multiple=True,
    metavar="SPEC",
    help="`lexical`, a YAML file with a judge section, or model=NAME,base_url=URL,…",
)
@click.option(
    "--rubrics",
    multiple=True,
    metavar="SET",
    help="rubric set by name or file, added to the run's instance rubrics "
    "(static:SET: alone); `instance`; `none`",
)
@click.option("--citation-weight", "weights", multiple=True, type=float, metavar="W")
@click.option("--cross", is_flag=True, help="all combinations instead of one option at a time")
@click.option(
    "--from",
    "source",
    type=click.Choice(["rollouts", "evaluation"]),
    default="rollouts",
    help="rescore rollouts of training, or samples of evaluations",
)
@click.option("--steps", metavar="STEPS", help="all, last:5, 40-50 (default: all; with several "
              "runs last:5)")  # fmt: skip
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="at most N groups")
@click.option("--model", "models", multiple=True, help="evaluations of this model only")
@click.option("--decoding", "decodings", multiple=True, type=click.Choice(["greedy", "sampled"]))
@click.option("--metric", type=click.Choice(["total", "rubric", "citation"]), default="total",
              help="of the judge x policy matrix")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="print the plan; ask and write nothing")
@click.option("--yes", is_flag=True, help=f"do not confirm more than {ASK_ABOVE} calls")
@click.option("--out", metavar="DIR", help="folder for the files (default: WORKSPACE/rescores/ID)")
@former_option("--common", "Several runs are compared on their common prompts.", flag=True)
@former_option(
    "--baseline", "All are compared with the run's own scores; rescore.json has the means."
)
@former_option("--price-in", "Multiply the printed tokens.")
@former_option("--price-out", "Multiply the printed tokens.")
@json_option
def rescore_command(words: tuple[str, ...], **options: Any) -> None:
    """Score stored rollouts of RUNs again under other settings (default: the newest run).

    Each --judge, --rubrics and --citation-weight is a setting of its own, compared with the run's
    own scores; KEY=VALUE of `reward` and `judge` apply to all of them. Stored judgements are reused
    for the same judge, so another weight, gate or aggregation makes no calls. Several RUNs make a
    judge x policy matrix.
    """
    from flows.rescoring.rescore import document_lines, next_lines, plan_lines, rescore

    planned = _planned(words, options)
    as_json = bool(options["as_json"])
    if options["dry_run"]:
        ending = "Nothing was asked or written. Next: the same command without --dry-run."
        show(as_json, lambda: _plan_json(planned), lambda: [*plan_lines(planned), ending])
        return
    for line in plan_lines(planned):
        print_line(line)
    if not options["yes"] and (calls := planned.new_calls) > ASK_ABOVE:
        why = f"This takes {calls} new judge calls, which need a confirmation."
        less = "or judge fewer rollouts with --steps last:5 or --sample 200"
        ask_leave(f"Make {calls} calls?", why, f"add --yes; {less}")
    out = output_folder(options["out"]) if options["out"] else None
    try:
        document, folder = rescore(planned, out, progress("rollouts scored"))
    except KeyboardInterrupt:
        print_line("Judgements are kept: the same command continues from there.")
        raise
    show(
        as_json,
        lambda: {**document, "folder": str(folder)},
        lambda: ["", *document_lines(document)],
    )
    if not as_json:
        for line in next_lines(document, folder, words):
            print_line(line)


def _planned(words: Sequence[str], options: dict[str, Any]) -> RescorePlan:
    from flows.rescoring.reading import RolloutSelection
    from flows.rescoring.rescore_plan import RescoreOptions, plan_rescoring

    where, rest = split_workspace(words)
    names, overrides = split_overrides(rest)
    part = {name: options[name] for name in ("source", "sample", "models", "decodings")}
    judges, rubrics, weights = (options[name] for name in ("judges", "rubrics", "weights"))
    return plan_rescoring(
        names,
        where,
        options=RescoreOptions(judges, rubrics, weights, tuple(overrides), options["cross"]),
        part=RolloutSelection(**part),
        steps=options["steps"],
        metric=options["metric"],
    )


def _plan_json(planned: RescorePlan) -> dict[str, Any]:
    return {
        "version": 1,
        "dry_run": True,
        "policies": [
            {**picked(p, "name", "run", "steps"), "rollouts": len(p.rollouts)}
            for p in planned.policies
        ],
        "settings": [setting.name for setting in planned.settings],
        "judging": [
            plan.figures() for plan in planned.judges.values() if plan.reused or plan.unknown
        ],
        "calls": planned.new_calls,
    }
