"""`refiner run`, `cancel` and `logs`: carry out a recipe, end it, read what its stages print."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from flows.cli.options import (
    json_option,
    overrides_argument,
    print_json,
    recipe_argument,
    say,
    say_next,
    show,
    split_workspace,
    until_nobody_reads,
    working_options,
)
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.records import picked
from refiner_core.report.printing import measured, table_lines

if TYPE_CHECKING:
    from flows.running.background import Detached, Launch
    from flows.running.calls import RunOutcome
    from infra.store.workspace import Workspace
    from refiner_core.contract.records import RunRecord


@click.command("run")
@recipe_argument
@overrides_argument
@click.option("--dry-run", is_flag=True, help="print the plan and change nothing")
@working_options
def run_command(
    recipe: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    detach: str | None,
    as_json: bool,
    launch: Launch,
) -> int:
    """Carry out RECIPE: a shipped name (see `refiner recipes`) or a YAML file.

    What is done is skipped, what already runs is waited for, what was interrupted goes on from its
    last checkpoint. Ctrl-C, SIGTERM and closing the terminal (unless under nohup) ask the running
    stages to save and stop; the same command goes on. With --detach the terminal may be closed.
    """
    from flows.cli.plan import show_plan
    from flows.running.calls import begin_run, make_recipe_plan
    from flows.running.runs import run_recipe

    if dry_run:
        show_plan(make_recipe_plan(recipe, overrides), recipe, overrides, as_json)
        return 0
    if detach is not None:
        _, workspace, run = begin_run(recipe, overrides)
        return leave_to(detach, workspace, run, as_json, launch)
    stop_on_signals()
    how = picked(launch, "use_server", "quiet")
    return finish(run_recipe(recipe, overrides, **how), as_json)


def stop_on_signals() -> None:
    """Take SIGTERM and a closed terminal for Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores a closed terminal
            signal.signal(number, _like_ctrl_c)


def finish(outcome: RunOutcome, as_json: bool) -> int:
    """Print how a call ended, and what to type now; its exit code."""
    from flows.running.runs import run_json

    show(as_json, lambda: run_json(outcome), lambda: summary_lines(outcome))
    if outcome.next_commands:
        say_next(*outcome.next_commands)
    return outcome.exit_code


def leave_to(
    where: Any, workspace: Workspace, run: RunRecord, as_json: bool, launch: Launch
) -> int:
    """Leave a recorded run to the background, and say how to look at it and end it."""
    from flows.running.background import detach_run
    from flows.running.status import stage_names

    how = picked(launch, "use_server", "take_over")
    left = detach_run(run, workspace.root, where=where, **how)
    following = (f"status {run.run}", f"logs -f {stage_names(run)[0]} {run.run}")
    return say_left(left, workspace, "run", run.run, following, as_json)


def say_left(
    left: Detached,
    workspace: Workspace,
    noun: str,
    name: str,
    following: tuple[str, ...],
    as_json: bool,
) -> int:
    """Print who works on what was left to the background; the exit code."""
    if as_json:
        value = {"version": 1, noun: name, "pid": left.pid, "job": left.job}
        print_json({**value, "log": str(left.log), "exit_code": left.exit_code})
    elif left.exit_code is not None:
        click.echo(f"{name}: ended at once with exit code {left.exit_code}; log: {left.log}")
    else:
        who = f"job {left.job}" if left.job else f"process {left.pid}"
        click.echo(f"{name}: in the background as {who}\nlog: {left.log}")
    if left.message:
        say(left.message)
    if not as_json and left.exit_code is None:
        place = f"workspace={workspace.root}"
        say_next(*(f"refiner {words} {place}" for words in (*following, f"cancel {name}")))
    return left.exit_code or 0


