"""`refiner plan`, `explain`, `diff` and `why`: the plan of a recipe, the differences of two runs,
and the origin of a number. They change nothing, and import nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from flows.cli.aliases import former_option
from flows.cli.options import (
    argument,
    command_line,
    json_option,
    misuse,
    overrides_argument,
    print_json,
    print_lines,
    print_next,
    recipe_argument,
    show,
    split_workspace,
)
from refiner_core.contract.records import picked
from refiner_core.report.printing import size, table_lines

if TYPE_CHECKING:
    from flows.disk import PlannedSpace
    from refiner_core.contract.plan import Plan
    from refiner_core.contract.sections.steering import Resources


@click.command("plan")
@recipe_argument
@overrides_argument
@json_option
@click.option("--disk", "with_disk", is_flag=True, help="show disk use of each stage")
@click.option("--gpu", metavar="NAME", help="GPU of the time forecast, such as H100")
@former_option("--fit", "If a plan does not fit, smaller settings are printed below it.", flag=True)
def plan_command(
    recipe: str, overrides: tuple[str, ...], as_json: bool, with_disk: bool, gpu: str | None
) -> None:
    """Show what a recipe would do: which stages run, which are skipped, and why.

    Nothing is changed; neither network nor GPU is needed.
    """
    from flows.checking.resources import gpus_json, memory_json, planning_notes
    from flows.disk import disk_of_plan
    from flows.durations import forecast_times, monitor_cost, time_lines, times_json
    from flows.plans import forecast, plan_json
    from flows.running.calls import make_recipe_plan

    plan = make_recipe_plan(recipe, overrides)
    times = forecast_times(plan, gpu)
    if not as_json:
        show_plan(plan, recipe, overrides, as_json)
        click.echo("")
        done = {f.stage.name for f in forecast(plan) if f.action == "skip"}
        print_lines(time_lines([one for one in times if one.stage not in done], plan, gpu))
    space = disk_of_plan(plan).room
    if as_json:
        value = {**plan_json(plan, forecast(plan)), "disk": _disk_json(space)}
        value |= {
            "memory": memory_json(plan),
            "time": times_json(times),
            "notes": planning_notes(plan),
        }
        if cost := monitor_cost(plan.config):
            value["monitor"] = asdict(cost)
        value["gpus"] = gpus_json(plan)
        print_json(value)
        return
    _show_disk(space, stages=with_disk)


def _show_disk(space: PlannedSpace, *, stages: bool) -> None:
    """Print the disk use of the plan: one line if it does not fit, the full table on request."""
    from flows.disk import LESS_ROOM

    found = space.forecast
    if stages:
        rows = [(s.stage.name, size(s.peak), size(s.final), s.basis) for s in found.stages]
        click.echo("")
        print_lines(table_lines(rows, ("stage", "at most", "at the end", "by")))
    if stages or not space.fits:
        verdict = "fits" if space.fits else "does not fit"
        more = f" and {size(space.reclaimable_bytes)} can be freed" * bool(space.reclaimable_bytes)
        unknown = f"; unknown: {', '.join(found.unknown)}" * bool(found.unknown)
        click.echo(
            f"\ndisk: needs {size(found.needed_bytes)}, {size(space.free_bytes)} are free{more} "
            f"({space.source}): {verdict}{unknown}"
        )
    if not space.fits:
        click.echo(f"Reduce this with {LESS_ROOM}.")


def _disk_json(space: PlannedSpace) -> dict[str, Any]:
    """A disk forecast as JSON."""
    found = space.forecast
    return {
        **picked(found, "needed_bytes", "peak_bytes", "final_bytes"),
        **picked(space, "fits", "free_bytes", "reclaimable_bytes", "source"),
        "stages": [
            {
                **{"stage": s.stage.name, "peak_bytes": s.peak, "final_bytes": s.final},
                **{"by": s.basis, "known": s.known},
            }
            for s in found.stages
        ],
    }


def show_plan(plan: Plan, recipe: str, overrides: Sequence[str], as_json: bool) -> None:
    """Print a recipe's plan as a table or as JSON, notes on its training, and suggested
    commands."""
    from flows.checking.resources import gpu_lines, planning_notes

    show_plan_of(plan, as_json)
    if as_json:
        return
    print_lines(["", *lines] if (lines := gpu_lines(plan)) else [])
    for note in planning_notes(plan):
        click.echo(f"\nnote: {note}")
    command = command_line("run", recipe, *overrides)
    explain = command_line("explain", plan.stages[-1].name, recipe, *overrides)
    print_next(command, explain, gap=True)


def show_plan_of(plan: Plan, as_json: bool) -> None:
    """Print a plan as a table or as JSON."""
    from flows.plans import forecast, plan_json

    forecasts = forecast(plan)
    if as_json:
        print_json(plan_json(plan, forecasts))
        return
    click.echo(f"{plan.recipe}: {plan.config.description}".strip())
    click.echo(f"workspace: {plan.config.workspace}\n")
    rows = [
        (f.stage.name, f.stage.fingerprint[:12], f.action, _resources(f.stage.resources), f.reason)
        for f in forecasts
    ]
    print_lines(table_lines(rows, ("stage", "fingerprint", "action", "resources", "why")))


def _resources(asked: Resources) -> str:
    unit = f"{asked.gpus} GPU" if asked.gpus else f"{asked.cpus} CPU"
    return unit if asked.nodes == 1 else f"{asked.nodes} x {unit}"


@click.command("explain")
@argument("stage", metavar="STAGE")
@recipe_argument
@overrides_argument
@json_option
def explain_command(stage: str, recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Explain why STAGE (a name such as `evaluate-sft`, or a kind) would run or be skipped.

    Lists every field in which it differs from the most similar stage of the workspace.
    """
    from flows.plans import explain_stage

    plan, found = explain_stage(stage, recipe, overrides)

    def lines() -> Iterator[str]:
        for entry, differences in found:
            yield f"{entry.stage.title}: {entry.action}, {entry.reason}"
            for line in differences:
                yield f"  differs from the most similar recorded stage in {line}"
            for key, value in sorted(entry.stage.identity.items()):
                yield f"  {key} = {value}"
            for role, name in entry.stage.inputs.items():
                yield f"  input {role} = {plan.by_name[name].title}"

    stages = [
        {
            "stage": entry.stage.kind,
            **picked(entry.stage, "name", "fingerprint", "inputs"),
            **picked(entry, "action", "reason"),
            **{"differences": list(differences), "config": dict(entry.stage.identity)},
        }
        for entry, differences in found
    ]
    show(as_json, lambda: {"version": 1, "stages": stages}, lines)


