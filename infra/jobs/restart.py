"""A job that the scheduler has started again: which attempt its worker is to run.

In: the attempt that the job's command names, and the job. Slurm starts a requeued job with its
*original* command, so that names the first attempt for ever, whatever has happened since. Out: the
number of the attempt to run. The attempt of the last start is closed, with the reason that the
scheduler knows, and the next one is claimed for the same orchestrator: with no orchestrator alive,
too. An orchestrator may claim it at the same moment; exactly one wins, and the loser leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infra.host.processes import ProcessId
from infra.jobs.failures import outcome_of
from infra.jobs.signals import Ask, SlurmJob, ask_scheduler, why_restarted
from infra.store.room import no_space_guard
from infra.store.workspace import Workspace
from refiner_core.contract.errors import Interrupted
from refiner_core.contract.records import FailureClass

log = logging.getLogger(__name__)

#: Ends after which the same job simply goes on. Others are for an orchestrator, which keeps count
#: of them, pauses, makes room or avoids the node.
_GOES_ON: frozenset[FailureClass] = frozenset(
    {"preempted", "time_limit", "node_failure", "interrupted", "killed"}
)


class AttemptClosed(Interrupted):
    """Somebody gave this attempt up, or a later one exists: it must not make anything visible."""


def job_of(workspace: Workspace, stage_id: str, number: int) -> SlurmJob | None:
    """The Slurm job that this process is, if the attempt was submitted to Slurm.

    A local worker may well live inside somebody's allocation, which is no job of its own.
    """
    attempt = workspace.read_attempt(stage_id, number)
    is_slurm = attempt is not None and attempt.executor == "slurm"
    return SlurmJob.from_environment() if is_slurm else None


def attempt_to_run(
    workspace: Workspace,
    stage_id: str,
    number: int,
    job: SlurmJob | None = None,
    ask: Ask = ask_scheduler,
) -> int:
    """The attempt that this process is to run: ``number`` at the first start of a job.

    Raises
    ------
    AttemptClosed
        There is nothing left to do for this job: the stage is done, was stopped, or goes on in
        another job.
    NoSpaceError
        The next attempt could not be claimed.
    """
    named = workspace.layout.attempt(stage_id, number)
    if job is None or workspace.read_control(named.started) is None:
        return number
    newest = max(workspace.layout.stage(stage_id).attempt_numbers(), default=number)
    if workspace.read_result(stage_id) is not None:
        raise _nothing_to_do(stage_id, newest, "it is done")
    _refuse_other_job(workspace, stage_id, newest, job)
    started = workspace.read_control(workspace.layout.attempt(stage_id, newest).started)
    attempt = workspace.read_attempt(stage_id, newest)
    if started is not None and started.get("void"):
        raise _nothing_to_do(stage_id, newest, "an orchestrator gave it up")
    if attempt is not None and attempt.outcome is None and started is None:
        return newest  # an earlier restart claimed it and came no further
    if attempt is None or (attempt.outcome is None and _holder_lives(started or {}, job)):
        raise _nothing_to_do(stage_id, newest, "another process of this job works on it")
    if workspace.stop_asked(stage_id, newest) is not None:
        raise _nothing_to_do(stage_id, newest, "it was asked to stop")
    if attempt.outcome is None:
        _close(workspace, stage_id, newest, job, ask)
        attempt = workspace.read_attempt(stage_id, newest) or attempt
    outcome = attempt.outcome
    if outcome is not None and (outcome.decision != "resume" or outcome.failure not in _GOES_ON):
        raise _nothing_to_do(stage_id, newest, f"it ended ({outcome.failure})")
    again = {"job_id": job.array_id or job.id, "restart": job.restart}
    claimed = workspace.claim_restart(stage_id, newest, again)
    if claimed is None:
        raise _nothing_to_do(stage_id, newest, "somebody else was faster to go on with it")
    log.info("restart %d of job %s: attempt %d", job.restart, job.id, claimed.number)
    return claimed.number


def _refuse_other_job(workspace: Workspace, stage_id: str, number: int, job: SlurmJob) -> None:
    """Only the job of the newest attempt may go on with it."""
    paths = workspace.layout.attempt(stage_id, number)
    files = (workspace.read_control(path) or {} for path in (paths.started, paths.job))
    if not any(job.is_called(file.get("job_id")) for file in files):
        raise _nothing_to_do(stage_id, number, "it is another job's")


def _holder_lives(started: Mapping[str, Any], job: SlurmJob) -> bool:
    """Whether the process that holds the attempt may still be at work.

    Slurm starts a job again only when it has ended all of its last start, so a lower count of
    restarts says that the holder is gone, or so nearly that its fence keeps it from harm.
    """
    if int(started.get("restart") or 0) < job.restart:
        return False
    holder = ProcessId.parse(str(started["process"]))
    return not holder.here or holder.alive


def _close(workspace: Workspace, stage_id: str, number: int, job: SlurmJob, ask: Ask) -> None:
    why = why_restarted(job, ask)
    beat = workspace.read_heartbeat(stage_id, number) or {}
    step = (beat.get("progress") or {}).get("done")
    outcome = replace(outcome_of(why.failure, why.message), step=step)
    with no_space_guard(workspace.root, "closing the attempt of the last start"):
        workspace.close_attempt(stage_id, number, outcome, beat.get("seconds"))


def _nothing_to_do(stage_id: str, number: int, why: str) -> AttemptClosed:
    return AttemptClosed(
        f"This job has nothing left to do for {stage_id}: of attempt {number}, {why}",
        fix="nothing; whoever works on it goes on",
    )
