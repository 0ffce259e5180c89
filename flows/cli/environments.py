"""`refiner environments`: list them, show one, check one, and play a task by hand."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from flows.cli.listing import show_listing
from flows.cli.options import json_option, print_json, print_table, until_nobody_reads

if TYPE_CHECKING:
    from refiner_core.environments.protocol import Environment, Message, Task, ToolCall

#: Exit code of an environment that is wrong: bad data.
_WRONG = 3
_SHOWN = 20
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
        context.invoke(list_command, as_json=as_json)


@environments_command.command("list")
@json_option
def list_command(as_json: bool) -> None:
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
def show_command(name: str, overrides: Sequence[str], with_tasks: bool, as_json: bool) -> None:
    """Show domains, policies, tools and tasks of an environment."""
    from flows.api import show_environment

    environment, tasks = show_environment(name, overrides)
    with until_nobody_reads():
        if as_json:
            print_json(_as_json(environment, tasks))
            return
        _show(environment, tasks, with_tasks)
        again = shlex.join(["refiner", "environments", "play", name, *overrides])
        click.echo(f"Next:\n  {again}", err=True)


@environments_command.command("check")
@click.argument("name", metavar="NAME")
@click.option("--most", type=click.IntRange(1), help="try at most this many tasks of each split")
@json_option
@_overrides
def check_command(name: str, overrides: Sequence[str], most: int | None, as_json: bool) -> int:
    """Check that an environment does what its protocol says, by trying its tasks."""
    from flows.api import check_environment

    checked = check_environment(name, overrides, most=most)
    with until_nobody_reads():
        if as_json:
            findings = [finding._asdict() for finding in checked.findings]
            values = {"tasks": checked.tasks, "expert_solved": checked.expert_solved}
            print_json({"version": 1, **values, "findings": findings})
        else:
            for finding in checked.findings[:_SHOWN]:
                click.echo(f"{finding.level}: {finding.where}: {finding.what}")
            if len(checked.findings) > _SHOWN:
                click.echo(f"… and {len(checked.findings) - _SHOWN} more (--json has all)")
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
def play_command(name: str, overrides: Sequence[str], task_id: str | None, seed: int) -> int:
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


def _as_json(environment: Environment, tasks: dict[str, tuple[Task, ...]]) -> dict[str, Any]:
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


def _show(environment: Environment, tasks: dict[str, tuple[Task, ...]], with_tasks: bool) -> None:
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
