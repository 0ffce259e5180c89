"""`refiner run`, `sweep`, `resume`, `cancel`, `logs`: carry out a recipe or an ablation, resume or
cancel a recorded one, read the output of stages.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from flows.cli.aliases import former_option
from flows.cli.options import (
    argument,
    ask_leave,
    at_most_one,
    ignore_closed_pipe,
    json_option,
    misuse,
    overrides_argument,
    print_json,
    print_line,
    print_next,
    recipe_argument,
    show,
    split_overrides,
    split_workspace,
    working_options,
)
from refiner_core.contract.records import picked
from refiner_core.report.printing import measured, table_lines

if TYPE_CHECKING:
    from flows.running.background import BackgroundProcess
    from flows.running.calls import RunOutcome
    from flows.running.foreground import LaunchOptions
    from flows.sweeping.launching import SweepOutcome
    from flows.sweeping.planning import SweepPreview
    from infra.store.workspace import Workspace
    from refiner_core.contract.records import RunRecord
    from sweeps.values import SweepPlan


@click.command("run")
@recipe_argument
@overrides_argument
@click.option("--dry-run", is_flag=True, help="print the plan and change nothing")
@click.option("--note", help="a note, shown by `refiner runs`; the same as tracking.notes=")
@working_options
def run_command(
    recipe: str,
    overrides: tuple[str, ...],
    note: str | None,
    dry_run: bool,
    detach: str | None,
    as_json: bool,
    launch: LaunchOptions,
) -> int:
    """Run RECIPE: a shipped name (see `refiner list recipes`) or a YAML file.

    Finished stages are skipped, running ones are awaited, interrupted ones resume from their
    last checkpoint. Ctrl-C, SIGTERM and closing the terminal (unless under nohup) ask the running
    stages to save and stop; the same command resumes. With --detach the terminal may be closed.
    """
    from flows.running.calls import begin_run, make_recipe_plan, run_recipe

    if note is not None:
        overrides = (*overrides, f"tracking.notes={json.dumps(note, ensure_ascii=False)}")
    if dry_run:
        from flows.cli.plan import show_plan

        show_plan(make_recipe_plan(recipe, overrides), recipe, overrides, as_json)
        return 0
    if detach is not None:
        _, workspace, run = begin_run(recipe, overrides)
        return leave_to(detach, workspace, run, as_json, launch)
    stop_on_signals()
    how = picked(launch, "use_server", "quiet")
    return finish(run_recipe(recipe, overrides, **how), as_json)


def stop_on_signals() -> None:
    """Treat SIGTERM and a closed terminal as Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores a closed terminal
            signal.signal(number, _like_ctrl_c)


def finish(outcome: RunOutcome, as_json: bool) -> int:
    """Print the outcome of a call and suggested commands; returns its exit code."""
    from flows.running.calls import run_json

    show(as_json, lambda: run_json(outcome), lambda: summary_lines(outcome))
    if outcome.next_commands:
        print_next(*outcome.next_commands)
    return outcome.exit_code


def leave_to(
    where: Any, workspace: Workspace, run: RunRecord, as_json: bool, launch: LaunchOptions
) -> int:
    """Continue a recorded run in the background, and print how to follow and end it."""
    from flows.running.background import detach_run
    from flows.running.status import stage_names

    how = picked(launch, "use_server", "take_over")
    left = detach_run(run, workspace.root, where=where, **how)
    following = (f"status {run.run}", f"logs -f {stage_names(run)[0]} {run.run}")
    return print_remaining(left, workspace, "run", run.run, following, as_json)


