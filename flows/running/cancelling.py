"""Cancels a run or some of its stages, through its orchestrator or directly if none is running.

In: a workspace, a run, names of stages. Out: a :class:`CancelOutcome`. The request is a file, so an
orchestrator on any host sees it. Without an orchestrator, this module asks the jobs to save and
end, kills them after the recipe's grace period, and closes their attempts as ``cancelled``. A
second cancel changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from flows.running.status import required_run, stage_names, the_stage
from infra.host.processes import ProcessId, host_name, user_name
from infra.orchestrator.executor import POLL_S, RateLimitedLog, Tell, end_jobs, open_stages
from infra.store.orchestrators import (
    OrchestratorProcess,
    held_by_others,
    orchestrator_of,
    wanted_by_others,
)
from infra.store.workspace import Workspace
from refiner_core.contract.config import DispatchConfig, RecipeConfig
from refiner_core.contract.records import RunRecord, from_json, picked
from refiner_core.contract.services import is_service

#: Added to the grace period of jobs: for the orchestrator's poll and a slow scheduler.
_MARGIN_S = 60.0


@dataclass(frozen=True)
class CancelOutcome:
    """Outcome of a cancel request.

    Attributes
    ----------
    run, stages
        The run, and names of the stages to end.
    by
        ``orchestrator``: it did the work; ``here``: this process, as no orchestrator was running;
        ``nobody``: there was nothing to end.
    ended
        True if none of it is running. False if the wait was too short.
    left
        Names of stages that are still running.
    """

    run: str
    stages: tuple[str, ...]
    by: str
    ended: bool
    left: tuple[str, ...] = ()
    orchestrator: OrchestratorProcess | None = None


def cancel_run(
    run_id: str | None = None,
    stages: Sequence[str] = (),
    workspace: str | Path = RecipeConfig.workspace,
    *,
    wait_s: float | None = None,
    now: bool = False,
    tell: Tell = lambda message: None,
) -> CancelOutcome:
    """End a run or some of its stages, and keep what is saved.

    Parameters
    ----------
    run_id
        Run id (default: the newest).
    stages
        Names of the stages to end (default: all).
    workspace
        The folder that has its records.
    wait_s
        Seconds to wait for the end (default: ``dispatch.grace_s`` of the recipe and a minute).
    now
        Do not ask the orchestrator: end the jobs from here.
    tell
        Receives progress messages.

    Returns
    -------
    CancelOutcome
        What was ended; ``ended`` is False if that takes longer than ``wait_s``.

    Raises
    ------
    ConfigurationError
        There is no such run or stage.
    WorkspaceError
        The records may have been written by another user.
    """
    ws = Workspace.read_only(Path(workspace).absolute())  # works on a full disk
    ws.require_trust()
    run = required_run(ws, run_id, "a run to cancel", or_begin=False)
    return cancel(ws, run, stages, wait_s=wait_s, now=now, tell=tell)


def cancel(
    workspace: Workspace,
    run: RunRecord,
    stages: Sequence[str] = (),
    *,
    wait_s: float | None = None,
    now: bool = False,
    tell: Tell = lambda message: None,
    ours: frozenset[str] = frozenset(),
) -> CancelOutcome:
    """End a run or some of its stages, as :func:`cancel_run` does.

    ``ours`` are other runs that end with it: stages that only they share are ended, too.

    Raises
    ------
    ConfigurationError
        The run has no such stage.
    """
    for name in stages:
        the_stage(run, name)
    settings = from_json(DispatchConfig, run.config.get("dispatch") or {})
    patience_s = settings.grace_s + _MARGIN_S if wait_s is None else wait_s
    names = _to_end(workspace, run, stages, ours)
    ids = {run.stages[name]: name for name in names}
    who = orchestrator_of(workspace, run.run)
    if not who.works and not open_stages(workspace, ids):
        return CancelOutcome(run.run, names, "nobody", True, orchestrator=who)
    by = f"{user_name()} on {host_name()}"
    try:
        if not workspace.request_cancel(run.run, by, stages):
            tell("a cancel was requested before")
    except OSError as error:
        if who.works and (stages or not _signal(who)):
            raise
        how = f"{who.where} receives a signal" if who.works else "its jobs are ended from here"
        tell(f"the request cannot be recorded ({error.strerror or error}), so {how}")
    if who.works and not now:
        deadline = time.monotonic() + patience_s
        ended = _wait_for(workspace, run, ids, not stages, deadline, tell)
        left, who = open_stages(workspace, ids), orchestrator_of(workspace, run.run)
        if who.works or (ended and not left):
            ended = ended and not left
            return CancelOutcome(run.run, names, "orchestrator", ended, left, who)
        tell(f"{who.where} has ended; its jobs are ended from here")
    reason = f"cancelled by {by}"
    left = end_jobs(workspace, settings, ids, "cancelled", reason, tell, patience_s)
    return CancelOutcome(run.run, names, "here", not left, left, who)


def waiting_stages(workspace: Workspace, run: RunRecord) -> list[str]:
    """Stages of a run that have no attempt."""
    made = ((n, workspace.layout.stage(i).attempt_numbers()) for n, i in run.stages.items())
    return [name for name, numbers in made if not numbers]


def _signal(who: OrchestratorProcess) -> bool:
    """Ask the run's orchestrator to stop, as Ctrl-C does; False if it is not on this host."""
    if who.standing != "running" or who.host != host_name() or not who.pid:
        return False
    try:
        return ProcessId.of(who.pid).terminate()
    except psutil.NoSuchProcess:  # it has just ended
        return False


