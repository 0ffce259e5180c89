"""Launches a sweep and works on it to its end: recorded, taken up, orchestrated, shown.

In: a :class:`SweepPlan` and the version that it is recorded as. Out: a :class:`SweepOutcome`. What
a sweep is stands in its record, so another process can go on with it: in the background, in a job,
from any shell. What is done is never done again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flows.checking.server_programs import check_server_programs
from flows.disk import planned_room
from flows.notifying.hears import Hears
from flows.notifying.watching_sweeps import hears_of_sweep
from flows.running.attaching import attach
from flows.running.calls import (
    check_hub_access,
    check_supported,
    refuse_what_never_fits,
    say,
    warn_of_silence,
    with_room,
)
from flows.running.console import Console
from flows.running.showing import orchestrate
from flows.sweeping.admission import Admission, Outlook
from flows.sweeping.canary import find_canary
from flows.sweeping.forecasting import forecast_of, passed_by
from flows.sweeping.limits import Budget
from flows.sweeping.live import LivePage
from flows.sweeping.reading import last_words, use_file
from flows.sweeping.trials import Trials
from flows.sweeping.use import UseReader
from flows.sweeping.versions import in_folder, pin_for, plan_of_record
from flows.sweeping.words import TrialWord
from infra.host.processes import ProcessId
from infra.jobs.dispatch import Router, make_router
from infra.store.layout import sweep_call
from infra.store.orchestrators import orchestrator_of, take_up
from infra.store.sweep_records import read_sweep
from infra.store.workspace import Workspace
from refiner_core.contract.config import DispatchConfig, RecipeConfig
from refiner_core.contract.services import is_service
from refiner_core.contract.sweep_records import SweepRecord
from sweeps.forecast import SweepForecast
from sweeps.history import CanaryMeasure
from sweeps.values import SweepPlan, Trial

log = logging.getLogger(__name__)
#: Trials at a time where the sweep does not say: on a cluster the queue decides how many run.
MANY = 256


@dataclass(frozen=True)
class Launch:
    """How a sweep is worked on.

    Attributes
    ----------
    use_server, quiet
        As for a run.
    past_canary
        Release the other trials whatever the first one shows.
    take_over
        Though a process on another host says that it works on it.
    resumed
        It was begun by an earlier call: what was cancelled goes on.
    """

    use_server: bool = True
    quiet: bool = False
    past_canary: bool = False
    take_over: bool = False
    resumed: bool = False


@dataclass(frozen=True)
class SweepOutcome:
    """How a call on a sweep ended.

    ``words`` maps trials to how they stand; ``held`` says why no more of them were begun.
    """

    record: SweepRecord
    workspace: Workspace
    words: Mapping[str, TrialWord]
    held: str
    exit_code: int


# ---------------------------------------------------------------- before


def workspace_of(plan: SweepPlan, *, to_write: bool = False) -> Workspace:
    """The workspace that a sweep's trials lie in."""
    config = config_of(plan)
    if to_write:
        return with_room(config, lambda: Workspace.open(config.workspace, config.data_root))
    return Workspace.read_only(config.workspace)


def config_of(plan: SweepPlan) -> RecipeConfig:
    """What all trials have in common: where and how they run."""
    return plan.trials[0].plan.config


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
    check_hub_access(config_of(plan))
    warn_of_silence(config_of(plan))


def check_arms(plan: SweepPlan) -> None:
    """Refuse arms that this version or machine cannot carry out; errors as of
    :func:`flows.running.calls.check_supported`."""
    for trial in {t.arm: t for t in plan.trials}.values():
        check_supported(trial.plan.config)
        check_server_programs(trial.plan)


# ---------------------------------------------------------------- work