def print_remaining(
    left: BackgroundProcess,
    workspace: Workspace,
    noun: str,
    name: str,
    following: tuple[str, ...],
    as_json: bool,
) -> int:
    """Print what works on a call in the background; returns the exit code."""
    if as_json:
        value = {"version": 1, noun: name, "pid": left.pid, "job": left.job}
        print_json({**value, "log": str(left.log), "exit_code": left.exit_code})
    elif left.exit_code is not None:
        click.echo(f"{name}: ended at once with exit code {left.exit_code}; log: {left.log}")
    else:
        who = f"job {left.job}" if left.job else f"process {left.pid}"
        click.echo(f"{name}: in the background as {who}\nlog: {left.log}")
    if left.message:
        print_line(left.message)
    if not as_json and left.exit_code is None:
        place = f"workspace={workspace.root}"
        print_next(*(f"refiner {words} {place}" for words in (*following, f"cancel {name}")))
    return left.exit_code or 0


def _like_ctrl_c(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@click.command("cancel")
@argument("words", nargs=-1, metavar="[RUN|SWEEP] [STAGE]... [workspace=DIR]")
@click.option("--wait", "wait_s", type=float, help="seconds to wait for the end")
@click.option("--now", is_flag=True, help="end jobs from here, without the orchestrator")
@json_option
def cancel_command(words: tuple[str, ...], wait_s: float | None, now: bool, as_json: bool) -> int:
    """Cancel RUN (default: the newest), only some STAGEs of it, or all trials of a SWEEP.

    Jobs are asked to save and end, and killed after `dispatch.grace_s`. `refiner resume` continues
    later. Jobs that another run waits for are cancelled as well. Exit code: 0 if nothing of it is
    running any more, 1 if --wait was too short.
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
        outcome = cancel_sweep(sweep, where, wait_s=wait_s, now=now, tell=print_line)
    else:
        stages = set(newest.stages) if newest is not None else set()
        run = rest.pop(0) if rest and rest[0] not in stages else None
        outcome = cancel_run(run, rest, where, wait_s=wait_s, now=now, tell=print_line)
    show(as_json, lambda: outcome_json(outcome), lambda: outcome_lines(outcome, workspace))
    return 0 if outcome.ended else 1


@click.command("logs")
@argument("words", nargs=-1, required=True, metavar="STAGE [RUN] [workspace=DIR]")
@click.option("-f", "--follow", is_flag=True, help="print new lines until the stage ends")
@click.option("--attempt", type=int, help="an attempt's number (default: the newest)")
def logs_command(words: tuple[str, ...], follow: bool, attempt: int | None) -> None:
    """Print the log of STAGE's newest attempt in RUN (default: the newest run).

    -f follows the stage from attempt to attempt until it ends. On a terminal, control sequences are
    removed; a pipe gets the log unchanged.
    """
    from flows.running.logs import find_log, follow_log, log_pieces

    where, rest = split_workspace(words)
    if not rest:
        raise misuse("It was given no STAGE; `refiner status` shows those of the newest run.")
    stage, *runs = rest
    run = runs[0] if runs else None
    if follow:
        lines = follow_log(stage, run, where, attempt=attempt, tell=print_line)
    else:
        log = find_log(stage, run, where, attempt=attempt)
        if log is None:
            print_line(f"{stage} has not been started yet.")
            return
        if log.why:
            print_line(f"Attempt {log.attempt} of {stage} has printed nothing: {log.why}.")
            return
        print_line(f"{log.path} (attempt {log.attempt})")
        lines = log_pieces(log.path)
    with ignore_closed_pipe():
        for text in lines:
            sys.stdout.write(text)
            sys.stdout.flush()


# ---------------------------------------------------------------- summary of a run


def summary_lines(outcome: RunOutcome) -> Iterator[str]:
    """Rows kept, metrics by model and decoding with 95 % intervals, publications."""
    from flows.evaluations import evaluations_of
    from infra.store.workspace import Workspace

    workspace = Workspace.read_only(outcome.plan.config.workspace)
    yield from _kept(outcome)
    numbers = evaluations_of(outcome.plan, workspace)
    for under, decoding in dict.fromkeys((n["under"], n["decoding"]) for n in numbers):
        here = [n for n in numbers if (n["under"], n["decoding"]) == (under, decoding)]
        agent = bool(outcome.plan.config.environment.name)
        measured = f"protocol {under}" if under else f"held-out {'tasks' if agent else 'prompts'}"
        yield ""
        yield f"{decoding} decoding, {measured} (95 % interval)"
        yield from _table(here)
    yield from _outputs(outcome, workspace)


def _outputs(outcome: RunOutcome, workspace: Workspace) -> Iterator[str]:
    """Finished stages with damaged outputs, and how to make them again; then one line per
    publication, by step, the final state of the repository last."""
    made = []
    for view in outcome.views.values():
        stage_id = outcome.plan.by_name[view.name].id
        if damage := workspace.output_damage(stage_id):
            folder = workspace.layout.stage(stage_id).control
            yield ""
            yield f"{view.name} is done, but {damage}. To make it again: delete {folder}"
        elif view.kind == "publish" and "target" in view.report:
            made.append(view.report)
    yield from [""] if made else []
    for report in sorted(made, key=lambda r: (bool(r.get("final")), int(r.get("step") or 0))):
        said = [f"step {report['step']}"] if "step" in report else []
        if report.get("revision", "main") != "main":
            said.append(f"revision {report['revision']}")
        if best := report.get("best"):
            said.append(f"the best of {len(best['candidates'])} by {best['metric']}")
        yield f"published: {report['target']} ({', '.join(said) or 'the last step'})"


def _kept(outcome: RunOutcome) -> Iterator[str]:
    """Rows kept and dropped by the data stage, with reasons; attempts kept by the sample stage."""
    data = outcome.views.get("data")
    report = data.report if data is not None else {}  # an external trainer has its own data
    for which, label in (("sft", "demonstrations"), ("rl", "prompts")):
        counts = report.get(which) or {}
        if counts.get("read"):
            reasons = sorted((counts.get("dropped") or {}).items())
            dropped = ", ".join(f"{n} {reason}" for reason, n in reasons)
            why = f" (dropped: {dropped})" if dropped else ""
            yield f"{counts['kept']} of {counts['read']} {label} kept{why}"
    sampled = outcome.views.get("sample")
    if sampled is not None and (kept := sampled.report.get("kept")):
        prompts = sampled.report["prompts"]
        yield (
            f"{kept['demonstrations']} of {sampled.report['attempts']['total']} attempts kept, "
            f"{kept['full_success']} of them full successes; {prompts['full']} of "
            f"{prompts['total']} prompts solved"
        )


def _table(numbers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    from refiner_core.evaluation.metrics import main_metrics

    models = list(dict.fromkeys(n["stage"] for n in numbers))
    shown = main_metrics(str(n["metric"]) for n in numbers)
    values = {(n["stage"], n["metric"]): measured(n) for n in numbers}
    rows = [[model, *(values.get((model, m), "") for m in shown)] for model in models]
    return table_lines(rows, ["", *shown])


# ---------------------------------------------------------------- sweeps and resumed calls


@click.command("sweep")
@argument("words", nargs=-1, metavar="[SWEEP] [KEY=VALUE]...")
@click.option("--dry-run", is_flag=True, help="show arms, forecast and warnings; change nothing")
@click.option("--yes", "-y", is_flag=True, help="launch without asking")
@former_option(
    "--rescore", "`refiner rescore RUN KEY=VALUE …` shows the effect of an arm's reward and judge."
)
@click.option("--past-canary", is_flag=True, help="continue whatever the canary has shown")
@click.option("--take-over", is_flag=True, help="even if another host claims it")
@working_options
def sweep_command(
    words: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    detach: str | None,
    as_json: bool,
    launch: LaunchOptions,
) -> int:
    """Run SWEEP: a shipped name or a YAML file; without one, list sweeps.

    Plan and forecast are shown, and launched after confirmation or with --yes. One trial starts
    alone as a canary; after two steps and a save it corrects the forecast, and the others start. A
    failed trial stops no other. Finished work is skipped: the same command resumes after any
    interruption, and after a change of arms, seeds or limits runs only the new trials.

    Exit codes: 0 if every trial is done, 1 if one has failed, 6 if some were stopped or are
    held by a limit, 5 or 7 if a full disk or a judge is the obstacle; the same command continues.
    """
    from flows.running.status import is_finished
    from flows.sweeping.launching import begin_sweep, work_on_sweep, workspace_of
    from flows.sweeping.planning import make_sweep_plan, show_sweep_plan, sweep_json

    names, overrides = split_overrides(words)
    if not names:
        where, rest = split_workspace(overrides)
        if rest or dry_run or yes or detach is not None:
            raise misuse("No sweep is named; `refiner sweep` alone lists them.")
        _list(where, as_json)
        return 0
    at_most_one(names, "sweep")
    plan = make_sweep_plan(names[0], overrides)
    if dry_run:
        show(as_json, lambda: sweep_json(plan), lambda: show_sweep_plan(plan))
        return 0
    finished = is_finished(workspace_of(plan), plan.stages())
    look = None if finished else _looked_at(plan, shown=not (launch.quiet and yes))
    if not finished and not yes:
        why = "Nothing was launched: without a terminal there is no confirmation."
        ask_leave("Launch it?", why, "look at it with --dry-run, then add --yes")
    record = begin_sweep(plan, overrides, look=look, take_over=launch.take_over)
    workspace = workspace_of(plan, to_write=True)
    if detach is not None and not finished:
        return _leave_sweep_to(detach, workspace, record.name, launch, as_json)
    stop_on_signals()
    return _finish_sweep(work_on_sweep(plan, workspace, record, launch), as_json)


def _looked_at(plan: SweepPlan, *, shown: bool) -> SweepPreview:
    """Forecast of a sweep, before the confirmation; refuses an impossible sweep."""
    from flows.sweeping.launching import check_launch
    from flows.sweeping.planning import forecast_sweep, show_sweep_plan
    from sweeps.forecast import refuse_what_cannot_fit

    check_launch(plan)
    look = forecast_sweep(plan)
    if shown:
        for line in show_sweep_plan(plan, look):
            print_line(line)  # stdout is for the result
    refuse_what_cannot_fit(look.passed)
    return look


def _finish_sweep(outcome: SweepOutcome, as_json: bool) -> int:
    """Print the outcome of a call on a sweep; returns its exit code."""
    from flows.sweeping.status import SweepWatcher, status_json, status_lines, table_of

    status = SweepWatcher(outcome.workspace, outcome.record.name).observe()

    def lines() -> Iterator[str]:
        header, rows = table_of(status)
        yield from table_lines(rows, header)
        yield from status_lines(status, outcome.workspace)

    ended = {"exit_code": outcome.exit_code, "held": outcome.held}
    show(as_json, lambda: {**status_json(status), **ended}, lines)
    return outcome.exit_code


def _leave_sweep_to(
    where: Any, workspace: Workspace, name: str, launch: LaunchOptions, as_json: bool
) -> int:
    """Continue a recorded sweep in the background, and print how to follow and end it."""
    from flows.sweeping.launching import detach_sweep

    left = detach_sweep(name, workspace.root, where=where, launch=launch)
    return print_remaining(left, workspace, "sweep", name, (f"status {name} -w",), as_json)


def _list(where: str, as_json: bool) -> None:
    """List shipped sweeps, and those of a workspace."""
    from flows.running.console import states_text
    from flows.sweeping.planning import list_sweeps

    known = list_sweeps(where)
    shipped, found = known.shipped, known.recorded

    def lines() -> Iterator[str]:
        yield from table_lines(shipped, ("shipped sweep", "recipe", "question"))
        yield ""
        if not found:
            yield f"No sweep is recorded in {where}."
            return
        rows = [(name, str(s.record.number), states_text(s.counts)) for name, s in found.items()]
        yield from table_lines(rows, (f"sweeps of {where}", "version", "trials"))

    recorded = [
        {"sweep": name, "counts": s.counts, "finished": s.finished, "number": s.record.number}
        for name, s in found.items()
    ]
    names = [one.name for one in shipped]
    value = {"version": 1, "shipped": names, "recorded": recorded}
    show(as_json, lambda: value, lines, ["refiner sweep SWEEP --dry-run"])


@click.command("resume")
@argument("words", nargs=-1, metavar="[RUN|SWEEP] [workspace=DIR]")
@click.option("--take-over", is_flag=True, help="even if another host claims it")
@click.option("--past-canary", is_flag=True, help="of a sweep: whatever its canary has shown")
@click.option("--as-job", is_flag=True, hidden=True, help="this is a job that may be requeued")
@working_options
def resume_command(
    words: tuple[str, ...], detach: str | None, as_job: bool, as_json: bool, launch: LaunchOptions
) -> int:
    """Resume RUN or SWEEP (default: the newest unfinished run, or its sweep), exactly as it was
    begun.

    It keeps its id, its configuration and its code, whatever has changed in the recipe's file and
    the checkout. Cancelled stages continue, too.
    """
    from flows.running.calls import resume_run, run_to_resume
    from flows.sweeping.launching import resume_sweep
    from infra.store.workspace import Workspace

    where, rest = split_workspace(words)
    word = at_most_one(rest, "run", " for the newest unfinished one")
    workspace = Workspace.read_only(where)
    sweep = _sweep_to_resume(workspace, word)
    if detach is None:
        stop_on_signals()
        if as_job:
            signal.signal(signal.SIGTERM, _leave_the_node)
    if sweep is not None:
        if detach is None:
            return _finish_sweep(resume_sweep(sweep, where, launch=launch), as_json)
        return _leave_sweep_to(detach, workspace, sweep, launch, as_json)
    run = run_to_resume(workspace, word)
    for line in _what_differs(run):
        print_line(f"note: {line}")
    if detach is not None:
        return leave_to(detach, workspace, run, as_json, launch)
    how = picked(launch, "use_server", "take_over", "quiet")
    return finish(resume_run(run.run, where, **how), as_json)


def _sweep_to_resume(workspace: Workspace, word: str | None) -> str | None:
    """The sweep to resume; None for a run."""
    from flows.running.calls import run_to_resume
    from flows.sweeping.status import sweep_named
    from infra.store.sweep_records import sweep_versions
    from refiner_core.contract.records import trial_of

    if word is not None:
        return sweep_named(workspace, word)
    trial = trial_of(run_to_resume(workspace).provenance)
    return trial[0] if trial is not None and sweep_versions(workspace, trial[0]) else None


#: Fields that `refiner publish` sets, whatever the recipe has.
_BY_HAND = ("only", "publish.evaluate", "stages")


def _what_differs(run: RunRecord) -> Iterator[str]:
    """Notes on how a new `refiner run` would differ; the record is what is resumed."""
    from flows.running.calls import in_folder
    from refiner_core.contract.errors import RefinerError
    from refiner_core.contract.loading import leaves, load_recipe
    from refiner_core.contract.records import to_json

    recipe = run.provenance.get("recipe")
    if not recipe:
        return
    try:
        with in_folder(run.provenance.get("folder")):
            new = dict(leaves("", to_json(load_recipe(str(recipe), run.overrides))))
    except RefinerError as error:
        yield f"the recipe cannot be read any more ({error.what}); the record is used"
        return
    passed = ("workspace", *(_BY_HAND if run.provenance.get("publishes") else ()))
    # A field newer than the run shows no difference.
    fields = sorted(p for p, v in leaves("", run.config) if p not in passed and new.get(p) != v)
    if fields:
        shown = ", ".join([*fields[:5], *[f"{len(fields) - 5} more"] * (len(fields) > 5)])
        yield f"the recipe {recipe} has changed since ({shown}); the run continues as recorded"


def _leave_the_node(_number: int, _frame: FrameType | None) -> None:
    """Handle the end of this job's time, or preemption: the stages' jobs continue, and this one
    returns if it may be requeued."""
    from infra.slurm.submission import requeue_own_job

    requeue_own_job()
    os._exit(0)
