"""`refiner rubrics`: list the sets, show one, check a set or the rubrics of rows."""

from __future__ import annotations

import shlex
import textwrap
from typing import TYPE_CHECKING, Any

import click

from flows.cli.listing import show_listing
from flows.cli.options import json_option, print_json, until_nobody_reads

if TYPE_CHECKING:
    from refiner_core.rubrics import RubricSet
    from refiner_core.rubrics.lint import Checked, Finding

#: Exit code of rubrics that are wrong: bad data.
_WRONG = 3
_SHOWN = 3  # findings of each kind that are printed; the JSON has all
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
        context.invoke(list_command, as_json=as_json)


@rubrics_command.command("list")
@json_option
def list_command(as_json: bool) -> None:
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
def show_command(name: str, as_json: bool) -> None:
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
def check_command(file: str, as_json: bool, strict: bool, show_all: bool) -> int:
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
        shown = found if show_all else found[:_SHOWN]
        for finding in shown:
            click.echo(f"    {_placed(checked, finding)}: {finding.what}")
        if len(found) > len(shown):
            click.echo(f"    ({len(found) - len(shown)} more: --all)")
    click.echo(_summary(checked))


def _placed(checked: Checked, finding: Finding) -> str:
    place = f" {finding.place}" if finding.place else ""
    titled = f" {finding.title!r}" if finding.title else ""
    return f"{checked.name}:{finding.line}{place}{titled}"


def _summary(checked: Checked) -> str:
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