def _to_end(
    workspace: Workspace, run: RunRecord, stages: Sequence[str], ours: frozenset[str]
) -> tuple[str, ...]:
    """Names of the stages to end: the given ones, or all unfinished ones except those that another
    run with an orchestrator shares."""
    if stages:
        return tuple(stages)
    spared = wanted_by_others(workspace, {run.run, *ours})
    mine = {run.run, *ours, *run.stages.values()}

    def ends(stage_id: str) -> bool:
        if stage_id in spared or workspace.read_result(stage_id) is not None:
            return False
        return not (is_service(stage_id) and held_by_others(workspace, stage_id, mine))

    return tuple(name for name in stage_names(run) if ends(run.stages[name]))


def _wait_for(
    workspace: Workspace,
    run: RunRecord,
    stages: Mapping[str, str],
    whole: bool,
    deadline: float,
    tell: Tell,
) -> bool:
    """Wait until the orchestrator has ended them; False on timeout, or if it is gone."""
    told = RateLimitedLog(tell)
    while time.monotonic() < deadline:
        try:
            who, left = orchestrator_of(workspace, run.run), open_stages(workspace, stages)
        except OSError as error:
            told.wait_out(error)
            continue
        if who.standing in ("ended", "gone") or (not whole and not left):
            return who.standing != "gone"
        told(f"{who.where} ends " + (", ".join(left) or "the run"))
        time.sleep(POLL_S)
    return False


def outcome_lines(outcome: CancelOutcome, workspace: Workspace) -> Sequence[str]:
    """Lines for people: what happened, and the next commands."""
    where = f"workspace={workspace.root}"
    what = ", ".join(outcome.stages) if outcome.stages else "the run"
    if outcome.by == "nobody":
        return [f"Nothing of {outcome.run} is running; there was nothing to end."]
    if outcome.ended:
        how = " from here, as no orchestrator was running" if outcome.by == "here" else ""
        lines = [f"Ended{how}: {what}. What was saved is kept.", "Next:"]
        return [*lines, f"  refiner resume {outcome.run} {where}"]
    lines = [f"Not ended yet: {', '.join(outcome.left) or what}."]
    if outcome.orchestrator and outcome.orchestrator.standing == "elsewhere":
        lines.append(
            f"{outcome.orchestrator.where} has not answered and cannot be checked from here. If "
            "it is gone, end its jobs from here:"
        )
        return [*lines, f"  refiner cancel {outcome.run} {where} --now"]
    return [*lines, "Next:", f"  refiner status {outcome.run} {where}"]


def outcome_json(outcome: CancelOutcome) -> Mapping[str, object]:
    """The outcome as JSON."""
    return {"version": 1, **picked(outcome, "run", "stages", "by", "ended", "left")}