# ---------------------------------------------------------------- diff and why


@click.command("diff")
@argument("words", nargs=-1, required=True, metavar="A B [workspace=DIR]")
@click.option("--other", metavar="DIR", help="workspace of B, if different")
@click.option("--exit-code", is_flag=True, help="exit with 1 if the outputs differ")
@json_option
def diff_command(
    words: tuple[str, ...], other: str | None, exit_code: bool, as_json: bool
) -> int | None:
    """Compare two runs: configuration, rows, code, judge, environment, training, numbers.

    A and B are runs (ids, or unique parts of ids), trials (SWEEP:ARM/seedN), or single stages
    (RUN:STAGE, or a stage's id). For two executions of one recipe in two workspaces it finds
    the first step and sample that differ.

    The exit code is 0 once both could be compared; with --exit-code it is 1 if the outputs are not
    bitwise the same, or not complete yet.
    """
    from flows.diffing.run_diff import diff_runs, difference_lines, next_commands
    from refiner_core.contract.records import to_json

    where, names = split_workspace(words)
    if len(names) != 2:
        raise misuse(f"It compares two, and was given {len(names)}; see `refiner runs`.")
    found = diff_runs(names[0], names[1], where, other=other)
    commands = next_commands(found)
    show(as_json, lambda: to_json(found), lambda: difference_lines(found), commands, gap=True)
    return 1 if exit_code and found["equal"] is not True else 0


@click.command("why", context_settings={"ignore_unknown_options": True})
@argument("words", nargs=-1, required=True, metavar="NUMBER|NAME... [RUN] [workspace=DIR]")
@former_option("--card", "Name the workspace=DIR of its run.")
@click.option("--sample", metavar="ID", help="show this sample in full (default: a typical one)")
@json_option
def why_command(words: tuple[str, ...], sample: str | None, as_json: bool) -> None:
    """Follow a number to its protocol, samples, answers and judgements.

    NUMBER is written as printed, such as 0.512; or names identify it: a metric, a model, a
    decoding (`citation_f1 grpo greedy`), or a training metric and a step (`scores step50`).
    It is searched in RUN (default: the newest run, then all).
    """
    from flows.why.explanation import (
        OUTPUT_VERSION,
        candidate_lines,
        explain_number,
        explanation_lines,
        find_numbers,
    )

    where, rest = split_workspace(words)
    figures, asked = find_numbers(rest, where), " ".join(rest)
    lines: Callable[[], list[str]]
    if len(figures) > 1:
        shown, lines = [asdict(f) for f in figures], partial(candidate_lines, figures, asked)
        others = [w for w in words if w.startswith("workspace=")]
        commands = [command_line("why", *figure.words, *others) for figure in figures[:2]]
    else:
        found = explain_number(figures[0], where, sample=sample)
        shown, lines = [found], partial(explanation_lines, figures[0], found)
        lowest = [s["name"] for s in found["samples"][:1] if sample is None]
        commands = [command_line("why", *words, "--sample", name) for name in lowest]
    value = {"version": OUTPUT_VERSION, "query": asked, "figures": shown}
    show(as_json, lambda: value, lines, commands, gap=True)
