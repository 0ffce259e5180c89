"""`refiner plan` and `explain`: look, change nothing, import nothing heavy."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from flows.cli.options import (
    json_option,
    overrides_argument,
    print_json,
    print_table,
    recipe_argument,
)

if TYPE_CHECKING:
    from flows.disk import Interval, PlannedRoom
    from infra.disk.forecast import Change
    from refiner_core.contract.plan import Plan


@click.command("plan")
@recipe_argument
@overrides_argument
@json_option
@click.option("--disk", "with_disk", is_flag=True, help="show what each stage takes on the disk")
@click.option("--fit", "with_fit", is_flag=True, help="propose the cheapest change that fits")
def plan_command(
    recipe: str, overrides: tuple[str, ...], as_json: bool, with_disk: bool, with_fit: bool
) -> None:
    """Show what a recipe would do: which stages run, which are skipped, and why.

    Changes nothing, and needs neither network nor GPU.
    """
    from flows.api import make_recipe_plan

    plan = make_recipe_plan(recipe, overrides)
    if not as_json:
        show_plan(plan, recipe, overrides, as_json)
    show_disk(plan, DiskWords(recipe, overrides, with_disk or with_fit, with_fit), as_json)


class DiskWords(NamedTuple):
    """The call of `refiner plan`, as far as the disk goes."""

    recipe: str
    overrides: Sequence[str]
    always: bool
    fit: bool


def show_disk(plan: Plan, words: DiskWords, as_json: bool) -> None:
    """Print what the plan takes on the disk: one line where it does not fit, all where asked."""
    from flows.api import disk_of_plan, forecast, plan_json
    from flows.checking.resources import memory_json, planning_notes, time_json, time_notes
    from infra.disk.keeper import gib

    room, change, intervals = disk_of_plan(plan, fit=words.fit)
    if as_json:
        value = {**plan_json(plan, forecast(plan)), "disk": disk_json(room)}
        value |= {"memory": memory_json(plan), "time": time_json(plan)}
        value |= {"notes": [*planning_notes(plan), *time_notes(plan)]}
        if words.fit:
            value["disk"]["fit"] = None if change is None else list(change.overrides)
            value["disk"]["save_freq"] = {i.kind: i.save_freq for i in intervals}
        print_json(value)
        return
    needed, free = room.forecast.needed_bytes, room.free_bytes
    unknown = f"; nothing is known of {', '.join(room.forecast.unknown)}" * bool(
        room.forecast.unknown
    )
    if words.always:
        rows = [
            (s.stage.name, gib(s.peak), gib(s.final), f"{s.inodes:,}", s.basis)
            for s in room.forecast.stages
        ]
        if judged := room.forecast.judgements:
            rows.append(("(judgements)", gib(judged), gib(judged), "", "estimated"))
        click.echo("")
        print_table(rows, ("stage", "at most", "in the end", "files", "by"))
    if words.always or not room.fits:
        verdict = "fits" if room.fits else "does not fit"
        more = f" and {gib(room.reclaimable_bytes)} may go" * bool(room.reclaimable_bytes)
        click.echo(
            f"\ndisk: needs {gib(needed)}, {gib(free)} are free{more} ({room.source}): "
            f"{verdict}{unknown}"
        )
    if words.fit:
        _show_fit(words, room.fits, change, intervals)


def _show_fit(
    words: DiskWords, fits: bool, change: Change | None, intervals: Sequence[Interval]
) -> None:
    from infra.disk.keeper import gib

    for interval in intervals:
        click.echo(
            f"{interval.kind}.save_freq={interval.save_freq} would lose the least time "
            f"(it is {interval.configured}): {interval.why}"
        )
    if fits:
        return
    if change is None:
        click.echo("No change of how it is carried out makes it fit.")
        where = [w for w in words.overrides if w.startswith("workspace=")]
        command = shlex.join(["refiner", "disk", *where, "--reclaim", "--dry-run"])
        click.echo(f"Next:\n  {command}", err=True)
        return
    click.echo(f"It fits with {gib(change.needed_bytes)}: {change.cost}.")
    command = shlex.join(["refiner", "run", words.recipe, *words.overrides, *change.overrides])
    click.echo(f"Next:\n  {command}", err=True)


def disk_json(room: PlannedRoom) -> dict[str, Any]:
    """A forecast for scripts."""
    found = room.forecast
    return {
        "fits": room.fits,
        "needed_bytes": found.needed_bytes,
        "peak_bytes": found.peak_bytes,
        "final_bytes": found.final_bytes,
        "judgements_bytes": found.judgements,
        "inodes": found.inodes,
        "free_bytes": room.free_bytes,
        "reclaimable_bytes": room.reclaimable_bytes,
        "source": room.source,
        "stages": [
            {
                "stage": s.stage.name,
                "peak_bytes": s.peak,
                "final_bytes": s.final,
                "inodes": s.inodes,
                "by": s.basis,
                "known": s.known,
            }
            for s in found.stages
        ],
    }


def show_plan(plan: Plan, recipe: str, overrides: Sequence[str], as_json: bool) -> None:
    """Print a recipe's plan as a table or as JSON, what is worth knowing of how it trains, and what
    to do next."""
    from flows.checking.resources import planning_notes, time_notes

    show_made_plan(plan, as_json)
    if as_json:
        return
    for note in (*planning_notes(plan), *time_notes(plan)):
        click.echo(f"\nnote: {note}")
    command = shlex.join(["refiner", "run", recipe, *overrides])
    explain = shlex.join(["refiner", "explain", plan.stages[-1].name, recipe, *overrides])
    click.echo(f"\nNext:\n  {command}\n  {explain}", err=True)


def show_made_plan(plan: Plan, as_json: bool) -> None:
    """Print a plan as a table or as JSON."""
    from flows.api import forecast, plan_json

    forecasts = forecast(plan)
    if as_json:
        print_json(plan_json(plan, forecasts))
        return
    click.echo(f"{plan.recipe}: {plan.config.description}".strip())
    click.echo(f"workspace: {plan.config.workspace}\n")
    rows = [
        (
            f.stage.name,
            f.stage.fingerprint[:12],
            f.action,
            _resources(f.stage.resources.gpus, f.stage.resources.nodes, f.stage.resources.cpus),
            f.reason,
        )
        for f in forecasts
    ]
    print_table(rows, ("stage", "fingerprint", "action", "resources", "why"))


def _resources(gpus: int, nodes: int, cpus: int) -> str:
    unit = f"{gpus} GPU" if gpus else f"{cpus} CPU"
    return unit if nodes == 1 else f"{nodes} x {unit}"


@click.command("explain")
@click.argument("stage", metavar="STAGE")
@recipe_argument
@overrides_argument
@json_option
def explain_command(stage: str, recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Say why STAGE (a name such as `evaluate-sft`, or a kind) would run or be skipped.

    Names every field in which it differs from the most similar stage that the workspace has.
    """
    from flows.api import explain_stage

    plan, explained = explain_stage(stage, recipe, overrides)
    found = [(one.forecast, list(one.differences)) for one in explained]
    if as_json:
        print_json(
            {
                "version": 1,
                "stages": [
                    {
                        "stage": e.stage.kind,
                        "name": e.stage.name,
                        "fingerprint": e.stage.fingerprint,
                        "action": e.action,
                        "reason": e.reason,
                        "differences": d,
                        "inputs": dict(e.stage.inputs),
                        "config": dict(e.stage.identity),
                    }
                    for e, d in found
                ],
            }
        )
        return
    for entry, differences in found:
        click.echo(f"{entry.stage.title}: {entry.action}, {entry.reason}")
        for line in differences:
            click.echo(f"  differs from the nearest recorded one in {line}")
        for key, value in sorted(entry.stage.identity.items()):
            click.echo(f"  {key} = {value}")
        for role, name in entry.stage.inputs.items():
            click.echo(f"  input {role} = {plan.by_name[name].title}")
