"""`refiner rubrics`, `protocols` and `environments`: list, show, check, and play a task."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from flows.cli.options import json_option, print_json, print_table, show_listing, until_nobody_reads

if TYPE_CHECKING:
    from refiner_core.environments.protocol import Environment, Message, Task, ToolCall
    from refiner_core.rubrics import RubricSet
    from refiner_core.rubrics.lint import Checked, Finding


#: Exit code of rubrics that are wrong: bad data.
_WRONG = 3
_SHOWN_FINDINGS = 3  # findings of each kind that are printed; the JSON has all
_WIDTH = 98


@click.group(
    "rubrics",
    invoke_without_command=True,
    epilog="A set of your own is one YAML file, named in reward.static_rubrics; begin with a copy "
    "of what `refiner rubrics show v3` names.",
)
@json_option
@click.pass_context
def rubrics_command(context: click.Context, as_json: bool) -> None:
    """List, show and check rubric sets.

    Without a command, list them.
    """
    if context.invoked_subcommand is None:
        context.invoke(list_rubrics, as_json=as_json)


@rubrics_command.command("list")
@json_option
def list_rubrics(as_json: bool) -> None:
    """List the rubric sets that come with refiner."""
    from flows.api import list_rubric_sets

    sets = list_rubric_sets()
    with until_nobody_reads():
        if as_json:
            print_json({"version": 1, "sets": [_set_json(s) for s in sets]})
            return
        rows = [
            (s.name, str(s.version), f"{_count(s, 'positive')} + {_count(s, 'negative')}",
             s.digest()[:12], s.description)
            for s in sets
        ]  # fmt: skip
        following = ("refiner rubrics show NAME", "refiner plan RECIPE reward.static_rubrics=NAME")
        show_listing(rows, ("name", "version", "rubrics (+ -)", "digest", "for"), following)


@rubrics_command.command("show")
@click.argument("name", metavar="NAME")
@json_option
def show_rubrics(name: str, as_json: bool) -> None:
    """Show the rubrics of a set: NAME is a shipped one (`refiner rubrics list`) or a YAML file."""
    from flows.api import show_rubric_set

    rubrics, path = show_rubric_set(name)
    with until_nobody_reads():
        if as_json:
            print_json({"version": 1, "file": str(path), "set": _set_json(rubrics)})
            return
        click.echo(f"{rubrics.name}, version {rubrics.version}, digest {rubrics.digest()[:12]}")
        click.echo(f"file: {path}")
        for label, text in (("source", rubrics.source), ("licence", rubrics.license)):
            if text:
                click.echo(f"{label}: {text}")
        if rubrics.description:
            click.echo(f"\n{_filled(rubrics.description, '')}")
        for rubric, origin in zip(rubrics.rubrics, rubrics.origins, strict=True):
            said = f" ({origin})" if origin and origin != rubrics.source else ""
            sign = "-" if rubric.polarity == "negative" else "+"
            click.echo(f"\n{sign} {rubric.title}, weight {rubric.weight:g}{said}")
            click.echo(_filled(rubric.description, "  "))


@rubrics_command.command("check")
@click.argument("file", metavar="FILE")
@json_option
@click.option("--strict", is_flag=True, help="warnings count as errors")
@click.option("--all", "show_all", is_flag=True, help="print every finding, not the first of each")
def check_rubrics_command(file: str, as_json: bool, strict: bool, show_all: bool) -> int:
    """Check a rubric set, or the rubrics that rows bring with them.

    FILE is a set (a YAML file, or a shipped name), or rows in either form (.jsonl, .parquet).
    Errors are what the reward would refuse or count wrongly; warnings are wording that judges tend
    to get wrong: several demands in one rubric, negated faults, what a judge cannot see, scales
    that are not the judge's. A set's author may accept a warning: `accept: {RULE: reason}` beside
    the rubric. The exit code is 3 where something is wrong.
    """
    from flows.api import check_rubrics

    checked = check_rubrics(file)
    wrong = bool(checked.errors or (strict and checked.warnings))
    with until_nobody_reads():
        if as_json:
            print_json(_checked_json(checked))
        else:
            _show_checked(checked, show_all)
            if wrong:
                again = shlex.join(["refiner", "rubrics", "check", file, *["--strict"] * strict])
                click.echo(f"Next: mend what is named above, then\n  {again}", err=True)
    return _WRONG if wrong else 0


def _count(rubrics: RubricSet, polarity: str) -> int:
    return sum(r.polarity == polarity for r in rubrics.rubrics)


def _set_json(rubrics: RubricSet) -> dict[str, Any]:
    return {
        "name": rubrics.name,
        "version": rubrics.version,
        "digest": rubrics.digest(),
        "description": rubrics.description,
        "source": rubrics.source,
        "license": rubrics.license,
        "rubrics": [
            {
                "title": rubric.title,
                "description": rubric.description,
                "polarity": rubric.polarity,
                "weight": rubric.weight,
                "source": origin,
                "accept": dict(accepted),
            }
            for rubric, origin, accepted in zip(
                rubrics.rubrics, rubrics.origins, rubrics.accepted, strict=True
            )
        ],
    }


def _checked_json(checked: Checked) -> dict[str, Any]:
    return {
        "version": 1,
        "file": checked.name,
        "form": checked.form,
        "rubrics": checked.rubrics,
        "rows": checked.rows,
        "rows_without_rubrics": checked.rows_without,
        "errors": checked.errors,
        "warnings": checked.warnings,
        "counts": {rule: len(found) for rule, found in checked.by_rule().items()},
        "findings": [f.to_json() for f in checked.findings],
        "accepted": [{**f.to_json(), "reason": reason} for f, reason in checked.accepted],
    }


def _show_checked(checked: Checked, show_all: bool) -> None:
    """Findings by rule, each rule explained once; then one line that sums up."""
    from refiner_core.rubrics.lint import RULES

    for rule, found in checked.by_rule().items():
        known = RULES[rule]
        click.echo(f"{known.severity} {rule}: {len(found)}")
        click.echo(_filled(f"Why: {known.why}. To mend it: {known.fix}.", "  "))
        shown = found if show_all else found[:_SHOWN_FINDINGS]
        for finding in shown:
            click.echo(f"    {_placed(checked, finding)}: {finding.what}")
        if len(found) > len(shown):
            click.echo(f"    ({len(found) - len(shown)} more: --all)")
    click.echo(_rubrics_summary(checked))


def _placed(checked: Checked, finding: Finding) -> str:
    place = f" {finding.place}" if finding.place else ""
    titled = f" {finding.title!r}" if finding.title else ""
    return f"{checked.name}:{finding.line}{place}{titled}"


def _rubrics_summary(checked: Checked) -> str:
    counts = [(checked.errors, "error"), (checked.warnings, "warning")]
    found = " and ".join(f"{n:,} {word}{'s' * (n != 1)}" for n, word in counts if n)
    size = f"{checked.rubrics:,} rubric{'s' * (checked.rubrics != 1)}"
    if checked.form == "rows":
        size += f" in {checked.rows:,} row{'s' * (checked.rows != 1)}"
        if checked.rows_without:
            size += f" ({checked.rows_without:,} without: no judge term under `instance`)"
    accepted = f"; {len(checked.accepted)} accepted by its author" if checked.accepted else ""
    return f"{checked.name}: {size}; {found or 'nothing wrong was found'}{accepted}"


def _filled(text: str, indent: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


if TYPE_CHECKING:
    pass


@click.group(
    "protocols",
    invoke_without_command=True,
    epilog="A protocol of your own is one YAML file, named in evaluate.protocols; begin with a copy"
    " of what `refiner protocols show held-out-greedy-v1` names.",
)
@json_option
@click.pass_context
def protocols_command(context: click.Context, as_json: bool) -> None:
    """List, show and check protocols: fixed ways of measuring, for models that differ in theirs.

    Without a command, list them.
    """
    if context.invoked_subcommand is None:
        context.invoke(list_protocols_command, as_json=as_json)


@protocols_command.command("list")
@json_option
def list_protocols_command(as_json: bool) -> None:
    """List the protocols that come with refiner."""
    from flows.api import list_protocols

    found = list_protocols()
    with until_nobody_reads():
        if as_json:
            print_json({"version": 1, "protocols": [known.as_json() for known in found]})
            return
        rows = [
            (known.protocol.name, known.fingerprint, ", ".join(known.protocol.sections),
             known.description)
            for known in found
        ]  # fmt: skip
        following = (
            "refiner protocols show NAME",
            "refiner plan RECIPE evaluate.protocols=[NAME]",
        )
        show_listing(rows, ("name", "fingerprint", "fixes", "for"), following)


@protocols_command.command("show")
@click.argument("name", metavar="NAME")
@json_option
def show_protocol_command(name: str, as_json: bool) -> None:
    """Show what a protocol fixes: NAME is a shipped one (`refiner protocols list`) or a YAML file.

    The fingerprint covers what is fixed in effect, rubrics and prompts by their content: two files
    that measure alike have one, whatever they are called. Sections that are named are fixed whole;
    all else follows the recipe, and each number's own protocol says what that was.
    """
    from flows.api import show_protocol

    known = show_protocol(name)
    with until_nobody_reads():
        if as_json:
            print_json({"version": 1, **known.as_json()})
            return
        click.echo(f"{known.protocol.name}, fingerprint {known.fingerprint}")
        click.echo(f"file: {known.path}")
        if known.description:
            click.echo("\n" + textwrap.fill(known.description, _WIDTH))
        click.echo("\nfixed (what the file leaves out of a section that it names has its default):")
        for path, value in known.protocol.values().items():
            said = "" if path in known.protocol.fields else "   (default)"
            click.echo(f"  {path}: {json.dumps(value, ensure_ascii=False)}{said}")
        where = {p: v for p, v in known.protocol.fields.items() if p not in known.protocol.fixed}
        for path, value in where.items():
            click.echo(f"  {path}: {json.dumps(value, ensure_ascii=False)}   (how, not what)")


@protocols_command.command("check")
@click.argument("file", metavar="FILE")
@click.option(
    "--recipe", default="tiny", show_default=True, help="check it with this recipe's other fields"
)
@json_option
def check_protocol_command(file: str, recipe: str, as_json: bool) -> None:
    """Check a protocol FILE: its fields and values, and that what it names can be read."""
    from flows.api import check_protocol

    known = check_protocol(file, recipe)
    with until_nobody_reads():
        if as_json:
            print_json({"version": 1, "ok": True, **known.as_json()})
            return
        click.echo(f"{known.protocol.name} is a protocol, fingerprint {known.fingerprint}")
        words = ["refiner", "plan", recipe, f"evaluate.protocols=[{file}]"]
        click.echo(f"Next: {shlex.join(words)}", err=True)


@protocols_command.command("fields")
@json_option
def protocol_fields_command(as_json: bool) -> None:
    """List the fields that a protocol may fix, with their defaults."""
    from flows.api import protocol_fields
    from refiner_core.contract.records import to_json

    known = protocol_fields()
    with until_nobody_reads():
        if as_json:
            fields = [
                {
                    "field": path,
                    "default": to_json(known[path].default),
                    "identity": known[path].mark == "identity",
                    "doc": known[path].doc,
                }
                for path in known
            ]
            print_json({"version": 1, "fields": fields})
            return
        rows = [
            (path, json.dumps(to_json(known[path].default)), textwrap.shorten(known[path].doc, 56))
            for path in known
        ]
        print_table(rows, ("field", "default", "what it is"))


#: Exit code of an environment that is wrong: bad data.
_SHOWN_TASKS = 20
_overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


@click.group(
    "environments",
    invoke_without_command=True,
    epilog="KEY=VALUE are fields of a recipe, e.g. environment.domains=[orders] or "
    "environment.tasks=FILE.jsonl. How to write one: refiner_core/environments/README.md.",
)
@json_option
@click.pass_context
def environments_command(context: click.Context, as_json: bool) -> None:
    """List, show and check what agents with tools work in; play a task by hand.

    Without a command, list them.
    """
    if context.invoked_subcommand is None:
        context.invoke(list_environments_command, as_json=as_json)


@environments_command.command("list")
@json_option
def list_environments_command(as_json: bool) -> None:
    """List the environments that a recipe may name in environment.name."""
    from flows.api import list_environments

    known = list_environments()
    with until_nobody_reads():
        if as_json:
            print_json({"version": 1, "environments": dict(known)})
            return
        following = ("refiner environments show desk", "refiner plan tiny-tools")
        show_listing(list(known.items()), ("name", "for"), following)


@environments_command.command("show")
@click.argument("name", metavar="NAME")
@click.option("--tasks", "with_tasks", is_flag=True, help="list every task, too")
@json_option
@_overrides
def show_environment_command(
    name: str, overrides: Sequence[str], with_tasks: bool, as_json: bool
) -> None:
    """Show domains, policies, tools and tasks of an environment."""
    from flows.api import show_environment

    environment, tasks = show_environment(name, overrides)
    with until_nobody_reads():
        if as_json:
            print_json(_environment_json(environment, tasks))
            return
        _show_environment(environment, tasks, with_tasks)
        again = shlex.join(["refiner", "environments", "play", name, *overrides])
        click.echo(f"Next:\n  {again}", err=True)


@environments_command.command("check")
@click.argument("name", metavar="NAME")
@click.option("--most", type=click.IntRange(1), help="try at most this many tasks of each split")
@json_option
@_overrides
def check_environment_command(
    name: str, overrides: Sequence[str], most: int | None, as_json: bool
) -> int:
    """Check that an environment does what its protocol says, by trying its tasks."""
    from flows.api import check_environment

    checked = check_environment(name, overrides, most=most)
    with until_nobody_reads():
        if as_json:
            findings = [finding._asdict() for finding in checked.findings]
            values = {"tasks": checked.tasks, "expert_solved": checked.expert_solved}
            print_json({"version": 1, **values, "findings": findings})
        else:
            for finding in checked.findings[:_SHOWN_TASKS]:
                click.echo(f"{finding.level}: {finding.where}: {finding.what}")
            if len(checked.findings) > _SHOWN_TASKS:
                click.echo(f"… and {len(checked.findings) - _SHOWN_TASKS} more (--json has all)")
            tried = ", ".join(f"{count} of {split}" for split, count in checked.tasks.items())
            solved = checked.expert_solved
            expert = "" if solved is None else f"; the expert solves {solved}"
            click.echo(f"{len(checked.errors)} errors; tasks tried: {tried}{expert}")
    return _WRONG if checked.errors else 0


@environments_command.command("play")
@click.argument("name", metavar="NAME")
@click.option("--task", "task_id", help="id of the task; the first one by default")
@click.option("--seed", type=int, default=0, show_default=True)
@_overrides
def play_environment_command(
    name: str, overrides: Sequence[str], task_id: str | None, seed: int
) -> int:
    """Do a task by hand: type one tool call a line, as `get_order order=S_k3F7` or as JSON.

    The exit code is 0 where the task was solved.
    """
    from flows.api import find_task, play_task, show_environment

    environment, tasks = show_environment(name, overrides)
    task = find_task(tasks, task_id)
    click.echo(f"{task.domain}/{task.id}: {task.summary}\n\n{environment.policy(task.domain)}\n")
    for tool in environment.tools(task.domain):
        click.echo(f"  {_signature(tool.name, tool.parameters)}  {tool.description}")
    played = play_task(name, _calls(), overrides, task=task.id, seed=seed, hear=_say)
    outcome = played.outcome
    click.echo(f"\nreward {outcome.reward:g}" + (f", {outcome.failure}" if outcome.failure else ""))
    for check in outcome.checks:
        mark = "done" if check.passed else "missing"
        click.echo(
            f"  {mark:8}{check.kind}: {check.name}" + f" ({check.detail})" * bool(check.detail)
        )
    return 0 if outcome.success else 1


def _calls() -> Iterator[ToolCall]:
    """What is typed, call by call, until there is no more."""
    while True:
        click.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line:
            return
        call = _call(line)
        if call is None:
            click.echo('one tool call, e.g. respond content="Hello." or {"name": …}', err=True)
        else:
            yield call


def _call(line: str) -> ToolCall | None:
    """A call as a person types it: JSON, or a name and ``key=value`` pairs."""
    from refiner_core.environments.protocol import ToolCall

    if line.lstrip().startswith("{"):
        try:
            value = json.loads(line)
            return ToolCall(str(value["name"]), dict(value.get("arguments", {})))
        except (ValueError, KeyError, TypeError):
            return None
    try:
        words = shlex.split(line)
    except ValueError:
        return None
    if not words or any("=" not in word for word in words[1:]):
        return None
    return ToolCall(words[0], dict(word.split("=", 1) for word in words[1:]))


def _say(messages: Sequence[Message]) -> None:
    for message in messages:
        click.echo(f"{message.role}: {message.content}")


def _signature(name: str, parameters: Any) -> str:
    return f"{name}({', '.join(parameters.get('properties', {}))})"


def _environment_json(
    environment: Environment, tasks: dict[str, tuple[Task, ...]]
) -> dict[str, Any]:
    return {
        "version": 1,
        "environment": dict(environment.describe()),
        "domains": {
            domain: {
                "policy": environment.policy(domain),
                "tools": [tool.as_json() for tool in environment.tools(domain)],
            }
            for domain in environment.domains()
        },
        "tasks": {
            split: [{"id": t.id, "domain": t.domain, "summary": t.summary} for t in found]
            for split, found in tasks.items()
        },
    }


def _show_environment(
    environment: Environment, tasks: dict[str, tuple[Task, ...]], with_tasks: bool
) -> None:
    kind = "deterministic" if environment.deterministic else "not deterministic"
    click.echo(f"{environment.name}, version {environment.version}, {kind}")
    for domain in environment.domains():
        counts = ", ".join(
            f"{sum(t.domain == domain for t in found)} {split}" for split, found in tasks.items()
        )
        click.echo(f"\n{domain} ({counts} tasks)\n  {environment.policy(domain)}")
        for tool in environment.tools(domain):
            click.echo(f"    {_signature(tool.name, tool.parameters)}  {tool.description}")
    if with_tasks:
        rows = [(t.domain, t.id, s, t.summary) for s, found in tasks.items() for t in found]
        click.echo("")
        print_table(rows, ("domain", "task", "split", "what"))
