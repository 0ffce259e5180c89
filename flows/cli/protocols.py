"""`refiner protocols`: list the shipped ones, show one, check a file, list the fields."""

from __future__ import annotations

import json
import shlex
import textwrap
from typing import TYPE_CHECKING

import click

from flows.cli.listing import show_listing
from flows.cli.options import json_option, print_json, print_table, until_nobody_reads

if TYPE_CHECKING:
    pass

_WIDTH = 98


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
        context.invoke(list_command, as_json=as_json)


@protocols_command.command("list")
@json_option
def list_command(as_json: bool) -> None:
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
def show_command(name: str, as_json: bool) -> None:
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
def check_command(file: str, recipe: str, as_json: bool) -> None:
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
def fields_command(as_json: bool) -> None:
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