def work_on_sweep(
    plan: SweepPlan, workspace: Workspace, record: SweepRecord, launch: Launch
) -> SweepOutcome:
    """Take a sweep up, and work on it until every trial has ended or may not begin.

    Parameters
    ----------
    plan, workspace, record
        The sweep, and its newest version as it is recorded.
    launch
        How.

    Returns
    -------
    SweepOutcome
        How each trial stands. Failed trials raise nothing.

    Raises
    ------
    ConfigurationError
        Another process works on it.
    """
    call = sweep_call(record.name)
    before = orchestrator_of(workspace, call)
    config = config_of(plan)
    router = make_router(config.dispatch, workspace)
    router.check(plan.stages().values())
    with_room(config, lambda: take_up(workspace, call, regardless=launch.take_over))
    with_room(config, lambda: workspace.withdraw_cancel(call))
    admission = admission_of(plan, workspace, record, launch)
    notify, resumed = config.notify, launch.resumed
    hears = hears_of_sweep(admission, record, notify, workspace, before, resumed=resumed, say=say)
    if is_finished(plan, workspace):
        admission.begin()
        admission.end(None)
        hears.over({})
        hears.close()
    else:
        _orchestrate(admission, router, launch, hears)
    _keep_use(admission)
    return SweepOutcome(
        record, workspace, admission.standing(), admission.held, admission.exit_code
    )


def _keep_use(admission: Admission) -> None:
    """For whoever looks next; a disk that does not take it costs them a second."""
    path = use_file(admission.workspace, admission.plan.sweep.name)
    try:
        admission.budget.use.keep(path, admission.plan.stages())
    except OSError as error:
        log.warning("what the sweep has used is not kept: %s", error)


def _orchestrate(admission: Admission, router: Router, launch: Launch, hears: Hears) -> None:
    room, call = admission.workspace, sweep_call(admission.plan.sweep.name)
    console = Console(trials=admission.standing, quiet=launch.quiet)
    admission.tell = console.note
    admission.note({"event": "begin", "process": str(ProcessId.of())})
    orchestrate(
        admission,
        room,
        router,
        config_of(admission.plan),
        console=console,
        hears=hears,
        begun=lambda: attach(room, call, console) if launch.use_server else None,
    )


def admission_of(
    plan: SweepPlan, workspace: Workspace, record: SweepRecord, launch: Launch
) -> Admission:
    """What admits the trials of a sweep, before it begins."""
    config = config_of(plan)
    trials = Trials(
        sweep=record.name,
        recipe=plan.sweep.recipe,
        workspace=workspace,
        told=last_words(workspace, record.name),
        take_over=launch.take_over,
        pin=lambda room: pin_for(room, record.name),
    )
    finished = is_finished(plan, workspace)

    def corrected(canary: Sequence[CanaryMeasure]) -> SweepForecast:
        return forecast_of(plan, workspace, canary)

    return Admission(
        plan=plan,
        workspace=workspace,
        trials=trials,
        budget=Budget(
            plan.sweep.limits,
            UseReader(workspace, use_file(workspace, record.name)),
            _disk_of,
        ),
        outlook=Outlook(
            canary=None if finished else find_canary(plan, workspace),
            forecast=None if finished else forecast_of(plan, workspace),
            corrected=corrected,
            passed=lambda forecast: [p.text for p in passed_by(forecast, plan, workspace)],
            past_canary=launch.past_canary,
        ),
        concurrency=concurrency_of(plan, config.dispatch),
        poll_s=config.dispatch.poll_s,
        clock=time.monotonic,
        page=LivePage(workspace, plan.sweep.name),
    )


def concurrency_of(plan: SweepPlan, dispatch: DispatchConfig) -> int:
    """Trials at a time: as the sweep says, else as many as this machine has slots for, or as a
    cluster's queue takes."""
    if plan.sweep.limits.concurrency is not None:
        return plan.sweep.limits.concurrency
    return dispatch.max_parallel if dispatch.executor == "local" else MANY


def _disk_of(trials: Sequence[Trial]) -> int:
    """Bytes that what is not done of trials takes."""
    return planned_room([trial.plan for trial in trials]).forecast.needed_bytes


def is_finished(plan: SweepPlan, workspace: Workspace) -> bool:
    """Whether every stage of every trial is done."""
    stages = (i for i in plan.stages() if not is_service(i))
    return all(workspace.layout.stage(i).result.exists() for i in stages)


def resume_sweep(workspace: Workspace, name: str, launch: Launch) -> SweepOutcome:
    """Go on with a recorded sweep, as its newest version says; see :func:`work_on_sweep`."""
    record = read_sweep(workspace, name)
    with in_folder(record.folder):
        plan = plan_of_record(workspace, record)
        check_arms(plan)
        room = workspace_of(plan, to_write=True)
        return work_on_sweep(plan, room, record, replace(launch, resumed=True))
