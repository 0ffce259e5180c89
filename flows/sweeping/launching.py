"""Launches, works on and ends a sweep; records its versions.

In: a :class:`SweepPlan`. Out: a :class:`SweepRecord`, written only if it differs from the newest
one; a :class:`SweepOutcome`. The record describes the sweep completely, so another process can
continue it: in the background, in a Slurm job, from any shell. Finished work never runs again. For
a cancel, a sweep is one call with the stages of all its trials.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.checking.resources import check_server_programs
from flows.notifying.notifiers import SweepNotifier
from flows.running.background import BackgroundProcess, Where, attach, leave
from flows.running.calls import (
    CodeSnapshot,
    check_hub_access,
    check_supported,
    in_folder,
    pin_code,
    print_line,
    refuse_what_never_fits,
    warn_of_silence,
    with_space,
)
from flows.running.cancelling import CancelOutcome, cancel, waiting_stages
from flows.running.console import Console
from flows.running.foreground import CallObserver, LaunchOptions, orchestrate
from flows.running.status import is_finished
from flows.sweeping.admission import Admission, TrialVerdict, find_canary
from flows.sweeping.budget import Budget, UsageReader
from flows.sweeping.forecasting import forecast_json, forecast_of, passed_by
from flows.sweeping.planning import SweepPreview, detectable_json, forecast_sweep, make_sweep_plan
from infra.host.processes import ProcessId, host_name, user_name
from infra.jobs.dispatch import make_router
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.layout import sweep_call
from infra.store.orchestrators import orchestrator_of, require_idle, take_up
from infra.store.provenance import snapshot_code
from infra.store.sweep_records import (
    read_sweep,
    sweep_folder,
    sweep_versions,
    trial_run,
    write_sweep,
)
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.records import (
    RECORD_VERSION,
    SWEEP_VERSION,
    RunRecord,
    SweepRecord,
    TrialRecord,
    from_json,
    to_json,
)
from refiner_core.contract.sections.steering import alarms_of
from sweeps.forecast import refuse_what_cannot_fit
from sweeps.values import SweepPlan

#: Fields that may differ between two records of one version.
_OF_THE_LAUNCH = ("number", "folder", "forecast", "code", "started_at", "provenance")


def record_version(
    plan: SweepPlan,
    workspace: Workspace,
    overrides: Sequence[str],
    forecast: Mapping[str, Any],
    *,
    take_over: bool = False,
) -> SweepRecord:
    """The newest version of the sweep; written now if it differs from the last one.

    Raises
    ------
    ConfigurationError
        Another process is working on the sweep.
    """
    sweep, name = plan.sweep, plan.sweep.name
    require_idle(workspace, sweep_call(name), regardless=take_over)
    while True:
        versions = sweep_versions(workspace, name)
        newest = read_sweep(workspace, name) if versions else None
        record = SweepRecord(
            version=SWEEP_VERSION,
            number=(versions or [0])[-1] + 1,
            name=name,
            recipe=sweep.recipe,
            folder=str(Path.cwd()),
            text=sweep.text,
            arms=plan.arms,
            baseline=plan.baseline,
            seeds=tuple(sweep.seeds),
            trials=tuple(
                TrialRecord(t.arm, t.seed, t.overrides, {s.name: s.id for s in t.plan.stages})
                for t in plan.trials
            ),
            limits=to_json(sweep.limits),
            question=_question_of(plan),
            forecast=forecast,
            code="",
            started_at=now_text(),
            provenance={"overrides": list(overrides), "origin": sweep.origin},
        )
        if newest is not None and _same(newest, record):
            return newest
        code = pin_for(workspace, name)
        found = {**code.provenance, **record.provenance}
        record = replace(record, code=code.code, provenance=found)
        if write_sweep(workspace, record):
            return record


def _question_of(plan: SweepPlan) -> dict[str, Any]:
    """The question. ``measured_as`` names the protocol with its numbers if another one measures in
    the same way (empty: the recipe's own); the question's protocol then has no stages of its
    own."""
    asked: dict[str, Any] = to_json(plan.sweep.question)
    first, named = plan.trials[0].plan, plan.sweep.question.protocol
    models = dict.fromkeys(s.model for s in first.stages if s.kind == "evaluate")
    found = (first.evaluation(model, named) for model in models)
    stage = next(filter(None, found), None)
    if named and stage is not None and stage.protocol != named:
        asked["measured_as"] = stage.protocol
    return asked


def _same(one: SweepRecord, other: SweepRecord) -> bool:
    """True if two records are the same sweep, whenever and wherever they were launched."""

    def what(record: SweepRecord) -> str:
        found = {k: v for k, v in to_json(record).items() if k not in _OF_THE_LAUNCH}
        for trial in found["trials"]:  # the workspace may be mounted elsewhere
            trial["overrides"] = [o for o in trial["overrides"] if not o.startswith("workspace=")]
        return json.dumps(found, sort_keys=True, default=str)

    return what(one) == what(other)


def pin_for(workspace: Workspace, name: str) -> CodeSnapshot:
    """The current code and its provenance, stored beside the sweep: background processes import the
    snapshot, and know no checkout."""
    code = snapshot_code(workspace)
    path = sweep_folder(workspace, name) / "pinned" / f"{code.name}.json"
    if (found := workspace.read_control(path)) is not None:
        return from_json(CodeSnapshot, found)
    pinned = pin_code(workspace)
    with no_space_guard(workspace.root, "pinning the code"):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_json(path, to_json(pinned))
    return pinned


def plan_of_record(workspace: Workspace, record: SweepRecord) -> SweepPlan:
    """Plan of a recorded version, from its text.

    Raises
    ------
    ConfigurationError
        The inputs of its trials have changed; the message names them.
    """
    from flows.sweeping.planning import plan_of
    from sweeps.definition import parse_sweep

    overrides = [str(text) for text in record.provenance.get("overrides") or ()]
    origin = str(record.provenance.get("origin") or "")
    place = f"workspace={workspace.root}"
    plan = plan_of(parse_sweep(record.text, record.name, origin), [*overrides, place])
    now = {t.name: {s.name: s.id for s in t.plan.stages} for t in plan.trials}
    other = [t.name for t in record.trials if now.get(t.name) != dict(t.stages)]
    if other:
        shown = ", ".join(other[:5]) + (f" and {len(other) - 5} more" if len(other) > 5 else "")
        raise ConfigurationError(
            f"Sweep {record.name} cannot be resumed as it was: the inputs of {len(other)} of its "
            f"{len(record.trials)} trials have changed ({shown}).",
            expected="the recipe, rows, weights, rubrics and protocols that it was launched with",
            fix="bring these back, or launch it as it is now: refiner sweep "
            f"{origin or record.name}",
        )
    return plan


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepOutcome:
    """Outcome of a call on a sweep.

    ``words`` maps trials to their states; ``held`` is the reason why no more were begun.
    """

    record: SweepRecord
    workspace: Workspace
    words: Mapping[str, TrialVerdict]
    held: str
    exit_code: int


# ---------------------------------------------------------------- before


def workspace_of(plan: SweepPlan, *, to_write: bool = False) -> Workspace:
    """The workspace of a sweep's trials."""
    config = plan.config
    if to_write:
        return with_space(config, lambda: Workspace.open(config.workspace, config.data_root))
    return Workspace.read_only(config.workspace)


def check_launch(plan: SweepPlan) -> None:
    """Refuse what cannot be carried out here, before anything is recorded.

    Raises
    ------
    RefinerError
        Names the field.
    """
    check_arms(plan)
    for trial in {t.arm: t for t in plan.trials}.values():
        refuse_what_never_fits(trial.plan)
    check_hub_access(plan.config)
    warn_of_silence(plan.config)


def check_arms(plan: SweepPlan) -> None:
    """Refuse arms that this version or machine cannot carry out; errors as for
    :func:`flows.running.calls.check_supported`."""
    for trial in {t.arm: t for t in plan.trials}.values():
        check_supported(trial.plan.config)
        check_server_programs(trial.plan)


# ---------------------------------------------------------------- work


def work_on_sweep(
    plan: SweepPlan, workspace: Workspace, record: SweepRecord, launch: LaunchOptions
) -> SweepOutcome:
    """Take a sweep up, and work on it until every trial has ended or is held.

    Parameters
    ----------
    plan, workspace, record
        The sweep, and its newest recorded version.
    launch
        Settings of the work.

    Returns
    -------
    SweepOutcome
        State of each trial. Failed trials raise nothing.

    Raises
    ------
    ConfigurationError
        Another process is working on it.
    """
    call = sweep_call(record.name)
    before, config = orchestrator_of(workspace, call), plan.config
    router = make_router(config.dispatch, workspace)
    router.check(plan.stages().values())
    with_space(config, lambda: take_up(workspace, call, regardless=launch.take_over))
    with_space(config, lambda: workspace.withdraw_cancel(call))
    name, limits, finished = record.name, plan.sweep.limits, is_finished(workspace, plan.stages())
    admission = Admission(
        plan,
        workspace,
        Budget(limits, UsageReader(workspace)),
        poll_s=config.dispatch.poll_s,
        corrected=lambda canary: forecast_of(plan, workspace, canary),
        passed=lambda forecast: passed_by(forecast, plan, workspace),
        canary=None if finished else find_canary(plan, workspace),
        forecast=None if finished else forecast_of(plan, workspace),
        past_canary=launch.past_canary,
        take_over=launch.take_over,
        pin=lambda ws: pin_for(ws, name),
    )
    observer = CallObserver()
    if alarms_of(config.notify):
        about = (call, record, config.notify, workspace, before)
        observer = SweepNotifier(admission, *about, resumed=launch.resumed, print_line=print_line)
    if finished:
        admission.begin()
        admission.end(None)
        observer.over({})
        observer.close()
    else:
        console = Console(trials=admission.standing, quiet=launch.quiet)
        admission.tell = console.note
        admission.note({"event": "begin", "process": str(ProcessId.of())})
        orchestrate(
            *(admission, workspace, router, config),
            console=console,
            observer=observer,
            begun=lambda: attach(workspace, call, console) if launch.use_server else None,
        )
    return SweepOutcome(
        record, workspace, admission.standing(), admission.held, admission.exit_code
    )


def begin_sweep(
    plan: SweepPlan,
    overrides: Sequence[str] = (),
    *,
    look: SweepPreview | None = None,
    take_over: bool = False,
) -> SweepRecord:
    """Check a sweep and record its newest version.

    Parameters
    ----------
    plan
        From :func:`flows.api.make_sweep_plan`.
    overrides
        The overrides of that plan.
    look
        A recent result of :func:`flows.api.forecast_sweep` (default: computed again).
    take_over
        Take over from a process on another host that claims the sweep.

    Returns
    -------
    SweepRecord
        The version; the last one if nothing has changed.

    Raises
    ------
    RefinerError
        It cannot be carried out here, exceeds its limits, or another process is working on it.
    """
    forecast = {}
    if not is_finished(workspace_of(plan), plan.stages()):
        check_launch(plan)
        before = look or forecast_sweep(plan)
        forecast = {
            **forecast_json(before.forecast, before.passed),
            "detectable": detectable_json(before.detectable),
        }
        refuse_what_cannot_fit(before.passed)
    workspace = workspace_of(plan, to_write=True)
    return with_space(
        plan.config,
        lambda: record_version(plan, workspace, overrides, forecast, take_over=take_over),
    )


def run_sweep(
    sweep: str, overrides: Sequence[str] = (), *, launch: LaunchOptions | None = None
) -> SweepOutcome:
    """Carry out a sweep without a confirmation; finished work is skipped.

    Parameters
    ----------
    sweep
        A shipped name or the path of a YAML file.
    overrides
        ``key=value``, for all arms.
    launch
        Settings of the work (default: quiet, with a flow run in the local Prefect server).

    Returns
    -------
    SweepOutcome
        State of each trial. Failed trials raise nothing.

    Raises
    ------
    RefinerError
        Nothing was started: it cannot be carried out here, or exceeds its limits.
    """
    plan = make_sweep_plan(sweep, overrides)
    launch = launch or LaunchOptions(quiet=True)
    record = begin_sweep(plan, overrides, take_over=launch.take_over)
    return work_on_sweep(plan, workspace_of(plan, to_write=True), record, launch)


def resume_sweep(
    sweep: str,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    launch: LaunchOptions | None = None,
) -> SweepOutcome:
    """Continue the newest version of a recorded sweep.

    Parameters
    ----------
    sweep
        Its name.
    workspace
        The folder that has its records.
    launch
        Settings of the work (default: quiet, with a flow run in the local Prefect server).

    Returns
    -------
    SweepOutcome
        State of each trial.

    Raises
    ------
    ConfigurationError
        There is no such sweep, or another process is working on it.
    """
    record = read_sweep(Workspace.read_only(workspace), sweep)
    with in_folder(record.folder):
        plan = plan_of_record(Workspace.read_only(workspace), record)
        check_arms(plan)
        ws = workspace_of(plan, to_write=True)
        launch = replace(launch or LaunchOptions(quiet=True), resumed=True)
        return work_on_sweep(plan, ws, record, launch)


def detach_sweep(
    sweep: str,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    where: Where = "process",
    launch: LaunchOptions | None = None,
) -> BackgroundProcess:
    """Continue a recorded sweep in the background; return once it is being worked on.

    Parameters
    ----------
    sweep
        Its name, as recorded by :func:`flows.api.begin_sweep`.
    workspace
        The folder that has its records.
    where
        A process on this machine, or a small Slurm job that may be started again.
    launch
        Settings of the work.

    Returns
    -------
    BackgroundProcess
        Process or job, and its log; ``exit_code`` if it has already ended.

    Raises
    ------
    ConfigurationError
        There is no such sweep, or another process is working on it.
    UnsupportedError, LaunchError
        There is no Slurm here to submit a job to, or it refused the job.
    """
    launch = launch or LaunchOptions()
    ws = Workspace.open(workspace)
    record = read_sweep(ws, sweep)
    require_idle(ws, sweep_call(sweep), regardless=launch.take_over)
    profile = None
    if where == "job":
        with in_folder(record.folder):
            profile = plan_of_record(ws, record).config.dispatch.profile
    code = pin_for(ws, record.name).code
    return leave(ws, sweep_call(record.name), code, where, profile, launch)


def cancel_sweep(
    sweep: str,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    wait_s: float | None = None,
    now: bool = False,
    tell: Callable[[str], None] = lambda message: None,
) -> CancelOutcome:
    """End all trials of a sweep, and keep what is saved.

    Parameters
    ----------
    sweep
        Its name.
    workspace
        The folder that has its records.
    wait_s, now, tell
        As of :func:`flows.api.cancel_run`.

    Returns
    -------
    CancelOutcome
        What was ended; ``ended`` is False if that takes longer than ``wait_s``.

    Raises
    ------
    ConfigurationError
        There is no such sweep; the message names the nearest.
    WorkspaceError
        The records may have been written by another user.
    """
    ws = Workspace.read_only(Path(workspace).absolute())
    ws.require_trust()
    record = read_sweep(ws, sweep)
    known = {t.name: trial_run(ws, sweep, t.name) for t in record.trials}
    runs = {trial: run for trial, run in known.items() if run is not None}
    begun = (trial for trial in reversed(record.trials) if trial.name in runs)
    names = {i: f"{t.name}/{n}" for t in begun for n, i in t.stages.items()}
    config = next((ws.read_run(run).config for run in runs.values()), {})
    stages = {name: i for i, name in names.items()}
    call = RunRecord(
        *(RECORD_VERSION, sweep_call(sweep), record.recipe, (), (), config, stages),
        *(record.code, record.started_at),
    )
    outcome = cancel(ws, call, wait_s=wait_s, now=now, tell=tell, ours=frozenset(runs.values()))
    return replace(outcome, run=sweep, stages=())


def suspend_sweep(workspace: Workspace, name: str) -> None:
    """Keep a sweep from beginning further trials, and its running trials from beginning further
    stages. Running stages finish; `refiner resume` continues the rest.

    Raises
    ------
    OSError, NoSpaceError
        The request could not be recorded.
    """
    sweep, by = read_sweep(workspace, name), f"{user_name()} on {host_name()}"
    workspace.request_cancel(sweep_call(name), by, [t.name for t in sweep.trials])
    for trial in sweep.trials:
        run = trial_run(workspace, name, trial.name)
        if run is None or not orchestrator_of(workspace, run).works:
            continue
        if waiting := waiting_stages(workspace, workspace.read_run(run)):
            workspace.request_cancel(run, by, waiting)
