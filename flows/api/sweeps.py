"""Sweeps: planned, forecast, carried out, gone on with, ended, looked at.

In: sweep files or recorded sweeps. Out: plans, outcomes and standings. A sweep is amended by its
file: plan it again, and what is new runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from flows.sweeping.launching import (
    Launch,
    SweepOutcome,
    check_launch,
    is_finished,
    work_on_sweep,
    workspace_of,
)
from flows.sweeping.planning import SweepLook, look_at_sweep, make_sweep_plan, shipped_rows
from flows.sweeping.status import SweepStatus, SweepWatcher
from infra.store.layout import sweep_call
from infra.store.sweep_records import read_sweep, sweep_names
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.records import SweepRecord
from sweeps.values import SweepPlan

if TYPE_CHECKING:
    from flows.running.background import Detached
    from flows.running.cancelling import CancelOutcome
    from flows.sweeping.evidence import RescoreShare

_HERE = RecipeConfig.workspace


class ShippedSweep(NamedTuple):
    """A sweep that comes with refiner."""

    name: str
    recipe: str
    question: str


@dataclass(frozen=True)
class KnownSweeps:
    """Sweeps that come with refiner, and how those of a workspace stand."""

    shipped: tuple[ShippedSweep, ...]
    recorded: dict[str, SweepStatus] = field(default_factory=dict)


def list_sweeps(workspace: str | Path = _HERE) -> KnownSweeps:
    """What sweeps there are.

    Parameters
    ----------
    workspace
        The folder whose sweeps are listed beside the shipped ones; it need not exist.

    Returns
    -------
    KnownSweeps
        The shipped ones, and those of the workspace by name.

    Raises
    ------
    WorkspaceError
        It is no workspace, or a record is damaged.
    """
    room = Workspace.read_only(workspace)
    recorded = {name: SweepWatcher(room, name).look() for name in sweep_names(room)}
    return KnownSweeps(tuple(ShippedSweep(*row) for row in shipped_rows()), recorded)


def forecast_sweep(plan: SweepPlan) -> SweepLook:
    """What a sweep would take and could show, as the workspace stands now. Changes nothing.

    Parameters
    ----------
    plan
        What :func:`flows.api.make_sweep_plan` has made.

    Returns
    -------
    SweepLook
        Counts, forecast, limits that do not hold, the smallest effect that it could see.

    Raises
    ------
    WorkspaceError
        A record is damaged.
    """
    return look_at_sweep(plan)


def rescore_share(plan: SweepPlan, run: str) -> RescoreShare:
    """Which share of a run's groups the arms' rewards and judges would change; asks no judge.

    Parameters
    ----------
    plan
        What :func:`flows.api.make_sweep_plan` has made.
    run
        A run with stored rollouts, in the sweep's workspace.

    Returns
    -------
    RescoreShare
        One share per arm.

    Raises
    ------
    ConfigurationError, DataError
        There is no such run, or it has no stored rollouts.
    """
    from flows.sweeping.evidence import share_of_run

    return share_of_run(plan, run)


def begin_sweep(
    plan: SweepPlan,
    overrides: Sequence[str] = (),
    *,
    look: SweepLook | None = None,
    take_over: bool = False,
) -> SweepRecord:
    """Check a sweep and record its newest version, for somebody to work on.

    Parameters
    ----------
    plan
        What :func:`flows.api.make_sweep_plan` has made.
    overrides
        Those that it was planned with.
    look
        What :func:`flows.api.forecast_sweep` has said just now (default: it is made again).
    take_over
        Though a process on another host says that it works on it.

    Returns
    -------
    SweepRecord
        The version; the last one where nothing has changed.

    Raises
    ------
    RefinerError
        It cannot be carried out here, does not fit its limits, or another process works on it.
    """
    from flows.running.calls import with_room
    from flows.sweeping.forecasting import forecast_json, used_before
    from flows.sweeping.launching import record_version
    from flows.sweeping.planning import detectable_json
    from sweeps.forecast import refuse_what_cannot_fit

    forecast = {}
    if not is_finished(plan, workspace_of(plan)):
        check_launch(plan)
        before = (look or look_at_sweep(plan)).before
        forecast = {
            **forecast_json(before.forecast, before.passed, trials=False),
            "used": used_before(plan, workspace_of(plan)),
            "detectable": detectable_json(before.detectable),
        }
        refuse_what_cannot_fit(before.passed)
    workspace = workspace_of(plan, to_write=True)
    return with_room(
        plan.config,
        lambda: record_version(plan, workspace, overrides, forecast, take_over=take_over),
    )


def run_sweep(
    sweep: str, overrides: Sequence[str] = (), *, launch: Launch | None = None
) -> SweepOutcome:
    """Carry out a sweep without asking anybody: what is done is skipped.

    Parameters
    ----------
    sweep
        A shipped name or the path of a YAML file.
    overrides
        ``key=value``, for all arms.
    launch
        How (default: quietly, with a flow run in the local Prefect server).

    Returns
    -------
    SweepOutcome
        How each trial stands. Failed trials raise nothing.

    Raises
    ------
    RefinerError
        Nothing was started: it cannot be carried out here, or does not fit its limits.
    """
    plan = make_sweep_plan(sweep, overrides)
    launch = launch or Launch(quiet=True)
    record = begin_sweep(plan, overrides, take_over=launch.take_over)
    return work_on_sweep(plan, workspace_of(plan, to_write=True), record, launch)


def resume_sweep(
    sweep: str, workspace: str | Path = _HERE, *, launch: Launch | None = None
) -> SweepOutcome:
    """Go on with a recorded sweep, as its newest version says.

    Parameters
    ----------
    sweep
        Its name.
    workspace
        The folder that it is recorded in.
    launch
        How (default: quietly, with a flow run in the local Prefect server).

    Returns
    -------
    SweepOutcome
        How each trial stands.

    Raises
    ------
    ConfigurationError
        There is no such sweep, or another process works on it.
    """
    from flows.sweeping import launching

    room = Workspace.read_only(workspace)
    return launching.resume_sweep(room, sweep, launch or Launch(quiet=True))


def detach_sweep(
    sweep: str,
    workspace: str | Path = _HERE,
    *,
    where: Literal["process", "job"] = "process",
    launch: Launch | None = None,
) -> Detached:
    """Leave a recorded sweep to the background, and come back as soon as it is worked on.

    Parameters
    ----------
    sweep
        Its name; :func:`flows.api.begin_sweep` has recorded it.
    workspace
        The folder that it is recorded in.
    where
        A process on this machine, or a small Slurm job that may be started again.
    launch
        How.

    Returns
    -------
    Detached
        Process or job, and its log; ``exit_code`` where it has ended already.

    Raises
    ------
    ConfigurationError
        There is no such sweep, or another process works on it.
    UnsupportedError, LaunchError
        There is no Slurm here to submit a job to, or it refused.
    """
    from flows.running.background import Call, detach, detach_as_job
    from flows.sweeping.launching import dispatch_of, pin_for
    from infra.store.orchestrators import require_idle

    launch = launch or Launch()
    room = Workspace.open(workspace)
    record = read_sweep(room, sweep)
    require_idle(room, sweep_call(sweep), regardless=launch.take_over)
    options = ["--no-server"] * (not launch.use_server) + ["--take-over"] * launch.take_over
    options += ["--past-canary"] * launch.past_canary
    call = Call(sweep_call(record.name), pin_for(room, record.name).code)
    if where == "job":
        return detach_as_job(room, call, dispatch_of(room, record), *options)
    return detach(room, call, *options)


def cancel_sweep(
    sweep: str,
    workspace: str | Path = _HERE,
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
        The folder that it is recorded in.
    wait_s, now, tell
        As of :func:`flows.api.cancel_run`.

    Returns
    -------
    CancelOutcome
        What was ended; ``ended`` is False where that takes longer than was waited for.

    Raises
    ------
    ConfigurationError
        There is no such sweep; names the nearest.
    WorkspaceError
        Somebody else may have written what is recorded there.
    """
    from flows.sweeping import launching as cancelling

    room = Workspace.read_only(Path(workspace).absolute())
    room.require_trust()
    return cancelling.cancel_sweep(room, sweep, wait_s=wait_s, now=now, tell=tell)


def status_of_sweep(sweep: str, workspace: str | Path = _HERE) -> SweepStatus:
    """How a sweep stands. Writes nothing.

    Parameters
    ----------
    sweep
        Its name.
    workspace
        The folder that it is recorded in.

    Returns
    -------
    SweepStatus
        Trials, totals, who works on it. As a dataframe: :func:`flows.api.trials_frame`.

    Raises
    ------
    ConfigurationError
        There is no such sweep; names the nearest.
    """
    return watch_sweep(sweep, workspace).look()


def watch_sweep(sweep: str, workspace: str | Path = _HERE) -> SweepWatcher:
    """Look at a sweep again and again: each ``look()`` gives a :class:`SweepStatus`.

    Parameters
    ----------
    sweep, workspace
        As of :func:`flows.api.status_of_sweep`.

    Returns
    -------
    SweepWatcher
        It remembers what cannot change.

    Raises
    ------
    ConfigurationError
        There is no such sweep; names the nearest.
    """
    room = Workspace.read_only(workspace)
    read_sweep(room, sweep)
    return SweepWatcher(room, sweep)
