"""`refiner list`, `show`, `completion`, `rubrics`, `protocols` and `environments`.

Show and check shipped and own sets; explain fields; play a task; print completion scripts.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from flows.cli.aliases import former_listing
from flows.cli.options import (
    Listing,
    argument,
    at_most_one,
    command_line,
    ignore_closed_pipe,
    json_option,
    misuse,
    output_folder,
    overrides_argument,
    print_json,
    print_line,
    print_lines,
    show,
    show_listing,
    split_overrides,
    split_workspace,
    wrong_text,
)
from refiner_core.contract.records import picked, to_json
from refiner_core.report.printing import counted, folded, table_lines

if TYPE_CHECKING:
    from refiner_core.contract.config import RecipeConfig
    from refiner_core.environments.protocol import Environment, Message, Task, ToolCall
    from refiner_core.rubrics import RubricSet
    from refiner_core.rubrics.lint import RubricCheck

#: Exit code for errors in a set: bad data.
_WRONG = 3
_SHOWN_FINDINGS = 3  # findings printed per kind; the JSON has all
_SHOWN_TASKS = 20


def _group(name: str, text: str, epilog: str) -> click.Group:
    """A group of commands; without one it lists its kind."""
    listed = former_listing(name, "list")

    @click.group(name, invoke_without_command=True, epilog=epilog, help=text)
    @json_option
    @click.pass_context
    def group(context: click.Context, as_json: bool) -> None:
        if context.invoked_subcommand is None:
            context.invoke(listed, as_json=as_json)

    group.add_command(listed)
    return group


# ---------------------------------------------------------------- rubrics

rubrics_command = _group(
    "rubrics",
    "Show and check rubric sets; report what criteria teach.",
    "A set of your own is one YAML file, named in reward.static_rubrics; begin with a copy "
    "of what `refiner rubrics show v3` names.",
)


@rubrics_command.command("show")
@argument("name", metavar="NAME")
@json_option
def show_rubrics(name: str, as_json: bool) -> None:
    """Show the rubrics of a set: NAME is a shipped one (`refiner list rubrics`) or a YAML file."""
    from flows.checking.sets import show_rubric_set

    rubrics, path = show_rubric_set(name)

    def lines() -> Iterator[str]:
        yield f"{rubrics.name}, version {rubrics.version}, digest {rubrics.digest()[:12]}"
        yield f"file: {path}"
        for label, text in (("source", rubrics.source), ("licence", rubrics.license)):
            if text:
                yield f"{label}: {text}"
        if rubrics.description:
            yield f"\n{folded(rubrics.description)}"
        for rubric, origin in zip(rubrics.rubrics, rubrics.origins, strict=True):
            said = f" ({origin})" if origin and origin != rubrics.source else ""
            sign = "-" if rubric.polarity == "negative" else "+"
            yield f"\n{sign} {rubric.title}, weight {rubric.weight:g}{said}"
            yield folded(rubric.description, "  ")

    show(as_json, lambda: {"version": 1, "file": str(path), "set": set_json(rubrics)}, lines)


@rubrics_command.command("check")
@argument("file", metavar="FILE")
@json_option
@click.option("--strict", is_flag=True, help="warnings count as errors")
@click.option(
    "--all", "show_all", is_flag=True, help="print every finding, not only the first of each"
)
def check_rubrics_command(file: str, as_json: bool, strict: bool, show_all: bool) -> int:
    """Check a rubric set, or the rubrics of rows.

    FILE is a set (a YAML file, or a shipped name), or rows in either form (.jsonl, .parquet).
    Errors are rubrics that the reward would refuse or count wrongly; warnings are wording that
    judges misread, such as negated faults.
    The exit code is 3 if there is an error.
    """
    from refiner_core.rubrics.lint import check_file

    checked = check_file(file)
    wrong = bool(checked.errors or (strict and checked.warnings))
    again = [command_line("rubrics", "check", file, *["--strict"] * strict)] * wrong
    show(as_json, lambda: _checked_json(checked), lambda: _checked_lines(checked, show_all), again)
    return _WRONG if wrong else 0


@rubrics_command.command("report", short_help="Report what the criteria of a run's judge teach.")
@argument("words", nargs=-1, metavar="[RUN] [workspace=DIR]")
@click.option(
    "--from",
    "source",
    type=click.Choice(["rollouts", "evaluation"]),
    default="rollouts",
    help="rollouts of training, or samples of evaluations",
)
@click.option("--steps", default="all", show_default=True, metavar="STEPS",
              help="all, last:5, 40-50")  # fmt: skip
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="at most N groups")
@click.option("--model", "models", multiple=True, help="evaluations of this model only")
@click.option("--keep", type=click.FloatRange(0.0, 1.0, max_open=True), default=0.95,
              show_default=True, help="rank correlation that a smaller set must keep")  # fmt: skip
@click.option("--out", metavar="DIR",
              help="folder for the files (default: WORKSPACE/rubric-reports/RUN)")  # fmt: skip
@json_option
def report_rubrics_command(
    words: tuple[str, ...], keep: float, out: str | None, as_json: bool, **part: Any
) -> None:
    """Report difficulty, discrimination, redundancy and course of RUN's criteria.

    From its stored judgements, without judge calls. Proposes a smaller static set, with the rank
    correlation that it keeps on held-out prompts, as a file for `refiner rescore --rubrics`.
    """
    from flows.rescoring.criteria import criteria_text, report_criteria
    from flows.rescoring.reading import RolloutSelection

    where, names = split_workspace(words)
    run, folder = at_most_one(names, "run", " for the newest"), output_folder(out) if out else None
    found = report_criteria(run, where, part=RolloutSelection(**part), keep=keep, out=folder)
    following = [found["command"]] if found["command"] else []
    show(as_json, lambda: found, criteria_text(found).splitlines, following)
    if not as_json:
        print_line(f"\nWritten: {found['folder']}/")


def set_json(rubrics: RubricSet) -> dict[str, Any]:
    """A rubric set as JSON."""
    parts = zip(rubrics.rubrics, rubrics.origins, strict=True)
    return {
        **picked(rubrics, "name", "version", "description", "source", "license"),
        "digest": rubrics.digest(),
        "rubrics": [{**to_json(rubric), "source": origin} for rubric, origin in parts],
    }


def _checked_json(checked: RubricCheck) -> dict[str, Any]:
    return {
        **{"version": 1, "file": checked.name, "rows_without_rubrics": checked.rows_without},
        **picked(checked, "form", "rubrics", "rows", "errors", "warnings"),
        "counts": {rule: len(found) for rule, found in checked.by_rule().items()},
        "findings": [f.to_json() for f in checked.findings],
    }


def _checked_lines(checked: RubricCheck, show_all: bool) -> Iterator[str]:
    """Findings by rule, each rule explained once; then a summary line."""
    from refiner_core.rubrics.lint import RULES

    for rule, found in checked.by_rule().items():
        known = RULES[rule]
        yield f"{known.severity} {rule}: {len(found)}"
        yield folded(f"Why: {known.why}. To fix it: {known.fix}.", "  ")
        shown = found if show_all else found[:_SHOWN_FINDINGS]
        for finding in shown:
            place = f" {finding.place}" if finding.place else ""
            titled = f" {finding.title!r}" if finding.title else ""
            yield f"    {checked.name}:{finding.line}{place}{titled}: {finding.what}"
        if len(found) > len(shown):
            yield f"    ({len(found) - len(shown)} more: --all)"
    total, size = wrong_text(checked.errors, checked.warnings), counted(checked.rubrics, "rubric")
    if checked.form == "rows":
        size += f" in {counted(checked.rows, 'row')}"
        if checked.rows_without:
            size += f" ({checked.rows_without:,} without: no judge term under `instance`)"
    yield f"{checked.name}: {size}; {total or 'no errors were found'}"


# ---------------------------------------------------------------- protocols

protocols_command = _group(
    "protocols",
    "Show and check protocols: fixed ways of measuring, for models that differ in theirs.",
    "A protocol of your own is one YAML file, named in evaluate.protocols; start with a copy"
    " of what `refiner protocols show held-out-greedy-v1` names.",
)


@protocols_command.command("show")
@argument("name", metavar="NAME")
@json_option
def show_protocol_command(name: str, as_json: bool) -> None:
    """Show what a protocol fixes: NAME is a shipped one (`refiner list protocols`) or a YAML file.

    The fingerprint covers the effective settings, rubrics and prompts by their content: two files
    that measure alike have the same, whatever their names. Named sections are fixed completely;
    other fields follow the recipe, and each metric's own protocol records them.
    """
    from flows.checking.sets import show_protocol

    known = show_protocol(name)

    def lines() -> Iterator[str]:
        protocol = known.protocol
        yield f"{protocol.name}, fingerprint {known.fingerprint}"
        yield f"file: {known.path}"
        if known.description:
            yield "\n" + folded(known.description)
        yield "\nfixed (fields left out of a named section have their defaults):"
        for path, value in protocol.values().items():
            said = "" if path in protocol.fields else "   (default)"
            yield f"  {path}: {json.dumps(value, ensure_ascii=False)}{said}"
        for path, value in protocol.fields.items():
            if path not in protocol.fixed:
                yield f"  {path}: {json.dumps(value, ensure_ascii=False)}   (how, not what)"

    show(as_json, lambda: {"version": 1, **known.as_json()}, lines)


@protocols_command.command("check")
@argument("file", metavar="FILE")
@click.option(
    "--recipe", default="tiny", show_default=True, help="check it with this recipe's other fields"
)
@json_option
def check_protocol_command(file: str, recipe: str, as_json: bool) -> None:
    """Check a protocol FILE: its fields and values, and the files that it names."""
    from flows.checking.sets import check_protocol

    known = check_protocol(file, recipe)
    said = f"{known.protocol.name} is a protocol, fingerprint {known.fingerprint}"
    following = [command_line("plan", recipe, f"evaluate.protocols=[{file}]")]
    value = {"version": 1, "ok": True, **known.as_json()}
    show(as_json, lambda: value, lambda: [said], following)


@protocols_command.command("fields")
@json_option
def protocol_fields_command(as_json: bool) -> None:
    """List the fields that a protocol may fix, with their defaults."""
    from flows.checking.sets import protocol_fields

    fields = [
        {"field": path, "identity": info.mark == "identity", **picked(info, "default", "doc")}
        for path, info in protocol_fields().items()
    ]
    rows = [(f["field"], json.dumps(f["default"]), textwrap.shorten(f["doc"], 56)) for f in fields]
    show(
        as_json,
        lambda: {"version": 1, "fields": fields},
        lambda: table_lines(rows, ("field", "default", "what it is")),
    )


# ---------------------------------------------------------------- environments

environments_command = _group(
    "environments",
    "Show and check environments of agents with tools; play a task by hand.",
    "KEY=VALUE are fields of a recipe, e.g. environment.domains=[orders]. How to write one: "
    "refiner_core/environments/README.md.",
)


@environments_command.command("show")
@argument("name", metavar="NAME")
@click.option("--tasks", "with_tasks", is_flag=True, help="also list every task")
@json_option
@overrides_argument
def show_environment_command(
    name: str, overrides: Sequence[str], with_tasks: bool, as_json: bool
) -> None:
    """Show domains, policies, tools and tasks of an environment."""
    from flows.checking.sets import show_environment

    environment, tasks = show_environment(name, overrides)
    show(
        as_json,
        lambda: _environment_json(environment, tasks),
        lambda: _environment_lines(environment, tasks, with_tasks),
        [command_line("environments", "play", name, *overrides)],
    )


@environments_command.command("check")
@argument("name", metavar="NAME")
@click.option("--most", type=click.IntRange(1), help="maximum number of tasks tried per split")
@json_option
@overrides_argument
def check_environment_command(
    name: str, overrides: Sequence[str], most: int | None, as_json: bool
) -> int:
    """Check an environment against its protocol, by trying its tasks."""
    from flows.checking.sets import check_environment

    checked = check_environment(name, overrides, most=most)

    def lines() -> Iterator[str]:
        for finding in checked.findings[:_SHOWN_TASKS]:
            yield f"{finding.level}: {finding.where}: {finding.what}"
        if len(checked.findings) > _SHOWN_TASKS:
            yield f"… and {len(checked.findings) - _SHOWN_TASKS} more (--json has all)"
        tried = ", ".join(f"{count} of {split}" for split, count in checked.tasks.items())
        solved = checked.expert_solved
        expert = "" if solved is None else f"; the expert solves {solved}"
        yield f"{len(checked.errors)} errors; tasks tried: {tried}{expert}"

    values = picked(checked, "tasks", "expert_solved")
    findings = [finding._asdict() for finding in checked.findings]
    show(as_json, lambda: {"version": 1, **values, "findings": findings}, lines)
    return _WRONG if checked.errors else 0


@environments_command.command("play")
@argument("name", metavar="NAME")
@click.option("--task", "task_id", help="id of the task; the first one by default")
@click.option("--seed", type=int, default=0, show_default=True)
@overrides_argument
def play_environment_command(
    name: str, overrides: Sequence[str], task_id: str | None, seed: int
) -> int:
    """Play a task by hand: type one tool call per line, as `get_order order=S_k3F7` or as JSON.

    The exit code is 0 if the task was solved.
    """
    from flows.checking.sets import find_task, play_task, show_environment

    environment, tasks = show_environment(name, overrides)
    task = find_task(tasks, task_id)
    click.echo(f"{task.domain}/{task.id}: {task.summary}\n\n{environment.policy(task.domain)}\n")
    for tool in environment.tools(task.domain):
        click.echo(f"  {_signature(tool.name, tool.parameters)}  {tool.description}")

    def hear(messages: Sequence[Message]) -> None:
        print_lines(f"{message.role}: {message.content}" for message in messages)

    outcome = play_task(name, _calls(), overrides, task=task.id, seed=seed, hear=hear).outcome
    click.echo(f"\nreward {outcome.reward:g}" + (f", {outcome.failure}" if outcome.failure else ""))
    for check in outcome.checks:
        mark = "done" if check.passed else "missing"
        click.echo(
            f"  {mark:8}{check.kind}: {check.name}" + f" ({check.detail})" * bool(check.detail)
        )
    return 0 if outcome.success else 1


def _calls() -> Iterator[ToolCall]:
    """Tool calls as they are typed, until the end of input."""
    while True:
        click.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line:
            return
        call = _call(line)
        if call is None:
            print_line('one tool call, e.g. respond content="Hello." or {"name": …}')
        else:
            yield call


def _call(line: str) -> ToolCall | None:
    """A typed tool call: JSON, or a name and ``key=value`` pairs."""
    from refiner_core.environments.protocol import ToolCall

    try:
        if line.lstrip().startswith("{"):
            value = json.loads(line)
            return ToolCall(str(value["name"]), dict(value.get("arguments", {})))
        name, *words = shlex.split(line)
        return ToolCall(name, dict(word.split("=", 1) for word in words))
    except (ValueError, KeyError, TypeError):
        return None


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
            split: [picked(task, "id", "domain", "summary") for task in found]
            for split, found in tasks.items()
        },
    }


def _environment_lines(
    environment: Environment, tasks: dict[str, tuple[Task, ...]], with_tasks: bool
) -> Iterator[str]:
    kind = "deterministic" if environment.deterministic else "not deterministic"
    yield f"{environment.name}, version {environment.version}, {kind}"
    for domain in environment.domains():
        counts = ", ".join(
            f"{sum(t.domain == domain for t in found)} {split}" for split, found in tasks.items()
        )
        yield f"\n{domain} ({counts} tasks)\n  {environment.policy(domain)}"
        for tool in environment.tools(domain):
            yield f"    {_signature(tool.name, tool.parameters)}  {tool.description}"
    if with_tasks:
        rows = [(t.domain, t.id, s, t.summary) for s, found in tasks.items() for t in found]
        yield ""
        yield from table_lines(rows, ("domain", "task", "split", "what"))


# ---------------------------------------------------------------- shipped items


def _recipes() -> Listing:
    """Recipes, with the GPUs that each requests at once."""
    from flows.plans import list_recipes

    found = list_recipes()
    rows = [(name, _gpus(config), config.description) for name, config in found.items()]
    following = ("refiner plan tiny", "refiner init DIR --help", "refiner show SECTION RECIPE")
    value = {"recipes": {name: config.description for name, config in found.items()}}
    return value, rows, ("name", "GPUs", "for"), following


def _gpus(config: RecipeConfig) -> str:
    """GPUs of the jobs that need the most at the same time: a stage and its services."""
    from flows.checking.sources import resolve_sources
    from refiner_core.contract.placement import all_gpus, stages_at_once
    from refiner_core.contract.plan import make_plan

    together = stages_at_once(make_plan(config, resolve_sources(config)).stages)
    return " + ".join(str(all_gpus(stage)) for stage in together) or "none"


def _profiles() -> Listing:
    from infra.slurm.profiles import list_profiles

    found = list_profiles()
    following = ("refiner plan RECIPE dispatch.executor=slurm dispatch.profile=NAME",)
    return {"profiles": found}, list(found.items()), ("name", "for"), following


def _rubrics() -> Listing:
    from flows.checking.sets import list_rubric_sets

    def count(polarity: str) -> int:
        return sum(r.polarity == polarity for r in one.rubrics)

    sets, rows = list_rubric_sets(), []
    for one in sets:
        size = f"{count('positive')} + {count('negative')}"
        rows.append((one.name, str(one.version), size, one.digest()[:12], one.description))
    header = ("name", "version", "rubrics (+ -)", "digest", "for")
    following = ("refiner rubrics show NAME", "refiner plan RECIPE reward.static_rubrics=NAME")
    return {"sets": [set_json(one) for one in sets]}, rows, header, following


def _protocols() -> Listing:
    from flows.checking.sets import list_protocols

    found = list_protocols()
    rows = [
        (k.protocol.name, k.fingerprint, ", ".join(k.protocol.sections), k.description)
        for k in found
    ]
    following = ("refiner protocols show NAME", "refiner plan RECIPE evaluate.protocols=[NAME]")
    value = {"protocols": [known.as_json() for known in found]}
    return value, rows, ("name", "fingerprint", "fixes", "for"), following


def _environments() -> Listing:
    from flows.checking.sets import list_environments

    known = dict(list_environments())
    following = ("refiner environments show desk", "refiner plan tiny-tools")
    return {"environments": known}, list(known.items()), ("name", "for"), following


_LISTINGS = {
    **{"recipes": _recipes, "profiles": _profiles, "rubrics": _rubrics},
    **{"protocols": _protocols, "environments": _environments},
}


@click.command("list")
@argument("kind", type=click.Choice(tuple(_LISTINGS)), metavar="KIND")
@json_option
def list_command(kind: str, as_json: bool) -> None:
    """List what ships with refiner of KIND: recipes, profiles (of Slurm), rubrics, protocols,
    environments.

    A recipe of your own is a YAML file with `include: NAME` and the fields that differ (`refiner
    init` writes one). Profiles, rubric sets and protocols of your own are YAML files, too.
    """
    value, rows, header, following = _LISTINGS[kind]()
    show_listing(as_json, lambda: {"version": 1, **value}, rows, header, following)


@click.command("show")
@argument("words", nargs=-1, metavar="[FIELD] [RECIPE] [KEY=VALUE]...")
@click.option("--all", "every", is_flag=True, help="every field, with a line each")
@click.option("--search", metavar="WORD", default="", help="fields whose text contains WORD")
@click.option("--schema", is_flag=True, help="the JSON Schema of a recipe file, for editors")
@json_option
def show_command(
    words: tuple[str, ...], every: bool, search: str, schema: bool, as_json: bool
) -> None:
    """Explain FIELD: `grpo.beta`, a last part such as `beta`, or a section such as `grpo`.

    Shows its type, default and mark: an identity field decides what is computed (with another value
    stages run again), an execution field only where and how. With RECIPE, its value there, and the
    file and line, or the override, that set it. Without FIELD, list the sections.
    """
    from flows.starting.fields import explain_fields, field_json, field_lines, field_rows
    from refiner_core.contract.field_facts import fields_below, sections

    if schema:
        from refiner_core.contract.field_facts import recipe_schema

        print_json(recipe_schema())
        return
    names, overrides = split_overrides(words)
    # FIELD comes first, unless --all or --search replaces it.
    field = "" if every or search or not names else names.pop(0)
    recipe = names.pop(0) if names else ""
    if names or (overrides and not recipe):
        raise misuse(f"It was given {' '.join(words)}; overrides follow a recipe.")
    facts, found = explain_fields(field, recipe, overrides, search=search)

    def again(name: str) -> str:
        return command_line("show", name, *[recipe] * bool(recipe), *overrides)

    if not (field or every or search):
        listed: list[dict[str, Any]] = [
            {"section": n, "doc": doc, "fields": fields_below(n)} for n, doc in sections().items()
        ]
        show_listing(
            as_json,
            lambda: {"version": 1, "sections": listed},
            [(s["section"], str(len(s["fields"])), s["doc"]) for s in listed],
            ("section", "fields", "what it is"),
            ("refiner show SECTION", "refiner show FIELD RECIPE", "refiner show --search WORD"),
        )
        return

    def value() -> dict[str, object]:
        return {"version": 1, "fields": [field_json(one, found) for one in facts]}

    if len(facts) > 1:
        with_value = ("value", "source") if found else ("default",)
        header = ("field", "mark", *with_value, "what it is")
        rows = field_rows(facts, found)
        show_listing(as_json, value, rows, header, [again(facts[0].path)])
        return
    path = facts[0].path
    section = path.rpartition(".")[0]
    following = [again(section)] if section else ["refiner show"]
    if not recipe:
        following = [command_line("show", path, "tiny"), *following]
    show(as_json, value, lambda: field_lines(facts[0], found), following, gap=True)


# ---------------------------------------------------------------- completion


_INSTALL = {
    "bash": """echo 'eval "$(refiner completion bash)"' >> ~/.bashrc""",
    "zsh": """echo 'eval "$(refiner completion zsh)"' >> ~/.zshrc    # behind its compinit""",
    "fish": "refiner completion fish > ~/.config/fish/completions/refiner.fish",
}


@click.command("completion")
@click.argument("shell", type=click.Choice(tuple(_INSTALL)), metavar="[SHELL]", required=False)
@click.option("--install", is_flag=True, help="only print the command that installs it")
@click.option("--line", hidden=True, help="used by completion scripts of the previous release")
def completion_command(shell: str | None, install: bool, line: str | None) -> None:
    """Print the completion script of SHELL (bash, zsh, fish; default: yours).

    Completes commands, options, recipes, sweeps, runs, stages, files, and fields with their values:
    `refiner run tiny grpo.kl_` and the Tab key.
    """
    from click.shell_completion import get_completion_class

    from flows.cli.main import cli
    from flows.starting.completion import candidates

    used = shell or os.path.basename(os.environ.get("SHELL", ""))  # noqa: PTH119 - a name
    used = used if used in _INSTALL else "bash"
    with ignore_closed_pipe():
        if line is not None:
            print_lines(str(found.value) for found in candidates(cli, line))
        elif install:
            click.echo(_INSTALL[used])
        elif kind := get_completion_class(used):
            click.echo(kind(cli, {}, "refiner", "_REFINER_COMPLETE").source(), nl=False)
            print_line(f"\nNext (once; for new shells):\n  {_INSTALL[used]}")