def _like_ctrl_c(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@click.command("cancel")
@click.argument("words", nargs=-1, metavar="[RUN|SWEEP] [STAGE]... [workspace=DIR]")
@click.option("--wait", "wait_s", type=float, help="seconds to wait for the end")
@click.option("--now", is_flag=True, help="do not leave it to the orchestrator; end jobs from here")
@json_option
def cancel_command(words: tuple[str, ...], wait_s: float | None, now: bool, as_json: bool) -> int:
    """End RUN (default: the newest), or only the STAGEs named; of a SWEEP all trials.

    Jobs are asked to save and end, and killed when they take longer than `dispatch.grace_s`.
    `refiner resume` goes on later. Jobs that another run waits for too are ended as well. Exit
    code: 0 when nothing of it runs any more, 1 when that takes longer than was waited for.
    """
    from flows.running.cancelling import cancel_run, outcome_json, outcome_lines
    from flows.running.status import find_run
    from flows.sweeping.launching import cancel_sweep
    from flows.sweeping.status import newest_sweep, sweep_named
    from infra.store.workspace import Workspace

    where, rest = split_workspace(words)
    workspace = Workspace.read_only(where)
    newest = find_run(workspace)
    sweep = sweep_named(workspace, rest[0]) if rest else newest_sweep(workspace, newest)
    if sweep is not None and len(rest) <= 1:
        outcome = cancel_sweep(sweep, where, wait_s=wait_s, now=now, tell=say)
    else:
        stages = set(newest.stages) if newest is not None else set()
        run = rest.pop(0) if rest and rest[0] not in stages else None
        outcome = cancel_run(run, rest, where, wait_s=wait_s, now=now, tell=say)
    show(as_json, lambda: outcome_json(outcome), lambda: outcome_lines(outcome, workspace))
    return 0 if outcome.ended else 1


@click.command("logs")
@click.argument("words", nargs=-1, required=True, metavar="STAGE [RUN] [workspace=DIR]")
@click.option("-f", "--follow", is_flag=True, help="go on printing until the stage ends")
@click.option("--attempt", type=int, help="an attempt's number (default: the newest)")
def logs_command(words: tuple[str, ...], follow: bool, attempt: int | None) -> None:
    """Print the log of STAGE's newest attempt in RUN (default: the newest run).

    With -f it goes over to the next attempt when there is one, and ends when the stage does. On a
    terminal control sequences are left out; a pipe has the log as it is.
    """
    from flows.running.logs import find_log, follow_log, log_pieces

    where, rest = split_workspace(words)
    if not rest:
        raise ConfigurationError(
            "`refiner logs` was given no stage.",
            expected="STAGE, such as grpo, and perhaps RUN and workspace=DIR",
            fix="name one; `refiner status` shows the stages of the newest run",
        )
    stage, *runs = rest
    run = runs[0] if runs else None
    if follow:
        lines = follow_log(stage, run, where, attempt=attempt, tell=say)
    else:
        log = find_log(stage, run, where, attempt=attempt)
        if log is None:
            say(f"{stage} has not been started yet.")
            return
        if log.why:
            say(f"Attempt {log.attempt} of {stage} has printed nothing: {log.why}.")
            return
        say(f"{log.path} (attempt {log.attempt})")
        lines = log_pieces(log.path)
    with until_nobody_reads():
        for text in lines:
            sys.stdout.write(text)
            sys.stdout.flush()


# ---------------------------------------------------------------- summary of a run


def summary_lines(outcome: RunOutcome) -> Iterator[str]:
    """Rows kept, numbers by model and decoding with 95 % intervals, what is published where."""
    from flows.evaluations import evaluations_of
    from infra.store.workspace import Workspace

    workspace = Workspace.read_only(outcome.plan.config.workspace)
    yield from _rows_kept(outcome)
    yield from _attempts_kept(outcome)
    numbers = evaluations_of(outcome.plan, workspace)
    for under, decoding in dict.fromkeys((n["under"], n["decoding"]) for n in numbers):
        here = [n for n in numbers if (n["under"], n["decoding"]) == (under, decoding)]
        agent = bool(outcome.plan.config.environment.name)
        measured = f"protocol {under}" if under else f"held-out {'tasks' if agent else 'prompts'}"
        yield ""
        yield f"{decoding} decoding, {measured} (95 % interval)"
        yield from _table(here)
    yield from _damages(outcome, workspace)
    yield from _publications(outcome, workspace)


def _damages(outcome: RunOutcome, workspace: Workspace) -> Iterator[str]:
    """Finished stages whose output is not what it was, and how to make it again."""
    for view in outcome.views.values():
        stage_id = outcome.plan.by_name[view.name].id
        if damage := workspace.output_damage(stage_id):
            folder = workspace.layout.stage(stage_id).control
            yield ""
            yield f"{view.name} is done, but {damage}. To make it again: delete {folder}"


def _publications(outcome: RunOutcome, workspace: Workspace) -> Iterator[str]:
    """One line for each publication that is there, by step; what the repository ends at is last."""
    made = []
    for view in outcome.views.values():
        stage_id = outcome.plan.by_name[view.name].id
        there = view.kind == "publish" and "target" in view.report
        if there and workspace.output_damage(stage_id) is None:
            made.append(view.report)
    if made:
        yield ""
    for report in sorted(made, key=lambda r: (bool(r.get("final")), int(r.get("step") or 0))):
        yield f"published: {report['target']} ({_which(report)})"


def _which(report: Mapping[str, Any]) -> str:
    said = [f"step {report['step']}"] if "step" in report else []
    if report.get("revision", "main") != "main":
        said.append(f"revision {report['revision']}")
    if report.get("best"):
        said.append(
            f"the best of {len(report['best']['candidates'])} by {report['best']['metric']}"
        )
    return ", ".join(said) or "the last step"


def _rows_kept(outcome: RunOutcome) -> Iterator[str]:
    """Rows that the data stage kept and dropped, and why."""
    data = outcome.views.get("data")
    report = data.report if data is not None else {}  # another trainer brings its own data
    for which, label in (("sft", "demonstrations"), ("rl", "prompts")):
        counts = report.get(which) or {}
        if not counts.get("read"):
            continue
        dropped = [f"{n} {reason}" for reason, n in sorted((counts.get("dropped") or {}).items())]
        why = f" (dropped: {', '.join(dropped)})" if dropped else ""
        yield f"{counts['kept']} of {counts['read']} {label} kept{why}"


def _attempts_kept(outcome: RunOutcome) -> Iterator[str]:
    """Attempts that the sample stage kept."""
    sampled = outcome.views.get("sample")
    report = sampled.report if sampled is not None else {}
    if not report.get("kept"):
        return
    kept, attempts, prompts = report["kept"], report["attempts"], report["prompts"]
    yield (
        f"{kept['demonstrations']} of {attempts['total']} attempts kept "
        f"({kept['full_success']} full successes, {kept['best_partial']} best partial ones) at "
        f"{prompts['total']} prompts, {prompts['full']} of them solved"
    )


def _table(numbers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    from refiner_core.evaluation.metrics import main_metrics

    models = list(dict.fromkeys(n["stage"] for n in numbers))
    shown = main_metrics(str(n["metric"]) for n in numbers)
    values = {(n["stage"], n["metric"]): measured(n) for n in numbers}
    rows = [[model, *(values.get((model, m), "") for m in shown)] for model in models]
    return table_lines(rows, ["", *shown])
