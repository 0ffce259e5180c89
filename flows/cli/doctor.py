"""`refiner doctor`: what of this machine works, what does not, and what mends it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from flows.cli.options import json_option, print_json, until_nobody_reads
from infra.host.terminal import raw

if TYPE_CHECKING:
    from infra.doctor.finding import Finding

_MARKS = {"ok": "ok", "missing": "--", "warning": "WARN", "broken": "BROKEN"}
_COLOURS = {"ok": "green", "missing": "bright_black", "warning": "yellow", "broken": "red"}
_BROKEN = 8  # as for every call that finds this machine lacking


@click.command("doctor")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
@click.option("--only", multiple=True, metavar="AREA", help="look at this area; may be repeated")
@click.option("--offline", is_flag=True, help="ask nobody outside this machine and its cluster")
@click.option("--job", is_flag=True, help="submit a tiny job to Slurm, and report from its node")
@click.option("--wait", "wait_s", type=click.FloatRange(min=1), default=120, show_default=True,
              metavar="SECONDS", help="with --job: how long to wait for it")  # fmt: skip
@click.option("--limit", "limit_s", type=click.FloatRange(min=0.1), metavar="SECONDS",
              help="give no check longer than this")  # fmt: skip
@json_option
def doctor_command(
    words: tuple[str, ...],
    only: tuple[str, ...],
    offline: bool,
    job: bool,
    wait_s: float,
    limit_s: float | None,
    as_json: bool,
) -> int:
    """Look at this machine: what works, what does not, and the one command that mends it.

    With RECIPE, what it needs is `broken` where it does not work, and the exit code is 8; without
    one, what is not there is only `missing`. Nothing is changed: files are tried in a scratch
    folder, jobs with `sbatch --test-only`. AREAs: recipe, python, machine, gpu, workspace, slurm,
    node, prefect, hub, wandb, judge, vllm, network.
    """
    from flows.doctor import examine, findings_json

    recipe, overrides = _split(words)
    findings = examine(
        recipe,
        overrides,
        offline=offline,
        only=[area for text in only for area in text.split(",")],
        job=job,
        wait_s=wait_s,
        limit_s=limit_s,
        tell=_tell,
    )
    broken = [f for f in findings if f.state == "broken"]
    if as_json:
        print_json(findings_json(findings))
    else:
        with until_nobody_reads():
            _show(findings)
            _say_next(recipe, words, findings)
    return _BROKEN if broken else 0


def _split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    from refiner_core.contract.errors import ConfigurationError

    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise ConfigurationError(
            f"`refiner doctor` looks with one recipe in mind, not with {len(names)}.",
            expected="a recipe's name or file, or none",
            fix=f"refiner doctor {names[0]}",
        )
    return (names[0] if names else None), [word for word in words if "=" in word]


def _tell(done: int, total: int) -> None:
    if sys.stderr.isatty():
        text = f"\r{done} of {total} checks" if done < total else "\r" + " " * 30 + "\r"
        click.echo(text, file=raw(sys.stderr), nl=False)


def _show(findings: Sequence[Finding]) -> None:
    width = max(len(mark) for mark in _MARKS.values())
    area = ""
    for finding in findings:
        if finding.area != area:
            area = finding.area
            click.secho(f"{'' if finding is findings[0] else chr(10)}{area}", bold=True)
        mark = click.style(_MARKS[finding.state].ljust(width), fg=_COLOURS[finding.state])
        click.echo(f"  {mark}  {finding.name}: {finding.what}")
        if finding.state == "ok":
            continue
        indent = " " * (width + 4)
        if finding.why:
            click.echo(f"{indent}for: {finding.why}")
        if finding.mend:
            click.echo(f"{indent}mend: {finding.mend}")


def _say_next(recipe: str | None, words: Sequence[str], findings: Sequence[Finding]) -> None:
    import shlex

    from infra.tracking.sync import shown_address

    count = {state: sum(f.state == state for f in findings) for state in _MARKS}
    click.echo(
        f"\n{count['ok']} ok, {count['warning']} with a warning, {count['missing']} not there, "
        f"{count['broken']} broken."
    )
    broken = next((f for f in findings if f.state == "broken" and f.mend), None)
    if broken is not None:
        click.echo(f"Next: mend {broken.area} ({broken.name}):\n  {broken.mend}")
    elif count["broken"]:
        click.echo("Next: mend what is broken, then call this again.")
    elif recipe is None:
        click.echo("Next: with a recipe in mind:\n  refiner doctor tiny")
    else:
        click.echo(f"Next:\n  {shown_address(shlex.join(['refiner', 'run', *words]))}")
